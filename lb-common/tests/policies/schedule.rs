//! The policies that follow the schedule: `round-robin` and `weighted-round-robin` pick the next
//! entry, `random` picks a random one.

use std::collections::BTreeMap;

use lb_common::abi::{MAX_SCHEDULE_LOG2, MIN_SCHEDULE_LOG2, NO_SLOT, Policy, TableRef};
use lb_common::pick::{How, Pick, choose, pick};
use proptest::prelude::*;

use crate::host::{Host, LENGTH, NOW, cpu_at, picked, rules};

const SCHEDULED: Policy = Policy::WeightedRoundRobin;

fn fallback(slot: u32) -> Pick {
    Pick { how: How::Fallback, slot }
}

fn no_slot(how: How) -> Pick {
    Pick { how, slot: NO_SLOT }
}

#[test]
fn a_single_usable_backend_is_found_and_the_fallback_comes_last() {
    for policy in [Policy::RoundRobin, SCHEDULED, Policy::Random, Policy::P2c] {
        for only in [0, 4, 255] {
            let others: Vec<usize> = (0..256).filter(|slot| *slot != only).collect();
            let host = Host { fallback: 9, ..Host::in_turn(256).without(&others) };
            for sample in 0..LENGTH {
                let choice = choose(&host, host.table(), rules(policy), sample * 4_099, NOW);
                assert_eq!(choice, picked(u32::try_from(only).unwrap()), "{policy:?}, sample {sample}");
            }
        }
        let all: Vec<usize> = (0..256).collect();
        let mut host = Host { fallback: 9, ..Host::in_turn(256).without(&all) };
        // The fallback's own state word is not read, because the daemon stores the fallback first.
        assert_eq!(choose(&host, host.table(), rules(policy), 0, NOW), fallback(9));
        host.fallback = NO_SLOT;
        assert_eq!(choose(&host, host.table(), rules(policy), 0, NOW), no_slot(How::Refused));
    }
}

/// A backend always has the same neighbours in a schedule. If connects of a dead backend used the
/// next entry, a single neighbour would get all of them.
#[test]
fn connects_of_unusable_backends_go_to_all_others_by_their_shares() {
    let weights = [4, 1, 2, 1, 2, 4, 1, 1];
    let entries: Vec<u32> =
        (0..).zip(weights).flat_map(|(slot, weight)| vec![slot; weight * LENGTH as usize / 16]).collect();
    // As in a real schedule, the entries of backends alternate in a fixed order.
    let entries = (0..LENGTH as usize).map(|place| entries[place * 389 % LENGTH as usize]).collect();
    for dead in [&[0][..], &[1, 2], &[0, 5], &[0, 1, 2, 3]] {
        for policy in [Policy::RoundRobin, SCHEDULED, Policy::Random] {
            for listed in [true, false] {
                let mut host = Host { listed, ..Host::new(Vec::clone(&entries), 8).without(dead) };
                // The first dead backend is ejected, the others are unusable: a choice treats both
                // in the same way.
                host.backends[dead[0]].usable = true;
                host.backends[dead[0]].is_ejected = true;
                let cpu = cpu_at(7);
                let mut counts = [0.0; 8];
                let picks = 100 * LENGTH;
                for _ in 0..picks {
                    let (pick, _) = pick(&host, &cpu, host.table(), rules(policy), NOW);
                    assert_eq!(pick.how, How::Picked);
                    counts[pick.slot as usize] += 1.0;
                }
                let left: usize = (0..8).filter(|slot| !dead.contains(slot)).map(|slot| weights[slot]).sum();
                for slot in 0..8 {
                    let part = if dead.contains(&slot) { 0 } else { weights[slot] };
                    let expected = f64::from(picks) * part as f64 / left as f64;
                    let most = expected * 0.04;
                    assert!(
                        (counts[slot] - expected).abs() <= most,
                        "{policy:?} without {dead:?}: {counts:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn positions_wrap_within_their_table() {
    let mut host = Host::in_turn(10).without(&[0]);
    // The tables of other services lie before and after this one.
    let mut entries: Vec<u32> = vec![9; LENGTH as usize];
    entries.append(&mut host.entries);
    entries.extend(vec![9; LENGTH as usize]);
    host.entries = entries;
    let table = TableRef { base: LENGTH, generation: 0, length_log2: MIN_SCHEDULE_LOG2, members: 1 };
    for sample in [0, LENGTH - 1, LENGTH, u32::MAX] {
        let slot = (sample % LENGTH) % 10;
        let choice = choose(&host, table, rules(SCHEDULED), sample, NOW);
        if slot == 0 {
            assert!(
                choice.how == How::Picked && (1..9).contains(&choice.slot),
                "sample {sample}: {choice:?}"
            );
        } else {
            assert_eq!(choice, picked(slot), "sample {sample}");
        }
    }
}

#[test]
fn every_policy_uses_the_fallback_without_a_table() {
    let mut host = Host { fallback: 3, listed: false, ..Host::in_turn(10) };
    let none = TableRef { base: 0, generation: 0, length_log2: 0, members: 0 };
    for policy in Policy::ALL {
        assert_eq!(choose(&host, none, rules(policy), 0, NOW), fallback(3));
    }
    host.fallback = NO_SLOT;
    for policy in Policy::ALL {
        assert_eq!(choose(&host, none, rules(policy), 0, NOW), no_slot(How::Refused));
    }
}

#[test]
fn inconsistent_tables_give_a_broken_pick() {
    let host = Host { fallback: 3, ..Host::in_turn(10) };
    let table = |base, length_log2| TableRef { base, generation: 0, length_log2, members: 1 };
    for policy in [SCHEDULED, Policy::Random, Policy::P2c] {
        let pick = |host: &Host, table| choose(host, table, rules(policy), 0, NOW);
        // A table past the end of the map; a length that is too short or too long; and entries with
        // slots that do not exist.
        assert_eq!(pick(&host, table(LENGTH, MIN_SCHEDULE_LOG2)), no_slot(How::Broken));
        for length_log2 in [1, MIN_SCHEDULE_LOG2 - 1, MAX_SCHEDULE_LOG2 + 1, 255] {
            assert_eq!(pick(&host, table(0, length_log2)), no_slot(How::Broken), "length_log2 {length_log2}");
        }
        let lost = Host { fallback: 3, ..Host::new(vec![77; LENGTH as usize], 10) };
        assert_eq!(pick(&lost, lost.table()), no_slot(How::Broken));
        let empty = Host { fallback: 3, ..Host::new(vec![NO_SLOT; LENGTH as usize], 0) };
        assert_eq!(pick(&empty, empty.table()), no_slot(How::Broken));
    }
    let unknown = lb_common::abi::Rules { policy: 200, ..rules(SCHEDULED) };
    assert_eq!(choose(&host, host.table(), unknown, 0, NOW), no_slot(How::Broken));
}

proptest! {
    /// From any start of a cursor, a number of picks equal to the length of the table picks every
    /// slot exactly as often as the slot has entries.
    #[test]
    fn shares_are_exact_over_a_table(entries in prop::collection::vec(0u32..10, LENGTH as usize), start: u32) {
        let host = Host::new(entries.clone(), 10);
        let cpu = cpu_at(start);
        let count = |slots: &mut dyn Iterator<Item = u32>| {
            let mut counts = BTreeMap::new();
            for slot in slots {
                *counts.entry(slot).or_insert(0) += 1;
            }
            counts
        };
        for policy in [Policy::RoundRobin, SCHEDULED] {
            let mut slots = (0..LENGTH).map(|_| pick(&host, &cpu, host.table(), rules(policy), NOW).0.slot);
            prop_assert_eq!(count(&mut slots), count(&mut entries.iter().copied()));
        }
    }

    /// No unusable backend is picked, a usable backend at the sample is always picked, and the
    /// fallback is used only if no backend is usable.
    #[test]
    fn unusable_backends_are_never_scheduled(
        entries in prop::collection::vec(0u32..10, LENGTH as usize),
        usable in prop::collection::vec(any::<bool>(), 10),
        sample: u32,
    ) {
        let mut host = Host { fallback: 0, ..Host::new(entries, 10) };
        for (backend, usable) in host.backends.iter_mut().zip(&usable) {
            backend.usable = *usable;
        }
        let first = host.entries[(sample & (LENGTH - 1)) as usize];
        let any = host.members.iter().any(|slot| usable[*slot as usize]);
        for policy in [Policy::RoundRobin, SCHEDULED, Policy::Random] {
            let choice = choose(&host, host.table(), rules(policy), sample, NOW);
            if usable[first as usize] {
                prop_assert_eq!(choice, picked(first));
            } else if any {
                prop_assert!(choice.how == How::Picked && usable[choice.slot as usize], "unexpected pick {:?}", choice);
            } else {
                prop_assert_eq!(choice, fallback(0));
            }
        }
    }

    /// A choice with the sample that a pick returned has the same result as the pick.
    #[test]
    fn a_sample_repeats_its_pick(
        number in 0u8..5,
        start: u32,
        flows in prop::collection::vec(0u32..4, 10),
        limit in 0u32..4,
    ) {
        let host = Host { fallback: 0, ..Host::in_turn(10).with_flows(&flows) };
        let cpu = cpu_at(start);
        let rules = lb_common::abi::Rules { policy: number, active_limit: limit, ..Default::default() };
        for _ in 0..20 {
            let (picked, sample) = pick(&host, &cpu, host.table(), rules, NOW);
            prop_assert_eq!(choose(&host, host.table(), rules, sample, NOW), picked);
        }
    }
}
