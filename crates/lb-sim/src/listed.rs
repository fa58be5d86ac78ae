//! A job, and a list of backends as a daemon reads it: some indexes may be missing, backends may
//! have weights, and some may be lame ducks.
//!
//! The daemon's own code, [`Memberships`], computes which backends the tasks use, so the result
//! equals the daemon's decision. This module must not depend on the source of the list.

use lb_core::endpoint::EndpointList;
use lb_core::membership::{Membership, Memberships};
use lb_core::service::{Service, Subset};
use lb_core::weights::Graph;
use thiserror::Error;

use crate::fleet::MAX_CONNECTIONS;

#[derive(Clone, Debug, PartialEq)]
pub struct ListedJob {
    /// The service: the algorithm and size of its subsets, and the seed.
    pub service: Service,
    /// The number of client tasks of the job.
    pub tasks: u32,
    pub list: EndpointList,
}

/// The tasks of a job have more members than fit into memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "{tasks} clients may have {members} members of this list, but at most {MAX_CONNECTIONS} can be planned \
     at once (fewer clients, or a smaller size)"
)]
pub struct TooManyMembers {
    tasks: u32,
    members: u64,
}

/// The subsets and shares of all tasks of the job.
#[derive(Clone, Debug)]
pub struct ListedSubsets {
    /// The indexes of each task's members.
    pub graph: Graph,
    /// For each task, the part of its connects that each member gets.
    pub shares: Vec<Vec<f64>>,
}

impl ListedJob {
    /// The algorithm's name; `all` if every task uses all backends.
    pub const fn algorithm(&self) -> &'static str {
        match self.service.subset {
            Subset::All => "all",
            Subset::Sized { algorithm, .. } => algorithm.name(),
        }
    }

    /// Checks that the members of all tasks fit into memory.
    ///
    /// # Errors
    /// The members do not fit.
    pub fn check_size(&self) -> Result<(), TooManyMembers> {
        let endpoints = u32::try_from(self.list.as_slice().len()).unwrap_or(u32::MAX);
        let size = self.service.subset.most_members().min(endpoints);
        let members = u64::from(self.tasks) * u64::from(size);
        if members > MAX_CONNECTIONS { Err(TooManyMembers { tasks: self.tasks, members }) } else { Ok(()) }
    }

    /// The membership of each task, in the order of the tasks.
    pub fn memberships(&self) -> impl Iterator<Item = Membership> {
        let memberships = Memberships::new(&self.service, self.tasks, &self.list);
        (0..self.tasks).map(move |task| memberships.of(task))
    }

    pub fn subsets(&self) -> ListedSubsets {
        let mut graph = Graph::new(self.list.index_space());
        let mut shares = Vec::new();
        for membership in self.memberships() {
            graph.push(membership.members.iter().map(|member| member.endpoint.index));
            shares.push(membership.members.iter().map(|member| member.share).collect());
        }
        ListedSubsets { graph, shares }
    }

    /// The weights of the endpoints that should get connections (`Endpoint::is_wanted`), in the
    /// order of indexes; 0 for other endpoints and for missing indexes.
    pub fn capacities(&self) -> Vec<u16> {
        let mut capacities = vec![0; self.list.index_space() as usize];
        for endpoint in self.list.as_slice().iter().filter(|endpoint| endpoint.is_wanted()) {
            capacities[endpoint.index as usize] = endpoint.weight;
        }
        capacities
    }
}

impl ListedSubsets {
    /// For each backend with a capacity above 0, in the order of indexes: its load divided by its
    /// capacity, if the tasks send at these rates.
    pub fn loads(&self, capacities: &[u16], rates: &[f64]) -> Vec<f64> {
        let mut loads = vec![0.0; capacities.len()];
        for ((row, shares), rate) in self.graph.rows().zip(&self.shares).zip(rates) {
            for (backend, share) in row.iter().zip(shares) {
                loads[*backend as usize] += rate * share;
            }
        }
        let wanted = loads.iter().zip(capacities).filter(|(_, capacity)| **capacity > 0);
        wanted.map(|(load, capacity)| load / f64::from(*capacity)).collect()
    }

    /// For each backend with a capacity above 0, in the order of indexes: how many tasks use it.
    pub fn connections(&self, capacities: &[u16]) -> Vec<u32> {
        let all = self.graph.connections();
        all.into_iter()
            .zip(capacities)
            .filter(|(_, capacity)| **capacity > 0)
            .map(|(count, _)| count)
            .collect()
    }
}
