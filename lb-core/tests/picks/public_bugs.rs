//! Bugs that befell other balancers, as tests: each is named after what happened, and its number in
//! docs/design/bugs-of-others.md.

use std::collections::BTreeMap;

use lb_common::abi::{NO_SLOT, Policy};
use lb_common::pick::{How, pick};
use lb_core::cursor::start;
use lb_core::schedule::apportion;

use crate::host::{Cpu, Host, NOW, rules};
use crate::weighted;

/// R16: every client balanced by what it knew itself, and each began with the first backend (kubernetes#79213: all nodes'
/// round robin and least-connection schedulers pick the same backend first; kubernetes#121591).
#[test]
fn r16_fifty_clients_that_know_only_themselves_do_not_flood_the_first_backend() {
    for policy in Policy::ALL {
        for picks in [1, 2, 5] {
            let mut loads = [0u32; 10];
            for client in 0..50 {
                // Each client has tables and loads of its own, and two CPUs.
                let mut host = Host::in_turn(10);
                for cpu in 0..2 {
                    let start = start(&format!("web/{client}@host-{client}"), "users", cpu, 2);
                    let cpu = Cpu::new(start);
                    for _ in 0..picks {
                        loads[host.connect(&cpu, rules(policy)).slot as usize] += 1;
                    }
                }
            }
            // On average 10 for each pick, and four standard deviations of what starts by chance make of that. Without
            // starts of their own it would be 100 for each on the first backends.
            let mean = 10.0 * f64::from(picks);
            let most = f64::from(*loads.iter().max().expect("ten"));
            assert!(most <= mean + 4.0 * mean.sqrt(), "{policy:?}, {picks}: {loads:?}");
            assert!(loads.iter().all(|load| *load > 0), "{policy:?}, {picks}: {loads:?}");
        }
    }
}

/// R26: the edges of weights.
#[test]
fn r26_a_weight_of_one_beside_a_thousand_has_its_share() {
    let host = weighted(&[1, 1000]);
    assert_eq!(host.shares, [1, 1023], "a positive weight always has an entry");
    for (policy, most) in [(Policy::WeightedRoundRobin, 1), (Policy::Random, 8), (Policy::P2c, 8)] {
        let cpu = Cpu::new(0);
        let rare = (0..1024).filter(|_| pick(&host, &cpu, host.table(), rules(policy), NOW).0.slot == 0);
        assert!(rare.count() <= most, "{policy:?}");
    }
    // Round robin and least-loaded know no weights.
    let mut host = weighted(&[1, 1000]);
    let cpu = Cpu::new(0);
    for _ in 0..100 {
        assert_eq!(host.connect(&cpu, rules(Policy::LeastLoaded)).how, How::Picked);
    }
    assert_eq!(host.flows(), [50, 50]);
    // By p2c the flows that stay open follow the table.
    let mut host = weighted(&[1, 1000]);
    for _ in 0..1024 * 8 {
        assert_eq!(host.connect(&cpu, rules(Policy::P2c)).how, How::Picked);
    }
    assert!(host.flows()[0] <= 16, "{:?}", host.flows());
}

/// R26: one backend.
#[test]
fn r26_a_single_backend_gets_all() {
    for policy in Policy::ALL {
        let mut host = weighted(&[7]);
        let cpu = Cpu::new(12_345);
        for _ in 0..1000 {
            assert_eq!(host.connect(&cpu, rules(policy)).slot, 0);
        }
    }
}

/// R26: more backends than a scan can look at.
#[test]
fn r26_of_4096_backends_each_has_its_share() {
    let mut host = weighted(&[1; 4096]);
    host.listed = false;
    assert_eq!(host.shares, [16; 4096]);
    for policy in [Policy::RoundRobin, Policy::WeightedRoundRobin, Policy::LeastLoaded] {
        let cpu = Cpu::new(99);
        let mut counts = BTreeMap::new();
        for _ in 0..65_536 {
            *counts.entry(pick(&host, &cpu, host.table(), rules(policy), NOW).0.slot).or_insert(0) += 1;
        }
        assert!(counts.len() == 4096 && counts.values().all(|count| *count == 16), "{policy:?}");
    }
    for (policy, most) in [(Policy::Random, 45), (Policy::P2c, 20)] {
        let cpu = Cpu::new(99);
        let mut host = host.clone();
        for _ in 0..65_536 {
            assert_eq!(host.connect(&cpu, rules(policy)).how, How::Picked);
        }
        let flows = host.flows();
        assert!(flows.iter().all(|flows| *flows <= most), "{policy:?}: {:?}", flows.iter().max());
    }
}

/// R26: all weights zero.
#[test]
fn r26_weights_that_are_all_zero_make_no_table_and_nobody_divides_by_them() {
    assert_eq!(apportion(&[0; 10], 1024), [0; 10]);
    let mut host = Host::in_turn(10);
    host.listed = false;
    let none = lb_common::abi::TableRef { base: 0, generation: 0, length_log2: 0, members: 0 };
    for policy in Policy::ALL {
        let (picked, _) = pick(&host, &Cpu::new(0), none, rules(policy), NOW);
        assert_eq!((picked.how, picked.slot), (How::Refused, NO_SLOT));
    }
    // Shares that are zero in the middle of a change of tables.
    let mut host = Host::in_turn(10);
    host.shares = vec![0; 10];
    let (picked, _) = pick(&host, &Cpu::new(0), host.table(), rules(Policy::P2c), NOW);
    assert_eq!(picked.how, How::Picked);
}
