//! A fleet: one job of client tasks before the backends of one service, and the subsets that its tasks take.

use lb_core::subset::{self, Algorithm, Position};
use lb_core::weights::Graph;

/// One job before one service, without holes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fleet {
    /// How subsets are chosen.
    pub algorithm: Algorithm,
    /// M: client tasks.
    pub clients: u32,
    /// N: backends.
    pub backends: u32,
    /// k: the wanted size of a subset.
    pub size: u32,
    /// The job's seed.
    pub seed: u64,
}

impl Fleet {
    /// Where one client stands.
    pub fn position(&self, client: u32) -> Position {
        let Self { clients, backends, size, seed, .. } = *self;
        Position { client, clients, backends, size, seed }
    }

    /// K: the size of a subset where the algorithm takes whole backends.
    pub fn wanted(&self) -> u32 {
        self.size.min(self.backends)
    }

    /// The subset of one client, best first.
    pub fn subset(&self, client: u32) -> Vec<u32> {
        let position = self.position(client);
        let length = subset::length(self.algorithm, position) as usize;
        subset::order(self.algorithm, position).take(length).collect()
    }

    /// The subsets of all clients.
    pub fn graph(&self) -> Graph {
        Graph::of_job(self.algorithm, self.position(0))
    }
}
