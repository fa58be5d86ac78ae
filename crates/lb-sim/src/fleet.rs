//! A fleet: one job of client tasks and the backends of one service. This module computes the
//! subsets of the tasks, and the shares of traffic that the tasks send to the backends of their
//! subsets.
//!
//! The planner computes its other results for numbered fleets from these subsets and shares. This
//! module must not evaluate how even the loads are.

use lb_core::endpoint::MAX_INDEXES;
use lb_core::subset::{self, Algorithm, Position};
use lb_core::weights::{Graph, Precision, Solution, solve};
use thiserror::Error;

/// The maximum number of client tasks of a job, the same as in the daemon's configuration.
pub const MAX_CLIENTS: u32 = 65_536;

/// The maximum number of backends of a service, which is the number of indexes that subsetting
/// algorithms support.
pub const MAX_BACKENDS: u32 = MAX_INDEXES;

/// The maximum wanted size. A subset never has more members than there are backends. The daemon
/// accepts fixed sizes of at most 256, or all backends.
pub const MAX_SIZE: u32 = MAX_BACKENDS;

/// The maximum number of connections of a fleet. Each connection takes four bytes, so all
/// connections take at most 128 MiB. A fleet with subsets of at most 500 backends never exceeds
/// this limit.
pub const MAX_CONNECTIONS: u64 = 1 << 25;

/// One job and one service. All client tasks and all backends run, and their indexes have no gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fleet {
    pub algorithm: Algorithm,
    /// M: the number of client tasks.
    pub clients: u32,
    /// N: the number of backends.
    pub backends: u32,
    /// k: the wanted size of a subset.
    pub size: u32,
    pub seed: u64,
}

/// A fleet with more connections than fit into memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "{clients} clients with subsets of {size} of {backends} backends make {connections} connections, but at \
     most {MAX_CONNECTIONS} can be planned at once (fewer clients, or a smaller size)"
)]
pub struct TooManyConnections {
    clients: u32,
    backends: u32,
    size: u32,
    connections: u64,
}

impl Fleet {
    /// The input of the algorithms for one client.
    pub fn position(&self, client: u32) -> Position {
        let Self { clients, backends, size, seed, .. } = *self;
        Position { client, clients, backends, size, seed }
    }

    /// K: the number of members of a subset. The arcs of aperture algorithms may have more members.
    pub fn wanted(&self) -> u32 {
        self.size.min(self.backends)
    }

    /// The subset of one client, in order of preference.
    pub fn subset(&self, client: u32) -> Vec<u32> {
        subset::subset(self.algorithm, self.position(client)).collect()
    }

    /// The subsets of all clients. For a large fleet, call [`Self::check_size`] first.
    pub fn graph(&self) -> Graph {
        Graph::of_job(self.algorithm, self.position(0))
    }

    /// The number of pairs of a client and a backend.
    pub fn pairs(&self) -> u64 {
        u64::from(self.clients) * u64::from(self.backends)
    }

    /// The number of connections of the fleet if each client opens one connection to each backend
    /// of its subset.
    pub fn connections(&self) -> u64 {
        let length = |client| u64::from(subset::length(self.algorithm, self.position(client)));
        if self.algorithm.is_aperture() {
            // The arcs of two clients may differ in length by one backend.
            (0..self.clients).map(length).sum()
        } else {
            u64::from(self.clients) * length(0)
        }
    }

    /// Checks that the subsets of all clients fit into memory.
    pub fn check_size(&self) -> Result<(), TooManyConnections> {
        let Self { clients, backends, size, .. } = *self;
        let connections = self.connections();
        if connections > MAX_CONNECTIONS {
            return Err(TooManyConnections { clients, backends, size, connections });
        }
        Ok(())
    }
}

/// How the clients of a fleet divide their traffic among the backends of their subsets. Every
/// client sends the same amount.
#[derive(Clone, Debug)]
pub enum Sharing {
    /// Every backend of the subset gets the same amount.
    Even,
    /// Each backend gets an amount in proportion to its overlap with the client's arc.
    Arcs(Fleet),
    /// Each backend gets an amount in proportion to its structural weight, as in the daemon.
    Structural(Solution),
}

impl Sharing {
    /// Determines how the clients of a fleet divide their traffic; `graph` is the [`Fleet::graph`].
    /// Aperture algorithms always use their own weights. The other algorithms use structural
    /// weights for backends of equal capacity if `weighted` is set.
    pub fn of(fleet: &Fleet, graph: &Graph, weighted: bool) -> Self {
        if fleet.algorithm.is_aperture() {
            Self::Arcs(*fleet)
        } else if weighted {
            Self::Structural(solve(graph, &vec![1; fleet.backends as usize], Precision::default()))
        } else {
            Self::Even
        }
    }

    /// For each backend of `subset`, the share of the client's traffic that goes to the backend, in
    /// the order of the subset. The sum is 1. `graph` is the graph that was passed to [`Self::of`].
    pub fn weights(&self, graph: &Graph, client: u32, subset: &[u32]) -> Vec<f64> {
        match self {
            #[expect(clippy::cast_precision_loss, reason = "at most 65,536 backends")]
            Self::Even => vec![(subset.len() as f64).recip(); subset.len()],
            Self::Arcs(fleet) => {
                let overlaps = overlaps(fleet, client);
                let sum = overlaps.iter().sum::<u64>();
                #[expect(clippy::cast_precision_loss, reason = "at most 2^32 units of a ring")]
                let share = |overlap: u64| overlap as f64 / sum as f64;
                overlaps.into_iter().map(share).collect()
            }
            Self::Structural(solution) => solution.weights(graph, client).to_vec(),
        }
    }

    /// The load of every backend, in the order of the indexes. A load of 1 is the traffic of one
    /// client.
    pub fn loads(&self, graph: &Graph) -> Vec<f64> {
        match self {
            Self::Even => {
                // With `Even`, all subsets have the same length, because only aperture algorithms
                // give clients subsets of different lengths. So backends with equal numbers of
                // connections get exactly equal loads.
                let length = graph.rows().next().map_or(0, <[u32]>::len).max(1);
                #[expect(clippy::cast_precision_loss, reason = "at most 65,536 backends")]
                let length = length as f64;
                graph.connections().into_iter().map(|clients| f64::from(clients) / length).collect()
            }
            Self::Arcs(fleet) => {
                // Integer sums of ring units are exact, so backends with equal loads get equal
                // floating-point numbers.
                let mut units = vec![0_u64; fleet.backends as usize];
                for (client, row) in (0..fleet.clients).zip(graph.rows()) {
                    for (&backend, overlap) in row.iter().zip(overlaps(fleet, client)) {
                        units[backend as usize] += overlap;
                    }
                }
                let all: u64 = units.iter().sum();
                #[expect(clippy::cast_precision_loss, reason = "a mean of loads needs no more than 53 bits")]
                let load = |units: u64| units as f64 / (all.max(1) as f64 / f64::from(fleet.clients));
                units.into_iter().map(load).collect()
            }
            Self::Structural(solution) => solution.loads.clone(),
        }
    }
}

/// The overlap of one client's arc with each backend of its subset, in units of the ring.
fn overlaps(fleet: &Fleet, client: u32) -> Vec<u64> {
    subset::overlaps(fleet.algorithm, fleet.position(client))
        .expect("only aperture algorithms divide traffic by arcs")
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fleet(algorithm: Algorithm, clients: u32, backends: u32, size: u32) -> Fleet {
        Fleet { algorithm, clients, backends, size, seed: 7 }
    }

    #[test]
    fn client_weights_sum_to_one_and_add_up_to_the_loads() {
        for algorithm in Algorithm::ALL {
            for weighted in [false, true] {
                let fleet = fleet(algorithm, 25, 37, 5);
                let graph = fleet.graph();
                let sharing = Sharing::of(&fleet, &graph, weighted);
                let mut loads = vec![0.0; 37];
                for client in 0..25 {
                    let weights = sharing.weights(&graph, client, graph.row(client));
                    let sum: f64 = weights.iter().sum();
                    assert!((sum - 1.0).abs() < 1e-12, "{algorithm}: {sum}");
                    for (&backend, weight) in graph.row(client).iter().zip(weights) {
                        loads[backend as usize] += weight;
                    }
                }
                for (load, expected) in sharing.loads(&graph).into_iter().zip(loads) {
                    assert!((load - expected).abs() < 1e-9, "{algorithm}, weighted {weighted}");
                }
            }
        }
    }

    #[test]
    fn the_loads_of_an_aperture_are_equal_to_the_bit() {
        for (clients, backends, size) in [(25, 37, 5), (3, 1000, 12), (256, 255, 20)] {
            let fleet = fleet(Algorithm::ApertureShuffled, clients, backends, size);
            let graph = fleet.graph();
            let loads = Sharing::of(&fleet, &graph, false).loads(&graph);
            assert!(loads.iter().all(|&load| load == loads[0]), "{loads:?}");
        }
    }

    #[test]
    fn the_computed_number_of_connections_equals_that_of_the_graph() {
        for algorithm in Algorithm::ALL {
            let fleet = fleet(algorithm, 25, 37, 5);
            let made: u32 = fleet.graph().connections().iter().sum();
            assert_eq!(fleet.connections(), u64::from(made), "{algorithm}");
        }
    }

    #[test]
    fn fleets_with_too_many_connections_are_refused() {
        let fits = fleet(Algorithm::Rocksteadier, MAX_CLIENTS, MAX_BACKENDS, 512);
        assert_eq!(fits.connections(), MAX_CONNECTIONS);
        assert_eq!(fits.check_size(), Ok(()));
        let over = Fleet { size: 513, ..fits };
        assert_eq!(
            over.check_size().unwrap_err().to_string(),
            "65536 clients with subsets of 513 of 65536 backends make 33619968 connections, but at most \
             33554432 can be planned at once (fewer clients, or a smaller size)"
        );
        assert!(Fleet { algorithm: Algorithm::Aperture, size: 65_536, ..fits }.check_size().is_err());
    }
}
