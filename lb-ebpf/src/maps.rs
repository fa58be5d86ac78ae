//! All maps of the programs. `lb_common::abi` documents the content of each map and the side that
//! writes it.
//!
//! The capacities here are defaults; the loader replaces those that the configuration sets.

use aya_ebpf::btf_maps::{Array, HashMap, PerCpuArray};
use aya_ebpf::macros::btf_map;
use lb_common::abi::host::{REPORT_IDS, Verdict};
use lb_common::abi::{
    Anomalies, Backend, BackendName, CpuService, Datagrams, ENTRIES_PER_CELL, FLOW_RECORDS, Flow, FlowBucket,
    MAX_SERVICES, Members, RetiredCounters, SCHEDULE_ENTRIES, SLOTS, ScheduleCell, Service, SlotCounters,
    VIP_CELLS, VipCell,
};

/// `BPF_F_MMAPABLE`: the daemon writes these arrays through a mapping, which takes microseconds for
/// a whole table.
const MAPPED: usize = 1 << 10;
/// `BPF_F_NO_PREALLOC`: these hashes usually have few entries, so memory is allocated with each
/// entry.
const ON_DEMAND: usize = 1;

#[btf_map(name = "vip_table")]
pub static VIP_TABLE: Array<VipCell, { VIP_CELLS as usize }, MAPPED> = Array::new();

#[btf_map(name = "services")]
pub static SERVICES: Array<Service, { MAX_SERVICES as usize }, MAPPED> = Array::new();

#[btf_map(name = "backends")]
pub static BACKENDS: Array<Backend, { SLOTS as usize }, MAPPED> = Array::new();

/// Twice the maximum number of entries in use, so that a new table fits beside the table that it
/// replaces.
#[btf_map(name = "schedule")]
pub static SCHEDULE: Array<ScheduleCell, { (2 * SCHEDULE_ENTRIES / ENTRIES_PER_CELL) as usize }, MAPPED> =
    Array::new();

/// Two lists per service, so that a new table's list can be written beside the list of the table
/// that it replaces.
#[btf_map(name = "members")]
pub static MEMBERS: Array<Members, { 2 * MAX_SERVICES as usize }, MAPPED> = Array::new();

#[btf_map(name = "cpu_services")]
pub static CPU_SERVICES: PerCpuArray<CpuService, { MAX_SERVICES as usize + 1 }> = PerCpuArray::new();

#[btf_map(name = "counts")]
pub static COUNTS: PerCpuArray<SlotCounters, { SLOTS as usize }> = PerCpuArray::new();

#[btf_map(name = "flows")]
pub static FLOWS: Array<FlowBucket, { FLOW_RECORDS as usize }, MAPPED> = Array::new();

#[btf_map(name = "flow_overflow")]
pub static FLOW_OVERFLOW: HashMap<u64, Flow, { FLOW_RECORDS as usize }, ON_DEMAND> = HashMap::new();

#[btf_map(name = "datagrams")]
pub static DATAGRAMS: HashMap<u64, Datagrams, { FLOW_RECORDS as usize }, ON_DEMAND> = HashMap::new();

/// The initial value of an entry of `datagrams`, which is too large for the stack.
#[unsafe(no_mangle)]
pub static EMPTY: Datagrams = Datagrams::EMPTY;

/// The initial value of an entry of `flow_overflow`.
#[unsafe(no_mangle)]
pub static NO_FLOW: Flow = Flow::NONE;

/// This is a map of the host, which all client tasks share.
#[btf_map(name = "verdicts")]
pub static VERDICTS: Array<Verdict, { REPORT_IDS as usize }, MAPPED> = Array::new();

#[btf_map(name = "anomalies")]
pub static ANOMALIES: PerCpuArray<Anomalies, 1> = PerCpuArray::new();

/// Only the daemon uses this map and `retired`.
#[btf_map(name = "reclaimed")]
pub static RECLAIMED: Array<u64, { SLOTS as usize }, MAPPED> = Array::new();

#[btf_map(name = "retired")]
pub static RETIRED: HashMap<BackendName, RetiredCounters, { SLOTS as usize }, ON_DEMAND> = HashMap::new();
