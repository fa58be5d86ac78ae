//! What is going to happen, in the order of virtual time; what happens at the same time, in the order in which it was
//! decided.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Events to come.
#[derive(Debug)]
pub struct Queue<E> {
    heap: BinaryHeap<Entry<E>>,
    decided: u64,
}

#[derive(Debug)]
struct Entry<E> {
    at_us: u64,
    decided: u64,
    event: E,
}

impl<E> Entry<E> {
    const fn key(&self) -> (u64, u64) {
        (self.at_us, self.decided)
    }
}

impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        // The heap gives its largest first: the earliest is the largest.
        other.key().cmp(&self.key())
    }
}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl<E> Eq for Entry<E> {}

impl<E> Default for Queue<E> {
    fn default() -> Self {
        Self { heap: BinaryHeap::new(), decided: 0 }
    }
}

impl<E> Queue<E> {
    /// Something is going to happen at a time.
    pub fn push(&mut self, at_us: u64, event: E) {
        self.heap.push(Entry { at_us, decided: self.decided, event });
        self.decided += 1;
    }

    /// The next to happen, and when, if it is before `end_us`.
    pub fn pop_before(&mut self, end_us: u64) -> Option<(u64, E)> {
        if self.heap.peek()?.at_us >= end_us {
            return None;
        }
        self.heap.pop().map(|entry| (entry.at_us, entry.event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_by_time_and_then_by_decision() {
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
