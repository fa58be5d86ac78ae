//! The sweep of the ACM article's Figure 2: one algorithm with one size, for every number of
//! clients and backends up to a maximum. It covers every fleet, because an algorithm with an even
//! load for one fleet may have an uneven load for the next.
//!
//! The result must not depend on the number of threads.

use lb_core::subset::Algorithm;
use lb_core::weights::Graph;
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use thiserror::Error;

use crate::fleet::{Fleet, Sharing};
use crate::metrics::{adjusted_utilization, raw_utilization};

pub mod summary;

/// The upper bound of `max`, the maximum number of clients and of backends of a sweep. It allows
/// about a million fleets.
pub const MAX_MAX: u32 = 1_024;

/// The maximum number of subset members that a sweep may examine. A sweep that examines so many
/// takes some minutes. If an additional client does not change the subsets of the existing clients,
/// the sweep examines each member once. If an additional client changes them, the sweep examines
/// the members of every fleet separately; the ACM article's sweep then examines 2^27 members.
pub const MAX_LOOKS: u64 = 1 << 34;

/// The maximum number of subset members for a sweep with structural weights, which examines each
/// member many times.
pub const MAX_WEIGHTED_LOOKS: u64 = 1 << 31;

/// A sweep: all fleets with 1 to `max` clients and `size` to `max` backends that have more
/// connections than backends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sweep {
    /// k: the size of every subset.
    pub size: u32,
    /// The maximum number of clients, and of backends.
    pub max: u32,
    pub seed: u64,
    /// Whether clients divide their traffic by structural weights.
    pub weighted: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cell {
    /// M: the number of clients.
    pub clients: u32,
    /// N: the number of backends.
    pub backends: u32,
    /// Adjusted utilization of the numbers of connections.
    pub adjusted: f64,
    /// Raw utilization of the numbers of connections, or of the loads if the traffic is weighted.
    pub raw: f64,
}

impl Cell {
    /// Clients per backend.
    pub fn ratio(&self) -> f64 {
        f64::from(self.clients) / f64::from(self.backends)
    }
}

/// The reason why a sweep is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SweepError {
    /// The size is larger than the maximum number of backends.
    #[error(
        "there is no fleet to sweep: the size {size} is larger than the maximum number of backends, {max}"
    )]
    Empty {
        size: u32,
        /// The maximum of the sweep.
        max: u32,
    },
    #[error(
        "{algorithm}: a sweep up to {max} with size {size} would examine {looks} members of subsets, but the \
         limit is {limit} (use a smaller size or maximum, or no weights)"
    )]
    TooMuch {
        algorithm: Algorithm,
        size: u32,
        /// The maximum of the sweep.
        max: u32,
        /// How many members the sweep would examine.
        looks: u64,
        /// How many members a sweep may examine.
        limit: u64,
    },
}

impl Sweep {
    /// The range of client counts of the fleets with this number of backends.
    fn clients(&self, backends: u32) -> std::ops::RangeInclusive<u32> {
        backends / self.size + 1..=self.max
    }

    /// The number of fleets in the sweep.
    pub fn cells(&self) -> u64 {
        let fleets = |backends| {
            u64::try_from(self.clients(backends).count()).expect("there are at most `MAX_MAX` values")
        };
        (self.size..=self.max).map(fleets).sum()
    }

    /// Checks that the sweep has a fleet, and does not take too long.
    pub fn check(&self, algorithm: Algorithm) -> Result<(), SweepError> {
        let Self { size, max, weighted, .. } = *self;
        if size > max {
            return Err(SweepError::Empty { size, max });
        }
        let looks_at = |backends| {
            let clients: u64 = if weighted || algorithm.depends_on_clients() {
                self.clients(backends).map(u64::from).sum()
            } else {
                max.into()
            };
            clients * u64::from(size)
        };
        let looks = (size..=max).map(looks_at).sum();
        let limit = if weighted { MAX_WEIGHTED_LOOKS } else { MAX_LOOKS };
        if looks > limit {
            return Err(SweepError::TooMuch { algorithm, size, max, looks, limit });
        }
        Ok(())
    }

    /// Returns all fleets, sorted by the number of backends and then of clients, computed on all
    /// processors. Calls `done` after all fleets with one number of backends are computed.
    pub fn run(&self, algorithm: Algorithm, done: impl Fn() + Sync) -> Vec<Cell> {
        let column = |backends| {
            let cells = self.column(algorithm, backends);
            done();
            cells
        };
        // The result is in the order of the numbers of backends, whichever column finishes first.
        let columns: Vec<Vec<Cell>> = (self.size..=self.max).into_par_iter().map(column).collect();
        columns.concat()
    }

    /// Computes the fleets with this number of backends.
    fn column(&self, algorithm: Algorithm, backends: u32) -> Vec<Cell> {
        let Self { size, max, seed, weighted } = *self;
        // All clients of a shuffled aperture share one permutation. The permutation decides which
        // backends are loaded, but not how much. Computing it for every client of every fleet would
        // take most of the time.
        let shuffled = algorithm == Algorithm::ApertureShuffled;
        let algorithm = if shuffled { Algorithm::Aperture } else { algorithm };
        let fleet = |clients| Fleet { algorithm, clients, backends, size, seed };
        if algorithm.depends_on_clients() {
            let cell = |clients| self.cell(&fleet(clients), &fleet(clients).graph());
            return self.clients(backends).map(cell).collect();
        }
        // An additional client does not change the subsets of the existing clients.
        let mut counted = ConnectionCounter::new(backends);
        let mut graph = Graph::new(backends);
        let mut cells = Vec::new();
        for clients in 1..=max {
            let subset = fleet(max).subset(clients - 1);
            let wanted = self.clients(backends).contains(&clients);
            if weighted {
                graph.push(subset);
                if wanted {
                    cells.push(self.cell(&fleet(clients), &graph));
                }
            } else {
                counted.push(&subset);
                if wanted {
                    cells.push(counted.cell(clients, size));
                }
            }
        }
        cells
    }

    fn cell(&self, fleet: &Fleet, graph: &Graph) -> Cell {
        let Fleet { clients, backends, .. } = *fleet;
        let loads = Sharing::of(fleet, graph, self.weighted).loads(graph);
        let adjusted = adjusted_utilization(&graph.connections());
        Cell { clients, backends, adjusted, raw: raw_utilization(&loads) }
    }
}

/// The number of connections of each backend, and the largest of these numbers. Both are updated
/// when a client is added.
struct ConnectionCounter {
    connections: Vec<u32>,
    largest: u32,
}

impl ConnectionCounter {
    fn new(backends: u32) -> Self {
        Self { connections: vec![0; backends as usize], largest: 0 }
    }

    fn push(&mut self, subset: &[u32]) {
        for &backend in subset {
            let count = &mut self.connections[backend as usize];
            *count += 1;
            self.largest = self.largest.max(*count);
        }
    }

    /// The utilizations of [`crate::metrics`], computed from the largest count only.
    fn cell(&self, clients: u32, size: u32) -> Cell {
        let backends = u32::try_from(self.connections.len()).expect("there are at most `MAX_MAX` backends");
        // The number is at most 2^20, the square of [`MAX_MAX`].
        let all = clients * size.min(backends);
        let largest = f64::from(self.largest);
        let adjusted = f64::from(all.div_ceil(backends)) / largest;
        let raw = f64::from(all) / f64::from(backends) / largest;
        Cell { clients, backends, adjusted, raw }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ARTICLE: Sweep = Sweep { size: 20, max: 256, seed: 0, weighted: false };

    #[test]
    fn the_sweep_of_the_article_has_59148_fleets() {
        assert_eq!(ARTICLE.cells(), 59_148);
        assert_eq!(Sweep { size: 1, max: 3, ..ARTICLE }.cells(), 3);
    }

    #[test]
    fn incremental_counts_equal_the_counts_of_each_fleet() {
        let sweep = Sweep { size: 5, max: 23, ..ARTICLE };
        for algorithm in Algorithm::ALL {
            let mut expected = Vec::new();
            for backends in 5..=23 {
                for clients in (1..=23).filter(|clients| clients * 5 > backends) {
                    let fleet = Fleet { algorithm, clients, backends, size: 5, seed: 0 };
                    expected.push(sweep.cell(&fleet, &fleet.graph()));
                }
            }
            let cells = sweep.run(algorithm, || ());
            assert_eq!(cells.len(), expected.len());
            for (cell, expected) in cells.iter().zip(&expected) {
                assert_eq!((cell.clients, cell.backends), (expected.clients, expected.backends));
                assert_eq!(cell.adjusted, expected.adjusted);
                assert!((cell.raw - expected.raw).abs() < 1e-12, "{algorithm}: {cell:?}, {expected:?}");
            }
            let single = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
            assert_eq!(single.install(|| sweep.run(algorithm, || ())), cells);
        }
    }

    #[test]
    fn an_empty_or_too_large_sweep_is_refused() {
        let refused = |sweep: Sweep, algorithm| sweep.check(algorithm).unwrap_err().to_string();
        assert_eq!(
            refused(Sweep { max: 19, ..ARTICLE }, Algorithm::Rocksteadier),
            "there is no fleet to sweep: the size 20 is larger than the maximum number of backends, 19"
        );
        let largest = Sweep { max: MAX_MAX, ..ARTICLE };
        assert_eq!(largest.check(Algorithm::Ring), Ok(()));
        assert_eq!(
            refused(Sweep { size: 100, ..largest }, Algorithm::Ring),
            "ring: a sweep up to 1024 with size 100 would examine 48542212500 members of subsets, but the \
             limit is 17179869184 (use a smaller size or maximum, or no weights)"
        );
        assert_eq!(Sweep { size: 100, ..largest }.check(Algorithm::Random), Ok(()));
        assert!(Sweep { weighted: true, ..largest }.check(Algorithm::Random).is_err());
    }
}
