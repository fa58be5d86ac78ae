//! Structural weights: how each client divides its traffic among the backends of its subset. They
//! make the loads of backends even, although no algorithm can assign exactly the same number of
//! clients to each backend.
//!
//! The weights are the Sinkhorn solution (iterative proportional fitting) on the graph of all
//! clients' subsets: the weights of each client sum to 1, and the weights of each backend sum to
//! its target. The iteration begins with 1 on every edge, or with the overlaps of an aperture.
//! Every client computes the weights of the whole graph, so that all agree without communication.
//! Sums are computed in a fixed order, so that all hosts compute the same bits.

use std::ops::Range;

use super::subset::{self, Algorithm, Position};

/// The subsets of all clients of a job, as the edges of a graph: one row of backend indexes per
/// client.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    backends: u32,
    /// The end of each row in `edges`.
    ends: Vec<usize>,
    edges: Vec<u32>,
}

impl Graph {
    /// A graph without clients, over backend indexes below `backends`.
    pub fn new(backends: u32) -> Self {
        Self { backends, ends: Vec::new(), edges: Vec::new() }
    }

    /// A graph from the subset of each client.
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

    /// The subsets of all clients of a job, if no index is a hole. `position.client` is not used.
    pub fn of_job(algorithm: Algorithm, position: Position) -> Self {
        let subset = |client| subset::subset(algorithm, Position { client, ..position });
        Self::of_rows(position.backends, (0..position.clients).map(subset))
    }

    /// Sorts every row by index.
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
        assert!(
            row.iter().all(|&backend| backend < self.backends),
            "an edge must lead to a backend of the graph"
        );
        self.ends.push(self.edges.len());
    }

    /// The subset of each client, as backend indexes.
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
        u32::try_from(self.ends.len()).expect("a job has at most 65,536 clients")
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

/// When the iteration of [`solve`] stops.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Precision {
    /// The largest allowed difference between a backend's load and its target, as a part of the
    /// target.
    pub tolerance: f64,
    /// The largest number of iterations, each of which normalises all rows.
    pub iterations: u32,
}

impl Default for Precision {
    /// The daemon's values. Every client must use the same values.
    fn default() -> Self {
        Self { tolerance: 5e-4, iterations: 1_000 }
    }
}

/// The weights of all edges.
///
/// The weights are stored per edge instead of as one factor per backend. If no weights can make
/// loads even, some factors grow without bound, but the weights converge to 0 or 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Solution {
    /// The weight of each edge. A row sums to 1, or to 0 if none of the client's backends has
    /// capacity.
    weights: Vec<f64>,
    /// The load at each backend index: the sum of the weights of the backend's edges. A load of 1
    /// is the traffic of one client.
    pub loads: Vec<f64>,
    /// The target of the load at each backend index; 0 for a backend without clients or without
    /// capacity.
    pub targets: Vec<f64>,
    /// The number of iterations.
    pub iterations: u32,
    /// Whether every load is within the tolerance of its target. If the graph has too few edges, no
    /// weights can achieve this, and the solution is the result of the last iteration.
    pub converged: bool,
}

/// Weights that make the load of each backend proportional to its capacity. `capacities` contains
/// the capacities by backend index.
///
/// # Panics
/// If there are fewer capacities than backends.
pub fn solve(graph: &Graph, capacities: &[u16], precision: Precision) -> Solution {
    solve_from(graph, vec![1.0; graph.edges.len()], capacities, precision)
}

/// Like [`solve`], but the iteration begins with the given weights of the edges instead of 1. The
/// weights are ordered by client, and then like the client's subset. Among all weights that make
/// the loads even, the result is the nearest to the given weights in relative entropy. If the given
/// weights already make the loads even, they do not change.
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
    assert_eq!(weights.len(), graph.edges.len(), "the number of weights must be the number of edges");
    assert!(capacities.len() >= graph.backends as usize, "every backend must have a capacity");
    let connections = graph.connections();
    let capacity =
        |backend: usize| if connections[backend] > 0 { f64::from(capacities[backend]) } else { 0.0 };
    let covered: f64 = (0..connections.len()).map(capacity).sum();
    let per_capacity = if covered > 0.0 { f64::from(graph.clients()) / covered } else { 0.0 };
    let targets: Vec<f64> = (0..connections.len()).map(|backend| capacity(backend) * per_capacity).collect();
    // The factor of each backend's edges. In the first iteration it is 1, or 0 for a backend
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

/// Multiplies every edge by its backend's factor, scales each row so that it sums to 1, and
/// computes every backend's load.
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
    /// The weights of one client's subset, in the order of the subset. `graph` must be the graph of
    /// the solution.
    ///
    /// # Panics
    /// If there is no such client.
    pub fn weights(&self, graph: &Graph, client: u32) -> &[f64] {
        &self.weights[graph.edges_of(client)]
    }

    /// [`raw_utilization`] of the loads, as if all capacities were equal.
    pub fn utilization(&self) -> f64 {
        raw_utilization(&self.loads)
    }
}

/// Raw utilization of loads, which may be counts of connections: the mean load divided by the
/// largest load, including backends without clients. This is the part of the capacity that can be
/// used before the first backend is full. The result is 0 without load.
pub fn raw_utilization(loads: &[f64]) -> f64 {
    let largest = loads.iter().copied().fold(0.0, f64::max);
    #[expect(clippy::cast_precision_loss, reason = "at most 65,536 backends")]
    let mean = loads.iter().sum::<f64>() / loads.len() as f64;
    // Because of rounding, the mean of equal loads may exceed the loads in the last bit.
    if largest > 0.0 { (mean / largest).min(1.0) } else { 0.0 }
}

/// The *rungs*: the sizes from which `auto` chooses.
pub const RUNGS: [u32; 11] = [12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256];

/// The default minimum of `size = "auto"`, as in Finagle: few enough backends for an idle fleet,
/// but so many that a client can lose some of them.
pub const MIN_AUTO_SIZE: u32 = 12;

/// The result of [`choose_size`].
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The number of backends that a client wants.
    pub size: u32,
    /// The rungs that were tried, and the part of the job's backends that structural weights could
    /// use with each rung.
    pub tried: Vec<(u32, f64)>,
}

/// The smallest size to try: `min` or, if larger, the number of backends per client, because
/// with a smaller size some backend would have no client.
pub fn least_size(position: Position, min: u32) -> u32 {
    min.max(position.backends.div_ceil(position.clients.max(1)))
}

/// The smallest rung that is not below [`least_size`], and at which structural weights can use 99 %
/// of the job's backends; the number of all backends if there is no such rung. For an aperture, the
/// result is the smallest rung that is not below [`least_size`], because the loads of an aperture
/// are even at any size. The client and the size of `position` are not used.
///
/// Weights fit together only if every client has the same size. So the result does not depend on
/// inputs that may differ between the clients of a job or change with time, such as holes or
/// capacities.
pub fn auto_size(algorithm: Algorithm, position: Position, min: u32) -> u32 {
    choose_size(algorithm, position, min).size
}

/// Like [`auto_size`], but also returns the sizes that were tried.
pub fn choose_size(algorithm: Algorithm, position: Position, min: u32) -> Choice {
    let backends = position.backends;
    let mut tried = Vec::new();
    let least = least_size(position, min);
    for size in RUNGS.into_iter().filter(|&rung| rung >= least) {
        if size >= backends || algorithm.is_aperture() {
            return Choice { size, tried };
        }
        // The rows are sorted, so that the order of the sums does not depend on the order of a
        // subset, and other implementations can compute the same size.
        let graph = Graph::of_job(algorithm, Position { size, ..position }).ascending();
        let utilization = solve(&graph, &vec![1; backends as usize], Precision::default()).utilization();
        tried.push((size, utilization));
        // The numbers are compared as whole numbers, so that the rounding of the last bit does not
        // matter.
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
    fn the_iteration_ends_even_if_no_weights_make_loads_even() {
        // Two clients use only backend 0, and a third uses backends 0 and 1.
        let graph = graph(3, &[&[0], &[0], &[0, 1]]);
        let solution = solve(&graph, &[1; 3], Precision::default());
        assert!(!solution.converged);
        assert_eq!(solution.iterations, 1_000);
        assert_eq!(solution.targets, [1.5, 1.5, 0.0]);
        assert!(solution.weights(&graph, 2)[1] > 0.99, "{solution:?}");
    }

    #[test]
    fn weights_of_a_client_sum_to_one_in_any_graph() {
        // The only client of the first backend cannot send more than its whole traffic, and the
        // clients of the second backend have no other backend.
        let mut rows: Vec<&[u32]> = vec![&[0]];
        rows.extend([&[1][..]; 8]);
        let solution = solve(&graph(2, &rows), &[2, 1], Precision::default());
        assert_eq!(solution.loads, [1.0, 8.0]);
        // In this job, some clients of a hashed ring have only backends that other clients
        // overload.
        let position = Position { client: 0, clients: 25, backends: 37, size: 5, seed: 7 };
        let graph = Graph::of_job(Algorithm::Consistent, position);
        let solution = solve(&graph, &[1; 37], Precision::default());
        assert!(!solution.converged);
        for client in 0..25 {
            let sum: f64 = solution.weights(&graph, client).iter().sum();
            assert!((sum - 1.0).abs() < 1e-12, "the weights sum to {sum}");
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
        // The only client of a job uses all backends, even if there are more than the largest rung.
        check_auto(1, 100, 12, 128);
        check_auto(1, 10_000, 12, 10_000);
        // There are fewer backends than the minimum, so the client uses all of them.
        check_auto(10, 5, 12, 12);
        // The minimum is above the largest rung.
        check_auto(10, 500, 300, 500);
    }
}
