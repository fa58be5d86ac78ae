//! The counters of slots, which the kernel programs keep for each CPU: read many at a time, and set when a backend takes
//! its slot.
//!
//! A value lies on every CPU that the kernel may ever run on, so reading a thousand slots moves half a megabyte for each
//! CPU. One call per slot would cost more than that: the kernel is asked for as many as fit a bounded buffer.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use lb_common::abi::Counts;

use super::error::DatapathError;
use super::sys;
use super::sys::elements;

/// What one batch may take.
const BATCH_BYTES: usize = 512 << 10;

/// The counters of all slots.
pub struct Counters {
    map: OwnedFd,
    cpus: usize,
    /// Whether the kernel reads many elements of a per-CPU array at a time. Found by trying.
    has_batches: AtomicBool,
}

impl Counters {
    /// Opens the counters that are pinned at `path`.
    ///
    /// # Errors
    /// If they cannot be opened, or the kernel does not tell how many CPUs there may be.
    pub fn open(path: &Path) -> Result<Self, DatapathError> {
        let fail = |source| DatapathError::Map { path: path.to_owned(), operation: "open", source };
        let map = sys::open_pin(path).map_err(fail)?;
        let cpus = super::possible_cpus().map_err(fail)? as usize;
        Ok(Self { map, cpus, has_batches: AtomicBool::new(true) })
    }

    /// The counts of one slot, over all CPUs.
    ///
    /// # Errors
    /// If the kernel refuses the look-up.
    pub fn get(&self, slot: u32) -> io::Result<Counts> {
        let mut values = vec![bytemuck::Zeroable::zeroed(); self.cpus];
        if !elements::get_into(self.map.as_fd(), &slot, &mut values)? {
            return Err(io::Error::new(io::ErrorKind::NotFound, format!("there is no slot {slot}")));
        }
        Ok(sum(&values))
    }

    /// Shows the counts of slots, over all CPUs. They are given in ascending order.
    ///
    /// # Errors
    /// If the kernel refuses a look-up.
    pub fn visit(&self, slots: &[u32], mut each: impl FnMut(u32, Counts)) -> io::Result<()> {
        let at_once = (BATCH_BYTES / (size_of::<Counts>() * self.cpus)).max(1);
        let mut values: Vec<Counts> = Vec::new();
        let mut rest = slots;
        // Bound: each turn takes at least one slot.
        while let [first, ..] = *rest {
            if !self.has_batches.load(Ordering::Relaxed) {
                break;
            }
            // Backends get the lowest free slots, so that few between two wanted ones are read for nothing.
            let reached = rest.partition_point(|slot| ((*slot - first) as usize) < at_once);
            let (batch, later) = rest.split_at(reached);
            let length = batch.last().map_or(0, |last| (last - first) as usize + 1);
            values.resize(length * self.cpus, bytemuck::Zeroable::zeroed());
            let read = elements::read_array(self.map.as_fd(), first, length, &mut values)?;
            if read.is_break() {
                self.has_batches.store(false, Ordering::Relaxed);
                break;
            }
            for slot in batch {
                let at = (slot - first) as usize * self.cpus;
                each(*slot, sum(&values[at..at + self.cpus]));
            }
            rest = later;
        }
        for slot in rest {
            each(*slot, self.get(*slot)?);
        }
        Ok(())
    }

    /// Sets the counts of a slot that nobody counts in.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set(&self, slot: u32, counts: &Counts) -> io::Result<()> {
        let mut values = vec![bytemuck::Zeroable::zeroed(); self.cpus];
        // What counts is the sum.
        values[0] = *counts;
        elements::set(self.map.as_fd(), &slot, &values)
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
        let mut one: Counts = bytemuck::Zeroable::zeroed();
        (one.chosen, one.endings[1], one.connect.buckets[19]) = (3, 1, 2);
        let mut other = one;
        other.retransmits = 7;
        let both = sum(&[one, other]);
        assert_eq!((both.chosen, both.endings[1], both.connect.buckets[19], both.retransmits), (6, 2, 4, 7));
        assert_eq!(sum::<Counts>(&[]), Counts::default());
    }
}
