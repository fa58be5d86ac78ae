//! The maps of a client task, opened through their pins: memory-mapped arrays, per-CPU arrays, and
//! the hash of retired counters.

use std::os::fd::AsFd;
use std::path::Path;

use lb_common::abi::{Anomalies, Backend, CpuService, Members, ScheduleCell, Service, VipCell, map};

use super::counters::Counters;
use super::retired::RetiredBackends;
use crate::error::DatapathError;
use crate::host::pins::Pins;
use crate::sys;
use crate::sys::{mapped::Mapped, per_cpu::PerCpuArray};

/// The number of a client's open flows, for pins of any ABI version. Every version has a mapped
/// array with one value per slot. Each value begins with the number of the slot's open flows.
///
/// # Errors
/// If the map cannot be opened or mapped.
pub fn open_flows(pins: &Pins) -> Result<u64, DatapathError> {
    /// The name of this array up to ABI version 3.
    const BEFORE: &str = "active";
    let dir = pins.maps();
    let before = dir.join(BEFORE);
    let path = if before.exists() { before } else { dir.join(map::BACKENDS) };
    let fail = |error| DatapathError::Map { path: path.clone(), operation: "mmap", source: error };
    let fd = sys::open_pin(&path).map_err(fail)?;
    let info = sys::map_info(fd.as_fd()).map_err(fail)?;
    // Kernel fact: the positions of an array's elements are multiples of eight bytes.
    let words = info.value_size.div_ceil(8) as usize;
    let values = Mapped::<u64>::map(&fd, info.max_entries as usize * words * 8, false).map_err(fail)?;
    let slots = 0..info.max_entries as usize;
    Ok(slots.fold(0u64, |sum, slot| sum.saturating_add(values.get(slot * words))))
}

/// The maps of a client task with its tables and counts.
pub struct Maps {
    pub vip_table: Mapped<VipCell>,
    pub services: Mapped<Service>,
    pub backends: Mapped<Backend>,
    pub schedule: Mapped<ScheduleCell>,
    pub members: Mapped<Members>,
    pub cpu_services: PerCpuArray<CpuService>,
    pub counts: Counters,
    pub anomalies: PerCpuArray<Anomalies>,
    /// Number of reclaimed flows of each slot.
    pub reclaimed: Mapped<u64>,
    pub retired: RetiredBackends,
}

impl Maps {
    /// Opens the maps pinned in `dir`. Does not check their shapes (see `object::check_pins`).
    ///
    /// # Errors
    /// If a map is missing, or this process may not open it.
    pub fn open(dir: &Path, writable: bool) -> Result<Self, DatapathError> {
        let path = |name: &str| dir.join(name);
        Ok(Self {
            vip_table: Mapped::open(&path(map::VIP_TABLE), writable)?,
            services: Mapped::open(&path(map::SERVICES), writable)?,
            backends: Mapped::open(&path(map::BACKENDS), writable)?,
            schedule: Mapped::open(&path(map::SCHEDULE), writable)?,
            members: Mapped::open(&path(map::MEMBERS), writable)?,
            cpu_services: PerCpuArray::open(&path(map::CPU_SERVICES))?,
            counts: Counters::open(dir)?,
            anomalies: PerCpuArray::open(&path(map::ANOMALIES))?,
            reclaimed: Mapped::open(&path(map::RECLAIMED), writable)?,
            retired: RetiredBackends::open(&path(map::RETIRED))?,
        })
    }
}
