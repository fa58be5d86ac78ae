//! The kernel ABI: every map's name, key, value and capacity, and the limits that both sides
//! observe.
//!
//! One set of these maps exists per client task, under `<pins>/v<ABI_VERSION>/<client>/maps/`. The
//! documentation of each value names its writer. Any change of a layout here needs a new
//! [`ABI_VERSION`]. The maps that all client tasks of a host share are in [`host`] and have a
//! version of their own. The maps that an agent shares with its program are in [`responder`] and
//! are not pinned.
//!
//! During an upgrade two versions run side by side, so two things are the same in all versions:
//! links are pinned as `links/<hook>@<cgroup id>`, and [`map::BACKENDS`] (`active` up to version 3)
//! is an array whose values begin with the open flows of a slot as a 64-bit number. With these, a
//! version takes over the hooks that begin flows from another, and detects the end of the last flow
//! of the other.

/// A value that fits in one word, so that a single store changes it and a single load reads it.
macro_rules! one_word {
    ($value:ty, $word:ty) => {
        const _: () = assert!(size_of::<$value>() == size_of::<$word>());

        impl $value {
            /// The word, for one load or store.
            #[inline(always)]
            pub fn to_word(self) -> $word {
                bytemuck::cast(self)
            }

            /// The value of a word.
            #[inline(always)]
            pub fn from_word(word: $word) -> Self {
                bytemuck::cast(word)
            }
        }
    };
}

mod service;

mod backend;

mod flow;

mod counts;

mod retired_counters;

pub mod host;

pub mod responder;

pub use backend::*;
pub use counts::*;
pub use flow::*;
pub use retired_counters::*;
pub use service::*;

/// The default directory of pins.
pub const DEFAULT_PINS: &str = "/sys/fs/bpf/socklb";

/// The version of everything in this module but [`host`] and [`responder`]; a part of the pin path.
pub const ABI_VERSION: u32 = 7;

// ---- limits, each with its reason ---------------------------------------------------------------

/// Maximum services per client task. One byte would be enough for an index; the bound limits every
/// per-service table to a few pages.
pub const MAX_SERVICES: u32 = 256;
/// Cells of the VIP table: at most an eighth is in use, so nearly every lookup ends at the first
/// cell. A power of two.
pub const VIP_CELLS: u32 = 8 * MAX_SERVICES;
/// Maximum distance of a service's cell from the one to which its address hashes: far beyond what
/// occurs by chance with an eighth of the cells in use.
pub const MAX_PROBES: u32 = 32;
/// Client tasks per host: each has its own programs and maps, so this bounds locked memory.
pub const MAX_CLIENTS: usize = 64;
/// The largest fixed subset size: the largest set that a scan inside one program run can afford.
pub const MAX_SUBSET: u32 = 256;
/// Maximum backends that are listed for one table: a whole subset, and half as many again for
/// members that were replaced.
pub const MAX_LISTED: u32 = MAX_SUBSET + MAX_SUBSET / 2;
/// Maximum backends of a service without a subset, which uses all of them.
pub const MAX_BACKENDS: u32 = 16_384;
/// The shortest schedule: at 1,024 entries the rounding of weights costs 0.7 % of utilization, at
/// 256 it costs 2.8 %.
pub const MIN_SCHEDULE_LOG2: u8 = 10;
/// The longest schedule of one service: 65,536 entries.
pub const MAX_SCHEDULE_LOG2: u8 = 16;
/// Entries of a schedule per backend, before rounding up to a power of two.
pub const SCHEDULE_ENTRIES_PER_BACKEND: u32 = 32;
/// Schedule entries of one client task in all its services, by default. The map holds twice as
/// many, so that a new table always finds room beside the one it replaces.
pub const SCHEDULE_ENTRIES: u32 = 524_288;
/// Slots of one client task, by default: enough to replace all backends of sixteen services with
/// 128 backends each. A slot's counters take half a kilobyte on every CPU, so a larger number must
/// be configured.
pub const SLOTS: u32 = 4_096;
/// Maximum slots of a client task: a schedule entry has 16 bits and [`NO_SLOT`] is one of its
/// values.
pub const MAX_SLOTS: u32 = 65_535;
/// Flow records of one client task, by default; as many again fit in the overflow table. A power of
/// two.
pub const FLOW_RECORDS: u32 = 131_072;
/// Maximum services to which one datagram socket can send addressed datagrams at the same time; a
/// further one replaces the one that was chosen first. Each is compared with the source of every
/// datagram that the socket receives.
pub const MAX_DATAGRAM_FLOWS: usize = 8;
/// Maximum entries that a connect draws again because their backends are not eligible, before it
/// examines all backends.
pub const MAX_REDRAWS: u32 = 4;
/// Bytes of a service's or client's name in the kernel, padded with zeros. One byte stays zero, so
/// names have at most 63.
pub const NAME_BYTES: usize = 64;

/// "No slot". In a schedule entry: no backend. As a fallback: refuse the connect.
pub const NO_SLOT: u32 = 0xffff;

// ---- map names ----------------------------------------------------------------------------------

/// Names of the maps as the object declares them and as they are pinned.
pub mod map {
    /// Array, memory-mapped: the hash of an address modulo the array's length, or a few cells
    /// further, to [`VipCell`](super::VipCell).
    pub const VIP_TABLE: &str = "vip_table";
    /// Array, memory-mapped: service index to [`Service`](super::Service).
    pub const SERVICES: &str = "services";
    /// Array, memory-mapped: slot to [`Backend`](super::Backend).
    pub const BACKENDS: &str = "backends";
    /// Array, memory-mapped: [`ScheduleCell`](super::ScheduleCell), four entries each.
    pub const SCHEDULE: &str = "schedule";
    /// Array, memory-mapped: twice the service index, plus the half of the pair, to
    /// [`Members`](super::Members).
    pub const MEMBERS: &str = "members";
    /// Per-CPU array: service index to [`Cursor`](super::Cursor).
    pub const CURSORS: &str = "cursors";
    /// Per-CPU array: service index, or [`NOT_A_SERVICE`](super::NOT_A_SERVICE), to
    /// [`Outcomes`](super::Outcomes).
    pub const OUTCOMES: &str = "outcomes";
    /// Per-CPU array: slot to [`SlotCounters`](super::SlotCounters).
    pub const COUNTS: &str = "counts";
    /// Per-CPU array: slot to the number of flows that were sent to its backend. It is separate
    /// from the other counters because a choice increments only this one: eight slots share one
    /// cache line.
    pub const CHOSEN: &str = "chosen";
    /// Array, memory-mapped: socket cookie modulo the array's length to
    /// [`FlowBucket`](super::FlowBucket).
    pub const FLOW_BUCKETS: &str = "flow_buckets";
    /// Array, memory-mapped: index as in [`FLOW_BUCKETS`] to the [`Flow`](super::Flow) of the
    /// socket that holds the bucket.
    pub const FLOWS: &str = "flows";
    /// Hash: socket cookie to [`Flow`](super::Flow), for sockets whose bucket in `flow_buckets` is
    /// taken.
    pub const FLOW_OVERFLOW: &str = "flow_overflow";
    /// Hash: socket cookie to [`Datagrams`](super::Datagrams), for datagram sockets that are not
    /// connected.
    pub const DATAGRAMS: &str = "datagrams";
    /// Per-CPU array of one [`Anomalies`](super::Anomalies).
    pub const ANOMALIES: &str = "anomalies";
    /// Array, memory-mapped: slot to the number of flows that the daemon reclaimed because their
    /// sockets were gone. Only the daemon uses it, no program does.
    pub const RECLAIMED: &str = "reclaimed";
    /// Hash: [`BackendName`](super::BackendName) to [`RetiredCounters`](super::RetiredCounters).
    pub const RETIRED: &str = "retired";

    /// All of them, in the order of their declarations.
    pub const ALL: [&str; 16] = [
        VIP_TABLE,
        SERVICES,
        BACKENDS,
        SCHEDULE,
        MEMBERS,
        CURSORS,
        OUTCOMES,
        COUNTS,
        CHOSEN,
        FLOW_BUCKETS,
        FLOWS,
        FLOW_OVERFLOW,
        DATAGRAMS,
        ANOMALIES,
        RECLAIMED,
        RETIRED,
    ];
}
