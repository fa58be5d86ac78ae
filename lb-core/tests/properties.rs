//! What holds for every input: of the orders that choose subsets, and of the tables that connect walks.
//!
//! The vectors fix the results of a few inputs; these are the promises that make the results worth having. Must not
//! repeat how a result is computed: a property is stated from the outside.

use std::collections::HashSet;

use lb_core::schedule::{apportion, interleave};
use lb_core::service::Algorithm;
use lb_core::subset::{Position, order};
use proptest::collection::vec;
use proptest::prelude::*;

/// Small spaces hold the corners (part lots, fewer backends than wanted), large ones the rest.
fn backends() -> impl Strategy<Value = u32> {
    prop_oneof![4 => 0..64_u32, 3 => 0..1_000_u32, 1 => 0..=65_536_u32]
}

fn positions() -> impl Strategy<Value = Position> {
    let clients = prop_oneof![0..40_u32, 0..65_536_u32];
    (clients, 1..=65_536_u32, backends(), 1..=256_u32, any::<u64>()).prop_map(
        |(client, clients, backends, size, seed)| Position { client, clients, backends, size, seed },
    )
}

fn subset(position: Position) -> Vec<u32> {
    order(Algorithm::Rocksteadier, position).take(position.size as usize).collect()
}

/// Weights as operators write them, as shares of 2^32, and of any size.
fn weights() -> impl Strategy<Value = Vec<u64>> {
    prop_oneof![
        vec(0..4_u64, 0..200),
        vec(0..=65_535_u64, 0..200),
        vec(0..=1_u64 << 32, 0..64),
        vec(prop_oneof![Just(1), Just(u64::MAX), any::<u64>()], 0..200),
    ]
}

fn slots() -> impl Strategy<Value = u32> {
    prop_oneof![200..300_u32, Just(1_024), 200..=8_192_u32, Just(65_536)]
}

fn counts() -> impl Strategy<Value = Vec<u32>> {
    prop_oneof![vec(0..4_u32, 0..200), vec(0..40_u32, 0..40), vec(0..3_000_u32, 0..8)]
}

fn sum(counts: &[u32]) -> u64 {
    counts.iter().copied().map(u64::from).sum()
}

proptest! {
    // A failure prints its smallest input, which belongs in a test of its own rather than in a file of seeds.
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn an_order_names_every_backend_once(position in positions()) {
        let mut all: Vec<u32> = order(Algorithm::Rocksteadier, position).collect();
        all.sort_unstable();
        prop_assert!(all.into_iter().eq(0..position.backends));
    }

    #[test]
    fn a_larger_subset_keeps_every_member(position in positions(), more in 1..=256_u32) {
        let larger = subset(Position { size: position.size + more, ..position });
        prop_assert!(larger.starts_with(&subset(position)));
    }

    #[test]
    fn a_subset_does_not_depend_on_the_number_of_tasks(position in positions(), clients in 1..=65_536_u32) {
        prop_assert_eq!(subset(Position { clients, ..position }), subset(position));
    }

    #[test]
    fn one_more_backend_enters_an_order_and_moves_no_other(position in positions()) {
        let new = position.backends.min(65_535);
        let before = order(Algorithm::Rocksteadier, Position { backends: new, ..position });
        let after = order(Algorithm::Rocksteadier, Position { backends: new + 1, ..position });
        prop_assert!(after.filter(|&backend| backend != new).eq(before));
    }

    #[test]
    fn one_more_backend_replaces_at_most_one_member(position in positions()) {
        let backends = position.backends.min(65_535) + 1;
        let before = subset(Position { backends: backends - 1, ..position });
        let after: HashSet<u32> = subset(Position { backends, ..position }).into_iter().collect();
        let dropped = before.iter().filter(|backend| !after.contains(backend)).count();
        prop_assert!(dropped <= 1, "{} members dropped", dropped);
    }

    #[test]
    fn a_table_is_full_and_has_everyone_with_a_weight(weights in weights(), slots in slots()) {
        let counts = apportion(&weights, slots);
        let any = weights.iter().any(|&weight| weight > 0);
        prop_assert_eq!(sum(&counts), if any { slots.into() } else { 0 });
        for (&weight, &count) in weights.iter().zip(&counts) {
            prop_assert_eq!(weight > 0, count > 0, "weight {} has {} entries", weight, count);
        }
    }

    #[test]
    fn a_heavier_weight_has_no_fewer_entries(weights in weights(), slots in slots()) {
        let counts = apportion(&weights, slots);
        let mut by_weight: Vec<(u64, u32)> = weights.into_iter().zip(counts).collect();
        by_weight.sort_unstable();
        prop_assert!(by_weight.windows(2).all(|pair| pair[0].1 <= pair[1].1 || pair[0].0 == pair[1].0));
    }

    #[test]
    fn where_everyone_is_due_an_entry_rounding_costs_less_than_one(
        weights in vec(1_000..=8_000_u64, 1..32),
        slots in slots(),
    ) {
        let total: u64 = weights.iter().sum();
        for (weight, count) in weights.iter().zip(apportion(&weights, slots)) {
            let quota = weight * u64::from(slots);
            prop_assert!(quota >= total, "the weights of this test are all due an entry");
            let count = u64::from(count);
            prop_assert!(quota / total <= count && count <= quota.div_ceil(total));
        }
    }

    #[test]
    fn a_table_has_as_many_entries_of_each_as_counted(counts in counts()) {
        let mut found = vec![0; counts.len()];
        for position in interleave(&counts) {
            found[position as usize] += 1;
        }
        prop_assert_eq!(found, counts);
    }

    /// At every entry there is a moment of the walk by which everyone has had its share to within half an entry.
    #[test]
    fn no_entry_comes_sooner_or_later_than_half_an_entry(counts in counts()) {
        let mut found = vec![0_u64; counts.len()];
        for position in interleave(&counts) {
            let position = position as usize;
            let (now, all) = (2 * found[position] + 1, 2 * u64::from(counts[position]));
            found[position] += 1;
            for (&found, &count) in found.iter().zip(&counts) {
                // count * now / all is the share by now; everything is doubled to keep the half whole.
                let share = 2 * u64::from(count) * now;
                prop_assert!((2 * found * all).abs_diff(share) <= all);
            }
        }
    }

    /// Equal counts are met at every prefix.
    #[test]
    fn equal_counts_take_turns(entries in 1..64_usize, count in 1..100_u32) {
        let table = interleave(&vec![count; entries]);
        let turns = (0..count).flat_map(|_| (0..).take(entries));
        prop_assert!(table.into_iter().eq(turns));
    }
}
