//! Events to come, in the order of virtual time; those of the same time in the order in which they were pushed.
//!
//! That second order makes a run a function of its seed. Must not know what the events are.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Events to come, each with a time.
#[derive(Debug)]
pub struct Queue<E> {
    heap: BinaryHeap<QueuedEvent<E>>,
    serial: u64,
}

#[derive(Debug)]
struct QueuedEvent<E> {
    at_us: u64,
    serial: u64,
    event: E,
}

impl<E> QueuedEvent<E> {
    const fn key(&self) -> (u64, u64) {
        (self.at_us, self.serial)
    }
}

impl<E> Ord for QueuedEvent<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        // The heap pops its greatest first, so the earliest is the greatest.
        other.key().cmp(&self.key())
    }
}

impl<E> PartialOrd for QueuedEvent<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for QueuedEvent<E> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl<E> Eq for QueuedEvent<E> {}

impl<E> Default for Queue<E> {
    fn default() -> Self {
        Self { heap: BinaryHeap::new(), serial: 0 }
    }
}

impl<E> Queue<E> {
    /// Adds an event.
    pub fn push(&mut self, at_us: u64, event: E) {
        self.heap.push(QueuedEvent { at_us, serial: self.serial, event });
        self.serial += 1;
    }

    /// Takes the next event and its time, if that is before `end_us`.
    pub fn pop_before(&mut self, end_us: u64) -> Option<(u64, E)> {
        if self.heap.peek()?.at_us >= end_us {
            return None;
        }
        self.heap.pop().map(|queued| (queued.at_us, queued.event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_by_time_and_then_in_the_order_of_their_pushes() {
        let mut queue = Queue::default();
        for (at_us, event) in [(5, 'a'), (3, 'b'), (5, 'c'), (3, 'd'), (9, 'e')] {
            queue.push(at_us, event);
        }
        let order: Vec<_> = std::iter::from_fn(|| queue.pop_before(9)).collect();
        assert_eq!(order, [(3, 'b'), (3, 'd'), (5, 'a'), (5, 'c')]);
        assert_eq!(queue.pop_before(10), Some((9, 'e')));
        assert_eq!(queue.pop_before(u64::MAX), None);
    }
}
