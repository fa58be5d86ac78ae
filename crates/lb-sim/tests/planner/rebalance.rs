//! Pools of long connections after the restart of a backend: they converge within [`Pools::bound`],
//! and do not oscillate.

use lb_common::abi::Policy;
use lb_core::rebalance::{ClosingRate, RebalanceRules};
use lb_sim::rebalance::{GOAL, Pools};

const POOLS: Pools = Pools {
    tasks: 20,
    connections: 50,
    backends: 8,
    policy: Policy::WeightedRoundRobin,
    cpus: 2,
    rules: RebalanceRules { rate: ClosingRate::per_second(20), ..RebalanceRules::DEFAULT },
    seed: 0,
};

/// Pools of several sizes, with several seeds and numbers of CPUs.
fn grid(policy: Policy) -> Vec<Pools> {
    let mut grid = Vec::new();
    for (tasks, connections, backends) in [
        (1, 20, 2),
        (20, 20, 8),
        (3, 50, 3),
        (20, 50, 8),
        (5, 50, 20),
        (2, 200, 8),
        (2, 200, 20),
        (1, 1000, 50),
    ] {
        for (seed, cpus) in [(0, 1), (1, 4), (2, 16)] {
            for below_thousandths in [600, 800, 950] {
                let rules = RebalanceRules {
                    rate: ClosingRate::per_second(tasks),
                    below_thousandths,
                    ..RebalanceRules::DEFAULT
                };
                grid.push(Pools { tasks, connections, backends, policy, cpus, rules, seed });
            }
        }
    }
    grid
}

#[test]
fn a_restarted_backend_gets_its_share_again_within_the_bound_and_then_nothing_is_closed() {
    for pools in Policy::ALL.into_iter().flat_map(grid) {
        let course = pools.play();
        let below = f64::from(pools.rules.below_thousandths) / 1000.0;
        let Some(bound) = pools.bound() else {
            assert_eq!(course.closed, 0, "{pools:?}: {course:?}");
            continue;
        };
        assert!(course.at_return < 1e-9 && course.at_end >= below, "{pools:?}: {course:?}");
        let reached = course.goal_reached.is_some_and(|reached| reached <= bound);
        assert!(reached || below < GOAL, "bound {bound} s, {pools:?}: {course:?}");
        // The simulation is much longer than the bound, and no connection is closed after the
        // bound.
        let settled = course.settled.is_some_and(|settled| settled <= bound);
        assert!(settled && course.last_closing <= bound, "bound {bound} s, {pools:?}: {course:?}");
    }
}

#[test]
fn other_backends_stay_near_their_shares() {
    let pools = grid(Policy::WeightedRoundRobin)
        .into_iter()
        .filter(|pools| pools.cpus == 1 && pools.connections >= 50);
    for pools in pools {
        let course = pools.play();
        // Before the return of the restarted backend, the others share its connections.
        let before = f64::from(pools.backends) / f64::from(pools.backends - 1);
        let two = 2.0 * f64::from(pools.backends) / f64::from(pools.connections);
        assert!(course.highest_other <= before + two, "{pools:?}: {course:?}");
        assert!(course.lowest_other >= 1.0 - two, "{pools:?}: {course:?}");
    }
}

#[test]
fn even_pools_close_nothing() {
    for policy in [Policy::WeightedRoundRobin, Policy::RoundRobin, Policy::LeastLoaded] {
        // With several CPUs, the positions of the cursors relative to each other are random.
        for pools in grid(policy).into_iter().filter(|pools| pools.cpus == 1) {
            assert_eq!(pools.play().closed_before, 0, "{pools:?}");
        }
    }
    // These policies choose backends at random, so even pools are not possible. But pools of 17
    // connections are so small that `rebalance` closes none of them.
    for policy in [Policy::P2c, Policy::Random] {
        for seed in 0..5 {
            let course = Pools { policy, connections: 17, seed, ..POOLS }.play();
            assert_eq!((course.closed_before, course.closed), (0, 0), "{policy:?}, seed {seed}");
        }
    }
}

/// `tests/local/backends/rebalance.rs` expects these numbers on a host.
#[test]
fn twenty_pools_of_fifty_connections_need_less_than_a_minute_and_a_connection_is_closed_once() {
    for (seed, cpus) in [(0, 1), (1, 2), (2, 2), (3, 4)] {
        let course = Pools { seed, cpus, ..POOLS }.play();
        assert!(course.goal_reached.is_some_and(|reached| reached <= 60), "{course:?}");
        assert!(course.closed <= 20 * 50, "{course:?}");
    }
    assert_eq!(POOLS.bound(), Some(240));
    let slow = Pools { rules: RebalanceRules::DEFAULT, ..POOLS };
    assert_eq!(slow.bound(), Some(1380));
    assert!(slow.play().goal_reached.is_some_and(|reached| (600..=1380).contains(&reached)));
}
