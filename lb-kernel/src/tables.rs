//! The tables of one client task as they lie in its maps: plans are read from them, steps written into them, and counts
//! read back.

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
use std::mem::offset_of;
use std::sync::Arc;

use aya::maps::MapError;
use lb_common::abi::{self, Anomalies, Backend, NO_SLOT, SERVICE_FREE, Service, StateWord, map};
use lb_core::plan::{BackendPlan, Plan, ServicePlan, Step};

use super::counters::sum;
use super::error::DatapathError;
use super::maps::{Maps, Raw};
use super::pins::Pins;
use schedule::Retired;

/// The tables of one client task.
pub struct Tables {
    maps: Maps,
    pins: Pins,
    /// Tables that were replaced, and may still be read.
    retired: Vec<Retired>,
    /// Those of them that were replaced before the wait for readers that is under way.
    waiting: Vec<Retired>,
    /// Backends that have returned: slot and generation, and the counts that they go on with.
    returned: Vec<((u32, u32), abi::SlotCounters)>,
}

impl Tables {
    /// Opens the tables of a client.
    ///
    /// # Errors
    /// If a map is missing or may not be opened.
    pub fn open(pins: &Pins, writable: bool) -> Result<Self, DatapathError> {
        let maps = Maps::open(&pins.maps(), writable)?;
        Ok(Self { maps, pins: pins.clone(), retired: Vec::new(), waiting: Vec::new(), returned: Vec::new() })
    }

    /// What should not have happened, over all CPUs.
    ///
    /// # Errors
    /// If the kernel refuses the look-up.
    pub fn anomalies(&self) -> Result<Anomalies, DatapathError> {
        let cpus =
            self.maps.anomalies.get(&0, 0).map_err(|error| self.fail(map::ANOMALIES, "read", error))?;
        Ok(sum(&raw_values(&cpus)))
    }

    /// The maps' contents as a plan.
    ///
    /// # Errors
    /// If they contradict themselves.
    pub fn read_plan(&self, pins: &Pins) -> Result<Plan, DatapathError> {
        let contradiction = |what: String| DatapathError::Contradiction {
            client: pins.client.clone(),
            detach: pins.detach_command(),
            what,
        };
        let mut plan = Plan::default();
        let mut seen = BTreeMap::new();
        for view in self.slots() {
            if let Some(other) = seen.insert((view.service, view.address), view.slot) {
                let what = format!("slots {other} and {} hold the same backend {}", view.slot, view.address);
                return Err(contradiction(what));
            }
            plan.backends.insert(
                view.slot,
                BackendPlan {
                    service: view.service,
                    address: view.address,
                    generation: view.generation,
                    weight: u16::try_from(view.weight).unwrap_or(u16::MAX),
                    state: view.state,
                    usable: view.usable,
                },
            );
        }
        for view in self.services() {
            let schedule: Arc<[u16]> = self.schedule(view.table).into();
            let owned = |slot: u32| plan.backends.get(&slot).is_some_and(|b| b.service == view.index);
            if schedule.len() != view.table.len() as usize {
                return Err(contradiction(format!("service {} points past the schedule map", view.name)));
            }
            if let Some(slot) = schedule.iter().find(|slot| !owned(u32::from(**slot))) {
                return Err(contradiction(format!(
                    "the schedule of service {} names slot {slot}",
                    view.name
                )));
            }
            if view.fallback != NO_SLOT && !owned(view.fallback) {
                return Err(contradiction(format!(
                    "the fallback of service {} is slot {}",
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
                    fallback: view.fallback,
                    schedule,
                },
            );
        }
        Ok(plan)
    }

    /// Carries out one step towards a plan with these services. Returns `false` if a new table finds no room until readers are gone.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn carry_out(
        &mut self,
        step: &Step,
        services: &BTreeMap<u16, ServicePlan>,
        cursor_seed: &CursorSeed,
    ) -> Result<bool, DatapathError> {
        match step {
            Step::Close(index) => self.close(*index),
            Step::WriteService(index, service) => self.write_service(*index, service, cursor_seed)?,
            Step::WriteBackend(slot, backend) => {
                let service = services.get(&backend.service).expect("a backend is of a service of the plan");
                self.write_backend(*slot, backend, &service.name)?;
            }
            Step::SetErrno(index, errno) => {
                let at = offset_of!(Service, errno);
                self.maps.services.store32(usize::from(*index), at, u32::from(*errno));
            }
            Step::SetRules(index, rules) => self.set_rules(*index, *rules),
            Step::SetFallback(index, slot) => {
                self.maps.services.store32(usize::from(*index), offset_of!(Service, fallback), *slot);
            }
            Step::SetState(slot, usable, state) => {
                self.set_state(*slot, StateWord::new(*usable, *state));
            }
            Step::SetWeight(slot, weight) => {
                let at = offset_of!(Backend, endpoint.weight);
                self.maps.backends.store32(*slot as usize, at, u32::from(*weight));
            }
            Step::Publish(index, schedule) => return Ok(self.publish(*index, schedule)),
            Step::Open(index) => self.open_service(*index)?,
            Step::FreeBackend(slot) => self.free_backend(*slot)?,
            // Nothing else changes: a program may have found the service just before its address was another's, and what it
            // reads is a closed service still. What gets the index next writes all of it.
            Step::FreeService(index) => self.set_service_state(*index, SERVICE_FREE),
        }
        Ok(true)
    }

    fn fail(&self, name: &str, operation: &'static str, error: MapError) -> DatapathError {
        self.fail_io(name, operation, io::Error::other(error))
    }

    fn fail_io(&self, name: &str, operation: &'static str, source: io::Error) -> DatapathError {
        DatapathError::Map { path: self.pins.maps().join(name), operation, source }
    }
}

fn raw_values<T: bytemuck::Pod>(cpus: &aya::maps::PerCpuValues<Raw<T>>) -> Vec<T> {
    cpus.iter().map(|Raw(value)| *value).collect()
}
