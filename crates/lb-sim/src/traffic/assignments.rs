//! Assignments: a list of endpoints, and the endpoints that each task of a job uses.
//!
//! [`Memberships`] makes the decisions. This module stores only the data that a task's balancer
//! needs, because in a large fleet several lists are on their way to many tasks at the same time.
//! This module must not depend on time.

use lb_core::endpoint::{Endpoint, EndpointList};
use lb_core::membership::{Member, Membership, Memberships};
use lb_core::service::Service;
use serde::Deserialize;

/// The rule that decides which part of a task's traffic goes to each member.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ShareModel {
    /// Shares follow from the subsets of the whole job, as in the daemon: they are structural
    /// weights or, with an aperture, the weights of its arcs.
    #[default]
    Structural,
    /// Shares follow only from the members' own weights, as in balancers without data about their
    /// peers. This rule is for comparison.
    Equal,
}

/// One member of one task's subset.
#[derive(Clone, Copy, Debug)]
struct Edge {
    index: u32,
    weight: u64,
    share: f64,
}

/// The traffic that all tasks of the job together send to one backend.
#[derive(Clone, Copy, Debug, Default)]
struct BackendTotals {
    connections: u32,
    load: f64,
    target: f64,
}

/// A list, and for each task of a job, the members of the list that the task uses.
#[derive(Debug)]
pub struct JobAssignments {
    list: EndpointList,
    edges: Vec<Edge>,
    /// For each task, the position at which its edges end.
    ends: Vec<usize>,
    /// One entry for each backend, in the order of the indexes.
    columns: Vec<BackendTotals>,
    size: Option<u32>,
}

impl JobAssignments {
    /// Computes which endpoints of `list` each of the `tasks` tasks of a job uses.
    pub fn of(service: &Service, tasks: u32, list: EndpointList, shares: ShareModel) -> Self {
        let mut columns = vec![BackendTotals::default(); list.index_space() as usize];
        let mut edges = Vec::new();
        let mut ends = Vec::new();
        let mut size = None;
        let memberships = Memberships::new(service, tasks, &list);
        for task in 0..tasks {
            let membership = memberships.of(task);
            size = membership.size;
            let sum: f64 = membership.members.iter().map(|member| f64::from(member.endpoint.weight)).sum();
            // If the size of subsets follows load, `reserve` has the members that a larger subset
            // would add. The task decides how many members it uses.
            for Member { endpoint, weight, share, connections, load, target } in
                membership.members.into_iter().chain(membership.reserve)
            {
                let index = endpoint.index;
                let (weight, share, load) = match shares {
                    ShareModel::Structural => (weight, share, load),
                    ShareModel::Equal => {
                        let share = f64::from(endpoint.weight) / sum;
                        // Adds to the load from the previous tasks.
                        (endpoint.weight.into(), share, columns[index as usize].load + share)
                    }
                };
                columns[index as usize] = BackendTotals { connections, load, target };
                edges.push(Edge { index, weight, share });
            }
            ends.push(edges.len());
        }
        Self { list, edges, ends, columns, size }
    }

    /// The number of members that one task uses. If the size of its subset follows load, this is
    /// the largest number that it may use.
    ///
    /// # Panics
    /// The job has no such task.
    pub fn most(&self, task: u32) -> u32 {
        u32::try_from(self.edges_of(task).len()).expect("indexes have 32 bits")
    }

    fn edges_of(&self, task: u32) -> &[Edge] {
        let task = task as usize;
        let start = task.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.edges[start..self.ends[task]]
    }

    /// One task's assignment: its members, and a list that contains only these members, because the
    /// task's balancer needs no others. `size` is set only if the size follows load; the assignment
    /// then has only the first `size` members.
    ///
    /// # Panics
    /// The job has no such task.
    pub fn task(&self, task: u32, service: &Service, size: Option<u32>) -> (EndpointList, Membership) {
        let edges = self.edges_of(task);
        let edges = &edges[..size.map_or(edges.len(), |size| edges.len().min(size as usize))];
        let member = |edge: &Edge| {
            let BackendTotals { connections, load, target } = self.columns[edge.index as usize];
            let endpoint = self.endpoint(edge.index).clone();
            Member { endpoint, weight: edge.weight, share: edge.share, connections, load, target }
        };
        let members: Vec<Member> = edges.iter().map(member).collect();
        let used = members.iter().map(|member| member.endpoint.clone()).collect();
        let used =
            EndpointList::new(used, service.address, &[]).expect("a part of a valid list is a valid list");
        let membership = Membership { members, size: self.size, ..Membership::default() };
        (used, size.map_or_else(|| membership.clone(), |size| membership.resized(size)))
    }

    fn endpoint(&self, index: u32) -> &Endpoint {
        let endpoints = self.list.as_slice();
        let found = endpoints.binary_search_by_key(&index, |endpoint| endpoint.index);
        &endpoints[found.expect("a member has an endpoint")]
    }
}

#[cfg(test)]
mod tests {
    use lb_core::endpoint::EndpointState;
    use lb_core::service::{Size, Subset, Task};
    use lb_core::subset::Algorithm;

    use super::super::client::{self, SERVICE};
    use super::*;

    fn service(algorithm: Algorithm, size: u32) -> Service {
        Service::new("users", SERVICE, Subset::Sized { algorithm, size: Size::Fixed(size) }, 7)
    }

    /// Endpoints with these weights; an endpoint with weight 0 is a lame duck.
    fn list(weights: &[u16]) -> EndpointList {
        let endpoint = |(index, &weight): (u32, &u16)| Endpoint {
            address: client::address(index),
            index,
            weight: weight.max(1),
            state: if weight == 0 { EndpointState::LameDuck } else { EndpointState::Healthy },
            zone: None,
            agent: None,
        };
        let endpoints = (0..).zip(weights).map(endpoint).collect();
        EndpointList::new(endpoints, SERVICE, &[]).unwrap()
    }

    #[test]
    fn every_task_gets_the_assignment_of_its_daemon() {
        let list = list(&[1, 1, 3, 0, 1, 2, 2, 0, 0, 1, 1, 5, 1, 1, 1, 1, 1]);
        for algorithm in Algorithm::ALL {
            let service = service(algorithm, 5);
            let job = JobAssignments::of(&service, 9, list.clone(), ShareModel::Structural);
            for index in 0..9 {
                let theirs = Membership::of(&service, Task { index, count: 9 }, &list);
                let (used, ours) = job.task(index, &service, None);
                assert_eq!(
                    ours,
                    Membership {
                        order: Vec::new(),
                        next: Vec::new(),
                        lame_ducks: Vec::new(),
                        unused: None,
                        ..theirs
                    },
                    "{algorithm}"
                );
                let mut indexes: Vec<_> = ours.members.iter().map(|member| member.endpoint.index).collect();
                indexes.sort_unstable();
                let used: Vec<_> = used.as_slice().iter().map(|endpoint| endpoint.index).collect();
                assert_eq!(used, indexes, "{algorithm}");
            }
        }
    }

    #[test]
    fn equal_shares_follow_only_the_members_weights() {
        let service = service(Algorithm::RoundRobin, 2);
        let job = JobAssignments::of(&service, 3, list(&[2, 1, 1]), ShareModel::Equal);
        let shares = |task| {
            let members = job.task(task, &service, None).1.members;
            members.iter().map(|member| (member.endpoint.index, member.weight)).collect::<Vec<_>>()
        };
        assert_eq!([shares(0), shares(1), shares(2)], [[(0, 2), (1, 1)], [(2, 1), (0, 2)], [(1, 1), (2, 1)]]);
    }
}
