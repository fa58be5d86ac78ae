//! Two statements that must hold for all rates and all absent clients: the formula for the
//! deviation of loads ([`deviation`]), and the lower bound of the utilization ([`guarantee`]).
//!
//! The tests use Rocksteadier with structural weights, in fleets with few and with many
//! connections, and with several seeds. They must not use the library's own computation of loads
//! from rates. So they compute loads again, with only the shares from the library.

use lb_core::subset::Algorithm;
use lb_core::subset::random::{SplitMix64, mix64, shuffle};
use lb_sim::fleet::{Fleet, Sharing};
use lb_sim::metrics::raw_utilization;
use lb_sim::samples::Skew;
use lb_sim::unequal::{
    Inequality, UnequalLoads, WANTED_UTILIZATION, deviation, expected_utilization, guarantee, size_for,
};

/// Clients, backends and size. The fleets range from half a backend for each client to twenty times
/// as many connections as necessary.
const FLEETS: [(u32, u32, u32); 6] =
    [(300, 300, 12), (300, 300, 96), (1_000, 1_000, 20), (300, 1_000, 32), (60, 200, 32), (2_000, 100, 12)];

fn fleet((clients, backends, size): (u32, u32, u32), seed: u64) -> Fleet {
    Fleet { algorithm: Algorithm::Rocksteadier, clients, backends, size, seed }
}

fn unequal(fleet: &Fleet, inequality: Inequality) -> UnequalLoads {
    let graph = fleet.graph();
    UnequalLoads::of(fleet, &graph, &Sharing::of(fleet, &graph, true), inequality)
}

#[test]
fn the_formula_matches_the_deviation_of_draws() {
    for (numbers, seed) in FLEETS.into_iter().flat_map(|numbers| [1, 2, 3].map(|seed| (numbers, seed))) {
        for (skew, missing) in [(0.2, 0), (0.5, 0), (1.0, 0), (0.0, 10), (0.0, 30), (0.5, 10)] {
            let inequality = Inequality { skew, missing };
            let fleet = fleet(numbers, seed);
            let found = unequal(&fleet, inequality).rsd.mean;
            let part = found / deviation(&fleet, inequality.variation(fleet.clients));
            assert!(
                (0.9..1.1).contains(&part),
                "{fleet:?}, {inequality:?}: the deviation {found} is {part} times the expected one"
            );
        }
    }
}

#[test]
fn the_expected_utilization_matches_draws() {
    for numbers in FLEETS {
        for (skew, missing) in [(0.2, 0), (0.5, 0), (0.0, 10), (0.0, 30), (0.5, 10)] {
            let inequality = Inequality { skew, missing };
            let fleet = fleet(numbers, 1);
            let (expected, found) =
                (expected_utilization(&fleet, inequality), unequal(&fleet, inequality).raw.mean);
            assert!(
                (expected - found).abs() < 0.04,
                "{fleet:?}, {inequality:?}: {found}, expected {expected}"
            );
        }
    }
}

#[test]
fn the_chosen_size_is_the_smallest_sufficient_size() {
    // The columns are clients, backends, skew, missing, and the expected size. The size is at least
    // 12.
    let rows = [
        (300, 300, 0.0, 0, 12),
        (300, 300, 0.2, 0, 48),
        (300, 300, 0.5, 0, 192),
        (1_000, 300, 0.5, 0, 64),
        (2_000, 100, 1.0, 0, 32),
        // In the first row the guarantee suffices for the absent clients, in the second row it does
        // not.
        (300, 300, 0.0, 10, 12),
        (300, 300, 0.0, 30, 192),
    ];
    for (clients, backends, skew, missing, expected) in rows {
        let inequality = Inequality { skew, missing };
        let size = size_for(&fleet((clients, backends, 12), 0), inequality);
        assert_eq!(size, expected, "{clients} clients, {backends} backends, {inequality:?}");
        // With structural weights, the loads differ by less than a thousandth.
        let found = |size| unequal(&fleet((clients, backends, size), 1), inequality).raw.mean;
        assert!(
            found(size) > WANTED_UTILIZATION - 0.001,
            "{clients} clients, {backends} backends, {inequality:?}: {}",
            found(size)
        );
        assert!(
            size == 12 || found(size / 2) < WANTED_UTILIZATION,
            "{clients} clients, {backends} backends: half of the size must not be enough"
        );
    }
    // No size that `auto` supports is enough, so the result is the largest of these sizes.
    assert_eq!(size_for(&fleet((300, 10_000, 12), 0), Inequality { skew: 1.0, missing: 0 }), 256);
    assert_eq!(size_for(&fleet((7, 100, 12), 0), Inequality { skew: 5.0, missing: 0 }), 96);
    assert_eq!(size_for(&fleet((7, 10, 12), 0), Inequality { skew: 5.0, missing: 0 }), 12);
}

/// The effect if some clients leave: utilization before and after, the part of all clients that
/// leaves, and the part of the traffic that leaves.
struct Loss {
    before: f64,
    after: f64,
    clients: f64,
    traffic: f64,
}

/// Makes the first `lost` clients of `order` leave. The others retain their shares.
fn lose(fleet: &Fleet, rates: &[f64], order: &[usize], lost: usize) -> Loss {
    let graph = fleet.graph();
    let sharing = Sharing::of(fleet, &graph, true);
    let utilization = |rates: &[f64]| {
        let mut loads = vec![0.0; fleet.backends as usize];
        for (client, rate) in (0..).zip(rates) {
            let subset = graph.row(client);
            for (backend, weight) in subset.iter().zip(sharing.weights(&graph, client, subset)) {
                loads[*backend as usize] += rate * weight;
            }
        }
        raw_utilization(&loads)
    };
    let mut left = rates.to_vec();
    order[..lost].iter().for_each(|client| left[*client] = 0.0);
    let (all, rest): (f64, f64) = (rates.iter().sum(), left.iter().sum());
    let part = f64::from(u32::try_from(lost).expect("few")) / f64::from(fleet.clients);
    Loss { before: utilization(rates), after: utilization(&left), clients: part, traffic: 1.0 - rest / all }
}

#[test]
fn absent_clients_cost_at_most_their_part_of_utilization() {
    let mut least = f64::INFINITY;
    for (numbers, seed) in FLEETS.into_iter().flat_map(|numbers| [1, 2, 3].map(|seed| (numbers, seed))) {
        let fleet = fleet(numbers, seed);
        let mut order: Vec<usize> = (0..fleet.clients as usize).collect();
        for percent in [1, 10, 30, 70, 99] {
            shuffle(&mut order, &mut SplitMix64::new(mix64(&[seed, percent])));
            let lost = order.len() * usize::try_from(percent).expect("few") / 100;
            let Loss { before, after, clients, .. } = lose(&fleet, &vec![1.0; order.len()], &order, lost);
            let over = after / guarantee(before, clients);
            assert!(
                over >= 1.0 - 1e-9,
                "{fleet:?}: {percent} % of clients lost, utilization {before} became {after}"
            );
            least = least.min(over);
        }
    }
    // The guarantee is only a bound, but it is reached: in a fleet with few connections, there is a
    // backend that loses none of its clients.
    assert!(least < 1.001, "{least}");
}

/// For unequal clients, the bound depends on the absent part of the traffic, because a few clients
/// can have a large part of the traffic.
#[test]
fn absent_unequal_clients_cost_at_most_their_part_of_the_traffic() {
    let mut is_worse_than_their_number = false;
    for (numbers, seed) in FLEETS.into_iter().flat_map(|numbers| [1, 2, 3].map(|seed| (numbers, seed))) {
        let fleet = fleet(numbers, seed);
        let mut rng = SplitMix64::new(seed);
        let rates = Skew::Variation(1.0).rates(fleet.clients, &mut rng);
        let mut by_chance: Vec<usize> = (0..rates.len()).collect();
        shuffle(&mut by_chance, &mut rng);
        let mut heaviest = by_chance.clone();
        heaviest.sort_by(|a, b| rates[*b].total_cmp(&rates[*a]));
        // Only the heaviest client stays.
        let busiest = (0..fleet.clients).max_by(|a, b| rates[*a as usize].total_cmp(&rates[*b as usize]));
        let busiest_client = busiest.expect("there are clients") as usize;
        let all_but_it: Vec<usize> =
            heaviest.iter().copied().filter(|client| *client != busiest_client).collect();
        for order in [by_chance, heaviest, all_but_it] {
            for lost in [order.len() / 10, order.len() / 3, order.len() - 1] {
                let Loss { before, after, clients, traffic } = lose(&fleet, &rates, &order, lost);
                assert!(
                    after >= before * (1.0 - traffic) - 1e-9,
                    "{fleet:?}: {lost} clients lost, utilization {before} became {after}"
                );
                is_worse_than_their_number |= after < before * (1.0 - clients) - 0.01;
            }
        }
    }
    assert!(is_worse_than_their_number, "a bound from the part of absent clients must not hold");
}
