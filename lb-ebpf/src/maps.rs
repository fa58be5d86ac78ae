//! Every map, one line each; `lb_common::abi` says who writes it and what lies in it.
//!
//! Capacities are defaults: the loader sets those that the configuration names.

use aya_ebpf::Global;
use aya_ebpf::btf_maps::{Array, HashMap, PerCpuArray};
use aya_ebpf::macros::btf_map;
use lb_common::abi::{
    Anomalies, Backend, BackendName, Cursor, Datagrams, ENTRIES_PER_CELL, FLOW_RECORDS, Flow, FlowBucket,
    MAX_SERVICES, Members, Outcomes, RetiredCounters, SCHEDULE_ENTRIES, SLOTS, ScheduleCell, Service,
    SlotCounters, VIP_CELLS, VipCell,
};

/// `BPF_F_MMAPABLE`: the daemon writes these arrays through a mapping, a whole table in microseconds.
const MAPPED: usize = 1 << 10;
/// `BPF_F_NO_PREALLOC`: collisions are rare, so memory is taken when one happens.
const ON_DEMAND: usize = 1;

#[btf_map(name = "dialled")]
pub static DIALLED: Array<VipCell, { VIP_CELLS as usize }, MAPPED> = Array::new();

#[btf_map(name = "services")]
pub static SERVICES: Array<Service, { MAX_SERVICES as usize }, MAPPED> = Array::new();

#[btf_map(name = "backends")]
pub static BACKENDS: Array<Backend, { SLOTS as usize }, MAPPED> = Array::new();

/// Twice the entries that may be in use, so that a new table finds room beside the one it replaces.
#[btf_map(name = "schedule")]
pub static SCHEDULE: Array<ScheduleCell, { (2 * SCHEDULE_ENTRIES / ENTRIES_PER_CELL) as usize }, MAPPED> =
    Array::new();

/// Two of each service, so that a new table's members lie beside those of the one it replaces.
#[btf_map(name = "members")]
pub static MEMBERS: Array<Members, { 2 * MAX_SERVICES as usize }, MAPPED> = Array::new();

#[btf_map(name = "walks")]
pub static WALKS: PerCpuArray<Cursor, { MAX_SERVICES as usize }> = PerCpuArray::new();

#[btf_map(name = "outcomes")]
pub static OUTCOMES: PerCpuArray<Outcomes, { MAX_SERVICES as usize + 1 }> = PerCpuArray::new();

#[btf_map(name = "counts")]
pub static COUNTS: PerCpuArray<SlotCounters, { SLOTS as usize }> = PerCpuArray::new();

#[btf_map(name = "chosen")]
pub static CHOSEN: PerCpuArray<u64, { SLOTS as usize }> = PerCpuArray::new();

#[btf_map(name = "flow_places")]
pub static FLOW_PLACES: Array<FlowBucket, { FLOW_RECORDS as usize }, MAPPED> = Array::new();

#[btf_map(name = "flows")]
pub static FLOWS: Array<Flow, { FLOW_RECORDS as usize }, MAPPED> = Array::new();

#[btf_map(name = "flow_overflow")]
pub static FLOW_OVERFLOW: HashMap<u64, Flow, { FLOW_RECORDS as usize }, ON_DEMAND> = HashMap::new();

#[btf_map(name = "datagrams")]
pub static DATAGRAMS: HashMap<u64, Datagrams, { FLOW_RECORDS as usize }, ON_DEMAND> = HashMap::new();

/// What an entry of `datagrams` begins as: too large for the stack.
#[unsafe(no_mangle)]
pub static EMPTY: Datagrams = Datagrams::EMPTY;

#[btf_map(name = "anomalies")]
pub static ANOMALIES: PerCpuArray<Anomalies, 1> = PerCpuArray::new();

/// The daemon's own: no program uses it.
#[btf_map(name = "departed")]
pub static DEPARTED: HashMap<BackendName, RetiredCounters, { SLOTS as usize }, ON_DEMAND> = HashMap::new();

/// Length of `flow_places` and of `flows` minus one. Set by the loader.
#[unsafe(no_mangle)]
pub static FLOW_MASK: Global<u32> = Global::new(FLOW_RECORDS - 1);

/// Whether the programs may ask the kernel if a socket is a path of an MPTCP socket (Linux 6.0 and CAP_PERFMON). Set by
/// the loader from a probe.
#[unsafe(no_mangle)]
pub static KNOWS_MPTCP: Global<u32> = Global::new(0);

/// Whether the kernel has `bpf_set_retval` (5.18). Set by the loader from a probe: where the helper is unknown, the call
/// is dead code, which the verifier skips. (Without CAP_PERFMON it follows dead code as well, as a processor might, and
/// then refuses a helper that it does not know.)
#[unsafe(no_mangle)]
pub static HAS_SET_RETVAL: Global<u32> = Global::new(0);

/// Whether the TCP program is attached as well: flows then end where their connections do, with a cause. Set by the loader.
#[unsafe(no_mangle)]
pub static FULL_ACCOUNTING: Global<u32> = Global::new(0);

/// Whether some service of the client may have its backends scanned. Where none has, the scans are dead code, which
/// newer verifiers skip. Set by the loader.
#[unsafe(no_mangle)]
pub static SCANS: Global<u32> = Global::new(0);

/// Nanoseconds of a jiffy. Set by the loader.
#[unsafe(no_mangle)]
pub static JIFFY_NS: Global<u64> = Global::new(0);

/// The time of the jiffy with the number 0, which may be long before the start of the clock: modulo 2^64. Set by the loader.
#[unsafe(no_mangle)]
pub static FIRST_JIFFY_NS: Global<u64> = Global::new(0);

/// Where a socket keeps its error (`sock.sk_err`), from the kernel's own description of its types; 0 if the programs may
/// not read it. Set by the loader.
#[unsafe(no_mangle)]
pub static SK_ERR: Global<u32> = Global::new(0);

/// Where a socket keeps an error that the kernel did not act on (`sock.sk_err_soft`), as [`SK_ERR`].
#[unsafe(no_mangle)]
pub static SK_ERR_SOFT: Global<u32> = Global::new(0);

/// As [`SK_ERR`], where a socket that is released is read: 0 if that may not be done.
#[unsafe(no_mangle)]
pub static RELEASED_SK_ERR: Global<u32> = Global::new(0);

/// `sock.sk_err_soft`, as [`RELEASED_SK_ERR`].
#[unsafe(no_mangle)]
pub static RELEASED_SK_ERR_SOFT: Global<u32> = Global::new(0);

/// `tcp_sock.bpf_sock_ops_cb_flags`, as [`RELEASED_SK_ERR`].
#[unsafe(no_mangle)]
pub static RELEASED_CALLBACKS: Global<u32> = Global::new(0);

/// `tcp_sock.srtt_us`, as [`RELEASED_SK_ERR`].
#[unsafe(no_mangle)]
pub static RELEASED_SRTT: Global<u32> = Global::new(0);

/// `tcp_sock.total_retrans`, as [`RELEASED_SK_ERR`].
#[unsafe(no_mangle)]
pub static RELEASED_RETRANSMITS: Global<u32> = Global::new(0);

/// `tcp_sock.bytes_received`, as [`RELEASED_SK_ERR`].
#[unsafe(no_mangle)]
pub static RELEASED_BYTES_RECEIVED: Global<u32> = Global::new(0);

/// `tcp_sock.bytes_acked`, as [`RELEASED_SK_ERR`].
#[unsafe(no_mangle)]
pub static RELEASED_BYTES_SENT: Global<u32> = Global::new(0);

/// `inet_connection_sock.icsk_syn_retries`, 0 if the programs may not read it or not set its option. Set by the loader.
#[unsafe(no_mangle)]
pub static SYN_RETRIES: Global<u32> = Global::new(0);

/// The byte of a socket that tells whether the kernel itself opened it (`sock.sk_kern_sock`), 0 if the programs may not read
/// it. Set by the loader.
#[unsafe(no_mangle)]
pub static KERNEL_SOCKET: Global<u32> = Global::new(0);

/// The bit of that byte, as a mask. Set by the loader.
#[unsafe(no_mangle)]
pub static KERNEL_SOCKET_MASK: Global<u32> = Global::new(0);
