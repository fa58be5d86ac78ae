//! The cost of a change of a fleet: the part of each client's subset that the client drops.
//!
//! For each dropped member, a client closes a connection, and usually opens a connection to another
//! backend.

use lb_core::weights::Graph;

use crate::fleet::Fleet;

/// The parts of their subsets that clients drop because of a change. Only clients that exist both
/// before and after the change are included.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Churn {
    /// The mean part of a subset that is dropped.
    pub mean: f64,
    /// The largest dropped part of one subset.
    pub worst: f64,
    /// The number of clients that drop their whole subset.
    pub replaced: u32,
}

/// The churn from the subsets of one fleet to the subsets of another fleet.
pub fn churn(old: &Graph, new: &Graph) -> Churn {
    let indexes = old.connections().len().max(new.connections().len());
    // For each backend: one more than the number of the last client that has the backend in its new
    // subset.
    let mut seen = vec![0; indexes];
    let (mut sum, mut worst, mut replaced) = (0.0, 0.0, 0);
    for ((old, new), mark) in old.rows().zip(new.rows()).zip(1_u32..) {
        for &backend in new {
            seen[backend as usize] = mark;
        }
        let gone = old.iter().filter(|&&backend| seen[backend as usize] != mark).count();
        let dropped = super::part(gone, old.len());
        sum += dropped;
        worst = f64::max(worst, dropped);
        replaced += u32::from(gone > 0 && gone == old.len());
    }
    let clients = old.clients().min(new.clients());
    Churn { mean: sum / f64::from(clients.max(1)), worst, replaced }
}

/// The mean part of a subset that clients must drop if the load is even before and after the
/// change.
///
/// S backends remain, that is, exist both before and after the change. Before the change, a
/// client's K connections are spread evenly over N backends, so K S/N of them go to remaining
/// backends. After the change, K' connections are spread evenly over N' backends, so K' S/N' of
/// them go to remaining backends. The client can retain at most the smaller of these two numbers,
/// so it drops at least the part 1 - min(1, (K'/N') / (K/N)) S/N.
///
/// The minimum is 1/(N+1) if one backend is added. It is 0 if the size grows, or if only the number
/// of clients changes. With an algorithm that spreads load unevenly, clients may drop less.
pub fn minimum(old: &Fleet, new: &Fleet) -> f64 {
    let stay = f64::from(old.backends.min(new.backends));
    let before = f64::from(old.wanted()) / f64::from(old.backends);
    let after = f64::from(new.wanted()) / f64::from(new.backends);
    1.0 - stay * before.min(after) / f64::from(old.wanted())
}

#[cfg(test)]
mod tests {
    use lb_core::subset::Algorithm;

    use super::*;

    #[test]
    fn churn_counts_only_clients_that_stay() {
        let graph = |rows: &[&[u32]]| {
            let mut graph = Graph::new(9);
            rows.iter().for_each(|row| graph.push(row.iter().copied()));
            graph
        };
        let old = graph(&[&[0, 1], &[2, 3], &[4, 5]]);
        let new = graph(&[&[1, 0], &[2, 6], &[7, 8], &[0, 1]]);
        assert_eq!(churn(&old, &new), Churn { mean: 0.5, worst: 1.0, replaced: 1 });
        assert_eq!(churn(&new, &old), Churn { mean: 0.5, worst: 1.0, replaced: 1 });
        assert_eq!(churn(&Graph::new(9), &old), Churn { mean: 0.0, worst: 0.0, replaced: 0 });
    }

    #[track_caller]
    fn check(old: (u32, u32), new: (u32, u32), expected: f64) {
        let fleet = |(backends, size)| Fleet {
            algorithm: Algorithm::Rocksteadier,
            clients: 100,
            backends,
            size,
            seed: 0,
        };
        let minimum = minimum(&fleet(old), &fleet(new));
        assert!((minimum - expected).abs() < 1e-12, "{minimum}");
    }

    #[test]
    fn the_minimum_churn_follows_from_evenness() {
        check((100, 20), (101, 20), 1.0 / 101.0);
        check((100, 20), (200, 20), 0.5);
        // A removed backend loses all its connections.
        check((100, 20), (99, 20), 0.01);
        check((100, 20), (100, 21), 0.0);
        check((100, 20), (100, 15), 0.25);
        // Every client has all backends before and after the change.
        check((10, 20), (11, 20), 0.0);
        // Every client has all backends before the change, and only some after it.
        check((20, 20), (40, 20), 0.5);
    }
}
