//! Arrays with a value for each CPU, in which the kernel programs count. Elements are read in
//! batches.
//!
//! Every CPU that the kernel may ever run on has a value, so reading a thousand slots copies half a
//! megabyte for each CPU. One call per element would take more time than the copying, so each call
//! reads as many elements as fit into a bounded buffer.

use std::io;
use std::marker::PhantomData;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use super::elements::Elements;
use crate::error::DatapathError;
use crate::sys;

/// Maximum number of bytes of a batch.
const BATCH_BYTES: usize = 512 << 10;
/// Maximum number of consecutive unwanted elements within a batch. Reading more of them would take
/// more time than another call.
const MOST_UNWANTED: u32 = 8;

pub struct PerCpuArray<V> {
    map: Box<dyn Elements>,
    cpus: usize,
    /// Whether the kernel supports batches for such an array; set to `false` after the first
    /// failure.
    has_batches: AtomicBool,
    of: PhantomData<V>,
}

impl<V: bytemuck::Pod> PerCpuArray<V> {
    /// Opens a pinned array.
    ///
    /// # Errors
    /// If the array cannot be opened, or the kernel does not report the number of possible CPUs.
    pub fn open(path: &Path) -> Result<Self, DatapathError> {
        let fail = |source| DatapathError::Map { path: path.to_owned(), operation: "open", source };
        let map = sys::open_pin(path).map_err(fail)?;
        let cpus = super::cpus::possible_cpus().map_err(fail)? as usize;
        Ok(Self::over(Box::new(map), cpus))
    }

    /// An array in `map`, with values for this number of CPUs.
    pub fn over(map: Box<dyn Elements>, cpus: usize) -> Self {
        Self { map, cpus, has_batches: AtomicBool::new(true), of: PhantomData }
    }

    /// Splits indexes, which must be ascending, into parts. All elements from the first to the last
    /// index of a part fit into one batch.
    pub fn batches<'i>(&self, indexes: &'i [u32]) -> impl Iterator<Item = &'i [u32]> + use<'i, V> {
        batches(indexes, (BATCH_BYTES / (size_of::<V>() * self.cpus)).max(1))
    }

    /// The sum of an element over all CPUs. The element's values must consist of 64-bit numbers
    /// only.
    ///
    /// # Errors
    /// If the kernel refuses the look-up.
    pub fn get(&self, index: u32) -> io::Result<V> {
        let mut values = vec![V::zeroed(); self.cpus];
        if !self.map.get(bytemuck::bytes_of(&index), bytemuck::cast_slice_mut(&mut values))? {
            return Err(io::Error::new(io::ErrorKind::NotFound, format!("no element {index}")));
        }
        Ok(sum(&values))
    }

    /// The sums of elements over all CPUs, in the order of the indexes, which must be ascending.
    /// May also read the elements between these indexes.
    ///
    /// # Errors
    /// If the kernel refuses a look-up.
    pub fn get_some(&self, indexes: &[u32]) -> io::Result<Vec<V>> {
        let mut found = Vec::with_capacity(indexes.len());
        for batch in self.batches(indexes) {
            self.get_batch(batch, &mut found)?;
        }
        Ok(found)
    }

    fn get_batch(&self, indexes: &[u32], found: &mut Vec<V>) -> io::Result<()> {
        if let [first, .., last] = *indexes
            && self.has_batches.load(Ordering::Relaxed)
        {
            let length = (last - first) as usize + 1;
            let mut values = vec![V::zeroed(); length * self.cpus];
            if self.map.read_array(first, length, bytemuck::cast_slice_mut(&mut values))?.is_continue() {
                let at = |index: &u32| (index - first) as usize * self.cpus;
                found.extend(indexes.iter().map(|index| sum(&values[at(index)..][..self.cpus])));
                return Ok(());
            }
            self.has_batches.store(false, Ordering::Relaxed);
        }
        for index in indexes {
            found.push(self.get(*index)?);
        }
        Ok(())
    }

    /// Sets an element so that the sum of its values is `value`. No program may count in the
    /// element at the same time.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set(&self, index: u32, value: V) -> io::Result<()> {
        // Only the sum over all CPUs matters, so the first CPU gets the whole value.
        self.set_each(index, |cpu| if cpu == 0 { value } else { V::zeroed() })
    }

    /// Sets an element to `value(cpu)` on each CPU.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set_each(&self, index: u32, value: impl Fn(u32) -> V) -> io::Result<()> {
        let values: Vec<V> = (0..).take(self.cpus).map(value).collect();
        self.map.set(bytemuck::bytes_of(&index), bytemuck::cast_slice(&values))
    }
}

/// Splits ascending indexes into parts. The difference between the last and the first index of a
/// part is less than `at_once`, and at most [`MOST_UNWANTED`] other indexes lie between two
/// consecutive indexes of a part.
fn batches(indexes: &[u32], at_once: usize) -> impl Iterator<Item = &[u32]> {
    let mut rest = indexes;
    std::iter::from_fn(move || {
        let first = *rest.first()?;
        let is_last =
            |pair: &[u32]| (pair[1] - first) as usize >= at_once || pair[1] - pair[0] > MOST_UNWANTED + 1;
        let length = rest.windows(2).position(is_last).map_or(rest.len(), |last| last + 1);
        let (batch, later) = rest.split_at(length);
        rest = later;
        Some(batch)
    })
}

/// The sum of values that consist of 64-bit numbers only, number by number.
fn sum<T: bytemuck::Pod>(values: &[T]) -> T {
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
    use lb_common::abi::SlotCounters;

    use super::*;

    #[test]
    fn batches_are_bounded_and_span_no_wide_gaps() {
        let parts = |indexes: &[u32]| batches(indexes, 4).map(<[u32]>::to_vec).collect::<Vec<_>>();
        assert_eq!(parts(&[0, 1, 3, 4, 9, 12, 13]), [vec![0, 1, 3], vec![4], vec![9, 12], vec![13]]);
        assert!(parts(&[]).is_empty());
        let far = MOST_UNWANTED + 2;
        assert_eq!(
            batches(&[0, far, 2 * far - 1], 1000).collect::<Vec<_>>(),
            [&[0][..], &[far, 2 * far - 1]]
        );
    }

    #[test]
    fn per_cpu_values_are_summed_field_by_field() {
        let mut one: SlotCounters = bytemuck::Zeroable::zeroed();
        (one.chosen, one.endings[1], one.connect.buckets[19]) = (3, 1, 2);
        let mut other = one;
        other.retransmits = 7;
        let both = sum(&[one, other]);
        assert_eq!((both.chosen, both.endings[1], both.connect.buckets[19], both.retransmits), (6, 2, 4, 7));
        assert_eq!(sum::<SlotCounters>(&[]), SlotCounters::default());
    }
}
