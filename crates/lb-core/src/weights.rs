//! Structural weights: how much of its traffic each client sends to each backend of its subset, so that the backends'
//! loads come out even although no algorithm can give each of them exactly as many clients.
//!
//! The weights are the Sinkhorn solution (iterative proportional fitting) on the graph of all clients' subsets: every
//! client's weights sum to 1, every backend's column to its target. It begins with 1 on every edge, or with an aperture's
//! overlaps. Every client computes the same graph alone, so all
//! agree without talking. The sums run in one order, for the same bits everywhere. Must not decide who is in a subset.

use std::ops::Range;

use crate::subset::{self, Algorithm, Position};

/// The subsets of all clients of a job, as the edges of a graph: one row of backend indexes per client.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    backends: u32,
    /// Where each row ends among the edges.
    ends: Vec<usize>,
    edges: Vec<u32>,
}

impl Graph {
    /// A graph of no clients yet, over backend indexes below `backends`.
    pub fn new(backends: u32) -> Self {
        Self { backends, ends: Vec::new(), edges: Vec::new() }
    }

    /// The graph of these subsets, one per client.
    ///
    /// # Panics
    /// As [`Graph::push`].
    pub fn of_rows<R: IntoIterator<Item = u32>>(backends: u32, rows: impl IntoIterator<Item = R>) -> Self {
        let mut graph = Self::new(backends);
        for row in rows {
            graph.push(row);
        }
        graph
    }

    /// The subsets that every client of a job takes of backends without holes. Of `position`, the client is not used.
    pub fn of_job(algorithm: Algorithm, position: Position) -> Self {
        let subset = |client| subset::subset(algorithm, Position { client, ..position });
        Self::of_rows(position.backends, (0..position.clients).map(subset))
    }

    /// The same with every row in ascending order of index.
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

    /// Where one client's row lies among all edges.
    fn edges_of(&self, client: u32) -> Range<usize> {
        let client = client as usize;
        let start = client.checked_sub(1).map_or(0, |before| self.ends[before]);
        start..self.ends[client]
    }

    /// How many clients there are.
    pub fn clients(&self) -> u32 {
        u32::try_from(self.ends.len()).expect("at most 65,536 clients")
    }

    /// How many clients use each backend.
    pub fn connections(&self) -> Vec<u32> {
        let mut connections = vec![0; self.backends as usize];
        for &backend in &self.edges {
            connections[backend as usize] += 1;
        }
        connections
    }
}

/// When to stop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Precision {
    /// Largest distance of a backend's load from its target, as a part of the target.
    pub tolerance: f64,
    /// Most normalisations of all rows.
    pub iterations: u32,
}

impl Default for Precision {
    /// What the daemon uses: every client must use the same.
    fn default() -> Self {
        Self { tolerance: 5e-4, iterations: 1_000 }
    }
}

/// The weights of all edges.
///
/// They are kept by edge although one factor per backend would determine them: where no weights can make loads even, the
/// factors of some backends grow without bound over those of others, while weights only tend to 0 and 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Solution {
    /// By edge: rows sum to 1, or to 0 where none of a client's backends has any capacity.
    weights: Vec<f64>,
    /// By backend index: the sum of its edges' weights, in clients' worth of traffic.
    pub loads: Vec<f64>,
    /// By backend index: what the load should be; 0 for one that no client uses or that has no capacity.
    pub targets: Vec<f64>,
    /// How often all rows were normalised.
    pub iterations: u32,
    /// Whether every load is within the tolerance of its target. No weights can make it so where the graph is too thin:
    /// then this is the best that was reached.
    pub converged: bool,
}

/// Weights that make the load of each backend proportional to its capacity. `capacities` is by backend index.
///
/// # Panics
/// If there are fewer capacities than backends.
pub fn solve(graph: &Graph, capacities: &[u16], precision: Precision) -> Solution {
    solve_from(graph, vec![1.0; graph.edges.len()], capacities, precision)
}

/// The same, begun with these weights of the edges, in the order of clients and of their subsets, in place of 1. Of all weights that
/// make the loads even, the result is the nearest to them in relative entropy: where they make them even already, they stay.
///
/// # Panics
/// If there are fewer capacities than backends, or not as many weights as edges.
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
    // What each backend's edges are multiplied with: at first, to have capacity or none.
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

/// Multiplies every edge by its backend's factor, scales each row to the sum of 1, and sums what every backend gets.
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
    /// The weights of one client's subset, in its order. `graph` is the one that was solved.
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

/// Raw utilization of loads, which may be counts of connections: mean over largest, backends that nobody uses included. The
/// part of the capacity that can be used before the first backend is full; 0 if there is no load.
pub fn raw_utilization(loads: &[f64]) -> f64 {
    let largest = loads.iter().copied().fold(0.0, f64::max);
    #[expect(clippy::cast_precision_loss, reason = "at most 65,536 backends")]
    let mean = loads.iter().sum::<f64>() / loads.len() as f64;
    // The mean of equal loads can come out above them in its last bit.
    if largest > 0.0 { (mean / largest).min(1.0) } else { 0.0 }
}

/// Sizes that `auto` chooses from.
pub const RUNGS: [u32; 11] = [12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256];

/// What `size = "auto"` takes at least: few enough backends for an idle fleet, enough to lose some (Finagle's default).
pub const MIN_AUTO_SIZE: u32 = 12;

/// What [`choose_size`] chose, and after what.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// How many backends a client wants.
    pub size: u32,
    /// The rungs that were looked at, and the part of the job's backends that structural weights could use at each.
    pub tried: Vec<(u32, f64)>,
}

/// The smallest size that is worth looking at: below `min` there are too few to lose some, and with fewer than a client's
/// part of the backends some backend would have no client.
pub fn least_size(position: Position, min: u32) -> u32 {
    min.max(position.backends.div_ceil(position.clients.max(1)))
}

/// The smallest rung, at least `min`, at which structural weights use 99 % of the job's backends; all backends where none
/// does. Of `position`, client and size are not used.
///
/// It depends on nothing that differs between the job's clients or changes with time, because weights only fit together
/// if every client has the same size: no holes, equal capacities.
pub fn auto_size(algorithm: Algorithm, position: Position, min: u32) -> u32 {
    choose_size(algorithm, position, min).size
}

/// As [`auto_size`], with its reasons.
pub fn choose_size(algorithm: Algorithm, position: Position, min: u32) -> Choice {
    let backends = position.backends;
    let mut tried = Vec::new();
    let least = least_size(position, min);
    for size in RUNGS.into_iter().filter(|&rung| rung >= least) {
        if size >= backends || algorithm.is_aperture() {
            return Choice { size, tried };
        }
        // Rows in ascending order of index, unlike subsets: a size that others may compute as well is fixed to the order of
        // its sums.
        let graph = Graph::of_job(algorithm, Position { size, ..position }).ascending();
        let utilization = solve(&graph, &vec![1; backends as usize], Precision::default()).utilization();
        tried.push((size, utilization));
        // Compared as whole numbers, so that no rounding of the last bit decides.
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
        // Two clients have one backend each, a third has both of the others' and its own.
        let graph = graph(3, &[&[0], &[0], &[0, 1]]);
        let solution = solve(&graph, &[1; 3], Precision::default());
        assert!(!solution.converged);
        assert_eq!(solution.iterations, 1_000);
        assert_eq!(solution.targets, [1.5, 1.5, 0.0]);
        assert!(solution.weights(&graph, 2)[1] > 0.99, "{solution:?}");
    }

    #[test]
    fn every_client_keeps_its_share_however_uneven_the_graph() {
        // The first backend's only client cannot give it twice what it has, nor can those of the second go elsewhere.
        let mut rows: Vec<&[u32]> = vec![&[0]];
        rows.extend([&[1][..]; 8]);
        let solution = solve(&graph(2, &rows), &[2, 1], Precision::default());
        assert_eq!(solution.loads, [1.0, 8.0]);
        // Here a hashed ring leaves clients to backends that others overload.
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
        // A lone client uses everything, also beyond the largest rung.
        check_auto(1, 100, 12, 128);
        check_auto(1, 10_000, 12, 10_000);
        // Fewer backends than the least: all of them.
        check_auto(10, 5, 12, 12);
        // A minimum above the largest rung.
        check_auto(10, 500, 300, 500);
    }
}
