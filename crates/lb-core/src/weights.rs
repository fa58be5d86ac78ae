//! Structural weights: how much of its traffic each client sends to each backend of its subset, so
//! that the backends' loads are even although no algorithm can give each backend exactly the same
//! number of clients.
//!
//! The weights are the Sinkhorn solution (iterative proportional fitting) on the graph of all
//! clients' subsets: every client's weights sum to 1, and every backend's column sums to its
//! target. The iteration begins with 1 on every edge, or with an aperture's overlaps. Every client
//! computes the same graph alone, so all agree without communication. The sums run in a fixed
//! order, so that the bits are the same everywhere. This file must not decide which backends are in
//! a subset.

use std::ops::Range;

use crate::subset::{self, Algorithm, Position};

/// The subsets of all clients of a job, as the edges of a graph: one row of backend indexes per
/// client.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    backends: u32,
    /// The end of each row among the edges.
    ends: Vec<usize>,
    edges: Vec<u32>,
}

impl Graph {
    /// A graph without clients, over backend indexes below `backends`.
    pub fn new(backends: u32) -> Self {
        Self { backends, ends: Vec::new(), edges: Vec::new() }
    }

    /// The graph of these subsets, one per client.
    ///
    /// # Panics
    /// Like [`Graph::push`].
    pub fn of_rows<R: IntoIterator<Item = u32>>(backends: u32, rows: impl IntoIterator<Item = R>) -> Self {
        let mut graph = Self::new(backends);
        for row in rows {
            graph.push(row);
        }
        graph
    }

    /// The subsets of every client of a job, for backends without holes. `position.client` is not
    /// used.
    pub fn of_job(algorithm: Algorithm, position: Position) -> Self {
        let subset = |client| subset::subset(algorithm, Position { client, ..position });
        Self::of_rows(position.backends, (0..position.clients).map(subset))
    }

    /// The same graph with every row in ascending order of index.
    fn ascending(mut self) -> Self {
        let mut start = 0;
        for &end in &self.ends {
            self.edges[start..end].sort_unstable();
            start = end;
        }
        self
    }

    /// Adds the next client's subset.
    ///
    /// # Panics
    /// If an index is not below the number of backends.
    pub fn push(&mut self, subset: impl IntoIterator<Item = u32>) {
        self.edges.extend(subset);
        let row = &self.edges[self.ends.last().copied().unwrap_or(0)..];
        assert!(row.iter().all(|&backend| backend < self.backends), "a backend of the graph");
        self.ends.push(self.edges.len());
    }

    /// The indexes in each client's subset.
    pub fn rows(&self) -> impl Iterator<Item = &[u32]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, &end)| &self.edges[start..end])
    }

    /// One client's subset.
    ///
    /// # Panics
    /// If there is no such client.
    pub fn row(&self, client: u32) -> &[u32] {
        &self.edges[self.edges_of(client)]
    }

    /// The range of one client's row among all edges.
    fn edges_of(&self, client: u32) -> Range<usize> {
        let client = client as usize;
        let start = client.checked_sub(1).map_or(0, |before| self.ends[before]);
        start..self.ends[client]
    }

    /// The number of clients.
    pub fn clients(&self) -> u32 {
        u32::try_from(self.ends.len()).expect("at most 65,536 clients")
    }

    /// The number of clients of each backend.
    pub fn connections(&self) -> Vec<u32> {
        let mut connections = vec![0; self.backends as usize];
        for &backend in &self.edges {
            connections[backend as usize] += 1;
        }
        connections
    }
}

/// When the iteration stops.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Precision {
    /// The largest distance of a backend's load from its target, as a part of the target.
    pub tolerance: f64,
    /// The largest number of normalisations of all rows.
    pub iterations: u32,
}

impl Default for Precision {
    /// The daemon's values. Every client must use the same ones.
    fn default() -> Self {
        Self { tolerance: 5e-4, iterations: 1_000 }
    }
}

/// The weights of all edges.
///
/// They are stored by edge, although one factor per backend would determine them: if no weights can
/// make loads even, the factors of some backends grow without bound relative to others, while
/// weights only tend to 0 and 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Solution {
    /// By edge. Rows sum to 1, or to 0 if none of a client's backends has any capacity.
    weights: Vec<f64>,
    /// By backend index: the sum of its edges' weights; 1 is the traffic of one client.
    pub loads: Vec<f64>,
    /// By backend index: the target of the load; 0 for a backend without clients or without
    /// capacity.
    pub targets: Vec<f64>,
    /// How often all rows were normalised.
    pub iterations: u32,
    /// Whether every load is within the tolerance of its target. If the graph is too thin, no
    /// weights can achieve this, and the solution is the best that was reached.
    pub converged: bool,
}

/// Weights that make the load of each backend proportional to its capacity. `capacities` is by
/// backend index.
///
/// # Panics
/// If there are fewer capacities than backends.
pub fn solve(graph: &Graph, capacities: &[u16], precision: Precision) -> Solution {
    solve_from(graph, vec![1.0; graph.edges.len()], capacities, precision)
}

/// The same, but the iteration begins with the given weights of the edges instead of 1, in the
/// order of clients and of their subsets. Of all weights that make the loads even, the result is
/// the nearest to the given ones in relative entropy. If these make the loads even already, they
/// stay.
///
/// # Panics
/// If there are fewer capacities than backends, or if the number of weights differs from the number
/// of edges.
pub fn solve_from(
    graph: &Graph,
    mut weights: Vec<f64>,
    capacities: &[u16],
    precision: Precision,
) -> Solution {
    assert_eq!(weights.len(), graph.edges.len(), "a weight for every edge");
    assert!(capacities.len() >= graph.backends as usize, "a capacity for every backend");
    let connections = graph.connections();
    let capacity =
        |backend: usize| if connections[backend] > 0 { f64::from(capacities[backend]) } else { 0.0 };
    let covered: f64 = (0..connections.len()).map(capacity).sum();
    let per_capacity = if covered > 0.0 { f64::from(graph.clients()) / covered } else { 0.0 };
    let targets: Vec<f64> = (0..connections.len()).map(|backend| capacity(backend) * per_capacity).collect();
    // The factors of each backend's edges. The first ones only distinguish backends with and
    // without capacity.
    let mut factors: Vec<f64> = targets.iter().map(|&target| f64::from(target > 0.0)).collect();
    let mut loads = vec![0.0; factors.len()];
    for iteration in 1.. {
        normalise(graph, &factors, &mut weights, &mut loads);
        let within = |(&load, &target): (&f64, &f64)| f64::abs(load - target) <= precision.tolerance * target;
        let converged = loads.iter().zip(&targets).all(within);
        if converged || iteration >= precision.iterations {
            return Solution { weights, loads, targets, iterations: iteration, converged };
        }
        for ((factor, &load), &target) in factors.iter_mut().zip(&loads).zip(&targets) {
            *factor = if load > 0.0 { target / load } else { 0.0 };
        }
    }
    unreachable!("there are finitely many iterations")
}

/// Multiplies every edge by its backend's factor, scales each row to the sum of 1, and sums every
/// backend's load.
fn normalise(graph: &Graph, factors: &[f64], weights: &mut [f64], loads: &mut [f64]) {
    loads.fill(0.0);
    let mut rest = weights;
    for row in graph.rows() {
        let weights;
        (weights, rest) = rest.split_at_mut(row.len());
        let mut sum = 0.0;
        for (weight, &backend) in weights.iter_mut().zip(row) {
            *weight *= factors[backend as usize];
            sum += *weight;
        }
        let scale = if sum > 0.0 { 1.0 / sum } else { 0.0 };
        for (weight, &backend) in weights.iter_mut().zip(row) {
            *weight *= scale;
            loads[backend as usize] += *weight;
        }
    }
}

impl Solution {
    /// The weights of one client's subset, in its order. `graph` must be the graph of the solution.
    ///
    /// # Panics
    /// If there is no such client.
    pub fn weights(&self, graph: &Graph, client: u32) -> &[f64] {
        &self.weights[graph.edges_of(client)]
    }

    /// [`raw_utilization`] with equal capacities.
    pub fn utilization(&self) -> f64 {
        raw_utilization(&self.loads)
    }
}

/// Raw utilization of loads, which may be counts of connections: the mean over the largest,
/// including backends without clients. This is the part of the capacity that can be used before the
/// first backend is full; 0 if there is no load.
pub fn raw_utilization(loads: &[f64]) -> f64 {
    let largest = loads.iter().copied().fold(0.0, f64::max);
    #[expect(clippy::cast_precision_loss, reason = "at most 65,536 backends")]
    let mean = loads.iter().sum::<f64>() / loads.len() as f64;
    // Rounding can make the mean of equal loads larger than them in its last bit.
    if largest > 0.0 { (mean / largest).min(1.0) } else { 0.0 }
}

/// Sizes that `auto` chooses from.
pub const RUNGS: [u32; 11] = [12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256];

/// The default minimum of `size = "auto"`: few enough backends for an idle fleet, and enough to
/// lose some (Finagle's default).
pub const MIN_AUTO_SIZE: u32 = 12;

/// The choice of [`choose_size`], and its reasons.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The number of backends that a client wants.
    pub size: u32,
    /// The rungs that were tried, and the part of the job's backends that structural weights could
    /// use at each.
    pub tried: Vec<(u32, f64)>,
}

/// The smallest size that is worth trying. Below `min`, a client has too few backends to lose some;
/// and if a size is below the number of backends per client, some backend has no client.
pub fn least_size(position: Position, min: u32) -> u32 {
    min.max(position.backends.div_ceil(position.clients.max(1)))
}

/// The smallest rung, at least `min`, at which structural weights use 99 % of the job's backends;
/// all backends if there is no such rung. The client and the size of `position` are not used.
///
/// The result depends on nothing that differs between the job's clients or changes with time,
/// neither on holes nor on capacities: weights only fit together if every client has the same size.
pub fn auto_size(algorithm: Algorithm, position: Position, min: u32) -> u32 {
    choose_size(algorithm, position, min).size
}

/// Like [`auto_size`], with the reasons.
pub fn choose_size(algorithm: Algorithm, position: Position, min: u32) -> Choice {
    let backends = position.backends;
    let mut tried = Vec::new();
    let least = least_size(position, min);
    for size in RUNGS.into_iter().filter(|&rung| rung >= least) {
        if size >= backends || algorithm.is_aperture() {
            return Choice { size, tried };
        }
        // Rows in ascending order of index, unlike subsets: other implementations may compute the
        // size as well, so the order of its sums is fixed.
        let graph = Graph::of_job(algorithm, Position { size, ..position }).ascending();
        let utilization = solve(&graph, &vec![1; backends as usize], Precision::default()).utilization();
        tried.push((size, utilization));
        // Compared as whole numbers, so that rounding of the last bit does not decide.
        if (10_000.0 * utilization).floor() >= 9_900.0 {
            return Choice { size, tried };
        }
    }
    Choice { size: backends, tried }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: Precision = Precision { tolerance: 1e-9, iterations: 1_000 };

    fn graph(backends: u32, rows: &[&[u32]]) -> Graph {
        Graph::of_rows(backends, rows.iter().map(|row| row.iter().copied()))
    }

    #[test]
    fn a_backend_with_fewer_clients_gets_more_of_each() {
        let graph = graph(3, &[&[0, 1], &[1, 2], &[0, 1, 2]]);
        let solution = solve(&graph, &[1; 3], WHOLE);
        assert!(solution.converged);
        for load in &solution.loads {
            assert!((load - 1.0).abs() < 1e-9, "{solution:?}");
        }
        let weights = solution.weights(&graph, 0);
        assert!(weights[0] > weights[1], "{weights:?}");
        assert_eq!(graph.connections(), [2, 3, 2]);
    }

    #[test]
    fn capacities_are_the_targets() {
        let graph = graph(2, &[&[0, 1], &[1, 0]]);
        let solution = solve(&graph, &[3, 1], WHOLE);
        assert_eq!(solution.targets, [1.5, 0.5]);
        let weights = solution.weights(&graph, 1);
        assert!((weights[0] - 0.25).abs() < 1e-9 && (weights[1] - 0.75).abs() < 1e-9, "{weights:?}");
    }

    #[test]
    fn without_capacity_there_is_no_share() {
        let graph = graph(3, &[&[0, 1], &[1, 2]]);
        let solution = solve(&graph, &[0, 1, 1], WHOLE);
        assert_eq!(solution.weights(&graph, 0), [0.0, 1.0]);
        assert_eq!(solution.loads[0], 0.0);
        let nothing = solve(&graph, &[0; 3], WHOLE);
        assert_eq!(nothing.weights(&graph, 0), [0.0, 0.0]);
        assert_eq!(nothing.utilization(), 0.0);
        assert!(nothing.converged);
    }

    #[test]
    fn what_no_weights_can_make_even_ends_all_the_same() {
        // Two clients have only backend 0, and a third has backends 0 and 1.
        let graph = graph(3, &[&[0], &[0], &[0, 1]]);
        let solution = solve(&graph, &[1; 3], Precision::default());
        assert!(!solution.converged);
        assert_eq!(solution.iterations, 1_000);
        assert_eq!(solution.targets, [1.5, 1.5, 0.0]);
        assert!(solution.weights(&graph, 2)[1] > 0.99, "{solution:?}");
    }

    #[test]
    fn every_client_keeps_its_share_however_uneven_the_graph() {
        // The first backend's only client cannot send it more than its whole traffic, and the
        // clients of the second have no other backend.
        let mut rows: Vec<&[u32]> = vec![&[0]];
        rows.extend([&[1][..]; 8]);
        let solution = solve(&graph(2, &rows), &[2, 1], Precision::default());
        assert_eq!(solution.loads, [1.0, 8.0]);
        // In this case a hashed ring leaves clients with backends that others overload.
        let position = Position { client: 0, clients: 25, backends: 37, size: 5, seed: 7 };
        let graph = Graph::of_job(Algorithm::Consistent, position);
        let solution = solve(&graph, &[1; 37], Precision::default());
        assert!(!solution.converged);
        for client in 0..25 {
            let sum: f64 = solution.weights(&graph, client).iter().sum();
            assert!((sum - 1.0).abs() < 1e-12, "{sum}");
        }
    }

    #[test]
    fn a_graph_without_clients_or_backends_is_solved() {
        assert!(solve(&Graph::new(0), &[], WHOLE).converged);
        assert!(solve(&Graph::new(3), &[1; 3], WHOLE).converged);
        assert!(solve(&graph(0, &[&[], &[]]), &[], WHOLE).converged);
    }

    #[track_caller]
    fn check_auto(clients: u32, backends: u32, min: u32, expected: u32) {
        let position = Position { client: 0, clients, backends, size: 0, seed: 7 };
        let size = auto_size(Algorithm::Rocksteadier, position, min);
        assert_eq!(size, expected, "{clients} clients, {backends} backends");
    }

    #[test]
    fn the_automatic_size_is_the_smallest_rung_that_is_even() {
        check_auto(1000, 1000, 12, 12);
        check_auto(1000, 1000, 13, 16);
        // A lone client uses all backends, also beyond the largest rung.
        check_auto(1, 100, 12, 128);
        check_auto(1, 10_000, 12, 10_000);
        // Fewer backends than the minimum: all of them.
        check_auto(10, 5, 12, 12);
        // A minimum above the largest rung.
        check_auto(10, 500, 300, 500);
    }
}
