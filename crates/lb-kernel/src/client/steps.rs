//! Carries out a plan's steps on the maps.
//!
//! Each step may fail and be repeated. A failed step leaves the arena consistent: a table is
//! retired in the arena before the row with its reference is overwritten, and a new table is
//! published in the arena only when no later write can fail.

use std::collections::BTreeMap;

use lb_core::arena::NoRoom;
use lb_core::ids::{BackendRef, ServiceIndex, Slot};
use lb_core::plan::{ServicePlan, Step, entries_by_slot};

use super::Datapath;
use super::tables::CursorSeed;
use crate::error::DatapathError;

impl Datapath {
    /// Carries out one step towards a plan with these services. Returns `false` if there is no room
    /// for a new table until readers are gone.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(super) fn carry_out(
        &mut self,
        step: &Step,
        services: &BTreeMap<ServiceIndex, ServicePlan>,
        cursor_seed: &CursorSeed,
    ) -> Result<bool, DatapathError> {
        match step {
            Step::Close(index) => self.tables.close_service(*index),
            Step::WriteService(index, service) => {
                // This overwrites the row, which contains the reference to the table.
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

    /// Writes a new table and switches to it. Returns `false` if there is no room until readers are
    /// gone.
    pub(super) fn publish(&mut self, index: ServiceIndex, schedule: &[Slot], replaced: &[Slot]) -> bool {
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
}
