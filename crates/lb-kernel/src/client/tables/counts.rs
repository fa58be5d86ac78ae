//! The counts of the backends in slots, and the check that they add up.

use std::mem::offset_of;

use lb_common::abi::{self, Backend, map};
use lb_core::ids::Slot;

use super::Tables;
use crate::error::DatapathError;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// The counters, summed over all CPUs.
    pub sums: abi::SlotCounters,
    /// Open flows.
    pub active: u64,
    /// Flows whose records were reclaimed because their sockets were gone.
    pub reclaimed: u64,
}

impl Counts {
    /// The number of flows that have ended or are in no active count.
    pub fn over(&self) -> u64 {
        let endings = self.sums.endings.iter().fold(0, |sum: u64, count| sum.wrapping_add(*count));
        endings.wrapping_add(self.reclaimed).wrapping_add(self.sums.untracked)
    }

    /// Whether every started flow is counted as ended, untracked or open. The result may be `false`
    /// while flows begin and end.
    pub fn add_up(&self) -> bool {
        self.sums.chosen == self.over().wrapping_add(self.active)
    }
}

impl Tables {
    /// The counts of a slot's backend.
    ///
    /// # Errors
    /// If the kernel refuses the look-up.
    pub fn counts(&self, slot: Slot) -> Result<Counts, DatapathError> {
        let sums = self.maps.counts.get(slot).map_err(|error| self.fail_io(map::COUNTS, "read", error))?;
        Ok(self.with_active(slot, sums))
    }

    /// Calls `each` with the counts of each slot. The slots must be in ascending order.
    ///
    /// # Errors
    /// If the kernel refuses a look-up.
    pub fn visit_counts(
        &self,
        slots: &[Slot],
        mut each: impl FnMut(Slot, Counts),
    ) -> Result<(), DatapathError> {
        let each = |slot, sums| each(slot, self.with_active(slot, sums));
        self.maps.counts.visit(slots, each).map_err(|error| self.fail_io(map::COUNTS, "read", error))
    }

    /// For each of these slots, the number of flows sent to its backend. The slots must be in
    /// ascending order.
    ///
    /// # Errors
    /// If the kernel refuses a look-up.
    pub fn chosen(&self, slots: &[Slot]) -> Result<Vec<u64>, DatapathError> {
        self.maps.counts.chosen(slots).map_err(|error| self.fail_io(map::CHOSEN, "read", error))
    }

    fn with_active(&self, slot: Slot, sums: abi::SlotCounters) -> Counts {
        // The active count is read last, because a flow's end is counted before the active count
        // decreases.
        let reclaimed = self.maps.reclaimed.load64(slot.index(), 0);
        let active = self.maps.backends.load64(slot.index(), offset_of!(Backend, flows));
        Counts { sums, active, reclaimed }
    }

    /// The number of a slot's started flows minus the sum of its ended, untracked and open flows.
    /// The result omits any part of this difference that may be due to flows that begin or end
    /// during the reading. Any result but 0 is a fault.
    ///
    /// A flow is counted as chosen before it is counted as open, and its end is counted before it
    /// is subtracted from the open flows. So counts that are read before the open flows may be too
    /// small, and counts that are read after the open flows may be too large. Flows that begin and
    /// end during the reading explain any difference within these bounds.
    ///
    /// # Errors
    /// If the kernel refuses a look-up.
    pub fn imbalance(&self, slot: Slot) -> Result<i64, DatapathError> {
        /// Maximum number of attempts: a program may be preempted between two counts, so this
        /// thread yields and reads the counts again.
        const LOOKS: usize = 8;
        let mut off = 0;
        for _ in 0..LOOKS {
            let before = self.counts(slot)?;
            let after = self.counts(slot)?;
            // The active count of `before` was read after the sums of `before` and before the sums
            // of `after`.
            let open = before.active.cast_signed();
            let at_most = after.sums.chosen.wrapping_sub(before.over()).cast_signed().wrapping_sub(open);
            let at_least = before.sums.chosen.wrapping_sub(after.over()).cast_signed().wrapping_sub(open);
            off = if at_least > 0 { at_least } else { at_most.min(0) };
            if off == 0 {
                break;
            }
            std::thread::yield_now();
        }
        Ok(off)
    }
}
