//! Slots that are about to be freed. Each slot first waits until no running program can have read
//! it from a table (a grace period as in RCU), and then until its last flow has ended. Other
//! numbers by which the kernel's maps refer to each other are freed in the same way.
//!
//! A program that began before a slot was removed from the last table may still choose the slot. No
//! program can choose it any more after a wait for readers has begun and ended while no table
//! contained the slot. The caller reports when a wait begins and ends.

use std::collections::BTreeSet;

use crate::ids::Slot;

/// The slots that no table and no fallback contains any more, grouped by the progress of their
/// grace periods.
#[derive(Clone, Debug)]
pub struct GracePeriods<N = Slot> {
    /// Slots that no table contained when the present wait began.
    waiting: BTreeSet<N>,
    /// Slots with a completed grace period: a wait for readers has begun and ended while no table
    /// contained them.
    over: BTreeSet<N>,
}

impl<N> Default for GracePeriods<N> {
    fn default() -> Self {
        Self { waiting: BTreeSet::new(), over: BTreeSet::new() }
    }
}

impl<N: Copy + Ord> GracePeriods<N> {
    /// Removes the slots that a table contains again. When no table contains such a slot any more,
    /// its grace period starts again. `unneeded`: all slots that no table contains now.
    pub fn retain(&mut self, unneeded: &BTreeSet<N>) {
        self.waiting.retain(|slot| unneeded.contains(slot));
        self.over.retain(|slot| unneeded.contains(slot));
    }

    /// Whether the grace period of one of these slots is not over, so that a wait is necessary.
    pub fn wants_wait(&self, unneeded: &BTreeSet<N>) -> bool {
        !unneeded.is_subset(&self.over)
    }

    /// Notes that a wait for readers begins while no table contains these slots. An earlier wait
    /// that has not ended is treated as failed.
    pub fn before_wait(&mut self, unneeded: &BTreeSet<N>) {
        self.waiting = unneeded - &self.over;
    }

    /// Notes that the latest wait has ended.
    pub fn after_wait(&mut self) {
        self.over.append(&mut self.waiting);
    }

    /// Removes and returns the slots that no program can choose any more and that have no open
    /// flow.
    pub fn take_idle(&mut self, has_flows: impl Fn(N) -> bool) -> BTreeSet<N> {
        self.over.extract_if(.., |slot| !has_flows(*slot)).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn slots(numbers: impl IntoIterator<Item = u32>) -> BTreeSet<Slot> {
        numbers.into_iter().filter_map(Slot::new).collect()
    }

    fn idle(periods: &mut GracePeriods) -> BTreeSet<Slot> {
        periods.take_idle(|_| false)
    }

    #[test]
    fn a_slot_is_free_after_a_wait_that_began_without_references() {
        let mut periods = GracePeriods::default();
        assert!(!periods.wants_wait(&slots([])));
        assert!(periods.wants_wait(&slots([1])));
        periods.before_wait(&slots([1]));
        // Slot 2 was dropped during the wait, so a program that began after the start of the wait
        // may have read it.
        assert!(periods.wants_wait(&slots([1, 2])));
        periods.after_wait();
        assert_eq!(idle(&mut periods), slots([1]));
        assert!(periods.wants_wait(&slots([2])));
        periods.before_wait(&slots([2]));
        periods.after_wait();
        assert_eq!(idle(&mut periods), slots([2]));
    }

    #[test]
    fn a_slot_with_flows_is_freed_after_they_have_ended() {
        let mut periods = GracePeriods::default();
        periods.before_wait(&slots([1, 2]));
        periods.after_wait();
        assert!(!periods.wants_wait(&slots([1, 2])), "no wait for readers is necessary, only flows are open");
        assert_eq!(periods.take_idle(|slot| slot.number() == 1), slots([2]));
        assert_eq!(idle(&mut periods), slots([1]));
        assert_eq!(idle(&mut periods), slots([]));
    }

    #[test]
    fn the_grace_period_of_a_reused_slot_starts_again() {
        let mut periods = GracePeriods::default();
        periods.before_wait(&slots([1, 2]));
        periods.retain(&slots([2]));
        periods.after_wait();
        assert_eq!(idle(&mut periods), slots([2]), "during the wait");
        periods.before_wait(&slots([1, 3]));
        periods.after_wait();
        periods.retain(&slots([3]));
        assert_eq!(idle(&mut periods), slots([3]), "after the wait");
        assert!(periods.wants_wait(&slots([1])));
    }

    #[test]
    fn a_failed_wait_frees_nothing_and_the_next_wait_frees_all() {
        let mut periods = GracePeriods::default();
        periods.before_wait(&slots([1]));
        assert_eq!(idle(&mut periods), slots([]));
        periods.before_wait(&slots([1, 2]));
        periods.after_wait();
        assert_eq!(idle(&mut periods), slots([1, 2]));
    }

    #[derive(Clone, Debug)]
    enum Event {
        Name(u32),
        Drop(u32),
        Begin,
        End,
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            2 => (0..4u32).prop_map(Event::Name),
            4 => (0..4u32).prop_map(Event::Drop),
            2 => Just(Event::Begin),
            2 => Just(Event::End),
        ]
    }

    proptest! {
        /// Compares with a model that remembers times: a slot is free if a wait that began after
        /// the slot was last in a table has ended.
        #[test]
        fn slots_that_a_reader_may_have_are_never_freed(events in prop::collection::vec(event(), 0..80)) {
            let mut periods = GracePeriods::default();
            let mut unneeded = BTreeSet::new();
            let mut dropped_at = [Some(0); 4];
            let (mut begun, mut ended) = (None, None);
            for (time, event) in events.into_iter().enumerate() {
                match event {
                    Event::Name(number) => {
                        unneeded.remove(&Slot::new(number).unwrap());
                        dropped_at[number as usize] = None;
                    }
                    Event::Drop(number) => {
                        if unneeded.insert(Slot::new(number).unwrap()) {
                            dropped_at[number as usize] = Some(time);
                        }
                    }
                    Event::Begin => {
                        periods.before_wait(&unneeded);
                        begun = Some(time);
                    }
                    Event::End => {
                        periods.after_wait();
                        ended = ended.max(begun.take());
                    }
                }
                periods.retain(&unneeded);
                let is_over = |slot: &Slot| {
                    dropped_at[slot.index()].zip(ended).is_some_and(|(dropped, began): (usize, usize)| dropped < began)
                };
                let expected: BTreeSet<Slot> = unneeded.iter().copied().filter(is_over).collect();
                prop_assert_eq!(periods.wants_wait(&unneeded), expected != unneeded);
                let mut copy = periods.clone();
                prop_assert_eq!(idle(&mut copy), expected);
            }
        }
    }
}
