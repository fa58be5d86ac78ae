//! `active_limit`: no backend at the limit is chosen while another backend is below the limit. If
//! all backends are at the limit, the least loaded one is chosen, or the call is refused.

use lb_common::abi::{NO_SLOT, Overflow, Policy, Rules};
use lb_common::pick::{How, Pick, choose};
use proptest::prelude::*;

use crate::host::{Host, LENGTH, NOW, cpu_at, picked, rules};

fn limited(policy: Policy, limit: u32, overflow: Overflow) -> Rules {
    Rules { active_limit: limit, overflow: overflow as u8, ..rules(policy) }
}

#[test]
fn backends_fill_up_to_the_limit_only() {
    for policy in Policy::ALL {
        let mut host = Host::in_turn(10);
        let cpu = cpu_at(0);
        let rules = limited(policy, 3, Overflow::Refuse);
        for _ in 0..30 {
            assert_eq!(host.connect(&cpu, rules).how, How::Picked);
        }
        assert_eq!(host.flows(), [3; 10], "{policy:?}");
        assert_eq!(host.connect(&cpu, rules), Pick { how: How::Limited, slot: NO_SLOT });
        // A backend that falls below the limit is found at any position in the table.
        host.backends[6].flows = 2;
        assert_eq!(host.connect(&cpu, rules), picked(6));
        // Above the limit, flows are spread evenly and marked as overflow.
        let rules = limited(policy, 3, Overflow::LeastLoaded);
        host.backends[4].usable = false;
        for _ in 0..18 {
            assert_eq!(host.connect(&cpu, rules).how, How::Overflowed);
        }
        assert_eq!(host.flows(), [5, 5, 5, 5, 3, 5, 5, 5, 5, 5], "{policy:?}");
    }
}

#[test]
fn unlisted_members_are_searched_in_256_scattered_entries() {
    for policy in Policy::ALL {
        let mut host = Host { listed: false, fallback: 1, ..Host::in_turn(LENGTH) };
        for backend in &mut host.backends {
            backend.flows = 1;
        }
        let rules = limited(policy, 1, Overflow::Refuse);
        let none = Pick { how: How::Limited, slot: NO_SLOT };
        let found = |host: &Host| {
            let samples = (0..1000u32).map(|sample| sample.wrapping_mul(0x9e37_79b9));
            let choices = samples.map(|sample| choose(host, host.table(), rules, sample, NOW));
            let found: Vec<Pick> = choices.filter(|choice| *choice != none).collect();
            assert!(found.iter().all(|choice| host.backends[choice.slot as usize].flows == 0), "{policy:?}");
            found.len()
        };
        assert_eq!(found(&host), 0);
        // If 16 of 1,024 entries are free, 260 random entries include a free one with a probability
        // of 98 %.
        for free in (0..LENGTH as usize).step_by(64) {
            host.backends[free].flows = 0;
        }
        assert!(found(&host) >= 960, "{policy:?}: {} of 1,000 samples found a free backend", found(&host));
        for free in (0..LENGTH as usize).step_by(64) {
            host.backends[free].flows = 1;
        }
        let sample = 100;
        // The overflow to the least loaded backend requires a list of members, and there is none.
        let rules = limited(policy, 1, Overflow::LeastLoaded);
        assert_eq!(choose(&host, host.table(), rules, sample, NOW), Pick { how: How::Fallback, slot: 1 });
    }
}

#[test]
fn without_usable_backends_the_limit_has_no_effect() {
    let all: Vec<usize> = (0..10).collect();
    for policy in Policy::ALL {
        for overflow in Overflow::ALL {
            let mut host = Host { fallback: 7, ..Host::in_turn(10).without(&all) };
            let rules = limited(policy, 1, overflow);
            for listed in [true, false] {
                host.listed = listed;
                assert_eq!(choose(&host, host.table(), rules, 0, NOW), Pick { how: How::Fallback, slot: 7 });
            }
        }
    }
}

proptest! {
    #[test]
    fn no_backend_at_the_limit_is_picked_while_another_is_below(
        number in 0u8..5,
        count in 1u32..=256,
        flows in prop::collection::vec(0u32..4, 256),
        usable in prop::collection::vec(prop::bool::weighted(0.7), 256),
        limit in 1u32..4,
        refuse: bool,
        sample: u32,
    ) {
        let policy = Policy::from_u8(number).expect("the policy exists");
        let overflow = if refuse { Overflow::Refuse } else { Overflow::LeastLoaded };
        let mut host = Host { fallback: NO_SLOT, ..Host::in_turn(count).with_flows(&flows) };
        for (backend, usable) in host.backends.iter_mut().zip(&usable) {
            backend.usable = *usable;
        }
        let pick = choose(&host, host.table(), limited(policy, limit, overflow), sample, NOW);
        let of = |slot: u32| host.backends[slot as usize];
        let all_usable: Vec<u32> = (0..count).filter(|slot| of(*slot).usable).collect();
        let least = all_usable.iter().map(|slot| of(*slot).flows).min();
        match (pick.how, least) {
            (How::Refused, None) => {}
            (How::Picked, Some(least)) => {
                prop_assert!(least < limit);
                prop_assert!(of(pick.slot).usable && of(pick.slot).flows < limit);
            }
            (How::Limited, Some(least)) => prop_assert!(refuse && least >= limit),
            (How::Overflowed, Some(least)) => {
                prop_assert!(!refuse && least >= limit && of(pick.slot).usable);
                prop_assert_eq!(of(pick.slot).flows, least);
            }
            other => prop_assert!(false, "unexpected pick {:?}", other),
        }
    }
}
