//! The kernel ABI: every map's name, key, value and capacity, and the limits that both the programs
//! and the daemon must respect.
//!
//! One set of these maps exists per client task, under `<pins>/v<ABI_VERSION>/<client>/maps/`. The
//! documentation of each value names the side that writes it. Any change of a layout here needs a
//! new [`ABI_VERSION`]. The maps that all client tasks of a host share are in [`host`] and have a
//! separate version. The maps that an agent shares with its program are in [`responder`] and are
//! not pinned.
//!
//! During an upgrade the programs of two versions run side by side. Therefore two properties are
//! the same in all versions. First, links are pinned as `links/<hook>@<cgroup id>`: the daemon of
//! one version finds the other version's programs there, and detaches those that begin flows.
//! Second, [`map::BACKENDS`] (named `active` up to version 3) is an array in which each value
//! begins with the number of a slot's open flows (64 bits). The daemon reads this number to find
//! when the last flow of the other version has ended.

/// Implements the conversions between a value and a word of the same size. A single store changes
/// such a value, and a single load reads it.
macro_rules! one_word {
    ($value:ty, $word:ty) => {
        const _: () = assert!(size_of::<$value>() == size_of::<$word>());

        impl $value {
            /// The value as a word, so that a single store can write it.
            #[inline(always)]
            pub fn to_word(self) -> $word {
                bytemuck::cast(self)
            }

            /// The value in a word that a single load has read.
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

/// The default directory of pins; `--pins` selects another one.
pub const DEFAULT_PINS: &str = "/sys/fs/bpf/socklb";

/// The version of everything in this module except [`host`] and [`responder`]; a part of the pin
/// path.
pub const ABI_VERSION: u32 = 8;

// ---- limits, each with its reason ---------------------------------------------------------------

/// Maximum services per client task. The bound limits the memory of the per-service arrays.
pub const MAX_SERVICES: u32 = 256;
/// Number of cells of the VIP table; a power of two. Services use at most an eighth of the cells,
/// so nearly every lookup ends at the first cell.
pub const VIP_CELLS: u32 = 8 * MAX_SERVICES;
/// Maximum number of cells that a lookup in the VIP table examines, beginning with the cell to
/// which the address hashes. With an eighth of the cells in use, longer runs of used cells
/// practically never occur by chance.
pub const MAX_PROBES: u32 = 32;
/// Maximum client tasks per host. Each client task has its own programs and maps, so this maximum
/// bounds the locked memory.
pub const MAX_CLIENTS: usize = 64;
/// The largest fixed subset size. A scan of more backends would take too long in one execution of a
/// program.
pub const MAX_SUBSET: u32 = 256;
/// Maximum length of the list of a table's backends ([`Members`]): a whole subset, and replaced
/// backends up to half that number.
pub const MAX_LISTED: u32 = MAX_SUBSET + MAX_SUBSET / 2;
/// Maximum backends of a service without a subset: all its endpoints are its backends.
pub const MAX_BACKENDS: u32 = 16_384;
/// Binary logarithm of the shortest schedule's length. With this length, 1,024 entries, the
/// rounding of weights reduces utilization by 0.7 %; with 256 entries, the reduction is 2.8 %.
pub const MIN_SCHEDULE_LOG2: u8 = 10;
/// Binary logarithm of the longest schedule's length, 65,536 entries.
pub const MAX_SCHEDULE_LOG2: u8 = 16;
/// Entries of a schedule per backend, before rounding up to a power of two.
pub const SCHEDULE_ENTRIES_PER_BACKEND: u32 = 32;
/// Default maximum of schedule entries of one client task, in all its services together. The map
/// has room for twice this number, so that a new table fits beside the table that it replaces.
pub const SCHEDULE_ENTRIES: u32 = 524_288;
/// Default number of slots of one client task: enough for sixteen services with 128 backends each,
/// even while all of these backends are being replaced. The default is not larger because the
/// counters of each slot use half a kilobyte of memory on every CPU.
pub const SLOTS: u32 = 4_096;
/// Maximum slots of a client task: a schedule entry has 16 bits, and the value [`NO_SLOT`] is not a
/// slot.
pub const MAX_SLOTS: u32 = 65_535;
/// Default number of flow records of one client task; a power of two. The overflow table has room
/// for the same number of further records.
pub const FLOW_RECORDS: u32 = 131_072;
/// Maximum flows of a datagram socket that sends to addresses without connecting; each flow goes to
/// a different service. A further flow replaces the flow that was chosen first. The maximum is
/// small, because a program compares the source of every datagram that the socket receives with
/// each flow.
pub const MAX_DATAGRAM_FLOWS: usize = 8;
/// Maximum scattered schedule entries that a connect examines if the picked backend is not eligible
/// and the service has a limit of open flows. After these entries, the connect examines all
/// members.
pub const MAX_REDRAWS: u32 = 4;
/// Number of bytes of a service's name in the kernel, padded with zeros. The last byte is always
/// zero, so names of services have at most 63 bytes; names of clients have the same limit.
pub const NAME_BYTES: usize = 64;

/// The number that means "no slot". In a schedule entry it means that there is no backend; as a
/// fallback, it means that the connect is refused.
pub const NO_SLOT: u32 = 0xffff;

// ---- map names ----------------------------------------------------------------------------------

/// Names of the maps as the object declares them and as they are pinned.
pub mod map {
    /// Array, memory-mapped, of [`VipCell`](super::VipCell). A destination's cell is at its hash
    /// modulo the array's length, or at one of the next [`MAX_PROBES`](super::MAX_PROBES) - 1
    /// indexes.
    pub const VIP_TABLE: &str = "vip_table";
    /// Array, memory-mapped: service index to [`Service`](super::Service).
    pub const SERVICES: &str = "services";
    /// Array, memory-mapped: slot to [`Backend`](super::Backend).
    pub const BACKENDS: &str = "backends";
    /// Array, memory-mapped: index of a schedule entry divided by four, to
    /// [`ScheduleCell`](super::ScheduleCell).
    pub const SCHEDULE: &str = "schedule";
    /// Array, memory-mapped: twice the service index, plus 0 or 1, to [`Members`](super::Members).
    /// Each service has two lists, so that the daemon can write the list for a new table while
    /// programs read the list of the current table.
    pub const MEMBERS: &str = "members";
    /// Per-CPU array: service index, or [`NOT_A_SERVICE`](super::NOT_A_SERVICE), to
    /// [`CpuService`](super::CpuService).
    pub const CPU_SERVICES: &str = "cpu_services";
    /// Per-CPU array: slot to [`SlotCounters`](super::SlotCounters).
    pub const COUNTS: &str = "counts";
    /// Array, memory-mapped: socket cookie modulo the array's length to
    /// [`FlowBucket`](super::FlowBucket).
    pub const FLOWS: &str = "flows";
    /// Hash: socket cookie to [`Flow`](super::Flow), for sockets whose bucket in [`FLOWS`] belongs
    /// to another socket.
    pub const FLOW_OVERFLOW: &str = "flow_overflow";
    /// Hash: socket cookie to [`Datagrams`](super::Datagrams), for datagram sockets that send to
    /// addresses without connecting.
    pub const DATAGRAMS: &str = "datagrams";
    /// Per-CPU array of one [`Anomalies`](super::Anomalies).
    pub const ANOMALIES: &str = "anomalies";
    /// Array, memory-mapped: slot to the number of its backend's flows that the daemon reclaimed
    /// because their sockets were gone. Only the daemon uses this map.
    pub const RECLAIMED: &str = "reclaimed";
    /// Hash: [`BackendName`](super::BackendName) to [`RetiredCounters`](super::RetiredCounters).
    /// Only the daemon uses this map.
    pub const RETIRED: &str = "retired";

    /// The names of all maps, in the order of the constants above.
    pub const ALL: [&str; 13] = [
        VIP_TABLE,
        SERVICES,
        BACKENDS,
        SCHEDULE,
        MEMBERS,
        CPU_SERVICES,
        COUNTS,
        FLOWS,
        FLOW_OVERFLOW,
        DATAGRAMS,
        ANOMALIES,
        RECLAIMED,
        RETIRED,
    ];
}
