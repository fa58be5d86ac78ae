//! `least-loaded`: round robin among the members with the least load, as in the book "Site
//! Reliability Engineering".

use lb_common::abi::{NO_SLOT, Policy, RecentErrors, Rules};
use lb_common::load::{HalfLife, decayed, with_more};
use lb_common::pick::{How, Pick, choose, pick};
use proptest::prelude::*;

use crate::host::{Host, NOW, cpu_at, picked, rules};

const RULES: Rules = Rules {
    policy: Policy::LeastLoaded as u8,
    overflow: 0,
    syn_retries: 0,
    _reserved: 0,
    active_limit: 0,
    error_half_life: TICKS,
    rebind: 0,
    unanswered_after: 0,
};
const TICKS: u32 = 9_537;

/// "Site Reliability Engineering", chapter 20, "Least-Loaded Round Robin", word for word.
#[test]
fn the_example_of_the_book_is_reproduced() {
    // "suppose a client uses a subset of backend tasks t0 to t9, and currently has the following
    // number of active requests against each backend"
    let mut host = Host::in_turn(10).with_flows(&[2, 1, 0, 0, 1, 0, 2, 0, 0, 1]);
    let cpu = cpu_at(0);
    // "For a new request, the client would filter the list of potential backend tasks to just those
    // tasks with the least number of connections (t2, t3, t5, t7, and t8) and choose a backend from
    // that list. Let's assume it picks t2."
    let candidates = |host: &Host| -> Vec<u32> {
        (0..10).map(|sample| choose(host, host.table(), RULES, sample, NOW).slot).collect()
    };
    assert_eq!(candidates(&host), [2, 2, 2, 3, 5, 5, 7, 7, 8, 2]);
    assert_eq!(host.connect(&cpu, RULES), picked(2));
    // "The client's connection state table would now look like the following"
    assert_eq!(host.flows(), [2, 1, 1, 0, 1, 0, 2, 0, 0, 1]);
    // "Assuming none of the current requests have completed, on the next request, the backend
    // candidate pool becomes t3, t5, t7, and t8."
    assert_eq!(candidates(&host), [3, 3, 3, 3, 5, 5, 7, 7, 8, 3]);
    // "Let's fast-forward until we've issued four new requests. Still assuming that no request
    // finishes in the meantime, the connection state table would look like the following"
    let slots: Vec<u32> = (0..4).map(|_| host.connect(&cpu, RULES).slot).collect();
    assert_eq!(slots, [3, 5, 7, 8], "in turn");
    assert_eq!(host.flows(), [2, 1, 1, 1, 1, 1, 2, 1, 1, 1]);
    // "At this point the set of backend candidates is all tasks except t0 and t6."
    assert_eq!(candidates(&host), [1, 1, 2, 3, 4, 5, 7, 7, 8, 9]);
    // "However, if the request against task t4 finishes, its current state becomes "0 active
    // requests" and a new request will be assigned to t4."
    host.backends[4].flows = 0;
    assert_eq!(host.connect(&cpu, RULES), picked(4));
}

#[test]
fn equally_loaded_backends_are_picked_in_turn() {
    // The test opens no flows, so the four idle backends remain equal.
    let host = Host::in_turn(10).with_flows(&[0, 5, 5, 0, 5, 5, 0, 0, 5, 5]);
    for start in [0, 1 << 30, u32::MAX] {
        let cpu = cpu_at(start);
        let mut counts = [0; 10];
        for _ in 0..400 {
            counts[pick(&host, &cpu, host.table(), RULES, NOW).0.slot as usize] += 1;
        }
        assert_eq!(counts, [100, 0, 0, 100, 0, 0, 100, 100, 0, 0]);
    }
}

#[test]
fn any_number_of_idle_members_is_picked_in_order() {
    for count in [1, 2, 3, 100, 128, 129, 200, 255, 256] {
        let host = Host::in_turn(count);
        let cpu = cpu_at(u32::MAX / 3);
        let first = pick(&host, &cpu, host.table(), RULES, NOW).0.slot;
        for step in 1..=3 * count {
            let expected = picked((first + step) % count);
            assert_eq!(
                pick(&host, &cpu, host.table(), RULES, NOW).0,
                expected,
                "{count} members, step {step}"
            );
        }
    }
}

/// "Sinkholing" in the book: a backend that fails at once never has an open flow, and would get all
/// connects.
#[test]
fn a_fast_failing_backend_attracts_no_connects() {
    let mut failed = [0; 2];
    for (run, half_life) in [0, TICKS].into_iter().enumerate() {
        let mut host = Host::in_turn(10);
        let cpu = cpu_at(0);
        let rules = Rules { error_half_life: half_life, ..RULES };
        for i in 0..1000u32 {
            let now = NOW + i * 10;
            let slot = pick(&host, &cpu, host.table(), rules, now).0.slot as usize;
            let backend = &mut host.backends[slot];
            if slot == 3 {
                failed[run] += 1;
                if half_life != 0 {
                    backend.errors = with_more(backend.errors, 1, now, HalfLife::new(half_life));
                }
            } else {
                backend.flows += 1;
            }
        }
    }
    assert!(
        failed[0] > 980,
        "errors ignored: {} connects to the failing backend, expected more than 980",
        failed[0]
    );
    assert!(
        failed[1] < 160,
        "errors counted: {} connects to the failing backend, expected fewer than 160",
        failed[1]
    );
}

#[test]
fn inconsistent_members_give_a_broken_pick() {
    let no_slot = |how| Pick { how, slot: NO_SLOT };
    let mut host = Host::in_turn(257);
    host.fallback = 0;
    assert_eq!(
        choose(&host, host.table(), RULES, 0, NOW),
        no_slot(How::Broken),
        "there are more members than fit in a list"
    );
    let lost = Host::new(vec![7; 1024], 7);
    assert_eq!(choose(&lost, lost.table(), RULES, 0, NOW), no_slot(How::Broken), "a slot past the end");
    // If a table has too many members to list, only its schedule is used.
    host.listed = false;
    assert_eq!(choose(&host, host.table(), RULES, 5, NOW), picked(5));
}

proptest! {
    #[test]
    fn no_usable_backend_has_less_load_than_the_pick(
        count in 1u32..=256,
        backends in prop::collection::vec((0u32..20, 0u32..20, 0u32..40_000, prop::bool::weighted(0.8)), 256),
        sample: u32,
    ) {
        let mut host = Host { fallback: 0, ..Host::in_turn(count) };
        for (backend, (flows, errors, ago, usable)) in host.backends.iter_mut().zip(&backends) {
            backend.usable = *usable;
            backend.flows = *flows;
            backend.errors = RecentErrors { count: *errors, since: NOW - ago };
        }
        let load = |slot: usize| {
            let backend = host.backends[slot];
            backend.flows + decayed(backend.errors, NOW, HalfLife::new(TICKS))
        };
        let usable = || (0..count as usize).filter(|slot| host.backends[*slot].usable);
        let pick = choose(&host, host.table(), RULES, sample, NOW);
        let Some(least) = usable().map(load).min() else {
            prop_assert_eq!(pick, Pick { how: How::Fallback, slot: 0 });
            return Ok(());
        };
        // The first of the least loaded members, beginning with the member at the sample.
        let expected = (0..count).map(|i| (sample % count + i) % count).find(|slot| {
            host.backends[*slot as usize].usable && load(*slot as usize) == least
        });
        prop_assert_eq!(pick, picked(expected.expect("a usable member has the least load")));
    }
}

#[test]
fn the_cursor_continues_after_a_change_of_policy() {
    // After switches to `least-loaded` and back, the cursor still visits every entry in turn.
    let host = Host::in_turn(10);
    let cpu = cpu_at(0);
    let slot = |policy| pick(&host, &cpu, host.table(), rules(policy), NOW).0.slot;
    let slots: Vec<u32> = (0..5).map(|_| slot(Policy::RoundRobin)).collect();
    assert_eq!(slots, [0, 1, 2, 3, 4]);
    let slots: Vec<u32> = (0..5).map(|_| slot(Policy::LeastLoaded)).collect();
    assert_eq!(slots, [5, 6, 7, 8, 9]);
    let slots: Vec<u32> = (0..5).map(|_| slot(Policy::WeightedRoundRobin)).collect();
    assert_eq!(slots, [0, 1, 2, 3, 4]);
}
