//! The kernel ABI: every map's name, key, value and capacity, and the limits that both sides keep.
//!
//! One set of these maps exists per client task, under `<pins>/v<ABI_VERSION>/<client>/maps/`. Each value says who
//! writes it. Any change of a layout here is a new [`ABI_VERSION`].
//!
//! Two versions meet in an upgrade, so a little is the same in all of them: links are pinned as `links/<hook>@<cgroup
//! id>`, and [`map::ACTIVE`] is an array whose values begin with the open flows of a slot as a 64-bit number. By these
//! one version takes the hooks that begin flows away from another, and sees when the last of its flows has ended.

use bytemuck::{Pod, Zeroable};

use crate::net::{Address, Be16, Be32};

/// The version of everything in this module; a part of the pin path.
pub const ABI_VERSION: u32 = 2;

// ---- limits, each with its reason ----------------------------------------------------------------------------------

/// Services per client task. A byte would hold them; the bound keeps every per-service table a few pages.
pub const MAX_SERVICES: u32 = 256;
/// Client tasks per host: each has its own programs and maps, so this bounds locked memory.
pub const MAX_CLIENTS: usize = 64;
/// The largest fixed subset size: the largest set that a scan inside one program run can afford.
pub const MAX_SUBSET: u32 = 256;
/// Backends of one service that takes all of them.
pub const MAX_BACKENDS: u32 = 16_384;
/// The shortest schedule: at 1,024 entries the rounding of weights costs 0.7 % of utilization, at 256 it costs 2.8 %.
pub const MIN_SCHEDULE_LOG2: u8 = 10;
/// The longest schedule of one service: 65,536 entries.
pub const MAX_SCHEDULE_LOG2: u8 = 16;
/// Entries of a schedule per backend, before rounding up to a power of two.
pub const SCHEDULE_ENTRIES_PER_BACKEND: u32 = 32;
/// Schedule entries of one client task in all its services, by default. The map holds twice as many, so that a new
/// table always finds room beside the one it replaces.
pub const SCHEDULE_ENTRIES: u32 = 524_288;
/// Slots of one client task, by default: room for one service of [`MAX_BACKENDS`] to be replaced whole.
pub const SLOTS: u32 = 32_768;
/// The most slots a client task can have: a schedule entry is 16 bits wide and [`NO_SLOT`] is one of its values.
pub const MAX_SLOTS: u32 = 65_535;
/// Flow records of one client task, by default; as many again fit in the overflow table. A power of two.
pub const FLOW_RECORDS: u32 = 131_072;
/// Unusable picks that connect walks past before it takes the service's fallback.
pub const MAX_SKIPS: u32 = 4;
/// Bytes of a service's or client's name in the kernel, padded with zeros. One is kept free, so names are at most 63.
pub const NAME_BYTES: usize = 64;

/// "No slot": in a schedule entry, an entry that names nobody; as a fallback, "refuse the connect".
pub const NO_SLOT: u32 = 0xffff;

// ---- map names -----------------------------------------------------------------------------------------------------

/// Names of the maps as the object declares them and as they are pinned.
pub mod map {
    /// Hash: [`ServiceKey4`](super::ServiceKey4) to [`ServiceIndex`](super::ServiceIndex).
    pub const SERVICES_V4: &str = "services_v4";
    /// Hash: [`ServiceKey6`](super::ServiceKey6) to [`ServiceIndex`](super::ServiceIndex).
    pub const SERVICES_V6: &str = "services_v6";
    /// Array, memory-mapped: service index to [`Service`](super::Service).
    pub const SERVICES: &str = "services";
    /// Array, memory-mapped: slot to [`Backend`](super::Backend).
    pub const BACKENDS: &str = "backends";
    /// Array, memory-mapped: [`ScheduleCell`](super::ScheduleCell), four entries each.
    pub const SCHEDULE: &str = "schedule";
    /// Per-CPU array: service index to [`Walk`](super::Walk).
    pub const WALKS: &str = "walks";
    /// Per-CPU array: service index, or [`NOT_A_SERVICE`](super::NOT_A_SERVICE), to [`Outcomes`](super::Outcomes).
    pub const OUTCOMES: &str = "outcomes";
    /// Per-CPU array: slot to [`Chosen`](super::Chosen).
    pub const CHOSEN: &str = "chosen";
    /// Array, memory-mapped: slot to [`Active`](super::Active).
    pub const ACTIVE: &str = "active";
    /// Array, memory-mapped: socket cookie modulo its length to [`FlowRecord`](super::FlowRecord).
    pub const FLOWS: &str = "flows";
    /// Hash: socket cookie to [`Flow`](super::Flow), for sockets whose place in `flows` is taken.
    pub const FLOW_OVERFLOW: &str = "flow_overflow";
    /// Hash: socket cookie to [`Listed`](super::Listed), for sockets that the kernel's socket list has shown.
    pub const LISTED: &str = "listed";

    /// All of them, in the order in which they are described.
    pub const ALL: [&str; 12] = [
        SERVICES_V4,
        SERVICES_V6,
        SERVICES,
        BACKENDS,
        SCHEDULE,
        WALKS,
        OUTCOMES,
        CHOSEN,
        ACTIVE,
        FLOWS,
        FLOW_OVERFLOW,
        LISTED,
    ];
}

// ---- services ------------------------------------------------------------------------------------------------------

/// An IPv4 address, port and protocol that processes dial. Written by the daemon.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct ServiceKey4 {
    /// The address dialled.
    pub address: Be32,
    /// The port dialled.
    pub port: Be16,
    /// The IP protocol number (6 is TCP).
    pub protocol: u8,
    /// Zero.
    pub _reserved: u8,
}
const _: () = assert!(size_of::<ServiceKey4>() == 8);

/// An IPv6 address, port and protocol that processes dial. Written by the daemon.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct ServiceKey6 {
    /// The address dialled.
    pub address: Address,
    /// The port dialled.
    pub port: Be16,
    /// The IP protocol number (6 is TCP).
    pub protocol: u8,
    /// Zero.
    pub _reserved: u8,
}
const _: () = assert!(size_of::<ServiceKey6>() == 20);

/// The place of a service in the per-service maps.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct ServiceIndex {
    /// Below [`MAX_SERVICES`].
    pub service: u32,
}
const _: () = assert!(size_of::<ServiceIndex>() == 4);

/// Where a service's current table lies: one word, so that it switches whole with a single store.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct TableRef {
    /// First entry (not cell) of the table; a multiple of its length.
    pub base: u32,
    /// Counts publications, wrapping: tells one table from the next in a dump.
    pub generation: u16,
    /// Logarithm of the length, [`MIN_SCHEDULE_LOG2`] to [`MAX_SCHEDULE_LOG2`]; 0 means "no table".
    pub length_log2: u8,
    /// Zero.
    pub _reserved: u8,
}
const _: () = assert!(size_of::<TableRef>() == 8);

impl TableRef {
    /// The word that is stored and loaded in one piece.
    #[inline(always)]
    pub fn to_word(self) -> u64 {
        bytemuck::cast(self)
    }

    /// From the word.
    #[inline(always)]
    pub fn from_word(word: u64) -> Self {
        bytemuck::cast(word)
    }

    /// Number of entries; 0 if there is no table.
    pub const fn len(self) -> u32 {
        if self.length_log2 == 0 { 0 } else { 1 << self.length_log2 }
    }

    /// Whether there is no table.
    pub const fn is_empty(self) -> bool {
        self.length_log2 == 0
    }
}

/// What connect needs of a service, and what `status` needs when the daemon is dead. Written by the daemon.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Service {
    /// The current table; stored as one word after the table itself is complete.
    pub table: TableRef,
    /// The slot taken when every pick was unusable, or [`NO_SLOT`] to refuse. Stored before any state word that would
    /// make it wrong, hence read after them.
    pub fallback: u32,
    /// The errno of a refused connect, as a positive number.
    pub errno: u32,
    /// The address processes dial; getpeername answers with it.
    pub address: Address,
    /// The port processes dial.
    pub port: Be16,
    /// The IP protocol number.
    pub protocol: u8,
    /// [`SERVICE_FREE`], [`SERVICE_LIVE`] or [`SERVICE_LEAVING`].
    pub state: u8,
    /// Name, padded with zeros.
    pub name: [u8; NAME_BYTES],
    /// Zero.
    pub _reserved: [u32; 7],
}
const _: () = assert!(size_of::<Service>() == 128);

/// The place holds no service.
pub const SERVICE_FREE: u8 = 0;
/// The service is configured.
pub const SERVICE_LIVE: u8 = 1;
/// The service was removed; the place is kept until its last flow ends, so that getpeername stays right.
pub const SERVICE_LEAVING: u8 = 2;

/// Four schedule entries, each the slot of a backend or [`NO_SLOT`]. Written by the daemon, only while no service
/// refers to it. Four to a cell because the kernel rounds every array element up to eight bytes.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct ScheduleCell {
    /// Slots of four consecutive entries.
    pub slots: [u16; 4],
}
const _: () = assert!(size_of::<ScheduleCell>() == 8);

/// Entries per [`ScheduleCell`].
pub const ENTRIES_PER_CELL: u32 = 4;

// ---- backends ------------------------------------------------------------------------------------------------------

/// Whether a backend may be chosen, and why not: one word, so that it changes with a single store.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct StateWord {
    /// 1 if connect may choose the backend, else 0. The only part the kernel reads.
    pub usable: u8,
    /// A [`BackendState`], for readers of the map.
    pub state: u8,
    /// Zero.
    pub _reserved: u16,
}
const _: () = assert!(size_of::<StateWord>() == 4);

impl StateWord {
    /// The word of a backend in `state`.
    pub const fn new(usable: bool, state: BackendState) -> Self {
        Self { usable: usable as u8, state: state as u8, _reserved: 0 }
    }

    /// The word that is stored and loaded in one piece.
    #[inline(always)]
    pub fn to_word(self) -> u32 {
        bytemuck::cast(self)
    }

    /// Whether the word says that the backend may be chosen.
    #[inline(always)]
    pub fn is_usable(word: u32) -> bool {
        bytemuck::cast::<u32, Self>(word).usable != 0
    }
}

/// What is known of a backend. Numbers are part of the ABI.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BackendState {
    /// The slot holds no backend.
    Free = 0,
    /// Takes connections.
    Healthy = 1,
    /// Serves, asks for no new connections.
    LameDuck = 2,
    /// Weight 0: no new connections.
    Unweighted = 3,
    /// Not in the subset any more; the slot is kept until its last flow ends.
    Leaving = 4,
}

impl BackendState {
    /// The state with this number, if there is one.
    pub const fn from_u8(number: u8) -> Option<Self> {
        Some(match number {
            0 => Self::Free,
            1 => Self::Healthy,
            2 => Self::LameDuck,
            3 => Self::Unweighted,
            4 => Self::Leaving,
            _ => return None,
        })
    }

    /// The word for it in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Healthy => "healthy",
            Self::LameDuck => "lame-duck",
            Self::Unweighted => "unweighted",
            Self::Leaving => "leaving",
        }
    }
}

/// One backend in its slot. Written by the daemon: the state word at any time, the rest only while no table, fallback
/// or flow refers to the slot.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Backend {
    /// The address that connect rewrites to.
    pub address: Address,
    /// The port that connect rewrites to.
    pub port: Be16,
    /// The service that owns the slot.
    pub service: u16,
    /// May it be chosen?
    pub state: StateWord,
    /// Counts the backends that have held this slot, wrapping. In a free slot, what the next one gets.
    pub generation: u32,
    /// The configured weight (capacity); for readers of the map.
    pub weight: u32,
}
const _: () = assert!(size_of::<Backend>() == 32);

// ---- counters ------------------------------------------------------------------------------------------------------

/// Where this CPU's walk over a service's schedule stands. Written by the daemon once, then by connect.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Walk {
    /// Picks so far, wrapping. Never reset: the walk goes on over each new table.
    pub phase: u32,
    /// Where the walk starts, as a fraction of the table's length in units of 2^-32.
    pub start: u32,
}
const _: () = assert!(size_of::<Walk>() == 8);

/// How calls of connect ended: each call counts in exactly one field. Written by connect.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Outcomes {
    /// Sent to the backend the schedule named.
    pub forwarded: u64,
    /// Every pick was unusable; sent to the service's fallback.
    pub fallback: u64,
    /// Sent to a backend, but the flow is not in any active count: the flow table was full, or the socket is a path of
    /// an MPTCP socket, whose end the programs cannot see.
    pub untracked: u64,
    /// No usable backend: refused with the service's errno.
    pub refused: u64,
    /// The maps contradicted each other; the call went through unchanged.
    pub passed: u64,
    /// The address is not a service; the call went through unchanged.
    pub not_a_service: u64,
}
const _: () = assert!(size_of::<Outcomes>() == 48);

/// The row of [`map::OUTCOMES`] that counts calls to addresses that are not services.
pub const NOT_A_SERVICE: u32 = MAX_SERVICES;

/// What became of a slot's backend since it took the slot. Written by the kernel programs, zeroed by the daemon before
/// reuse.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Chosen {
    /// Connects sent to it.
    pub connects: u64,
    /// Flows that, when they ended, turned out to be connected to another address: a program of somebody else rewrote
    /// the destination after ours.
    pub diverted: u64,
}
const _: () = assert!(size_of::<Chosen>() == 16);

/// Sockets that were last directed to this slot and are still open. Written by the kernel programs, and by the daemon
/// for records whose socket is gone, with atomic adds on both sides.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Active {
    /// Flows.
    pub flows: u64,
}
const _: () = assert!(size_of::<Active>() == 8);

// ---- flows ---------------------------------------------------------------------------------------------------------

/// Where a socket was sent. The slot cannot be reused while the flow is counted in its [`Active`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Flow {
    /// The slot of the backend.
    pub slot: u32,
    /// The generation of the slot at that time.
    pub generation: u32,
    /// Cookie of the socket's network namespace: in which list of sockets it is to be looked for.
    pub namespace: u64,
}
const _: () = assert!(size_of::<Flow>() == 16);

/// One place of the flow table. Written by the kernel programs; taken out by the daemon, with the same
/// compare-and-swap, if its socket is gone. Two to a cache line, so that none lies across two.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct FlowRecord {
    /// The socket that holds the place, 0 if none, and all ones while the daemon looks whether its socket is gone. Cookies are
    /// never reused while the host is up.
    pub cookie: u64,
    /// Its flow.
    pub flow: Flow,
    /// Sockets of this place whose flow is in the overflow table. Only if non-zero is that table searched; a socket
    /// whose flow is there can therefore not claim the place as well once it is free.
    pub overflowed: u64,
}
const _: () = assert!(size_of::<FlowRecord>() == 32);

/// The phase of a flow as the daemon knows it: which flow of a socket the kernel's list of sockets has shown. A connect that
/// the kernel has not begun, or that failed, is in no list though its socket is open; once a list has shown the flow, the
/// socket's absence means that the connection is over. Written and read by the daemon only; in a map so that it outlives
/// the daemon.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Listed {
    /// The slot of the flow's backend.
    pub slot: u32,
    /// Its generation.
    pub generation: u32,
}
const _: () = assert!(size_of::<Listed>() == 8);
