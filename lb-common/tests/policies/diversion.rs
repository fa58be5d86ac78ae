//! A chosen lame duck is replaced by another backend; if none is found, the choice remains.

use std::collections::BTreeSet;

use lb_common::abi::{Policy, Rules};
use lb_common::pick::{DIVERSION_LOOKS, How, Pick, diverted, limit_of_diversion, other_than_lame};

use crate::host::{Host, LENGTH, picked, rules};

fn other(host: &Host, sample: u32, limit: u32, first: u32, lame: &[usize]) -> u32 {
    other_than_lame(host, host.table(), sample, limit, first, |backend| lame.contains(&backend))
}

/// Samples like those of cursors, and random samples like those of the policy `random`.
fn samples() -> impl Iterator<Item = u32> {
    (0..3 * LENGTH).chain((0..1000).map(|n: u32| n.wrapping_mul(0x9e37_79b9)))
}

#[test]
fn the_choice_remains_if_all_backends_are_lame_ducks() {
    let host = Host::in_turn(20);
    let all: Vec<usize> = (0..20).collect();
    for sample in samples() {
        assert_eq!(other(&host, sample, 0, 7, &all), 7);
    }
}

#[test]
fn the_only_healthy_one_of_few_backends_is_always_found() {
    for backends in 2..=5 {
        let host = Host::in_turn(backends);
        for well in 0..backends {
            let lame: Vec<usize> = (0..backends as usize).filter(|slot| *slot != well as usize).collect();
            let first = (well + 1) % backends;
            // The samples cover all positions of the table, including its end, where the search
            // wraps around.
            for sample in samples() {
                assert_eq!(
                    other(&host, sample, 0, first, &lame),
                    well,
                    "{backends} backends, sample {sample}"
                );
            }
        }
    }
}

#[test]
fn the_only_healthy_one_of_many_backends_is_mostly_found() {
    let host = Host::in_turn(20);
    let lame: Vec<usize> = (1..20).collect();
    let found = samples().filter(|sample| other(&host, *sample, 0, 1, &lame) == 0).count();
    let share = found as f64 / samples().count() as f64;
    // For (19/20)^8 * 12/20 of the samples, the search finds no other backend.
    assert!((0.55..0.65).contains(&share), "another backend for {share} of the samples");
}

#[test]
fn connects_of_a_lame_duck_go_to_all_others_by_their_shares() {
    // The first backend has twice as many entries as each of the others.
    let host = Host::new((0..LENGTH).map(|entry| [0, 1, 0, 2, 3][entry as usize % 5]).collect(), 4);
    let mut counts = [0u32; 4];
    for sample in samples() {
        counts[other(&host, sample, 0, 3, &[3]) as usize] += 1;
    }
    let total = f64::from(counts.iter().sum::<u32>());
    for (slot, share) in [(0, 0.5), (1, 0.25), (2, 0.25), (3, 0.0)] {
        assert!((f64::from(counts[slot]) / total - share).abs() < 0.03, "{counts:?}");
    }
}

#[test]
fn unusable_or_full_backends_replace_no_lame_duck() {
    let mut host = Host::in_turn(6).with_flows(&[0, 3, 0, 2, 0, 0]).without(&[2]);
    host.backends[4].is_ejected = true;
    let seen: BTreeSet<u32> = samples().map(|sample| other(&host, sample, 3, 0, &[0])).collect();
    assert_eq!(seen, [3, 5].into());
    // Without a limit (0), backends with any number of flows are eligible.
    let seen: BTreeSet<u32> = samples().map(|sample| other(&host, sample, 0, 0, &[0])).collect();
    assert_eq!(seen, [1, 3, 5].into());
    // No other backend may be chosen.
    let host = host.without(&[1, 3, 5]);
    assert!(samples().all(|sample| other(&host, sample, 0, 0, &[0]) == 0));
}

#[test]
fn a_diversion_checks_a_limited_number_of_backends() {
    let host = Host::in_turn(20);
    let examined = std::cell::Cell::new(0);
    let first = other_than_lame(&host, host.table(), 5, 0, 9, |_| {
        examined.set(examined.get() + 1);
        true
    });
    assert_eq!((first, examined.get()), (9, DIVERSION_LOOKS));
}

#[test]
fn an_empty_or_broken_table_leaves_the_choice_unchanged() {
    let host = Host::in_turn(4);
    let empty = lb_common::abi::TableRef { length_log2: 0, ..host.table() };
    let past_the_end = lb_common::abi::TableRef { base: 1 << 30, ..host.table() };
    for table in [empty, past_the_end] {
        assert_eq!(other_than_lame(&host, table, 5, 0, 3, |_| false), 3);
    }
    let unknown_backends = Host::new(vec![77; LENGTH as usize], 4);
    assert_eq!(other(&unknown_backends, 5, 0, 3, &[]), 3);
}

#[test]
fn an_overflowed_choice_ignores_the_limit() {
    let limited = Rules { active_limit: 5, ..rules(Policy::LeastLoaded) };
    let limits = [How::Picked, How::Fallback, How::Overflowed].map(|how| limit_of_diversion(how, limited));
    assert_eq!(limits, [5, 5, 0]);
}

#[test]
fn a_pick_shows_whether_it_was_diverted() {
    assert_eq!(diverted(picked(3), 3), picked(3));
    assert_eq!(diverted(picked(3), 4), Pick { how: How::Diverted, slot: 4 });
    let fallback = Pick { how: How::Fallback, slot: 3 };
    assert_eq!(diverted(fallback, 3), fallback);
    assert_eq!(diverted(fallback, 4), Pick { how: How::Diverted, slot: 4 });
    let overflowed = |slot| Pick { how: How::Overflowed, slot };
    assert_eq!(diverted(overflowed(3), 4), overflowed(4));
}
