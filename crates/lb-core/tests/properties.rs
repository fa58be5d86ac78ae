//! Properties of subset orders and of tables, for every input.
//!
//! Vectors in another test fix the results for a few inputs. The properties are the reason why the
//! results are useful. The tests must not repeat the computation of a result.

use std::collections::{HashMap, HashSet};

use lb_core::endpoint::{Endpoint, EndpointList, EndpointState};
use lb_core::membership::Membership;
use lb_core::schedule::{apportion, interleave};
use lb_core::service::{Service, Size, Subset, Task};
use lb_core::subset::{self, Algorithm, Position, length, order, overlaps};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

/// Numbers of backends. Small numbers contain the corner cases (partial lots, fewer backends than
/// wanted).
fn backends() -> impl Strategy<Value = u32> {
    prop_oneof![4 => 0..64_u32, 3 => 0..1_000_u32, 1 => 0..=65_536_u32]
}

/// Any client of any job. The client's number is below the number of tasks in the job.
fn positions() -> impl Strategy<Value = Position> {
    let clients = prop_oneof![1..40_u32, 1..=65_536_u32];
    let clients = clients.prop_flat_map(|clients| (0..clients, Just(clients)));
    (clients, backends(), 1..=256_u32, any::<u64>()).prop_map(|((client, clients), backends, size, seed)| {
        Position { client, clients, backends, size, seed }
    })
}

fn algorithms() -> impl Strategy<Value = Algorithm> {
    select(Algorithm::ALL.to_vec())
}

fn those(property: impl Fn(Algorithm) -> bool) -> impl Strategy<Value = Algorithm> {
    select(Algorithm::ALL.into_iter().filter(|&algorithm| property(algorithm)).collect::<Vec<_>>())
}

/// Algorithms in which an added backend takes one position in an order and does not change the
/// order of the other backends.
const STEADY: [Algorithm; 4] =
    [Algorithm::Rendezvous, Algorithm::Consistent, Algorithm::Ringsteady, Algorithm::Rocksteadier];

fn subset(algorithm: Algorithm, position: Position) -> Vec<u32> {
    subset::subset(algorithm, position).collect()
}

/// A task's membership. `weights` has the weight of the endpoint at each index; 0 is a hole.
fn members(algorithm: Algorithm, position: Position, weights: &[u16]) -> Membership {
    let service = {
        let subset = Subset::Sized { algorithm, size: Size::Fixed(position.size) };
        Service::new("users", "10.96.0.10:80".parse().expect("the address is valid"), subset, position.seed)
    };
    let endpoints =
        (0_u32..).zip(weights).filter(|(_, weight)| **weight > 0).map(|(index, &weight)| Endpoint {
            address: (std::net::Ipv4Addr::from_bits(0x0a00_0001 + index), 80).into(),
            index,
            weight,
            state: EndpointState::Healthy,
            zone: None,
            agent: None,
        });
    let list = EndpointList::new(endpoints.collect(), service.address, &[]).expect("the list is valid");
    let task = Task { index: position.client, count: position.clients };
    Membership::of(&service, task, &list)
}

/// A small job with holes among its backends: the client, and a weight for each index.
fn jobs() -> impl Strategy<Value = (Position, Vec<u16>)> {
    let clients = (1..30_u32).prop_flat_map(|clients| (0..clients, Just(clients)));
    (clients, vec(prop_oneof![Just(0), Just(1), 0..10_u16], 1..60), 1..20_u32, any::<u64>()).prop_map(
        |((client, clients), mut weights, size, seed)| {
            // N is the highest index plus one.
            *weights.last_mut().expect("there is at least one weight") = 1;
            let backends = u32::try_from(weights.len()).expect("the number is small");
            (Position { client, clients, backends, size, seed }, weights)
        },
    )
}

/// Small weights as operators write them, shares in units of 2^-32, and weights of any size.
fn weights() -> impl Strategy<Value = Vec<u64>> {
    prop_oneof![
        vec(0..4_u64, 0..200),
        vec(0..=65_535_u64, 0..200),
        vec(0..=1_u64 << 32, 0..64),
        vec(prop_oneof![Just(1), Just(u64::MAX), any::<u64>()], 0..200),
    ]
}

fn slots() -> impl Strategy<Value = u32> {
    prop_oneof![200..300_u32, Just(1_024), 200..=8_192_u32, Just(65_536)]
}

fn counts() -> impl Strategy<Value = Vec<u32>> {
    prop_oneof![vec(0..4_u32, 0..200), vec(0..40_u32, 0..40), vec(0..3_000_u32, 0..8)]
}

fn sum(counts: &[u32]) -> u64 {
    counts.iter().copied().map(u64::from).sum()
}

proptest! {
    // A failure prints its smallest input. That input belongs in a test of its own, and not in a
    // file of seeds.
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn an_order_contains_every_backend_once(algorithm in algorithms(), position in positions()) {
        let mut all: Vec<u32> = order(algorithm, position).collect();
        all.sort_unstable();
        prop_assert!(all.into_iter().eq(0..position.backends));
    }

    #[test]
    fn a_larger_subset_contains_the_smaller_one(
        algorithm in those(|algorithm| !algorithm.depends_on_size()),
        position in positions(),
        more in 1..=256_u32,
    ) {
        let larger = subset(algorithm, Position { size: position.size + more, ..position });
        prop_assert!(larger.starts_with(&subset(algorithm, position)));
    }

    #[test]
    fn a_subset_does_not_depend_on_the_number_of_tasks(
        algorithm in those(|algorithm| !algorithm.depends_on_clients()),
        position in positions(),
        clients in 1..=65_536_u32,
    ) {
        prop_assert_eq!(subset(algorithm, Position { clients, ..position }), subset(algorithm, position));
    }

    #[test]
    fn an_added_backend_moves_no_other_in_an_order(
        algorithm in select(&STEADY),
        position in positions(),
    ) {
        let new = position.backends.min(65_535);
        let before = order(algorithm, Position { backends: new, ..position });
        let after = order(algorithm, Position { backends: new + 1, ..position });
        prop_assert!(after.filter(|&backend| backend != new).eq(before));
    }

    #[test]
    fn an_added_backend_replaces_at_most_one_member(algorithm in select(&STEADY), position in positions()) {
        let backends = position.backends.min(65_535) + 1;
        let before = subset(algorithm, Position { backends: backends - 1, ..position });
        let after: HashSet<u32> = subset(algorithm, Position { backends, ..position }).into_iter().collect();
        let dropped = before.iter().filter(|backend| !after.contains(backend)).count();
        prop_assert!(dropped <= 1, "{} members dropped", dropped);
    }

    /// A round has as many clients as there are whole slices, and these clients share no backend.
    #[test]
    fn no_backend_serves_two_clients_of_a_round(position in positions(), round in 0..100_u32) {
        let slices = position.backends.checked_div(position.wanted()).unwrap_or(0);
        let mut served = HashSet::new();
        // Bound: the round's backends are distinct, and their number is limited.
        for client in (0..slices).map(|place| round * slices + place) {
            let own = subset(Algorithm::Deterministic, Position { client, ..position });
            prop_assert_eq!(own.len(), position.wanted() as usize);
            prop_assert!(own.into_iter().all(|backend| served.insert(backend)), "client {}", client);
            if served.len() > 2_000 {
                break;
            }
        }
    }

    /// In exact fractions of a backend, the overlaps of all clients with a backend sum to the same
    /// whole number for every backend.
    #[test]
    fn apertures_cover_every_backend_equally(
        algorithm in those(Algorithm::is_aperture),
        clients in 1..60_u32,
        backends in 1..60_u32,
        size in 1..70_u32,
        seed: u64,
    ) {
        let mut covered: HashMap<u32, u64> = HashMap::new();
        for client in 0..clients {
            let position = Position { client, clients, backends, size, seed };
            let parts: Vec<u64> = overlaps(algorithm, position).expect("the algorithm is an aperture").collect();
            prop_assert!(parts.iter().all(|&part| 0 < part && part <= u64::from(clients)));
            prop_assert!(parts.len() >= position.wanted() as usize);
            for (backend, part) in subset(algorithm, position).into_iter().zip(parts) {
                *covered.entry(backend).or_default() += part;
            }
        }
        prop_assert_eq!(covered.len(), backends as usize);
        let first = covered[&0];
        prop_assert!(covered.values().all(|&sum| sum == first), "{:?}", covered);
        prop_assert_eq!(first % u64::from(clients), 0, "the sum must be a multiple of the number of clients");
    }

    #[test]
    fn only_holes_are_skipped(algorithm in algorithms(), job in jobs()) {
        let (position, weights) = job;
        let used = members(algorithm, position, &weights).members;
        let used: Vec<u32> = used.iter().map(|member| member.endpoint.index).collect();
        let present = order(algorithm, position).filter(|&index| weights[index as usize] > 0);
        let expected: Vec<u32> = present.take(length(algorithm, position) as usize).collect();
        prop_assert_eq!(used, expected);
    }

    /// If a member is lost, the other members remain, and the next backend of the order takes its
    /// place.
    #[test]
    fn only_a_lost_member_is_replaced(
        algorithm in algorithms(),
        job in jobs(),
        lost: proptest::sample::Index,
    ) {
        let (position, mut weights) = job;
        let before: Vec<u32> =
            members(algorithm, position, &weights).members.iter().map(|member| member.endpoint.index).collect();
        let lost = before[lost.index(before.len())];
        // Without the last index, N would change.
        prop_assume!(lost + 1 < position.backends);
        weights[lost as usize] = 0;
        let after: Vec<u32> =
            members(algorithm, position, &weights).members.iter().map(|member| member.endpoint.index).collect();
        let stayed: Vec<u32> = before.iter().copied().filter(|&index| index != lost).collect();
        prop_assert!(after.starts_with(&stayed), "{:?} became {:?}", before, after);
        prop_assert!(after.len() <= before.len());
        let left = weights.iter().filter(|&&weight| weight > 0).count();
        prop_assert_eq!(after.len(), before.len().min(left));
    }

    /// A client's shares sum to its whole traffic, and the loads of all backends sum to the traffic
    /// of all clients.
    #[test]
    fn shares_sum_to_one_and_loads_to_the_clients(algorithm in algorithms(), job in jobs()) {
        let (position, weights) = job;
        let mut loads: HashMap<u32, f64> = HashMap::new();
        let mut first_loads: HashMap<u32, f64> = HashMap::new();
        for client in 0..position.clients {
            let used = members(algorithm, Position { client, ..position }, &weights).members;
            let sum: f64 = used.iter().map(|member| member.share).sum();
            prop_assert!((sum - 1.0).abs() < 1e-9, "client {} has {}", client, sum);
            for member in used {
                *loads.entry(member.endpoint.index).or_default() += member.share;
                let before = *first_loads.entry(member.endpoint.index).or_insert(member.load);
                prop_assert!((before - member.load).abs() < 1e-12, "all clients compute the same load");
            }
        }
        // Each client's own computation of all loads equals the loads from all clients' shares.
        for (index, load) in loads {
            prop_assert!((load - first_loads[&index]).abs() < 1e-6, "backend {}: {} sent, {} computed", index, load, first_loads[&index]);
        }
    }

    #[test]
    fn a_table_is_full_and_contains_every_positive_weight(weights in weights(), slots in slots()) {
        let counts = apportion(&weights, slots);
        let any = weights.iter().any(|&weight| weight > 0);
        prop_assert_eq!(sum(&counts), if any { slots.into() } else { 0 });
        for (&weight, &count) in weights.iter().zip(&counts) {
            prop_assert_eq!(weight > 0, count > 0, "weight {} has {} entries", weight, count);
        }
    }

    #[test]
    fn a_heavier_weight_has_no_fewer_entries(weights in weights(), slots in slots()) {
        let counts = apportion(&weights, slots);
        let mut by_weight: Vec<(u64, u32)> = weights.into_iter().zip(counts).collect();
        by_weight.sort_unstable();
        prop_assert!(by_weight.windows(2).all(|pair| pair[0].1 <= pair[1].1 || pair[0].0 == pair[1].0));
    }

    #[test]
    fn rounding_costs_less_than_one_entry(
        weights in vec(1_000..=8_000_u64, 1..32),
        slots in slots(),
    ) {
        let total: u64 = weights.iter().sum();
        for (weight, count) in weights.iter().zip(apportion(&weights, slots)) {
            let quota = weight * u64::from(slots);
            prop_assert!(quota >= total, "each weight of this test must be due an entry");
            let count = u64::from(count);
            prop_assert!(quota / total <= count && count <= quota.div_ceil(total));
        }
    }

    #[test]
    fn a_table_contains_each_position_as_often_as_counted(counts in counts()) {
        let mut found = vec![0; counts.len()];
        for position in interleave(&counts) {
            found[position as usize] += 1;
        }
        prop_assert_eq!(found, counts);
    }

    /// At the time at which an entry is due, the number of entries of every backend so far differs
    /// from the backend's share by at most half an entry.
    #[test]
    fn entries_are_early_or_late_by_at_most_half_an_entry(counts in counts()) {
        let mut found = vec![0_u64; counts.len()];
        for position in interleave(&counts) {
            let position = position as usize;
            let (now, all) = (2 * found[position] + 1, 2 * u64::from(counts[position]));
            found[position] += 1;
            for (&found, &count) in found.iter().zip(&counts) {
                // count * now / all is the share until now; all terms are doubled to avoid halves.
                let share = 2 * u64::from(count) * now;
                prop_assert!((2 * found * all).abs_diff(share) <= all);
            }
        }
    }

    /// In every prefix of the table, the counts differ by at most one.
    #[test]
    fn equal_counts_take_turns(entries in 1..64_usize, count in 1..100_u32) {
        let table = interleave(&vec![count; entries]);
        let turns = (0..count).flat_map(|_| (0..).take(entries));
        prop_assert!(table.into_iter().eq(turns));
    }
}
