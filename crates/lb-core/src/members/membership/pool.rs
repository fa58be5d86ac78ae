//! Numbers for the endpoints that may be members: the order of each task, the shares of the members
//! (by weight, equal, or from the subsets of the whole job), and how the job uses the endpoints.

use std::collections::BTreeSet;

use lb_common::abi::MAX_SUBSET;

use super::{CandidatePool, MembershipVerdict};
use crate::members::subset::{self, Algorithm, Position};
use crate::members::weights::{self, Graph, Precision, Solution};

/// Endpoints that accept connections but that no task of a job uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unused {
    /// The number of unused endpoints.
    pub endpoints: u32,
    /// The number of all endpoints that accept connections.
    pub of: u32,
    /// The smallest size at which every endpoint is used by some task; `None` if no size is large
    /// enough.
    pub size: Option<u32>,
}

/// How evenly the tasks of a job connect to the endpoints of a list without indexes: the mean
/// number of tasks per endpoint divided by the largest number of tasks of one endpoint; 1 is even.
/// Even if this ratio is below 1, structural weights make the loads even, unless the policy ignores
/// weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evenness {
    /// The evenness with the indexes that are derived from the addresses.
    pub by_address: f64,
    /// The evenness with the indexes 0, 1, 2 and so on.
    pub dense: f64,
}

/// How members' shares are computed.
#[derive(Debug)]
pub enum Shares {
    /// The endpoints' own weights (or equal parts, if the policy ignores weights). They are used if
    /// the job has one task, if every task uses all endpoints, or if sizes follow load.
    Weights,
    /// Equal parts for the members of each task, because the policy ignores weights.
    Equal(Job),
    /// The subsets of all tasks, and the weights that make the loads of endpoints even.
    Solution(Graph, Solution, Job),
}

impl CandidatePool<'_> {
    /// The prefix of one client's order that contains its members, or the whole order if it
    /// contains too few members.
    pub fn order(&self, algorithm: Algorithm, position: Position) -> Vec<(u32, MembershipVerdict)> {
        let mut left = subset::length(algorithm, position);
        let mut order = Vec::new();
        // Bound: the order is a permutation of the indexes.
        for index in subset::order(algorithm, position) {
            if left == 0 {
                break;
            }
            let Some(verdict) = self.verdict(index) else { continue };
            left -= u32::from(verdict == MembershipVerdict::Member);
            order.push((index, verdict));
        }
        order
    }

    /// Determines how the shares of all tasks are computed.
    pub fn shares(&self, algorithm: Algorithm, position: Position) -> Shares {
        let is_whole = position.wanted() as usize >= self.admitted;
        if is_whole || position.clients == 1 {
            Shares::Weights
        } else if !self.is_weighted {
            Shares::Equal(self.job(algorithm, position))
        } else {
            self.solution(algorithm, position)
        }
    }

    /// The verdict on an index; `None` if no endpoint has this index.
    pub fn verdict(&self, index: u32) -> Option<MembershipVerdict> {
        self.by_index[index as usize].map(|(_, verdict)| verdict)
    }

    fn is_admitted(&self, index: u32) -> bool {
        self.verdict(index) == Some(MembershipVerdict::Member)
    }

    /// Endpoints that no task uses, given the shares of all tasks.
    pub fn unused(&self, algorithm: Algorithm, position: Position, shares: &Shares) -> Option<Unused> {
        let used = match shares {
            Shares::Weights => self.admitted.min(subset::length(algorithm, position) as usize),
            Shares::Equal(job) | Shares::Solution(_, _, job) => {
                job.connections.iter().filter(|connections| **connections > 0).count()
            }
        };
        let of = self.count();
        let endpoints = of - u32::try_from(used).unwrap_or(of);
        let size = || {
            if algorithm.depends_on_size() {
                self.least_size_by_size(algorithm, position)
            } else {
                self.least_size_by_order(algorithm, position)
            }
        };
        (endpoints > 0).then(|| Unused { endpoints, of, size: size() })
    }

    /// The number of endpoints that may be members.
    fn count(&self) -> u32 {
        u32::try_from(self.admitted).expect("a list has at most 65,536 endpoints")
    }

    /// How evenly the tasks connect, and how evenly they would connect with dense indexes; `None`
    /// if the job has one task, or every task uses all endpoints.
    pub fn evenness(&self, algorithm: Algorithm, position: Position, shares: &Shares) -> Option<Evenness> {
        let (Shares::Equal(job) | Shares::Solution(_, _, job)) = shares else { return None };
        let dense = Graph::of_job(algorithm, Position { backends: self.count(), ..position }).connections();
        let mean_over_largest = |connections: &[u32]| {
            let largest = connections.iter().max().copied().unwrap_or(0);
            f64::from(connections.iter().sum::<u32>()) / (f64::from(self.count()) * f64::from(largest.max(1)))
        };
        Some(Evenness { by_address: mean_over_largest(&job.connections), dense: mean_over_largest(&dense) })
    }

    /// The smallest size at which every endpoint that may be a member is used, if the order is the
    /// same for all sizes. Each endpoint has a best rank in the orders of all tasks; the size is
    /// the largest of these ranks.
    fn least_size_by_order(&self, algorithm: Algorithm, position: Position) -> Option<u32> {
        let mut first = vec![MAX_SUBSET + 1; self.by_index.len()];
        for client in 0..position.clients {
            let order = subset::order(algorithm, Position { client, ..position });
            let order = order.filter(|index| self.is_admitted(*index));
            for (rank, index) in (1..=MAX_SUBSET).zip(order) {
                let first = &mut first[index as usize];
                *first = rank.min(*first);
            }
        }
        let admitted = (0..).zip(first).filter(|(index, _)| self.is_admitted(*index));
        admitted.map(|(_, rank)| rank).max().filter(|rank| *rank <= MAX_SUBSET)
    }

    /// The smallest size at which every endpoint that may be a member is used, if each size has an
    /// order of its own.
    fn least_size_by_size(&self, algorithm: Algorithm, position: Position) -> Option<u32> {
        let least = self.count().div_ceil(position.clients).max(position.size + 1);
        (least..=MAX_SUBSET).find(|size| {
            let mut used = BTreeSet::new();
            for client in 0..position.clients {
                let position = Position { client, size: *size, ..position };
                used.extend(self.edges(algorithm, position).map(|(index, _)| index));
            }
            used.len() == self.admitted
        })
    }

    /// The indexes of one client's members, with the initial weights for the solution: 1 or, in the
    /// arc of an aperture, the overlap. A member outside the arc, in place of an endpoint that may
    /// not be a member, gets the mean overlap.
    fn edges(&self, algorithm: Algorithm, position: Position) -> impl Iterator<Item = (u32, f64)> {
        let length = subset::length(algorithm, position);
        let overlaps: Vec<f64> = match subset::overlaps(algorithm, position) {
            #[expect(clippy::cast_precision_loss, reason = "an overlap is at most the number of clients")]
            Some(overlaps) => overlaps.map(|overlap| overlap as f64).collect(),
            None => Vec::new(),
        };
        let mean = if overlaps.is_empty() { 1.0 } else { overlaps.iter().sum::<f64>() / f64::from(length) };
        let order = subset::order(algorithm, position);
        let edges = order.zip(overlaps.into_iter().chain(std::iter::repeat(mean)));
        edges.filter(|(index, _)| self.is_admitted(*index)).take(length as usize)
    }

    /// The subsets of the whole job, and the weights that make the loads even.
    fn solution(&self, algorithm: Algorithm, position: Position) -> Shares {
        let mut graph = Graph::new(position.backends);
        let mut start = Vec::new();
        for client in 0..position.clients {
            let edges = self.edges(algorithm, Position { client, ..position });
            graph.push(edges.map(|(index, weight)| {
                start.push(weight);
                index
            }));
        }
        let solution = weights::solve_from(&graph, start, &self.capacities(), Precision::default());
        let job = Job {
            connections: graph.connections(),
            loads: solution.loads.clone(),
            targets: self.targets(position.clients),
        };
        Shares::Solution(graph, solution, job)
    }

    /// The load of each index from all tasks of a job, if each task divides its traffic equally
    /// among its members.
    fn job(&self, algorithm: Algorithm, position: Position) -> Job {
        let space = self.by_index.len();
        let targets = self.targets(position.clients);
        let mut job = Job { connections: vec![0; space], loads: vec![0.0; space], targets };
        for client in 0..position.clients {
            let (row, shares) = self.equal(algorithm, Position { client, ..position });
            for (index, share) in row.into_iter().zip(shares) {
                job.connections[index as usize] += 1;
                job.loads[index as usize] += share;
            }
        }
        job
    }

    /// The load that each index would have from all tasks if loads were proportional to weights.
    fn targets(&self, clients: u32) -> Vec<f64> {
        let target = |capacity: u16| f64::from(clients) * f64::from(capacity) / self.capacity;
        self.capacities().into_iter().map(target).collect()
    }

    /// One client's members, and equal shares.
    pub fn equal(&self, algorithm: Algorithm, position: Position) -> (Vec<u32>, Vec<f64>) {
        let row: Vec<u32> = self.edges(algorithm, position).map(|(index, _)| index).collect();
        let shares = vec![part(row.len()); row.len()];
        (row, shares)
    }

    /// The capacity of the endpoint at each index; 0 for an index that may not be a member.
    fn capacities(&self) -> Vec<u16> {
        let capacity = |found: &Option<(usize, MembershipVerdict)>| match found {
            Some((at, MembershipVerdict::Member)) => self.endpoints[*at].weight,
            _ => 0,
        };
        self.by_index.iter().map(capacity).collect()
    }
}

/// Sums over all tasks of a job, indexed by endpoint index.
#[derive(Debug)]
pub struct Job {
    pub connections: Vec<u32>,
    pub loads: Vec<f64>,
    pub targets: Vec<f64>,
}

/// One of `count` equal parts of the whole.
pub fn part(count: usize) -> f64 {
    1.0 / f64::from(u32::try_from(count.max(1)).unwrap_or(u32::MAX))
}
