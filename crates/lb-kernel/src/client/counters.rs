//! The counters of slots, in which the kernel programs count per CPU. This module reads the
//! counters in batches, and sets them when a slot is assigned to a backend.

use std::io;
use std::path::Path;

use lb_common::abi::{SlotCounters, map};
use lb_core::ids::Slot;

use crate::error::DatapathError;
use crate::sys::per_cpu::PerCpuArray;

/// The counters of all slots, without `chosen`, which is in the row of the backend.
pub struct Counters(PerCpuArray<SlotCounters>);

impl Counters {
    pub fn over(counts: PerCpuArray<SlotCounters>) -> Self {
        Self(counts)
    }

    /// Opens the counters that are pinned in `dir`.
    ///
    /// # Errors
    /// If the map cannot be opened, or the kernel does not report the number of possible CPUs.
    pub fn open(dir: &Path) -> Result<Self, DatapathError> {
        PerCpuArray::open(&dir.join(map::COUNTS)).map(Self)
    }

    /// The counts of one slot, summed over all CPUs.
    ///
    /// # Errors
    /// If the kernel refuses the look-up.
    pub fn get(&self, slot: Slot) -> io::Result<SlotCounters> {
        self.0.get(slot.number()).map(|counts| SlotCounters::from_stored(&counts))
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
        for batch in self.0.batches(&numbers) {
            let counts = self.0.get_some(batch)?;
            // `slots` must be the last iterator, because `zip` advances its first iterator once
            // more when the second one is exhausted.
            for (counts, slot) in counts.iter().zip(slots.by_ref()) {
                each(*slot, SlotCounters::from_stored(counts));
            }
        }
        Ok(())
    }

    /// Sets the counts of a slot. No program may count in this slot at the same time.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set(&self, slot: Slot, counts: &SlotCounters) -> io::Result<()> {
        self.0.set(slot.number(), counts.to_stored())
    }
}
