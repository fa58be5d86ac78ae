//! The tables of one client task in its maps. This module reads a plan from the maps, writes the
//! steps of plans into them, and reads counts.
//!
//! The module contains the layout of each value and the order in which words must be written. Plans
//! and the arena determine which values are written and when they are written.

mod services;

mod backends;

mod schedule;

mod counts;

mod vip_table;

mod fullness;

pub use backends::SlotView;
pub use counts::Counts;
pub use fullness::Fullness;
pub use services::{CursorSeed, ServiceView};

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use lb_common::abi::{Anomalies, NO_SLOT, map};
use lb_core::ids::Slot;
use lb_core::plan::{BackendPlan, Plan, ServicePlan};

use super::maps::Maps;
use crate::error::DatapathError;
use crate::host::{maps::Verdicts, pins::Pins};

/// The tables of one client task, and its opened maps.
pub struct Tables {
    maps: Maps,
    verdicts: Verdicts,
    pins: Pins,
}

impl Tables {
    /// Opens the tables of a client.
    ///
    /// # Errors
    /// If a map is missing or this process may not open it.
    pub fn open(pins: &Pins, writable: bool) -> Result<Self, DatapathError> {
        let maps = Maps::open(&pins.maps(), writable)?;
        Ok(Self::over(maps, Verdicts::open(pins.base())?, pins.clone()))
    }

    /// The tables in these maps. `pins`: the location of the maps, which errors name.
    pub fn over(maps: Maps, verdicts: Verdicts, pins: Pins) -> Self {
        Self { maps, verdicts, pins }
    }

    /// The counts of anomalies, summed over all CPUs.
    ///
    /// # Errors
    /// If the kernel refuses the look-up.
    pub fn anomalies(&self) -> Result<Anomalies, DatapathError> {
        self.maps.anomalies.get(0).map_err(|error| self.fail_io(map::ANOMALIES, "read", error))
    }

    /// Reads the contents of the maps as a plan.
    ///
    /// # Errors
    /// If the contents contradict each other.
    pub fn read_plan(&self) -> Result<Plan, DatapathError> {
        let contradiction = |what: String| self.contradiction(what);
        let mut plan = Plan::default();
        let mut seen = BTreeMap::new();
        for view in self.slots() {
            if let Some(other) = seen.insert((view.service, view.address), view.at.slot) {
                let what =
                    format!("slots {other} and {} contain the same backend {}", view.at.slot, view.address);
                return Err(contradiction(what));
            }
            plan.backends.insert(
                view.at.slot,
                BackendPlan {
                    service: view.service,
                    address: view.address,
                    generation: view.at.generation,
                    weight: view.weight,
                    state: view.state,
                    usable: view.usable,
                    reason: view.reason,
                    is_probed_healthy: view.is_probed_healthy,
                    report: view.report,
                },
            );
        }
        for view in self.services() {
            let owned = |number: u32| {
                let slot = Slot::new(number)?;
                plan.backends.get(&slot).is_some_and(|b| b.service == view.index).then_some(slot)
            };
            let entries = self.schedule(view.table);
            if entries.len() != view.table.len() as usize {
                return Err(contradiction(format!("the table of service {} ends past the map", view.name)));
            }
            let schedule: Result<Arc<[Slot]>, u16> =
                entries.into_iter().map(|entry| owned(entry.into()).ok_or(entry)).collect();
            let schedule = schedule.map_err(|entry| {
                contradiction(format!(
                    "the schedule of service {} names slot {entry}, which is not a slot of the service",
                    view.name
                ))
            })?;
            let replaced = self.replaced(view.index, view.table);
            let replaced: Result<Vec<Slot>, u16> =
                replaced.into_iter().map(|slot| owned(slot.into()).ok_or(slot)).collect();
            let replaced = replaced.map_err(|slot| {
                contradiction(format!(
                    "the members of service {} name slot {slot}, which is not a slot of the service",
                    view.name
                ))
            })?;
            let fallback = owned(view.fallback);
            if view.fallback != NO_SLOT && fallback.is_none() {
                return Err(contradiction(format!(
                    "the fallback of service {} is slot {}, which is not a slot of the service",
                    view.name, view.fallback
                )));
            }
            plan.services.insert(
                view.index,
                ServicePlan {
                    name: view.name,
                    address: view.address,
                    protocol: view.protocol,
                    open: view.open,
                    errno: view.errno,
                    rules: view.rules,
                    ejection: view.ejection,
                    fallback,
                    schedule,
                    replaced,
                },
            );
        }
        Ok(plan)
    }

    pub(crate) fn contradiction(&self, what: String) -> DatapathError {
        let client = self.pins.client.clone();
        DatapathError::Contradiction { client, detach: self.pins.detach_command(), what }
    }

    fn fail_io(&self, name: &str, operation: &'static str, source: io::Error) -> DatapathError {
        DatapathError::Map { path: self.pins.maps().join(name), operation, source }
    }
}
