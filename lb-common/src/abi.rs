//! The kernel ABI: every map's name, key, value and capacity, and the limits that both sides keep.
//!
//! One set of these maps exists per client task, under `<pins>/v<ABI_VERSION>/<client>/maps/`. Each value says who
//! writes it. Any change of a layout here is a new [`ABI_VERSION`]. What all client tasks of a host share is in [`host`] and has a
//! version of its own; what an agent shares with its program is in [`responder`] and is pinned nowhere.
//!
//! Two versions meet in an upgrade, so a little is the same in all of them: links are pinned as `links/<hook>@<cgroup
//! id>`, and [`map::BACKENDS`] (`active` up to version 3) is an array whose values begin with the open flows of a slot as a
//! 64-bit number. By these one version takes the hooks that begin flows away from another, and sees when the last of its flows has ended.

/// A value that fits in one word, so that it changes with a single store and is read whole.
macro_rules! one_word {
    ($value:ty, $word:ty) => {
        const _: () = assert!(size_of::<$value>() == size_of::<$word>());

        impl $value {
            /// The word that is stored and loaded in one piece.
            #[inline(always)]
            pub fn to_word(self) -> $word {
                bytemuck::cast(self)
            }

            /// From the word.
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

/// The directory of pins that is used unless another is named.
pub const DEFAULT_PINS: &str = "/sys/fs/bpf/socklb";

/// The version of everything in this module but [`host`] and [`responder`]; a part of the pin path.
pub const ABI_VERSION: u32 = 7;

// ---- limits, each with its reason ----------------------------------------------------------------------------------

/// Services per client task. A byte would hold them; the bound keeps every per-service table a few pages.
pub const MAX_SERVICES: u32 = 256;
/// Cells of the VIP table: at most an eighth is in use, so nearly every look-up is over with the first. A
/// power of two.
pub const VIP_CELLS: u32 = 8 * MAX_SERVICES;
/// Cells in which a service may be, from where its address hashes to: far beyond what chance makes of an eighth in use.
pub const MAX_PROBES: u32 = 32;
/// Client tasks per host: each has its own programs and maps, so this bounds locked memory.
pub const MAX_CLIENTS: usize = 64;
/// The largest fixed subset size: the largest set that a scan inside one program run can afford.
pub const MAX_SUBSET: u32 = 256;
/// Backends that are listed of one table: a whole subset, and as many again as half of it, which may have been replaced.
pub const MAX_LISTED: u32 = MAX_SUBSET + MAX_SUBSET / 2;
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
/// Slots of one client task, by default: room for sixteen services of 128 backends to be replaced whole. A slot's
/// counters take half a kilobyte on every CPU, so whoever uses more says so.
pub const SLOTS: u32 = 4_096;
/// The most slots a client task can have: a schedule entry is 16 bits wide and [`NO_SLOT`] is one of its values.
pub const MAX_SLOTS: u32 = 65_535;
/// Flow records of one client task, by default; as many again fit in the overflow table. A power of two.
pub const FLOW_RECORDS: u32 = 131_072;
/// Services that one datagram socket can talk to by addressed datagrams at the same time; a further one takes the place
/// of the one that was chosen first. Each is compared with the source of every datagram that the socket receives.
pub const MAX_DATAGRAM_FLOWS: usize = 8;
/// Entries that a connect draws again, because their backends are not eligible, before all are asked that there are.
pub const MAX_REDRAWS: u32 = 4;
/// Bytes of a service's or client's name in the kernel, padded with zeros. One is kept free, so names are at most 63.
pub const NAME_BYTES: usize = 64;

/// "No slot": in a schedule entry, an entry that names nobody; as a fallback, "refuse the connect".
pub const NO_SLOT: u32 = 0xffff;

// ---- map names -----------------------------------------------------------------------------------------------------

/// Names of the maps as the object declares them and as they are pinned.
pub mod map {
    /// Array, memory-mapped: the hash of an address, modulo its length, or a few further, to [`VipCell`](super::VipCell).
    pub const VIP_TABLE: &str = "vip_table";
    /// Array, memory-mapped: service index to [`Service`](super::Service).
    pub const SERVICES: &str = "services";
    /// Array, memory-mapped: slot to [`Backend`](super::Backend).
    pub const BACKENDS: &str = "backends";
    /// Array, memory-mapped: [`ScheduleCell`](super::ScheduleCell), four entries each.
    pub const SCHEDULE: &str = "schedule";
    /// Array, memory-mapped: twice the service index, plus the half, to [`Members`](super::Members).
    pub const MEMBERS: &str = "members";
    /// Per-CPU array: service index to [`Cursor`](super::Cursor).
    pub const CURSORS: &str = "cursors";
    /// Per-CPU array: service index, or [`NOT_A_SERVICE`](super::NOT_A_SERVICE), to [`Outcomes`](super::Outcomes).
    pub const OUTCOMES: &str = "outcomes";
    /// Per-CPU array: slot to [`SlotCounters`](super::SlotCounters).
    pub const COUNTS: &str = "counts";
    /// Per-CPU array: slot to the flows that were sent to its backend. Apart from the other counts, because it is all that a
    /// choice counts: those of eight slots lie in one cache line.
    pub const CHOSEN: &str = "chosen";
    /// Array, memory-mapped: socket cookie modulo its length to [`FlowBucket`](super::FlowBucket).
    pub const FLOW_BUCKETS: &str = "flow_buckets";
    /// Array, memory-mapped: as [`FLOW_BUCKETS`] to the [`Flow`](super::Flow) of the socket that holds the bucket.
    pub const FLOWS: &str = "flows";
    /// Hash: socket cookie to [`Flow`](super::Flow), for sockets whose bucket in `flow_buckets` is taken.
    pub const FLOW_OVERFLOW: &str = "flow_overflow";
    /// Hash: socket cookie to [`Datagrams`](super::Datagrams), for datagram sockets that are not connected.
    pub const DATAGRAMS: &str = "datagrams";
    /// Per-CPU array of one [`Anomalies`](super::Anomalies).
    pub const ANOMALIES: &str = "anomalies";
    /// Array, memory-mapped: slot to the flows whose records the daemon has taken out, because their sockets were gone. The
    /// daemon's own: no program uses it.
    pub const RECLAIMED: &str = "reclaimed";
    /// Hash: [`BackendName`](super::BackendName) to [`RetiredCounters`](super::RetiredCounters).
    pub const RETIRED: &str = "retired";

    /// All of them, in the order in which they are described.
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
