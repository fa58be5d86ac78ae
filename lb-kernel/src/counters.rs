//! The counters of slots, which the kernel programs keep for each CPU: read many at a time, and set when a backend
//! takes its slot.
//!
//! A value lies on every CPU that the kernel may ever run on, so reading a thousand slots moves half a megabyte for
//! each CPU. One call per slot would cost more than that: the kernel is asked for as many as fit a bounded buffer.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use lb_common::abi::{SlotCounters, map};
use lb_core::ids::Slot;

use super::error::DatapathError;
use super::sys;
use super::sys::elements;

/// Bytes that one batch may take.
const BATCH_BYTES: usize = 512 << 10;

/// The counters of all slots.
pub struct Counters {
    /// Map `counts`: what was counted of flows once they were chosen.
    map: OwnedFd,
    /// Map `chosen`: how many flows were chosen.
    chosen: OwnedFd,
    cpus: usize,
    /// Whether the kernel reads many elements of a per-CPU array at a time. Found by trying.
    has_batches: AtomicBool,
}

impl Counters {
    /// Opens the counters that are pinned in `dir`.
    ///
    /// # Errors
    /// If they cannot be opened, or the kernel does not tell how many CPUs there may be.
    pub fn open(dir: &Path) -> Result<Self, DatapathError> {
        let open = |name: &str| {
            let path = dir.join(name);
            sys::open_pin(&path).map_err(|source| DatapathError::Map { path, operation: "open", source })
        };
        let (map, chosen) = (open(map::COUNTS)?, open(map::CHOSEN)?);
        let cpus = crate::cpus::possible_cpus().map_err(|source| DatapathError::Map {
            path: dir.join(map::COUNTS),
            operation: "open",
            source,
        })?;
        Ok(Self { map, chosen, cpus: cpus as usize, has_batches: AtomicBool::new(true) })
    }

    /// The counts of one slot, over all CPUs.
    ///
    /// # Errors
    /// If the kernel refuses the look-up.
    pub fn get(&self, slot: Slot) -> io::Result<SlotCounters> {
        // The chosen ones last: a flow is counted there first, so no end is read without its choice.
        let mut counts: SlotCounters = sum(&self.values(&self.map, slot)?);
        counts.chosen = sum(&self.values::<u64>(&self.chosen, slot)?);
        Ok(counts)
    }

    fn values<V: bytemuck::Pod>(&self, map: &OwnedFd, slot: Slot) -> io::Result<Vec<V>> {
        let mut values = vec![V::zeroed(); self.cpus];
        if !elements::get_into(map.as_fd(), &slot.number(), &mut values)? {
            return Err(io::Error::new(io::ErrorKind::NotFound, format!("there is no slot {slot}")));
        }
        Ok(values)
    }

    /// Shows the counts of slots, over all CPUs. The slots are given in ascending order.
    ///
    /// # Errors
    /// If the kernel refuses a look-up.
    pub fn visit(&self, slots: &[Slot], mut each: impl FnMut(Slot, SlotCounters)) -> io::Result<()> {
        let at_once = (BATCH_BYTES / (size_of::<SlotCounters>() * self.cpus)).max(1);
        let (mut values, mut chosen): (Vec<SlotCounters>, Vec<u64>) = (Vec::new(), Vec::new());
        let mut rest = slots;
        // Bound: each turn takes at least one slot.
        while let [first, ..] = *rest {
            if !self.has_batches.load(Ordering::Relaxed) {
                break;
            }
            // Backends get the lowest free slots, so that few between two wanted ones are read for nothing.
            let reached = rest.partition_point(|slot| slot.index() - first.index() < at_once);
            let (batch, later) = rest.split_at(reached);
            let length = batch.last().map_or(0, |last| last.index() - first.index() + 1);
            values.resize(length * self.cpus, bytemuck::Zeroable::zeroed());
            chosen.resize(length * self.cpus, 0);
            if elements::read_array(self.map.as_fd(), first.number(), length, &mut values)?.is_break()
                || elements::read_array(self.chosen.as_fd(), first.number(), length, &mut chosen)?.is_break()
            {
                self.has_batches.store(false, Ordering::Relaxed);
                break;
            }
            for slot in batch {
                let at = (slot.index() - first.index()) * self.cpus;
                let at = at..at + self.cpus;
                each(*slot, SlotCounters { chosen: sum(&chosen[at.clone()]), ..sum(&values[at]) });
            }
            rest = later;
        }
        for slot in rest {
            each(*slot, self.get(*slot)?);
        }
        Ok(())
    }

    /// Sets the counts of a slot in which no program counts.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set(&self, slot: Slot, counts: &SlotCounters) -> io::Result<()> {
        let (mut values, mut chosen) = (vec![SlotCounters::default(); self.cpus], vec![0; self.cpus]);
        // Only the sum over all CPUs matters.
        (values[0], chosen[0]) = (SlotCounters { chosen: 0, ..*counts }, counts.chosen);
        elements::set(self.map.as_fd(), &slot.number(), &values)?;
        elements::set(self.chosen.as_fd(), &slot.number(), &chosen)
    }
}

/// The sum of values that are 64-bit numbers and nothing else, number by number.
pub fn sum<T: bytemuck::Pod>(values: &[T]) -> T {
    let mut sum = T::zeroed();
    let numbers: &mut [u64] = bytemuck::cast_slice_mut(std::slice::from_mut(&mut sum));
    for value in values {
        let value: &[u64] = bytemuck::cast_slice(std::slice::from_ref(value));
        for (sum, number) in numbers.iter_mut().zip(value) {
            *sum = sum.wrapping_add(*number);
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_cpus_add_up_field_by_field() {
        let mut one: SlotCounters = bytemuck::Zeroable::zeroed();
        (one.chosen, one.endings[1], one.connect.buckets[19]) = (3, 1, 2);
        let mut other = one;
        other.retransmits = 7;
        let both = sum(&[one, other]);
        assert_eq!((both.chosen, both.endings[1], both.connect.buckets[19], both.retransmits), (6, 2, 4, 7));
        assert_eq!(sum::<SlotCounters>(&[]), SlotCounters::default());
    }
}
