//! Future events in the order of virtual time. Events with the same time are in the order of their
//! insertion.
//!
//! The order of insertion makes a run a function of its seed. Nearly all events are due within a
//! tenth of a second, so the queue stores them in buckets of a few events each, and sorts only the
//! current bucket. A single heap of all events would take a third of a run's time. This module must
//! not depend on the content of events.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// The binary logarithm of a bucket's width in microseconds.
const WIDTH_LOG2: u32 = 7;

/// The number of buckets after the current one. Together they cover 131 ms.
const BUCKETS: usize = 1024;

#[derive(Debug)]
pub struct Queue<E> {
    /// The events of the current bucket, and events that were inserted later for an earlier time.
    /// They are in descending order of time, so the next event is the last one.
    current: Vec<QueuedEvent<E>>,
    /// The number of the current bucket: any time in the bucket, divided by the bucket's width.
    number: u64,
    /// The buckets after the current one, unsorted. A bucket is at the position of its number
    /// modulo [`BUCKETS`].
    near: Vec<Vec<QueuedEvent<E>>>,
    /// A bit for each near bucket, which is set if the bucket contains events.
    occupied: [u64; BUCKETS / 64],
    /// Events that are later than the near buckets.
    far: BinaryHeap<QueuedEvent<E>>,
    serial: u64,
}

#[derive(Debug)]
struct QueuedEvent<E> {
    /// The time is in the upper half, and the serial number in the lower half.
    key: u128,
    event: E,
}

impl<E> QueuedEvent<E> {
    const fn at_us(&self) -> u64 {
        (self.key >> 64) as u64
    }

    const fn bucket(&self) -> u64 {
        self.at_us() >> WIDTH_LOG2
    }
}

impl<E> Ord for QueuedEvent<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        // A heap pops its greatest element first, so the earliest event is the greatest.
        other.key.cmp(&self.key)
    }
}

impl<E> PartialOrd for QueuedEvent<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for QueuedEvent<E> {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}

impl<E> Eq for QueuedEvent<E> {}

impl<E> Default for Queue<E> {
    fn default() -> Self {
        Self {
            current: Vec::new(),
            number: 0,
            near: (0..BUCKETS).map(|_| Vec::new()).collect(),
            occupied: [0; BUCKETS / 64],
            far: BinaryHeap::new(),
            serial: 0,
        }
    }
}

/// The position of a bucket in `near`, and its word and bit in `occupied`.
const fn place(number: u64) -> (usize, usize, u32) {
    #[expect(clippy::cast_possible_truncation, reason = "a remainder of 1,024")]
    let place = (number % BUCKETS as u64) as usize;
    (place, place / 64, (number % 64) as u32)
}

impl<E> Queue<E> {
    pub fn push(&mut self, at_us: u64, event: E) {
        let queued = QueuedEvent { key: u128::from(at_us) << 64 | u128::from(self.serial), event };
        self.serial += 1;
        let bucket = queued.bucket();
        if bucket <= self.number {
            let place = self.current.partition_point(|other| *other < queued);
            self.current.insert(place, queued);
        } else if bucket - self.number < BUCKETS as u64 {
            let (place, word, bit) = place(bucket);
            self.near[place].push(queued);
            self.occupied[word] |= 1 << bit;
        } else {
            self.far.push(queued);
        }
    }

    /// Removes the next event, if its time is before `end_us`. Returns the time and the event.
    pub fn pop_before(&mut self, end_us: u64) -> Option<(u64, E)> {
        if self.current.is_empty() {
            self.next_bucket()?;
        }
        if self.current.last()?.at_us() >= end_us {
            return None;
        }
        self.current.pop().map(|queued| (queued.at_us(), queued.event))
    }

    /// Makes the next bucket that contains events the current bucket. Returns `None` if there are
    /// no events.
    fn next_bucket(&mut self) -> Option<()> {
        let near = self.next_near();
        let far = self.far.peek().map(QueuedEvent::bucket);
        self.number = near.into_iter().chain(far).min()?;
        if near == Some(self.number) {
            let (place, word, bit) = place(self.number);
            std::mem::swap(&mut self.current, &mut self.near[place]);
            self.occupied[word] &= !(1 << bit);
        }
        while self.far.peek().is_some_and(|queued| queued.bucket() == self.number) {
            self.current.extend(self.far.pop());
        }
        self.current.sort_unstable();
        Some(())
    }

    /// The number of the first near bucket that contains events.
    fn next_near(&self) -> Option<u64> {
        let from = self.number + 1;
        let (_, first, bit) = place(from);
        // Examines the words of `occupied`. It begins with the word of bucket `from`, and ends with
        // the bits before that bucket in the same word.
        (0..=self.occupied.len()).find_map(|step| {
            let word = self.occupied[(first + step) % self.occupied.len()];
            let before = (1 << bit) - 1;
            let word = match step {
                0 => word & !before,
                _ if step == self.occupied.len() => word & before,
                _ => word,
            };
            (word != 0).then(|| from - u64::from(bit) + 64 * step as u64 + u64::from(word.trailing_zeros()))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use lb_core::subset::random::SplitMix64;

    use super::*;

    #[test]
    fn events_are_in_order_of_time_and_then_of_insertion() {
        let mut queue = Queue::default();
        for (at_us, event) in [(5, 'a'), (3, 'b'), (5, 'c'), (3, 'd'), (9, 'e')] {
            queue.push(at_us, event);
        }
        let order: Vec<_> = std::iter::from_fn(|| queue.pop_before(9)).collect();
        assert_eq!(order, [(3, 'b'), (3, 'd'), (5, 'a'), (5, 'c')]);
        assert_eq!(queue.pop_before(10), Some((9, 'e')));
        assert_eq!(queue.pop_before(u64::MAX), None);
    }

    #[test]
    fn near_and_far_events_have_the_order_of_a_sorted_map() {
        let mut rng = SplitMix64::new(1);
        // The times of events are within a bucket, within the near buckets, around the end of the
        // near buckets, and far beyond it.
        for span in [100, 100_000, 131_000, 131_072, 140_000, 10_000_000] {
            let (mut queue, mut sorted, mut now) = (Queue::default(), BTreeMap::new(), 0);
            for serial in 0..20_000_u64 {
                let at_us = now + rng.below(span);
                queue.push(at_us, serial);
                sorted.insert((at_us, serial), ());
                // Sometimes no event is due at `end`. Then the next inserted event may be earlier
                // than all events in the queue.
                let end = now + rng.below(span);
                while let Some((at_us, event)) = queue.pop_before(end) {
                    assert_eq!(sorted.pop_first().map(|(key, ())| key), Some((at_us, event)));
                    now = at_us;
                }
                assert!(sorted.first_key_value().is_none_or(|((at_us, _), ())| *at_us >= end));
            }
        }
    }
}
