//! Of the backends at two points, `p2c` picks the one with the lower load for its weight.

use lb_common::abi::{NO_SLOT, Policy, RecentErrors, Rules};
use lb_common::load::{HalfLife, decayed};
use lb_common::pick::{How, choose, pick};
use proptest::prelude::*;

use crate::host::{Host, LENGTH, NOW, cpu_at, picked, rules};

const TICKS: u32 = 9_537;

/// The sample that compares these two entries.
fn points(one: u32, other: u32) -> u32 {
    other << 16 | one
}

#[track_caller]
fn check(host: &Host, one: u32, other: u32, expected: u32) {
    let rules = Rules { error_half_life: TICKS, ..rules(Policy::P2c) };
    assert_eq!(choose(host, host.table(), rules, points(one, other), NOW), picked(expected));
}

#[test]
fn the_lower_load_per_weight_wins_and_equal_loads_pick_the_first() {
    // Slot 0 has a quarter of the table, slot 1 the rest.
    let host = |flows: &[u32]| {
        let entries = (0..LENGTH).map(|entry| u32::from(entry % 4 != 0)).collect();
        Host::new(entries, 2).with_flows(flows)
    };
    for (flows, expected) in
        [([0, 0], 0), ([1, 2], 1), ([1, 3], 0), ([1, 4], 0), ([2, 5], 1), ([0, 1], 0), ([1, 0], 1)]
    {
        check(&host(&flows), 0, 1, expected);
    }
    check(&host(&[1, 3]), 1, 0, 1);
}

#[test]
fn a_second_backend_is_searched_if_both_points_are_the_same() {
    // Every fourth entry has slot 0, including entry 4 and entry 8.
    let entries = (0..LENGTH).map(|entry| u32::from(entry % 4 != 0)).collect();
    let host = Host::new(entries, 2).with_flows(&[9, 0]);
    check(&host, 4, 8, 1);
    check(&host.clone().with_flows(&[0, 9]), 4, 8, 0);
    // If the other backend is unusable, the backend of both points is picked. If the backend of
    // both points is unusable, the other backend is picked.
    check(&host.clone().without(&[1]), 4, 8, 0);
    check(&host.without(&[0]), 4, 8, 1);
    // There is no other backend.
    let alone = Host::new(vec![0; LENGTH as usize], 1).with_flows(&[9]);
    check(&alone, 4, 8, 0);
}

/// If one of two backends has 30 flows, at most 10 of 1,000 connects go to it, even if it has up to
/// four fifths of the entries. None go to it if the entries of the two backends alternate.
#[test]
fn a_loaded_backend_gets_no_connects_while_another_is_idle() {
    for weight in 1..=4 {
        for loaded in 0..2 {
            // `weight` entries of slot 0 and one entry of slot 1 alternate.
            let entries = (0..LENGTH).map(|entry| u32::from(entry % (weight + 1) == weight)).collect();
            let mut host = Host::new(entries, 2);
            host.backends[loaded].flows = 30;
            let cpu = cpu_at(weight << 28);
            let to_it = (0..1000).filter(|_| {
                pick(&host, &cpu, host.table(), rules(Policy::P2c), NOW).0.slot as usize == loaded
            });
            // The alternation breaks where the table wraps around.
            let at_most = if weight == 1 { 0 } else { 10 };
            assert!(to_it.count() <= at_most, "entries {weight} : 1");
        }
    }
}

#[test]
fn recent_errors_count_as_flows_until_they_decay() {
    let mut host = Host::in_turn(2).with_flows(&[0, 3]);
    host.backends[0].errors = RecentErrors { count: 8, since: NOW };
    check(&host, 0, 1, 1);
    host.backends[0].errors.since = NOW - TICKS;
    check(&host, 0, 1, 1);
    host.backends[0].errors.since = NOW - 2 * TICKS - TICKS / 2;
    check(&host, 0, 1, 0);
}

#[test]
fn unusable_backends_are_not_picked_and_a_third_one_replaces_two_of_them() {
    check(&Host::in_turn(10).with_flows(&[0, 9]).without(&[0]), 0, 1, 1);
    check(&Host::in_turn(10).with_flows(&[9, 0]).without(&[1]), 0, 1, 0);
    let host = Host { fallback: 9, ..Host::in_turn(10).without(&[2, 5]) };
    let mut counts = [0; 10];
    for round in 0..100 {
        let choice = choose(&host, host.table(), rules(Policy::P2c), points(2 + 10 * round, 5), NOW);
        assert_eq!(choice.how, How::Picked);
        counts[choice.slot as usize] += 1;
    }
    assert!([0, 1, 3, 4, 6, 7, 8, 9].iter().all(|slot| counts[*slot] > 0), "{counts:?}");
    assert_eq!([counts[2], counts[5]], [0, 0]);
}

proptest! {
    #[test]
    fn the_better_of_two_points_is_picked(
        entries in prop::collection::vec(0u32..10, LENGTH as usize),
        flows in prop::collection::vec(0u32..1000, 10),
        errors in prop::collection::vec((0u32..100, 0u32..100_000), 10),
        usable in prop::collection::vec(prop::bool::weighted(0.8), 10),
        sample: u32,
    ) {
        let mut host = Host::new(entries, 10).with_flows(&flows);
        for (slot, backend) in host.backends.iter_mut().enumerate() {
            backend.usable = usable[slot];
            backend.errors = RecentErrors { count: errors[slot].0, since: NOW - errors[slot].1 };
        }
        let at = |point: u32| host.entries[(point % LENGTH) as usize];
        let (one, other) = (at(sample & 0xffff), at(sample >> 16));
        // Other tests cover the replacement of the second point.
        prop_assume!(one != other);
        // Exact loads per weight, computed in another way.
        let load = |slot: u32| {
            let backend = host.backends[slot as usize];
            let load = backend.flows + decayed(backend.errors, NOW, HalfLife::new(TICKS));
            let entries = host.entries.iter().filter(|entry| **entry == slot).count();
            (u128::from(load) << 64) / entries as u128
        };
        let rules = Rules { error_half_life: TICKS, ..rules(Policy::P2c) };
        let pick = choose(&host, host.table(), rules, sample, NOW);
        let is_usable = |slot: u32| usable[slot as usize];
        match (is_usable(one), is_usable(other)) {
            (true, true) => {
                prop_assert_eq!(pick.how, How::Picked);
                prop_assert!(pick.slot == one || pick.slot == other);
                prop_assert_eq!(load(pick.slot), load(one).min(load(other)));
            }
            (true, false) => prop_assert_eq!(pick, picked(one)),
            (false, true) => prop_assert_eq!(pick, picked(other)),
            (false, false) => prop_assert!(pick.slot == NO_SLOT || is_usable(pick.slot)),
        }
    }
}
