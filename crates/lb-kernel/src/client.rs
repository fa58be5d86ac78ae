//! One client task in the kernel: its maps, its programs, and the steps that make the maps match a
//! plan.
//!
//! [`Datapath`] stores the contents of the maps as a plan, and the positions of the tables. If a
//! step fails, the next comparison with the wanted plan yields this step again. A failed step
//! leaves the arena consistent: a table is retired in the arena before the row with its reference
//! is overwritten, and a new table is published in the arena only when no later write can fail.
//! [`Datapath`] makes no decisions: `lb-core` computes plans, and its arena determines the
//! positions of tables.

mod adoption;

pub mod counters;

pub mod detach;

pub mod flow_table;

pub mod hooks;

mod kernel;

pub mod links;

pub mod maps;

pub mod object;

pub mod retired;

pub mod tables;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use lb_common::abi::SlotCounters;
use lb_core::arena::{Arena, NoRoom};
use lb_core::ids::{BackendRef, ServiceIndex, Slot};
use lb_core::limits::Limits;
use lb_core::plan::{Plan, ServicePlan, Step, diff, entries_by_slot};

use crate::error::DatapathError;
use crate::host::{features::Features, pins::Lock};
use object::Purpose;
use tables::{CursorSeed, Tables};

pub use kernel::{ClientKernel, PinnedClient};

/// One client task in the kernel.
pub struct Datapath {
    kernel: Box<dyn ClientKernel>,
    tables: Tables,
    /// The positions of the tables in the map `schedule`.
    arena: Arena,
    /// The contents of the maps as a plan, which includes every completed step.
    applied: Plan,
    /// Backends that returned to their service, each with the retired counters from which its
    /// counts continue.
    returned: Vec<(BackendRef, SlotCounters)>,
}

impl Datapath {
    /// Creates or adopts the maps of a client, and loads programs for them. Does not attach the
    /// programs.
    ///
    /// # Errors
    /// If existing pins are not socklb's, or have another shape than `limits` requires, or if the
    /// kernel refuses.
    pub fn open(
        mut kernel: Box<dyn ClientKernel>,
        limits: &Limits,
        features: Features,
        purpose: Purpose,
    ) -> Result<Self, DatapathError> {
        let tables = kernel.open(limits, features, purpose)?;
        let applied = tables.read_plan()?;
        let arena = Arena::adopt(tables.schedule_entries(), tables.table_refs());
        let arena = arena.map_err(|error| tables.contradiction(error.to_string()))?;
        Ok(Self { kernel, tables, arena, applied, returned: Vec::new() })
    }

    /// Loads programs for another [`Purpose`]. The next [`ClientKernel::attach`] replaces the
    /// attached programs.
    ///
    /// # Errors
    /// If the kernel refuses; the previous programs remain.
    pub fn reload(
        &mut self,
        limits: &Limits,
        features: Features,
        purpose: Purpose,
    ) -> Result<(), DatapathError> {
        self.kernel.load(limits, features, purpose)
    }

    pub fn kernel(&self) -> &dyn ClientKernel {
        &*self.kernel
    }

    /// Releases all resources, and returns the lock of the pins if there is one.
    pub fn into_lock(self) -> Option<Lock> {
        self.kernel.into_lock()
    }

    /// The contents of the maps as a plan.
    pub fn applied(&self) -> &Plan {
        &self.applied
    }

    /// The tables, from which callers read counts.
    pub fn tables(&self) -> &Tables {
        &self.tables
    }

    /// Changes the contents of the maps to those of `plan`. Returns whether all steps are done. If
    /// the schedule map has no free region for a new table, the new table must wait for
    /// [`Datapath::readers_are_gone`]. All other steps are carried out.
    ///
    /// # Errors
    /// If the kernel refuses a step. The steps before it remain done, and the next call repeats the
    /// refused step.
    pub fn apply(&mut self, plan: &Plan, cursor_seed: &CursorSeed) -> Result<bool, DatapathError> {
        let mut complete = true;
        for step in diff(&self.applied, plan) {
            if self.carry_out(&step, &plan.services, cursor_seed)? {
                self.applied.record(&step);
            } else {
                complete = false;
            }
        }
        Ok(complete)
    }

    /// Carries out one step towards a plan with these services. Returns `false` if the schedule map
    /// has no free region for a new table until the readers of replaced tables are gone.
    ///
    /// # Errors
    /// If the kernel refuses.
    fn carry_out(
        &mut self,
        step: &Step,
        services: &BTreeMap<ServiceIndex, ServicePlan>,
        cursor_seed: &CursorSeed,
    ) -> Result<bool, DatapathError> {
        match step {
            Step::Close(index) => self.tables.close_service(*index),
            Step::WriteService(index, service) => {
                // The step overwrites the row, which contains the reference to the table.
                self.arena.retire(*index);
                self.tables.write_service(*index, service, cursor_seed)?;
            }
            Step::WriteBackend(slot, backend) => {
                let service = services.get(&backend.service).expect("a backend's service is in the plan");
                let counts = self.tables.write_backend(*slot, backend, &service.name)?;
                let at = BackendRef { slot: *slot, generation: backend.generation };
                self.returned.extend(counts.map(|counts| (at, counts)));
            }
            Step::SetErrno(index, errno) => self.tables.set_errno(*index, *errno),
            Step::SetRules(index, rules) => self.tables.set_rules(*index, *rules),
            Step::SetEjection(index, rules) => self.tables.set_ejection(*index, *rules),
            Step::SetFallback(index, slot) => self.tables.set_fallback(*index, *slot),
            Step::SetState(slot, state) => self.tables.set_state(*slot, *state),
            Step::SetWeight(slot, weight) => self.tables.set_weight(*slot, *weight),
            Step::SetReport(slot, report) => self.tables.set_report(*slot, *report),
            Step::Publish(index, schedule, replaced) => return Ok(self.publish(*index, schedule, replaced)),
            Step::Open(index) => self.tables.open_service(*index)?,
            Step::FreeBackend(slot) => self.tables.free_backend(*slot, self.kernel.now_ns())?,
            Step::FreeService(index) => self.tables.free_service(*index),
        }
        Ok(true)
    }

    /// Writes a new table and switches to it. Returns `false` if the schedule map has no free
    /// region for the table until the readers of replaced tables are gone.
    fn publish(&mut self, index: ServiceIndex, schedule: &[Slot], replaced: &[Slot]) -> bool {
        let length = u32::try_from(schedule.len()).expect("the planner bounds schedules");
        let entries_of = entries_by_slot(schedule);
        match self.arena.publish(index, length, entries_of.len()) {
            Ok(new) => {
                self.tables.switch_schedule(index, new, schedule, &entries_of, replaced);
                true
            }
            Err(NoRoom { moves }) => {
                moves.into_iter().for_each(|step| self.tables.move_schedule(step));
                false
            }
        }
    }

    /// Switches a service to another table with the same backends. The result is the same as that
    /// of [`Datapath::apply`] with a plan that differs only in this table. Returns `false` if the
    /// schedule map has no free region for the table until the readers of replaced tables are gone,
    /// or if there is no such service.
    ///
    /// # Panics
    /// If the table contains a slot that does not belong to the service.
    pub fn reschedule(&mut self, index: ServiceIndex, schedule: Arc<[Slot]>) -> bool {
        let Some(service) = self.applied.services.get(&index) else { return false };
        for slot in entries_by_slot(&schedule).keys() {
            let is_own = self.applied.backends.get(slot).is_some_and(|backend| backend.service == index);
            assert!(is_own, "service {index}: the schedule contains slot {slot} of another service");
        }
        let replaced = service.replaced.clone();
        let is_done = self.publish(index, &schedule, &replaced);
        if is_done {
            self.applied.record(&Step::Publish(index, schedule, replaced));
        }
        is_done
    }

    /// Ensures that the next trial ([`Service::next_trial`](lb_common::abi::Service::next_trial))
    /// of each service with any of these ejected backends is the trial of one of them.
    pub fn renew_trials(&mut self, ejected: &[Slot]) {
        if !ejected.is_empty() {
            self.tables.renew_trials(ejected, self.kernel.now_ns());
        }
    }

    /// Stores for the programs which flows are evidence of backends' health. `namespace`: the
    /// cookie of the only network namespace with flows that are evidence; if it is `None`, all
    /// flows are evidence. `several_processes`: whether several processes have recently begun
    /// flows. In this case, failures that may depend on a process's data do not eject a backend
    /// while only one process has these failures.
    pub fn set_evidence_scope(&mut self, namespace: Option<u64>, several_processes: bool) {
        for index in self.applied.services.keys() {
            self.tables.set_evidence_scope(*index, namespace.unwrap_or_default(), several_processes);
        }
    }

    /// Ejects the backends in these slots, which must be failing and not ejected.
    pub fn eject(&mut self, slots: &[Slot]) {
        let now = self.kernel.now_ns();
        for slot in slots {
            self.tables.eject(*slot, now);
        }
        self.renew_trials(slots);
    }

    /// Adds recent errors to the backend in a slot, if its service counts errors as load.
    pub fn add_errors(&self, slot: Slot, more: u32) {
        self.tables.add_errors(slot, more, self.kernel.now_ns());
    }

    /// Stores for the programs the peak number of open flows per share of a service, which
    /// [`error_load`](lb_core::control::error_load) computes.
    pub fn set_peak_flows(&mut self, index: ServiceIndex, peak: u64) {
        self.tables.set_peak_flows(index, peak);
    }

    /// Reduces the recent errors of the backend in a slot to at most `most`.
    pub fn limit_errors(&self, slot: Slot, most: u32) {
        self.tables.limit_errors(slot, most, self.kernel.now_ns());
    }

    /// Delays the next halving of the recent errors of a slot's backend.
    pub fn hold_errors(&self, slot: Slot, delay: Duration) {
        self.tables.hold_errors(slot, delay, self.kernel.now_ns());
    }

    /// Ends the ejection times of the backends in these slots, so that the next connects are their
    /// trials. Call this if evidence other than flows shows that the backends may be healthy again.
    pub fn try_at_once(&mut self, slots: &[Slot]) {
        let now = self.kernel.now_ns();
        for slot in slots {
            self.tables.end_ejection(*slot, now);
        }
    }

    /// Readmits the backend in a slot if it is ejected, and resets its count of consecutive
    /// failures. Returns whether the backend was ejected.
    pub fn readmit(&mut self, slot: Slot) -> bool {
        let was_ejected = self.tables.slot(slot).is_some_and(|view| view.is_ejected);
        if was_ejected {
            self.tables.readmit(slot);
        }
        was_ejected
    }

    /// The backends that have returned since the last call of this method, and the retired counters
    /// from which their counts continue.
    pub fn returned(&mut self) -> Vec<(BackendRef, SlotCounters)> {
        std::mem::take(&mut self.returned)
    }

    /// The slots among `slots` that the tables and fallbacks in the maps still contain. While the
    /// schedule map has no free region for a service's next table, its current table may contain
    /// slots that the wanted plan no longer contains.
    pub fn named(&self, slots: &BTreeSet<Slot>) -> BTreeSet<Slot> {
        let mut named = BTreeSet::new();
        if slots.is_empty() {
            return named;
        }
        for service in self.applied.services.values() {
            let entries = service.schedule.iter().chain(&service.replaced).copied();
            named.extend(entries.chain(service.fallback).filter(|slot| slots.contains(slot)));
        }
        named
    }

    /// Whether the region of a replaced table is still occupied because programs may read it. A
    /// failed wait for readers does not change the result.
    pub fn is_waiting_for_readers(&self) -> bool {
        self.arena.is_waiting()
    }

    /// Call this before a wait for readers begins. After the wait, the regions of tables that were
    /// replaced before this call are free.
    pub fn before_wait(&mut self) {
        self.arena.before_wait();
    }

    /// Call this after a wait for readers that began with [`Datapath::before_wait`], unless the
    /// wait failed.
    pub fn readers_are_gone(&mut self) {
        self.arena.after_wait();
    }
}
