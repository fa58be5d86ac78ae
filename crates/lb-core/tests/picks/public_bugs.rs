//! Bugs of other balancers, as tests. Each test has the number of the bug in
//! docs/design/bugs-of-others.md.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use lb_common::abi::{NO_SLOT, Policy};
use lb_common::pick::{How, pick};
use lb_core::control::flows::{Lives, OfLate};
use lb_core::control::{Control, ControlRules, Law, Look, MemberObservation, ReceivedReport};
use lb_core::cursor::start;
use lb_core::reports::ReportedLoad;
use lb_core::schedule::apportion;

use super::host::{Host, NOW, cpu_at, rules};
use super::weighted;

/// R16: each client used only its own knowledge for balancing, and began with the first backend
/// (kubernetes#79213: all nodes' round robin and least-connection schedulers pick the same backend
/// first; kubernetes#121591).
#[test]
fn r16_fifty_independent_clients_do_not_flood_the_first_backend() {
    for policy in Policy::ALL {
        for picks in [1, 2, 5] {
            let mut loads = [0u32; 10];
            for client in 0..50 {
                // Each client has tables and loads of its own, and two CPUs.
                let mut host = Host::in_turn(10);
                for cpu in 0..2 {
                    let start = start(&format!("web/{client}@host-{client}"), "users", cpu, 2);
                    let cpu = cpu_at(start);
                    for _ in 0..picks {
                        loads[host.connect(&cpu, rules(policy)).slot as usize] += 1;
                    }
                }
            }
            // On average, each backend gets 10 connects for each pick that all CPUs make. The bound
            // adds four standard deviations of random starts. If all clients had the same start,
            // the first backends would get 100 connects for each pick.
            let mean = 10.0 * f64::from(picks);
            let most = f64::from(*loads.iter().max().expect("there are ten backends"));
            assert!(most <= mean + 4.0 * mean.sqrt(), "{policy:?}, {picks} picks: loads {loads:?}");
            assert!(loads.iter().all(|load| *load > 0), "{policy:?}, {picks} picks: loads {loads:?}");
        }
    }
}

/// R26: extreme weights.
#[test]
fn r26_a_weight_of_one_beside_a_thousand_has_its_share() {
    let host = weighted(&[1, 1000]);
    assert_eq!(host.shares, [1, 1023], "a positive weight always has an entry");
    for (policy, most) in [(Policy::WeightedRoundRobin, 1), (Policy::Random, 8), (Policy::P2c, 8)] {
        let cpu = cpu_at(0);
        let rare = (0..1024).filter(|_| pick(&host, &cpu, host.table(), rules(policy), NOW).0.slot == 0);
        assert!(rare.count() <= most, "{policy:?}");
    }
    // Round robin and least-loaded ignore weights.
    let mut host = weighted(&[1, 1000]);
    let cpu = cpu_at(0);
    for _ in 0..100 {
        assert_eq!(host.connect(&cpu, rules(Policy::LeastLoaded)).how, How::Picked);
    }
    assert_eq!(host.flows(), [50, 50]);
    // With p2c, the flows that remain open follow the table.
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
        let cpu = cpu_at(12_345);
        for _ in 0..1000 {
            assert_eq!(host.connect(&cpu, rules(policy)).slot, 0);
        }
    }
}

/// R26: more backends than a scan can examine.
#[test]
fn r26_of_4096_backends_each_has_its_share() {
    let mut host = weighted(&[1; 4096]);
    host.listed = false;
    assert_eq!(host.shares, [16; 4096]);
    for policy in [Policy::RoundRobin, Policy::WeightedRoundRobin, Policy::LeastLoaded] {
        let cpu = cpu_at(99);
        let mut counts = BTreeMap::new();
        for _ in 0..65_536 {
            *counts.entry(pick(&host, &cpu, host.table(), rules(policy), NOW).0.slot).or_insert(0) += 1;
        }
        assert!(counts.len() == 4096 && counts.values().all(|count| *count == 16), "{policy:?}");
    }
    for (policy, most) in [(Policy::Random, 45), (Policy::P2c, 20)] {
        let cpu = cpu_at(99);
        let mut host = host.clone();
        for _ in 0..65_536 {
            assert_eq!(host.connect(&cpu, rules(policy)).how, How::Picked);
        }
        let flows = host.flows();
        assert!(flows.iter().all(|flows| *flows <= most), "{policy:?}: most flows {:?}", flows.iter().max());
    }
}

/// R26: all weights are zero.
#[test]
fn r26_all_zero_weights_make_no_table_and_no_division_by_zero() {
    assert_eq!(apportion(&[0; 10], 1024), [0; 10]);
    let mut host = Host::in_turn(10);
    host.listed = false;
    let none = lb_common::abi::TableRef { base: 0, generation: 0, length_log2: 0, members: 0 };
    for policy in Policy::ALL {
        let (picked, _) = pick(&host, &cpu_at(0), none, rules(policy), NOW);
        assert_eq!((picked.how, picked.slot), (How::Refused, NO_SLOT));
    }
    // Shares may be zero while tables change.
    let mut host = Host::in_turn(10);
    host.shares = vec![0; 10];
    let (picked, _) = pick(&host, &cpu_at(0), host.table(), rules(Policy::P2c), NOW);
    assert_eq!(picked.how, How::Picked);
}

/// R28: weights followed the few calls of a client with hardly any traffic (rest.li#545). The
/// client in this test connects once per minute, and every connect to one of the backends fails.
/// Weights do not change, because the reports show no difference, and a few connects prove nothing.
/// When reports show a difference, weights follow as slowly as with any other client.
#[test]
fn r28_rare_connects_move_no_weight_and_reports_move_it_slowly() {
    const BACKENDS: u32 = 4;
    let address = |index: u32| SocketAddr::new(Ipv4Addr::from_bits(0x0a00_0000 + index).into(), 80);
    let play = |busy_until: u64, quiet: u32| -> (Vec<f64>, usize) {
        let rules = ControlRules { law: Some(Law::Feedback), ..ControlRules::default() };
        let mut control = Control::new(rules);
        let (mut lives, mut of_late) = (Lives::default(), [OfLate::default(); BACKENDS as usize]);
        let mut tables = 0;
        for second in 0..3_600 {
            // Each backend is dialled every four minutes, and every connect to the first backend
            // fails.
            let dialled = (second % 60 == 0).then_some((second / 60) as usize % BACKENDS as usize);
            of_late.iter_mut().for_each(|of_late| of_late.tick(0.0));
            if let Some(at) = dialled {
                of_late[at].add(1.0, f64::from(u8::from(at == 0)));
            }
            lives.tick(f64::from(u8::from(dialled.is_some())), f64::from(u8::from(dialled.is_some())));
            let now = Duration::from_secs(second);
            let seen = |index: u32| {
                let used =
                    if index == 1 && second < busy_until { 600 } else { 500 - quiet * u32::from(index == 0) };
                let load = ReportedLoad {
                    utilization: Some(used),
                    window: Duration::from_secs(1),
                    ..ReportedLoad::default()
                };
                let errors = of_late[index as usize].errors();
                let report = Some(ReceivedReport { load, at: now, interval: Duration::from_secs(1) });
                (
                    address(index),
                    MemberObservation {
                        weight: 1,
                        report,
                        errors,
                        life: None,
                        is_available: true,
                        is_at_limit: false,
                        is_overridden: false,
                    },
                )
            };
            let row = (0..BACKENDS).map(seen).collect();
            let look = Look { row, flows: lives.flows(), is_panic: false, is_idle: false, entries: 512 };
            if let Some(proposal) = control.tick(now, &look) {
                control.publish(proposal.factors);
                tables += 1;
            }
        }
        ((0..BACKENDS).map(|index| control.in_force().of(address(index)).number()).collect(), tables)
    };
    assert_eq!(play(0, 0), (vec![1.0; BACKENDS as usize], 0));
    // One failed connect in four minutes does not prevent a factor from rising, either, if the
    // backend reports a low utilization.
    assert!(play(0, 100).0[0] > 1.2);
    // If one backend is busier for twenty seconds, its weight moves by a few percent, in a few
    // tables.
    let (factors, tables) = play(20, 0);
    assert!(factors[1] < 1.0 && factors[1] > 0.6 && tables <= 30, "factors {factors:?}, {tables} tables");
}
