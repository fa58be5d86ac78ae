//! The rules of docs/design/health.md, cell by cell: tiers, which backends a connect may choose
//! while a tier serves, and the meaning of a failed probe. (A stale list changes none of these
//! rules: its last verdicts remain valid, as a test of the daemon shows.)

use lb_common::abi::Usable;
use lb_core::health::Health;
use lb_core::health::probed::seen_from;
use lb_core::health::tiers::{Tier, TierCandidate, is_below_threshold, tier, usable};

const fn candidate(health: Health) -> TierCandidate {
    TierCandidate { health, is_lame_duck: matches!(health, Health::LameDuck), accepts: false }
}

const HEALTHY: TierCandidate = candidate(Health::Healthy);
const UNPROVEN: TierCandidate = candidate(Health::Unproven);
const LAME_DUCK: TierCandidate = candidate(Health::LameDuck);
const EJECTED: TierCandidate = candidate(Health::Ejected);
const LEAVING: TierCandidate = TierCandidate { is_lame_duck: true, ..EJECTED };
const REFUSING: TierCandidate = candidate(Health::Refusing);
const UNWELL: TierCandidate = TierCandidate { accepts: true, ..REFUSING };
const DRAINED: TierCandidate = candidate(Health::Drained);
const ALL: [TierCandidate; 8] = [HEALTHY, UNPROVEN, LAME_DUCK, EJECTED, LEAVING, REFUSING, UNWELL, DRAINED];

#[test]
fn the_first_tier_that_is_not_empty_serves() {
    let cases: [(&[TierCandidate], Tier, Tier); 11] = [
        (&ALL, Tier::Healthy, Tier::Panic),
        (&[UNPROVEN, LAME_DUCK, EJECTED, REFUSING], Tier::Unproven, Tier::Unproven),
        (&[EJECTED, LAME_DUCK, REFUSING], Tier::LameDucks, Tier::LameDucks),
        (&[LEAVING, LAME_DUCK], Tier::LameDucks, Tier::LameDucks),
        (&[EJECTED, REFUSING, DRAINED], Tier::Ejected, Tier::Ejected),
        (&[LEAVING], Tier::Ejected, Tier::Ejected),
        (&[REFUSING, UNWELL, DRAINED], Tier::Answering, Tier::Answering),
        (&[EJECTED, UNWELL], Tier::Ejected, Tier::Ejected),
        (&[REFUSING, DRAINED], Tier::Refusing, Tier::Refusing),
        (&[DRAINED, DRAINED], Tier::NoBackend, Tier::NoBackend),
        (&[], Tier::NoBackend, Tier::NoBackend),
    ];
    for (candidates, normal, in_panic) in cases {
        for turned in [candidates.to_vec(), candidates.iter().rev().copied().collect()] {
            assert_eq!(
                [false, true].map(|is_panic| tier(turned.clone(), is_panic, false)),
                [normal, in_panic]
            );
        }
    }
}

#[test]
fn usability_follows_every_cell_of_the_table() {
    use Usable::{EvenEjected as Even, No, UnlessEjected as Unless};
    let tiers = [
        Tier::Healthy,
        Tier::Panic,
        Tier::Unproven,
        Tier::LameDucks,
        Tier::Ejected,
        Tier::Answering,
        Tier::Refusing,
    ];
    let table = [
        ("healthy", HEALTHY, [Unless, Even, Unless, Unless, Unless, Unless, Unless]),
        ("unproven", UNPROVEN, [No, No, Unless, No, No, No, No]),
        ("lame duck", LAME_DUCK, [No, No, No, Unless, No, No, No]),
        ("ejected", EJECTED, [Unless, Even, Unless, Unless, Even, Unless, Unless]),
        ("ejected and lame duck", LEAVING, [No, No, No, Unless, Even, No, No]),
        ("refusing", REFUSING, [No, No, No, No, No, No, Even]),
        ("refusing, but it accepts", UNWELL, [No, Even, No, No, Even, Even, Even]),
        ("drained", DRAINED, [No, No, No, No, No, No, No]),
    ];
    for (name, candidate, expected) in table {
        assert_eq!(tiers.map(|tier| usable(candidate, tier)), expected, "{name}");
        assert_eq!(usable(candidate, Tier::NoBackend), No, "{name}");
    }
}

/// For all sets of backends, with and without panic: if any backend has a positive weight, a
/// connect may choose some backend. A connect may choose a backend that does not accept connections
/// only if no other backend has a positive weight.
#[test]
fn a_backend_that_cannot_accept_is_chosen_last() {
    for set in 0u32..1 << ALL.len() {
        let candidates: Vec<TierCandidate> =
            ALL.iter().enumerate().filter(|(at, _)| set >> at & 1 != 0).map(|(_, one)| *one).collect();
        for is_panic in [false, true] {
            let serves = tier(candidates.clone(), is_panic, false);
            // Connects do not choose an ejected backend, unless its state word permits this.
            let is_chosen = |one: &&TierCandidate| match usable(**one, serves) {
                Usable::No => false,
                Usable::UnlessEjected => one.health != Health::Ejected,
                Usable::EvenEjected => true,
            };
            let chosen: Vec<&TierCandidate> = candidates.iter().filter(is_chosen).collect();
            assert_eq!(chosen.is_empty(), serves == Tier::NoBackend, "{candidates:?}, panic {is_panic}");
            let worst = chosen.iter().map(|one| one.health).max();
            assert_ne!(worst, Some(Health::Drained));
            if worst == Some(Health::Refusing) && chosen.contains(&&REFUSING) {
                let accepts = |one: &TierCandidate| one.health < Health::Refusing || *one == UNWELL;
                assert!(!candidates.iter().any(accepts), "{candidates:?}");
            }
        }
    }
}

/// Each case has the result of probes, whether the client is in another network namespace, and
/// whether the client has established a connection.
#[test]
fn a_failed_probe_only_raises_suspicion_in_another_network_namespace() {
    for (found, is_elsewhere, has_established, expected) in [
        (Health::Refusing, false, false, Health::Refusing),
        (Health::Refusing, false, true, Health::Refusing),
        (Health::Refusing, true, false, Health::Ejected),
        (Health::Refusing, true, true, Health::Healthy),
        (Health::Healthy, true, false, Health::Healthy),
        (Health::Healthy, true, true, Health::Healthy),
    ] {
        assert_eq!(seen_from(found, is_elsewhere, has_established), expected, "{found:?}");
    }
    let guessed = candidate(seen_from(Health::Refusing, true, false));
    assert_eq!(tier([guessed, REFUSING, UNWELL], false, false), Tier::Ejected);
    assert_eq!(
        usable(guessed, Tier::Panic),
        Usable::EvenEjected,
        "in panic, a suspected backend may be chosen"
    );
}

#[test]
fn drained_backends_serve_only_if_the_service_allows_it_and_has_no_others() {
    for is_panic in [false, true] {
        assert_eq!(tier([DRAINED, DRAINED], is_panic, true), Tier::Drained);
        assert_eq!(tier([DRAINED, REFUSING], is_panic, true), Tier::Refusing);
    }
    assert_eq!(usable(DRAINED, Tier::Drained), Usable::EvenEjected, "there is no better backend");
}

#[test]
fn panic_begins_below_the_threshold() {
    let cases = [
        (5, 10, 50, false),
        (4, 10, 50, true),
        (2, 3, 50, false),
        (1, 3, 50, true),
        (1, 2, 50, false),
        (0, 1, 50, true),
        (0, 0, 50, false),
        (0, 10, 0, false),
        (9, 10, 100, true),
        (10, 10, 100, false),
    ];
    for (available, members, threshold, expected) in cases {
        assert_eq!(
            is_below_threshold(available, members, threshold),
            expected,
            "{available} of {members} available, threshold {threshold} %"
        );
    }
}
