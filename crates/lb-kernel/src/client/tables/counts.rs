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

/// The lower half of a count.
#[expect(clippy::cast_possible_truncation, reason = "the lower half")]
pub(super) fn low_half(count: u64) -> u32 {
    count as u32
}

/// The count with this lower half that is nearest to `near`.
fn extended(low: u32, near: u64) -> u64 {
    near.wrapping_add_signed(i64::from(low.wrapping_sub(low_half(near)).cast_signed()))
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

    /// The number of flows sent to a slot's backend, modulo 2^32.
    pub fn chosen(&self, slot: Slot) -> u32 {
        self.maps.backends.load32(slot.index(), offset_of!(Backend, chosen))
    }

    fn with_active(&self, slot: Slot, sums: abi::SlotCounters) -> Counts {
        // Flows are counted as chosen before they end, so `chosen` is read after the endings. The
        // active count is read last, because a flow's end is counted before the active count
        // decreases.
        let chosen = self.chosen(slot);
        let reclaimed = self.maps.reclaimed.load64(slot.index(), 0);
        let active = self.maps.backends.load64(slot.index(), offset_of!(Backend, flows));
        let mut counts = Counts { sums, active, reclaimed };
        counts.sums.chosen = extended(chosen, counts.over().wrapping_add(active));
        counts
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lower_half_is_extended_to_the_nearest_count() {
        const HALF: u64 = 1 << 32;
        let cases = [
            (7, 7, 7),
            (9, 7, 9),
            (5, 7, 5),
            (1, HALF - 2, HALF + 1),
            (u32::MAX, 3 * HALF + 1, 3 * HALF - 1),
            (0, 2 * HALF, 2 * HALF),
        ];
        for (low, near, expected) in cases {
            assert_eq!(extended(low, near), expected, "{low} near {near}");
        }
    }
}
