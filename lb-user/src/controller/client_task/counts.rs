//! The recent counts of a client task's programs, from regular samples of their counters.
//!
//! Counters only grow; the counts of the last minute are the difference of two samples. This module
//! reads no clock.

use std::time::Instant;

use lb_core::ids::{BackendRef, ServiceIndex, Slot};
use lb_kernel::DatapathError;

use super::ClientTask;
use crate::counts::window::{Sample, Window};

impl ClientTask {
    /// Samples the counts of every slot, if a sample is due.
    ///
    /// # Errors
    /// If the kernel refuses a lookup. The `bool` is `true` if the error differs from the last one.
    pub fn sample(&mut self, now: Instant) -> Result<(), (DatapathError, bool)> {
        if !self.window.is_due(now) || !self.counting.is_due(now) {
            return Ok(());
        }
        match self.take_sample(now) {
            Ok(()) => {
                self.counting.succeeded();
                Ok(())
            }
            Err(error) => {
                let is_new = self.counting.failed(now, &crate::error::chain(&error));
                Err((error, is_new))
            }
        }
    }

    fn take_sample(&mut self, now: Instant) -> Result<(), DatapathError> {
        let (tables, backends) = (self.datapath.tables(), &self.datapath.applied().backends);
        let slots: Vec<Slot> = backends.keys().copied().collect();
        let at = |slot: Slot| BackendRef { slot, generation: backends[&slot].generation };
        // The chosen flows are read before the open flows, because the programs count a flow in
        // this order.
        let has_changed = |slot: &Slot| {
            let is_settled = self.window.is_settled(at(*slot), tables.chosen(*slot));
            tables.active(*slot) != 0 || !is_settled
        };
        let changed: Vec<Slot> = slots.iter().copied().filter(has_changed).collect();
        let has_begun = !changed.is_empty();
        let mut counted = Vec::with_capacity(changed.len());
        tables.visit_counts(&changed, |slot, counts| {
            let mut sample = Sample::of(at(slot), &counts.sums);
            sample.is_off = !counts.add_up();
            sample.is_settled = !sample.is_off && counts.active == 0;
            counted.push(sample);
        })?;
        for sample in counted.iter_mut().filter(|sample| sample.is_off) {
            sample.is_off = tables.imbalance(sample.backend.slot)? != 0;
        }
        let limited = self.limited()?;
        let all: Vec<BackendRef> = slots.into_iter().map(at).collect();
        self.window.push_changes(now, &all, counted, limited);
        if has_begun {
            self.flows_have_begun();
        }
        Ok(())
    }

    /// For each service with a limit: how many connects were refused because all backends were at
    /// the limit.
    fn limited(&self) -> Result<Vec<(ServiceIndex, u64)>, DatapathError> {
        let services = self.datapath.applied().services.iter();
        let limited = services.filter(|(_, service)| service.rules.active_limit != 0);
        let count = |index: ServiceIndex| Ok((index, self.datapath.tables().outcomes(index)?.limited));
        limited.map(|(index, _)| count(*index)).collect()
    }

    pub fn window(&self) -> &Window {
        &self.window
    }
}
