//! How similar the subsets of a fleet are. If all backends of a subset fail, each client with the
//! same subset loses all its backends. A misbehaving client affects all clients with subsets that
//! overlap its own subset.

use std::collections::HashSet;

use lb_core::subset::random::mix64;
use lb_core::weights::Graph;
use serde::Serialize;

/// The maximum number of shared backends that the search for the largest overlap may count.
/// Counting that many takes about a second. The limit permits a comparison of every pair of 10,000
/// clients with 20 of 1,000 backends each, or of 1,000 clients that all use the same 1,000
/// backends.
const MAX_MEETINGS: u64 = 1 << 30;

/// The part of a subset that two clients have in common, over all pairs of clients. Arcs of an
/// aperture are longer than the configured size, and their lengths differ by one backend.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Overlap {
    /// The mean over all pairs of clients, relative to the mean size of their subsets; 0 with fewer
    /// than two clients.
    pub mean: f64,
    /// The largest overlap of the compared pairs, relative to the size of the smaller subset of a
    /// pair.
    pub max: f64,
    /// How many clients were compared with every other client. The compared clients are evenly
    /// spaced. If all clients were compared, `max` is exact. `mean` is always exact.
    pub compared: u32,
}

/// The number of different sets of backends that the clients use. The function stores and compares
/// only hashes of 128 bits, not the sets.
pub fn distinct(graph: &Graph) -> u32 {
    // The hash of a subset is a sum, because a sum does not depend on the order of its terms.
    let hash = |subset: &[u32], salt| {
        subset.iter().fold(0_u64, |sum, &backend| sum.wrapping_add(mix64(&[salt, backend.into()])))
    };
    let sets: HashSet<(u64, u64, usize)> =
        graph.rows().map(|subset| (hash(subset, 1), hash(subset, 2), subset.len())).collect();
    u32::try_from(sets.len()).expect("the count is at most the number of clients")
}

pub fn overlap(graph: &Graph) -> Overlap {
    let connections = graph.connections();
    let clients = graph.clients();
    // Each backend is counted once for every pair of clients that share it.
    let shared: u64 = connections.iter().map(|&clients| pairs(clients)).sum();
    let meetings: u64 = connections.iter().map(|&clients| u64::from(clients).pow(2)).sum();
    let step = u32::try_from(meetings.div_ceil(MAX_MEETINGS))
        .expect("the number of meetings is at most 2^41")
        .max(1);
    let compared: Vec<u32> = (0..clients).step_by(step as usize).collect();
    #[expect(clippy::cast_precision_loss, reason = "a mean needs no more than 53 bits")]
    let mean = shared as f64 / pairs(clients).max(1) as f64;
    let all: u64 = connections.iter().map(|&count| u64::from(count)).sum();
    #[expect(clippy::cast_precision_loss, reason = "at most 2^25 connections")]
    let size = all.max(1) as f64 / f64::from(clients.max(1));
    Overlap {
        mean: mean / size,
        max: most_in_common(graph, &connections, &compared),
        compared: u32::try_from(compared.len()).expect("the count is at most the number of clients"),
    }
}

/// The number of pairs among `count` clients.
fn pairs(count: u32) -> u64 {
    u64::from(count) * u64::from(count.saturating_sub(1)) / 2
}

/// The largest part of a subset that one of the `compared` clients has in common with another
/// client.
fn most_in_common(graph: &Graph, connections: &[u32], compared: &[u32]) -> f64 {
    let by_backend = ClientsByBackend::new(graph, connections);
    let mut common = vec![0_u32; graph.clients() as usize];
    let sizes: Vec<u32> = graph
        .rows()
        .map(|row| u32::try_from(row.len()).expect("a subset has at most all backends"))
        .collect();
    let mut most = 0.0;
    for &client in compared {
        common.fill(0);
        for &backend in graph.row(client) {
            for &user in by_backend.of(backend) {
                common[user as usize] += 1;
            }
        }
        // A client is not compared with itself.
        common[client as usize] = 0;
        let size = sizes[client as usize];
        for (&common, &other) in common.iter().zip(&sizes).filter(|(common, _)| **common > 0) {
            most = f64::max(most, f64::from(common) / f64::from(size.min(other)));
        }
    }
    most
}

/// The clients of each backend: the inverse of the graph.
struct ClientsByBackend {
    ends: Vec<usize>,
    clients: Vec<u32>,
}

impl ClientsByBackend {
    fn new(graph: &Graph, connections: &[u32]) -> Self {
        // At first, each value is the position at which the clients of a backend start. Writing a
        // client increases the value, so at the end it is the position at which the backend's
        // clients end.
        let mut ends: Vec<usize> = Vec::with_capacity(connections.len());
        let mut before = 0;
        for &count in connections {
            ends.push(before);
            before += count as usize;
        }
        let mut clients = vec![0; before];
        for (client, row) in (0..).zip(graph.rows()) {
            for &backend in row {
                let end = &mut ends[backend as usize];
                clients[*end] = client;
                *end += 1;
            }
        }
        Self { ends, clients }
    }

    fn of(&self, backend: u32) -> &[u32] {
        let backend = backend as usize;
        let start = backend.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.clients[start..self.ends[backend]]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(backends: u32, rows: &[&[u32]]) -> Graph {
        Graph::of_rows(backends, rows.iter().map(|row| row.iter().copied()))
    }

    #[test]
    fn the_same_backends_in_another_order_are_the_same_subset() {
        assert_eq!(distinct(&graph(5, &[&[0, 1, 2], &[2, 0, 1], &[0, 1, 3], &[0, 1]])), 3);
    }

    #[test]
    fn overlaps_are_counted_over_all_pairs() {
        // The three pairs share 2, 1 and 1 of 3 backends.
        let overlap = overlap(&graph(6, &[&[0, 1, 2], &[2, 1, 3], &[2, 4, 5]]));
        assert_eq!(overlap, Overlap { mean: 4.0 / 9.0, max: 2.0 / 3.0, compared: 3 });
    }

    #[test]
    fn an_overlap_is_at_most_the_smaller_subset() {
        // Subsets of 2 and of 3 backends: the smaller one is a part of the larger one.
        let overlap = overlap(&graph(6, &[&[0, 1, 2], &[1, 2]]));
        assert_eq!(overlap, Overlap { mean: 2.0 / 2.5, max: 1.0, compared: 2 });
    }

    #[test]
    fn fewer_than_two_clients_have_no_overlap() {
        let none = |clients| Overlap { mean: 0.0, max: 0.0, compared: clients };
        assert_eq!(overlap(&graph(6, &[&[0, 1, 2]])), none(1));
        assert_eq!(overlap(&graph(6, &[])), none(0));
    }

    #[test]
    fn in_large_fleets_some_clients_are_compared_with_all() {
        // 65,536 clients all use the same 10 backends. Comparing all pairs needs 10 * 2^32 counts,
        // which is 40 times the maximum.
        let graph = Graph::of_rows(10, (0..65_536).map(|_| 0..10));
        assert_eq!(overlap(&graph), Overlap { mean: 1.0, max: 1.0, compared: 1_639 });
    }
}
