//! How well apertures use backends of unequal capacities if shares are fitted on the edges of the
//! arcs.
//!
//! The tests compare fitted shares with two references: with shares of overlap times weight, which
//! do not depend on other clients' arcs, and with the maximum that the arcs allow. This maximum may
//! be below 100 %, because an arc has no edges to distant backends. The tests must not repeat the
//! computation of shares.

use std::net::Ipv4Addr;

use lb_core::endpoint::{Endpoint, EndpointList, EndpointState};
use lb_core::membership::{Member, Memberships};
use lb_core::service::{Service, Size, Subset};
use lb_core::subset::random::SplitMix64;
use lb_core::subset::{self, Algorithm, Position};
use lb_core::weights::{Graph, Precision, solve_from};

/// A job with backends of these capacities; 0 is a hole.
struct Job {
    algorithm: Algorithm,
    clients: u32,
    size: u32,
    capacities: Vec<u16>,
}

impl Job {
    fn position(&self, client: u32) -> Position {
        let backends = u32::try_from(self.capacities.len()).expect("the number is small");
        Position { client, clients: self.clients, backends, size: self.size, seed: 7 }
    }

    fn subset(&self, client: u32) -> impl Iterator<Item = usize> {
        subset::subset(self.algorithm, self.position(client)).map(|index| index as usize)
    }

    fn overlaps(&self, client: u32) -> Vec<f64> {
        let overlaps =
            subset::overlaps(self.algorithm, self.position(client)).expect("the algorithm is an aperture");
        overlaps
            .map(|overlap| {
                f64::from(u32::try_from(overlap).expect("an overlap is at most the number of clients"))
            })
            .collect()
    }

    fn capacity(&self) -> f64 {
        self.capacities.iter().copied().map(f64::from).sum()
    }

    /// The members of each client, as its daemon computes them.
    fn members(&self) -> Vec<Vec<Member>> {
        let endpoints =
            (0..).zip(&self.capacities).filter(|(_, weight)| **weight > 0).map(|(index, &weight)| Endpoint {
                address: (Ipv4Addr::from_bits(0x0a00_0001 + index), 80).into(),
                index,
                weight,
                state: EndpointState::Healthy,
                zone: None,
                agent: None,
            });
        let subset = Subset::Sized { algorithm: self.algorithm, size: Size::Fixed(self.size) };
        let service =
            Service::new("users", "10.96.0.10:80".parse().expect("the address is valid"), subset, 7);
        let list = EndpointList::new(endpoints.collect(), service.address, &[]).expect("the list is valid");
        let memberships = Memberships::new(&service, self.clients, &list);
        (0..self.clients).map(|client| memberships.of(client).members).collect()
    }

    /// The part of all capacity that can be used before the first backend is full.
    fn utilization(&self, sent: impl Iterator<Item = (usize, f64)>) -> f64 {
        let mut loads = vec![0.0; self.capacities.len()];
        sent.for_each(|(index, share)| loads[index] += share);
        let by_capacity = loads.iter().zip(&self.capacities).filter(|(_, capacity)| **capacity > 0);
        let most = by_capacity.map(|(load, capacity)| load / f64::from(*capacity)).fold(0.0, f64::max);
        loads.iter().sum::<f64>() / self.capacity() / most
    }

    fn fitted(&self) -> f64 {
        let members = self.members().into_iter().flatten();
        self.utilization(members.map(|member| (member.endpoint.index as usize, member.share)))
    }

    /// The utilization with shares of overlap times weight.
    fn unfitted(&self) -> f64 {
        self.utilization((0..self.clients).flat_map(|client| {
            let weights = self.subset(client).zip(self.overlaps(client));
            let weights: Vec<_> =
                weights.map(|(index, part)| (index, part * f64::from(self.capacities[index]))).collect();
            let sum: f64 = weights.iter().map(|(_, weight)| weight).sum();
            weights.into_iter().map(move |(index, weight)| (index, weight / sum))
        }))
    }

    /// The highest utilization that any shares on these edges can reach (Hall's condition). The
    /// load of a run of neighbouring clients can reach only the backends that their arcs overlap.
    /// On a ring of arcs, such runs are the sets of clients with the fewest backends.
    fn possible(&self) -> f64 {
        let rows: Vec<Vec<usize>> = (0..self.clients).map(|client| self.subset(client).collect()).collect();
        let mut most: f64 = 1.0;
        for first in 0..rows.len() {
            let mut is_reached = vec![false; self.capacities.len()];
            let mut reached = 0.0;
            for (clients, row) in (1..).zip(rows.iter().cycle().skip(first).take(rows.len())) {
                for &index in row {
                    if !std::mem::replace(&mut is_reached[index], true) {
                        reached += f64::from(self.capacities[index]);
                    }
                }
                let part = f64::from(clients) / f64::from(self.clients);
                most = most.max(part / (reached / self.capacity()));
            }
        }
        1.0 / most
    }
}

/// Every second backend has 2.5 times the capacity.
fn alternate(backends: u32) -> Vec<u16> {
    (0..backends).map(|index| if index % 2 == 0 { 2 } else { 5 }).collect()
}

/// Lognormal capacities with a mean of about 100 and a standard deviation of 0.5 times the mean.
fn lognormal(backends: u32) -> Vec<u16> {
    let mut rng = SplitMix64::new(1);
    // A sum of twelve uniform numbers is close to a normal distribution with variance 1.
    let mut uniform =
        || f64::from(u32::try_from(rng.below(1 << 24)).expect("the number has 24 bits")) / 16_777_216.0 - 0.5;
    let mut capacity = || (90.0 * (0.47 * (0..12).map(|_| uniform()).sum::<f64>()).exp()).round();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 5 and 1,600")]
    let capacities = (0..backends).map(|_| capacity() as u16).collect();
    capacities
}

/// Every tenth backend is missing.
fn with_holes(mut capacities: Vec<u16>) -> Vec<u16> {
    capacities.iter_mut().step_by(10).for_each(|capacity| *capacity = 0);
    capacities
}

const PLAIN: Algorithm = Algorithm::Aperture;
const SHUFFLED: Algorithm = Algorithm::ApertureShuffled;

#[test]
fn shares_are_fitted_to_capacities_on_the_arcs_own_edges() {
    // Each case has an algorithm, the number of clients, the size, the capacities, and the
    // utilization with shares that are not fitted.
    let rows = [
        (PLAIN, 25, 5, alternate(37), 0.9375),
        (SHUFFLED, 25, 5, alternate(37), 0.8375),
        (PLAIN, 25, 5, lognormal(37), 0.7331),
        (SHUFFLED, 25, 5, lognormal(37), 0.7255),
        (SHUFFLED, 50, 10, alternate(50), 0.9302),
        (SHUFFLED, 100, 12, alternate(100), 0.7655),
        (PLAIN, 100, 12, lognormal(100), 0.8525),
        (SHUFFLED, 100, 20, alternate(100), 0.8462),
        (SHUFFLED, 300, 20, alternate(300), 0.8395),
        (PLAIN, 300, 20, lognormal(300), 0.8611),
        (SHUFFLED, 300, 20, lognormal(300), 0.8485),
        (SHUFFLED, 500, 12, alternate(250), 0.7773),
        (PLAIN, 500, 12, lognormal(250), 0.7978),
    ];
    for (algorithm, clients, size, capacities, before) in rows {
        let job = Job { algorithm, clients, size, capacities };
        let (unfitted, fitted) = (job.unfitted(), job.fitted());
        assert!(
            (unfitted - before).abs() < 1e-4,
            "{algorithm} {clients} x {size}: utilization {unfitted} before fitting"
        );
        assert!(fitted >= 0.99, "{algorithm} {clients} x {size}: utilization {fitted}");
    }
}

#[test]
fn the_replacement_of_a_lost_arc_member_is_fitted() {
    for (algorithm, clients, size, backends) in
        [(PLAIN, 25, 5, 37), (SHUFFLED, 100, 12, 100), (SHUFFLED, 300, 20, 300)]
    {
        for capacities in [vec![1; backends as usize], alternate(backends), lognormal(backends)] {
            let job = Job { algorithm, clients, size, capacities: with_holes(capacities) };
            let fitted = job.fitted();
            assert!(fitted >= 0.99, "{algorithm} {clients} x {size}: utilization {fitted}");
        }
    }
}

#[test]
fn equal_capacities_do_not_change_the_overlaps() {
    for (algorithm, clients, size, backends) in
        [(PLAIN, 25, 5, 37), (SHUFFLED, 7, 60, 200), (PLAIN, 4, 12, 18)]
    {
        for capacity in [1, 7, 65_535] {
            let job = Job { algorithm, clients, size, capacities: vec![capacity; backends] };
            for (client, members) in (0..).zip(job.members()) {
                let overlaps = job.overlaps(client);
                let whole: f64 = overlaps.iter().sum();
                assert_eq!(members.len(), overlaps.len());
                for (member, overlap) in members.iter().zip(overlaps) {
                    // A division may change the last bits.
                    assert!(
                        (member.share * whole - overlap).abs() <= 1e-12 * overlap,
                        "{algorithm}: {member:?}"
                    );
                }
            }
            // The first iteration has already converged, so the shares were not changed.
            let graph = Graph::of_job(algorithm, job.position(0));
            let start = (0..clients).flat_map(|client| job.overlaps(client)).collect();
            assert_eq!(solve_from(&graph, start, &job.capacities, Precision::default()).iterations, 1);
        }
    }
}

#[test]
fn infeasible_targets_are_approached() {
    // Each case has an algorithm, the number of clients, the size, the capacities, and the highest
    // utilization that the arcs allow.
    let rows = [
        // Arcs side by side share no backend, so there is nothing to fit.
        (PLAIN, 10, 20, lognormal(200), 0.8276),
        (SHUFFLED, 10, 20, alternate(200), 0.9571),
        // By chance, the capacities in a long part of the ring are above or below the mean by more
        // than arcs of 12 backends can balance.
        (SHUFFLED, 1_000, 12, alternate(1_000), 0.9855),
    ];
    for (algorithm, clients, size, capacities, expected) in rows {
        let job = Job { algorithm, clients, size, capacities };
        let (fitted, possible) = (job.fitted(), job.possible());
        assert!(
            (possible - expected).abs() < 1e-3,
            "{algorithm} {clients} x {size}: highest possible utilization {possible}"
        );
        assert!(
            fitted > 0.985 * possible && fitted < possible + 1e-9,
            "{algorithm} {clients} x {size}: utilization {fitted}"
        );
    }
}
