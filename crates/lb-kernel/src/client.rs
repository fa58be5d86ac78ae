//! One client task in the kernel: its maps, its programs, and the steps that bring them to a plan.
//!
//! It remembers what the maps hold, so that comparing plans finds a failed step again, and where tables lie. It decides
//! neither: plans come from the core, and the arena places tables.

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

mod steps;

pub mod tables;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use lb_common::abi::SlotCounters;
use lb_core::arena::Arena;
use lb_core::ids::{BackendRef, ServiceIndex, Slot};
use lb_core::limits::Limits;
use lb_core::plan::{Plan, Step, diff, entries_by_slot};

use crate::error::DatapathError;
use crate::host::{features::Features, pins::Lock};
use object::Purpose;
use tables::{CursorSeed, Tables};

pub use kernel::{ClientKernel, PinnedClient};

/// One client task in the kernel.
pub struct Datapath {
    kernel: Box<dyn ClientKernel>,
    tables: Tables,
    /// Where tables lie in the schedule map.
    arena: Arena,
    /// What the maps hold: every step that was carried out is in it.
    applied: Plan,
    /// Backends that have returned, and the counts that they go on with.
    returned: Vec<(BackendRef, SlotCounters)>,
}

impl Datapath {
    /// Makes or adopts the maps of a client, and loads programs for them. Nothing is attached yet.
    ///
    /// # Errors
    /// If what is there is not ours or not of this shape, or the kernel refuses.
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

    /// Loads programs for another purpose. They take the place of those before when they are attached.
    ///
    /// # Errors
    /// If the kernel refuses; the programs before stay.
    pub fn reload(
        &mut self,
        limits: &Limits,
        features: Features,
        purpose: Purpose,
    ) -> Result<(), DatapathError> {
        self.kernel.load(limits, features, purpose)
    }

    /// The kernel.
    pub fn kernel(&self) -> &dyn ClientKernel {
        &*self.kernel
    }

    /// Gives up all but the lock of the pins, if there is one.
    pub fn into_lock(self) -> Option<Lock> {
        self.kernel.into_lock()
    }

    /// What the maps hold.
    pub fn applied(&self) -> &Plan {
        &self.applied
    }

    /// The tables, for reading counts.
    pub fn tables(&self) -> &Tables {
        &self.tables
    }

    /// Brings the maps to `plan`. Returns whether all of it was done: a new table that finds no room waits for
    /// [`Datapath::readers_are_gone`], while everything else is done.
    ///
    /// # Errors
    /// If the kernel refuses a step. The steps before it stay done, and the next call goes on from there.
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

    /// Switches a service to another table over its backends, where all else is as planned: what [`Datapath::apply`] does for a plan
    /// that differs in nothing else. Returns `false` if it finds no room until readers are gone, or there is no such service.
    ///
    /// # Panics
    /// If the table names a slot that is not one of the service's.
    pub fn reschedule(&mut self, index: ServiceIndex, schedule: Arc<[Slot]>) -> bool {
        let Some(service) = self.applied.services.get(&index) else { return false };
        for slot in entries_by_slot(&schedule).keys() {
            let is_own = self.applied.backends.get(slot).is_some_and(|backend| backend.service == index);
            assert!(is_own, "service {index}: schedule names slot {slot}");
        }
        let replaced = service.replaced.clone();
        let is_done = self.publish(index, &schedule, &replaced);
        if is_done {
            self.applied.record(&Step::Publish(index, schedule, replaced));
        }
        is_done
    }

    /// Sees to it that one of these ejected backends is named for the next trial of each of their services.
    pub fn renew_trials(&mut self, ejected: &[Slot]) {
        if !ejected.is_empty() {
            self.tables.renew_trials(ejected, self.kernel.now_ns());
        }
    }

    /// Tells the programs whose evidence counts: only that of flows of one network namespace, by its cookie, if it is known; and if
    /// several processes have begun flows lately, not that of one alone where it depends on what that has sent.
    pub fn set_evidence_scope(&mut self, namespace: Option<u64>, several_processes: bool) {
        for index in self.applied.services.keys() {
            self.tables.set_evidence_scope(*index, namespace.unwrap_or_default(), several_processes);
        }
    }

    /// Ejects the backends in these slots, which fail and are not ejected.
    pub fn eject(&mut self, slots: &[Slot]) {
        let now = self.kernel.now_ns();
        for slot in slots {
            self.tables.eject(*slot, now);
        }
        self.renew_trials(slots);
    }

    /// Adds recent errors to the backend in a slot, if its service counts them as load.
    pub fn add_errors(&self, slot: Slot, more: u32) {
        self.tables.add_errors(slot, more, self.kernel.now_ns());
    }

    /// Gives the programs the most open flows of a service per share, as [`error_load`](lb_core::control::error_load) computes it.
    pub fn set_peak_flows(&mut self, index: ServiceIndex, peak: u64) {
        self.tables.set_peak_flows(index, peak);
    }

    /// Leaves the backend in a slot at most so many errors.
    pub fn limit_errors(&self, slot: Slot, most: u32) {
        self.tables.limit_errors(slot, most, self.kernel.now_ns());
    }

    /// Halves the errors of the backend in a slot so much later.
    pub fn hold_errors(&self, slot: Slot, delay: Duration) {
        self.tables.hold_errors(slot, delay, self.kernel.now_ns());
    }

    /// Makes the next connects the trials of the ejected backends in these slots: something else has shown that they may be well
    /// again.
    pub fn try_at_once(&mut self, slots: &[Slot]) {
        let now = self.kernel.now_ns();
        for slot in slots {
            self.tables.end_ejection(*slot, now);
        }
    }

    /// Takes back the backend in a slot, if it is ejected, and forgets what failed. Returns whether it was ejected.
    pub fn readmit(&mut self, slot: Slot) -> bool {
        let was_ejected = self.tables.slot(slot).is_some_and(|view| view.is_ejected);
        if was_ejected {
            self.tables.readmit(slot);
        }
        was_ejected
    }

    /// Backends that have returned since this was last asked, and the counts that they go on with.
    pub fn returned(&mut self) -> Vec<(BackendRef, SlotCounters)> {
        std::mem::take(&mut self.returned)
    }

    /// Those of these slots that a table or a fallback in the maps names. What the plan no longer needs may still be
    /// named by a table whose successor waits for room.
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

    /// Whether the region of some replaced table is not free before readers are gone; also after a wait that failed.
    pub fn is_waiting_for_readers(&self) -> bool {
        self.arena.is_waiting()
    }

    /// To be called before a wait for readers starts: what was replaced until now will be free after it.
    pub fn before_wait(&mut self) {
        self.arena.before_wait();
    }

    /// To be called after a wait for readers that began with [`Datapath::before_wait`].
    pub fn readers_are_gone(&mut self) {
        self.arena.after_wait();
    }
}
