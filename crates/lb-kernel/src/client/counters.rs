//! The counters of slots, which the kernel programs keep for each CPU: read many at a time, and set when a backend
//! takes its slot.

use std::io;
use std::path::Path;

use lb_common::abi::{SlotCounters, map};
use lb_core::ids::Slot;

use crate::error::DatapathError;
use crate::sys::per_cpu::PerCpuArray;

/// The counters of all slots.
pub struct Counters {
    /// What was counted of flows once they were chosen.
    counts: PerCpuArray<SlotCounters>,
    /// How many flows were chosen.
    chosen: PerCpuArray<u64>,
}

impl Counters {
    /// Those that lie in these arrays.
    pub fn over(counts: PerCpuArray<SlotCounters>, chosen: PerCpuArray<u64>) -> Self {
        Self { counts, chosen }
    }

    /// Opens the counters that are pinned in `dir`.
    ///
    /// # Errors
    /// If they cannot be opened, or the kernel does not tell how many CPUs there may be.
    pub fn open(dir: &Path) -> Result<Self, DatapathError> {
        Ok(Self {
            counts: PerCpuArray::open(&dir.join(map::COUNTS))?,
            chosen: PerCpuArray::open(&dir.join(map::CHOSEN))?,
        })
    }

    /// The counts of one slot, over all CPUs.
    ///
    /// # Errors
    /// If the kernel refuses the look-up.
    pub fn get(&self, slot: Slot) -> io::Result<SlotCounters> {
        // The chosen ones last: a flow is counted there first, so no end is read without its choice.
        let counts = self.counts.get(slot.number())?;
        Ok(SlotCounters { chosen: self.chosen.get(slot.number())?, ..counts })
    }

    /// Shows the counts of slots, over all CPUs. The slots are given in ascending order.
    ///
    /// # Errors
    /// If the kernel refuses a look-up.
    pub fn visit(&self, slots: &[Slot], mut each: impl FnMut(Slot, SlotCounters)) -> io::Result<()> {
        let numbers: Vec<u32> = slots.iter().map(|slot| slot.number()).collect();
        let mut slots = slots.iter();
        // Backends get the lowest free slots, so that few between two wanted ones are read for nothing.
        for batch in self.counts.batches(&numbers) {
            let counts = self.counts.get_some(batch)?;
            let chosen = self.chosen.get_some(batch)?;
            // The slots last: who is asked first has taken one more when another has no more.
            for ((counts, chosen), slot) in counts.into_iter().zip(chosen).zip(slots.by_ref()) {
                each(*slot, SlotCounters { chosen, ..counts });
            }
        }
        Ok(())
    }

    /// How many flows were ever sent to each of these slots, which are given in ascending order.
    ///
    /// # Errors
    /// If the kernel refuses a look-up.
    pub fn chosen(&self, slots: &[Slot]) -> io::Result<Vec<u64>> {
        let numbers: Vec<u32> = slots.iter().map(|slot| slot.number()).collect();
        self.chosen.get_some(&numbers)
    }

    /// Sets the counts of a slot in which no program counts.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set(&self, slot: Slot, counts: &SlotCounters) -> io::Result<()> {
        self.counts.set(slot.number(), SlotCounters { chosen: 0, ..*counts })?;
        self.chosen.set(slot.number(), counts.chosen)
    }
}
