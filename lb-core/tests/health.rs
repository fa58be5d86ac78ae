//! The truth table of docs/design/health.md: verdict x panic x who else is there, cell by cell. (That a list is stale changes
//! none of it: its last verdicts stay, see the test of the daemon.)

use lb_common::abi::Usable;
use lb_core::health::Health;
use lb_core::health::tiers::{Candidate, Tier, is_panic, tier, usable};

const HEALTHY: Candidate = Candidate { health: Health::Healthy, is_lame_duck: false };
const LAME_DUCK: Candidate = Candidate { health: Health::LameDuck, is_lame_duck: true };
const REFUSING: Candidate = Candidate { health: Health::Refusing, is_lame_duck: false };
const EJECTED: Candidate = Candidate { health: Health::Ejected, is_lame_duck: false };
const BOTH: Candidate = Candidate { health: Health::Ejected, is_lame_duck: true };
const DRAINED: Candidate = Candidate { health: Health::Drained, is_lame_duck: false };

#[test]
fn the_first_line_that_applies_decides_who_serves() {
    let cases: [(&[Candidate], bool, Tier); 12] = [
        (&[HEALTHY, LAME_DUCK, EJECTED, REFUSING, DRAINED], false, Tier::Healthy),
        (&[HEALTHY, LAME_DUCK, EJECTED, REFUSING, DRAINED], true, Tier::Panic),
        (&[EJECTED, LAME_DUCK, REFUSING], false, Tier::LameDucks),
        (&[EJECTED, LAME_DUCK, REFUSING], true, Tier::LameDucks),
        (&[EJECTED, REFUSING, DRAINED], false, Tier::LastResort),
        (&[EJECTED, REFUSING, DRAINED], true, Tier::LastResort),
        (&[REFUSING], false, Tier::LastResort),
        (&[BOTH], true, Tier::LastResort),
        (&[BOTH, LAME_DUCK], false, Tier::LameDucks),
        (&[DRAINED, DRAINED], false, Tier::Nobody),
        (&[DRAINED], true, Tier::Nobody),
        (&[], false, Tier::Nobody),
    ];
    for (candidates, in_panic, expected) in cases {
        for turned in [candidates.to_vec(), candidates.iter().rev().copied().collect()] {
            assert_eq!(tier(turned.clone(), in_panic), expected, "{turned:?}, panic {in_panic}");
        }
    }
}

#[test]
fn every_cell_of_the_table() {
    use Usable::{EvenEjected, No, UnlessEjected};
    // Normal, panic, nobody available but lame ducks, nobody available at all.
    let tiers = [Tier::Healthy, Tier::Panic, Tier::LameDucks, Tier::LastResort];
    let table = [
        ("healthy", HEALTHY, [UnlessEjected, EvenEjected, UnlessEjected, UnlessEjected]),
        ("lame duck", LAME_DUCK, [No, No, UnlessEjected, No]),
        ("refusing", REFUSING, [No, EvenEjected, No, EvenEjected]),
        ("ejected", EJECTED, [UnlessEjected, EvenEjected, UnlessEjected, EvenEjected]),
        ("ejected and lame duck", BOTH, [No, No, UnlessEjected, EvenEjected]),
        ("drained", DRAINED, [No, No, No, No]),
    ];
    for (name, candidate, expected) in table {
        assert_eq!(tiers.map(|tier| usable(candidate, tier)), expected, "{name}");
        assert_eq!(usable(candidate, Tier::Nobody), No, "{name}");
    }
}

/// Whoever serves, somebody may be chosen; and nobody that is drained ever is.
#[test]
fn a_tier_that_serves_has_somebody() {
    let all = [HEALTHY, LAME_DUCK, REFUSING, EJECTED, BOTH, DRAINED];
    // All sets of these, each in panic and not.
    for set in 0u32..64 {
        let candidates: Vec<Candidate> =
            all.iter().enumerate().filter(|(at, _)| set >> at & 1 != 0).map(|(_, one)| *one).collect();
        for in_panic in [false, true] {
            let serves = tier(candidates.clone(), in_panic);
            // The kernel keeps back whoever is ejected, unless it is told otherwise.
            let is_chosen = |one: &Candidate| match usable(*one, serves) {
                Usable::No => false,
                Usable::UnlessEjected => one.health != Health::Ejected,
                Usable::EvenEjected => true,
            };
            let chosen = candidates.iter().filter(|one| is_chosen(one)).count();
            assert_eq!(chosen > 0, serves != Tier::Nobody, "{candidates:?}, panic {in_panic}");
            assert!(!candidates.iter().any(|one| one.health == Health::Drained && is_chosen(one)));
        }
    }
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
            is_panic(available, members, threshold),
            expected,
            "{available} of {members}, {threshold} %"
        );
    }
}
