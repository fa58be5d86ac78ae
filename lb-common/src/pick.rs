//! Which backend a connect goes to: one function, run by the kernel programs and by the tests on the host.
//!
//! A walk goes over the service's schedule, one entry per connect. An entry whose backend may not be chosen is skipped,
//! at most [`MAX_SKIPS`] times; then the service's fallback is taken. It knows nothing of weights: they are in the
//! schedule already.

use crate::abi::{MAX_SCHEDULE_LOG2, MAX_SKIPS, MIN_SCHEDULE_LOG2, NO_SLOT, TableRef, Walk};

/// The tables as one side sees them.
pub trait Tables {
    /// A reference to a backend.
    type Backend: Copy;

    /// The slot at an entry of the schedule map, or `None` past its end.
    fn entry(&self, entry: u32) -> Option<u32>;

    /// The backend in a slot, or `None` past the end of the map.
    fn backend(&self, slot: u32) -> Option<Self::Backend>;

    /// Whether the backend's state word allows it to be chosen.
    fn is_usable(&self, backend: Self::Backend) -> bool;

    /// The service's fallback word. Asked last: the daemon stores it before the state words that need it.
    fn fallback(&self) -> u32;
}

/// How a pick ended.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pick<B> {
    /// The schedule named this slot and backend.
    Scheduled(u32, B),
    /// Every entry looked at was unusable; this is the service's fallback.
    Fallback(u32, B),
    /// No usable backend.
    Refused,
    /// The tables contradict each other.
    Broken,
}

/// The position in a table that a walk points to: its start, moved on by its phase. The caller masks it by the length.
#[inline(always)]
pub fn position(walk: Walk, length_log2: u8) -> u32 {
    // A start is a fraction of the table, so it keeps its meaning when the length changes.
    walk.phase.wrapping_add(walk.start >> ((32 - u32::from(length_log2)) & 31))
}

/// Picks a backend from `table` for a walk that stands at `walk`.
#[inline(always)]
pub fn pick<T: Tables>(tables: &T, table: TableRef, walk: Walk) -> Pick<T::Backend> {
    if !table.is_empty() {
        if table.length_log2 < MIN_SCHEDULE_LOG2 || table.length_log2 > MAX_SCHEDULE_LOG2 {
            return Pick::Broken;
        }
        let mask = (1u32 << table.length_log2) - 1;
        let first = position(walk, table.length_log2);
        // Bound: 1 + MAX_SKIPS entries. An inclusive range keeps a flag besides its counter, on which the verifier sees a
        // path that never ends; it minds only for those without CAP_PERFMON.
        for skipped in 0..MAX_SKIPS + 1 {
            let entry = table.base.wrapping_add(first.wrapping_add(skipped) & mask);
            let Some(slot) = tables.entry(entry) else { return Pick::Broken };
            if slot == NO_SLOT {
                continue;
            }
            let Some(backend) = tables.backend(slot) else { return Pick::Broken };
            if tables.is_usable(backend) {
                return Pick::Scheduled(slot, backend);
            }
        }
    }
    let slot = tables.fallback();
    if slot == NO_SLOT {
        return Pick::Refused;
    }
    match tables.backend(slot) {
        Some(backend) => Pick::Fallback(slot, backend),
        None => Pick::Broken,
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::collections::BTreeMap;
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    /// Tables on the host. The backend of a slot is the slot.
    struct Host {
        entries: Vec<u32>,
        usable: Vec<bool>,
        fallback: u32,
    }

    impl Tables for Host {
        type Backend = u32;

        fn entry(&self, entry: u32) -> Option<u32> {
            self.entries.get(entry as usize).copied()
        }

        fn backend(&self, slot: u32) -> Option<u32> {
            self.usable.get(slot as usize).map(|_| slot)
        }

        fn is_usable(&self, backend: u32) -> bool {
            self.usable[backend as usize]
        }

        fn fallback(&self) -> u32 {
            self.fallback
        }
    }

    const LENGTH_LOG2: u8 = MIN_SCHEDULE_LOG2;
    const LENGTH: u32 = 1 << LENGTH_LOG2;

    fn table(base: u32) -> TableRef {
        TableRef { base, generation: 0, length_log2: LENGTH_LOG2, members: 0 }
    }

    /// Slots 0 to 9 in turn over a whole table.
    fn in_turn(usable: [bool; 10], fallback: u32) -> Host {
        Host { entries: (0..LENGTH).map(|entry| entry % 10).collect(), usable: usable.to_vec(), fallback }
    }

    #[track_caller]
    fn check(unusable: &[usize], fallback: u32, phase: u32, expected: Pick<u32>) {
        let mut usable = [true; 10];
        for slot in unusable {
            usable[*slot] = false;
        }
        assert_eq!(pick(&in_turn(usable, fallback), table(0), Walk { phase, start: 0 }), expected);
    }

    #[test]
    fn at_most_four_unusable_entries_are_skipped() {
        check(&[], 9, 0, Pick::Scheduled(0, 0));
        check(&[0], 9, 0, Pick::Scheduled(1, 1));
        check(&[0, 1, 2, 3], 9, 0, Pick::Scheduled(4, 4));
        check(&[0, 1, 2, 3, 4], 9, 0, Pick::Fallback(9, 9));
        // The fallback's own state word is not asked: the daemon stores the fallback first.
        check(&[0, 1, 2, 3, 4, 9], 9, 0, Pick::Fallback(9, 9));
        check(&[0, 1, 2, 3, 4], NO_SLOT, 0, Pick::Refused);
    }

    #[test]
    fn a_walk_wraps_at_the_end_of_its_table_and_stays_in_it() {
        let mut host = in_turn([true; 10], NO_SLOT);
        // Another service's table before and after ours.
        let mut entries: Vec<u32> = std::vec![9; LENGTH as usize];
        entries.append(&mut host.entries);
        entries.extend(std::vec![9; LENGTH as usize]);
        host.entries = entries;
        host.usable[0] = false;
        for phase in [0, LENGTH - 1, LENGTH, u32::MAX] {
            let picked = pick(&host, table(LENGTH), Walk { phase, start: 0 });
            let slot = (phase % LENGTH) % 10;
            let slot = if slot == 0 { 1 } else { slot };
            assert_eq!(picked, Pick::Scheduled(slot, slot), "phase {phase}");
        }
    }

    #[test]
    fn without_a_table_the_fallback_decides() {
        let host = in_turn([true; 10], 3);
        let none = TableRef { base: 0, generation: 0, length_log2: 0, members: 0 };
        assert_eq!(pick(&host, none, Walk { phase: 0, start: 0 }), Pick::Fallback(3, 3));
        let host = in_turn([true; 10], NO_SLOT);
        assert_eq!(pick(&host, none, Walk { phase: 0, start: 0 }), Pick::Refused);
    }

    #[test]
    fn contradictions_are_told_and_harm_nobody() {
        let host = in_turn([true; 10], 3);
        let walk = Walk { phase: 0, start: 0 };
        // Past the end of the map; too short and too long to be a table; a slot and a fallback past the end.
        assert_eq!(pick(&host, table(LENGTH), walk), Pick::Broken);
        for length_log2 in [1, MIN_SCHEDULE_LOG2 - 1, MAX_SCHEDULE_LOG2 + 1, 255] {
            let table = TableRef { base: 0, generation: 0, length_log2, members: 0 };
            assert_eq!(pick(&host, table, walk), Pick::Broken, "{length_log2}");
        }
        let host = Host { entries: std::vec![77; LENGTH as usize], usable: std::vec![true; 10], fallback: 3 };
        assert_eq!(pick(&host, table(0), walk), Pick::Broken);
        let host = Host { entries: std::vec![NO_SLOT; LENGTH as usize], usable: std::vec![], fallback: 3 };
        assert_eq!(pick(&host, table(0), walk), Pick::Broken);
    }

    proptest! {
        /// Wherever a walk starts, as many picks as the table has entries give every slot exactly its entries.
        #[test]
        fn shares_are_exact_over_a_table(
            entries in prop::collection::vec(0u32..10, LENGTH as usize),
            phase in any::<u32>(),
            start in any::<u32>(),
        ) {
            let mut expected = BTreeMap::new();
            for slot in &entries {
                *expected.entry(*slot).or_insert(0) += 1;
            }
            let host = Host { entries, usable: std::vec![true; 10], fallback: NO_SLOT };
            let mut had = BTreeMap::new();
            for i in 0..LENGTH {
                let walk = Walk { phase: phase.wrapping_add(i), start };
                let Pick::Scheduled(slot, _) = pick(&host, table(0), walk) else { panic!("all are usable") };
                *had.entry(slot).or_insert(0) += 1;
            }
            prop_assert_eq!(had, expected);
        }

        /// Nothing unusable is ever taken from the schedule, and the fallback only if five in a row were unusable.
        #[test]
        fn unusable_backends_are_never_scheduled(
            entries in prop::collection::vec(0u32..10, LENGTH as usize),
            usable in prop::collection::vec(any::<bool>(), 10),
            phase in any::<u32>(),
        ) {
            let host = Host { entries, usable, fallback: 0 };
            let at = |skipped: u32| host.entries[(phase.wrapping_add(skipped) & (LENGTH - 1)) as usize];
            let first = (0..=MAX_SKIPS).map(at).find(|slot| host.usable[*slot as usize]);
            let expected = first.map_or(Pick::Fallback(0, 0), |slot| Pick::Scheduled(slot, slot));
            prop_assert_eq!(pick(&host, table(0), Walk { phase, start: 0 }), expected);
        }
    }
}
