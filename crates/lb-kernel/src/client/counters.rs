//! The counters of slots, in which the kernel programs count per CPU. This module reads the
//! counters in batches, and sets them when a slot is assigned to a backend.

use std::io;
use std::path::Path;

use lb_common::abi::{SlotCounters, map};
use lb_core::ids::Slot;

use crate::error::DatapathError;
use crate::sys::per_cpu::PerCpuArray;

/// The counters of all slots.
pub struct Counters {
    /// All counters except `chosen`.
    counts: PerCpuArray<SlotCounters>,
    /// Number of flows that were sent to the slot's backend.
    chosen: PerCpuArray<u64>,
}

impl Counters {
    pub fn over(counts: PerCpuArray<SlotCounters>, chosen: PerCpuArray<u64>) -> Self {
        Self { counts, chosen }
    }

    /// Opens the counters that are pinned in `dir`.
    ///
    /// # Errors
    /// If the maps cannot be opened, or the kernel does not report the number of possible CPUs.
    pub fn open(dir: &Path) -> Result<Self, DatapathError> {
        Ok(Self {
            counts: PerCpuArray::open(&dir.join(map::COUNTS))?,
            chosen: PerCpuArray::open(&dir.join(map::CHOSEN))?,
        })
    }

    /// The counts of one slot, summed over all CPUs.
    ///
    /// # Errors
    /// If the kernel refuses the look-up.
    pub fn get(&self, slot: Slot) -> io::Result<SlotCounters> {
        // `chosen` is read last, because programs increase it before they count the flow's end. So
        // no flow is counted as ended but not as chosen.
        let counts = self.counts.get(slot.number())?;
        Ok(SlotCounters::from_stored(&counts, self.chosen.get(slot.number())?))
    }

    /// Calls `each` with the counts of each slot, summed over all CPUs. The slots must be in
    /// ascending order.
    ///
    /// # Errors
    /// If the kernel refuses a look-up.
    pub fn visit(&self, slots: &[Slot], mut each: impl FnMut(Slot, SlotCounters)) -> io::Result<()> {
        let numbers: Vec<u32> = slots.iter().map(|slot| slot.number()).collect();
        let mut slots = slots.iter();
        // Backends are assigned to the lowest free slots, so only few other slots are between the
        // wanted slots.
        for batch in self.counts.batches(&numbers) {
            let counts = self.counts.get_some(batch)?;
            let chosen = self.chosen.get_some(batch)?;
            // `slots` must be the last iterator, because `zip` advances its first iterator once
            // more when the second one is exhausted.
            for ((counts, chosen), slot) in counts.into_iter().zip(chosen).zip(slots.by_ref()) {
                each(*slot, SlotCounters::from_stored(&counts, chosen));
            }
        }
        Ok(())
    }

    /// For each of these slots, the number of flows ever sent to it. The slots must be in ascending
    /// order.
    ///
    /// # Errors
    /// If the kernel refuses a look-up.
    pub fn chosen(&self, slots: &[Slot]) -> io::Result<Vec<u64>> {
        let numbers: Vec<u32> = slots.iter().map(|slot| slot.number()).collect();
        self.chosen.get_some(&numbers)
    }

    /// Sets the counts of a slot. No program may count in this slot at the same time.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set(&self, slot: Slot, counts: &SlotCounters) -> io::Result<()> {
        self.counts.set(slot.number(), counts.to_stored())?;
        self.chosen.set(slot.number(), counts.chosen)
    }
}
