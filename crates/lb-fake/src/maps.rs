//! The maps of one client task in memory, as the simulated programs use them, and the maps of the
//! host.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use lb_common::abi::host::{LastReport, MAX_LISTENERS, MAX_SENDERS, REPORT_IDS, Receptions, Verdict};
use lb_common::abi::{
    Anomalies, Backend, CpuService, Members, ScheduleCell, Service, SlotCounters, VipCell, map,
};
use lb_core::limits::Limits;
use lb_kernel::{
    Counters, HostArrays, Mapped, Maps, PerCpuArray, RetiredBackends, Verdicts, entries_of_maps,
};

use crate::faults::FaultInjection;
use crate::memory::{Array, CPUS, Hash};
use crate::records::FlowRecords;

/// The maps that all client tasks of a host share.
pub struct SharedMaps {
    pub verdicts: Mapped<Verdict>,
    last_reports: Mapped<LastReport>,
    senders: Hash,
    listeners: Hash,
    receptions: Array,
}

impl SharedMaps {
    pub fn new(faults: &Arc<FaultInjection>, cpu: &Arc<AtomicUsize>) -> io::Result<Self> {
        Ok(Self {
            verdicts: Mapped::in_memory(REPORT_IDS as usize)?,
            last_reports: Mapped::in_memory(REPORT_IDS as usize)?,
            senders: Hash::new(MAX_SENDERS, faults),
            listeners: Hash::new(MAX_LISTENERS, faults),
            receptions: Array::new(1, size_of::<Receptions>(), faults, cpu)?,
        })
    }

    /// Handles of these maps, in the form in which the daemon opens maps.
    pub fn opened(&self) -> HostArrays {
        HostArrays {
            verdicts: self.verdicts.shared(),
            last_reports: self.last_reports.shared(),
            senders: Box::new(self.senders.clone()),
            listeners: Box::new(self.listeners.clone()),
            receptions: PerCpuArray::over(Box::new(self.receptions.clone()), CPUS),
        }
    }
}

/// The maps of one client task.
pub struct ClientMaps {
    pub vip_table: Mapped<VipCell>,
    pub services: Mapped<Service>,
    pub backends: Mapped<Backend>,
    pub schedule: Mapped<ScheduleCell>,
    pub members: Mapped<Members>,
    pub cpu_services: Array,
    pub counts: Array,
    anomalies: Array,
    pub reclaimed: Mapped<u64>,
    retired: Hash,
    pub records: FlowRecords,
    pub verdicts: Mapped<Verdict>,
}

impl ClientMaps {
    /// Empty maps with the same numbers of elements as in the real kernel.
    pub fn new(
        limits: &Limits,
        verdicts: &Mapped<Verdict>,
        faults: &Arc<FaultInjection>,
        cpu: &Arc<AtomicUsize>,
    ) -> io::Result<Self> {
        let entries = entries_of_maps(limits);
        let length = |name: &str| entries[name] as usize;
        let array = |name: &str, bytes: usize| Array::new(entries[name], bytes, faults, cpu);
        Ok(Self {
            vip_table: Mapped::in_memory(length(map::VIP_TABLE))?,
            services: Mapped::in_memory(length(map::SERVICES))?,
            backends: Mapped::in_memory(length(map::BACKENDS))?,
            schedule: Mapped::in_memory(length(map::SCHEDULE))?,
            members: Mapped::in_memory(length(map::MEMBERS))?,
            cpu_services: array(map::CPU_SERVICES, size_of::<CpuService>())?,
            counts: array(map::COUNTS, size_of::<SlotCounters>())?,
            anomalies: array(map::ANOMALIES, size_of::<Anomalies>())?,
            reclaimed: Mapped::in_memory(length(map::RECLAIMED))?,
            retired: Hash::new(entries[map::RETIRED], faults),
            records: FlowRecords::new(faults)?,
            verdicts: verdicts.shared(),
        })
    }

    /// The lengths of those maps that [`Limits`] determine.
    pub fn lengths(&self) -> [(&'static str, usize); 2] {
        [(map::BACKENDS, self.backends.length()), (map::SCHEDULE, self.schedule.length())]
    }

    /// The number of open flows of all backends.
    pub fn open_flows(&self) -> u64 {
        let rows = 0..self.backends.length();
        rows.map(|row| self.backends.load64(row, std::mem::offset_of!(Backend, flows))).sum()
    }

    /// Handles of these maps, in the form in which the daemon opens maps.
    pub fn opened(&self) -> (Maps, Verdicts) {
        fn per_cpu<V: bytemuck::Pod>(array: &Array) -> PerCpuArray<V> {
            PerCpuArray::over(Box::new(array.clone()), CPUS)
        }
        let maps = Maps {
            vip_table: self.vip_table.shared(),
            services: self.services.shared(),
            backends: self.backends.shared(),
            schedule: self.schedule.shared(),
            members: self.members.shared(),
            cpu_services: per_cpu(&self.cpu_services),
            counts: Counters::over(per_cpu(&self.counts)),
            anomalies: per_cpu(&self.anomalies),
            reclaimed: self.reclaimed.shared(),
            retired: RetiredBackends::over(Box::new(self.retired.clone())),
        };
        (maps, Verdicts::over(self.verdicts.shared()))
    }
}
