//! Which of a service's endpoints this client task uses, and why not the others.
//!
//! The subset's order is walked from its best; holes and endpoints that the shared source does not want count as lost
//! and are replaced by the next of the order, so that one loss is one change. Only if nothing wanted remains do lame
//! ducks serve; weight 0 never does. Knows nothing of slots or tables.

use lb_common::abi::BackendState;

use crate::endpoint::{Endpoint, EndpointList, EndpointState};
use crate::service::{Service, Subset, Task};
use crate::subset::{self, Position};

/// Why an index of the order was taken or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is a member.
    Member,
    /// No endpoint has this index.
    Hole,
    /// Its endpoint is a lame duck.
    LameDuck,
    /// Its endpoint has weight 0.
    Unweighted,
}

impl Verdict {
    /// The word for it in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Member => "member",
            Self::Hole => "hole",
            Self::LameDuck => "lame-duck",
            Self::Unweighted => "weight 0",
        }
    }
}

/// The endpoints that a client task uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The members, best first.
    pub members: Vec<Endpoint>,
    /// The walk that found them: each index looked at, and what became of it.
    pub walk: Vec<(u32, Verdict)>,
}

impl Membership {
    /// The members of `service` that `task` uses, out of `endpoints`.
    pub fn of(service: &Service, task: Task, endpoints: &EndpointList) -> Self {
        let wanted = Self::choose(service, task, endpoints, Endpoint::is_wanted);
        if !wanted.members.is_empty() {
            return wanted;
        }
        // Lame ducks can serve, which is better than refusing everybody.
        Self::choose(service, task, endpoints, |endpoint| endpoint.weight > 0)
    }

    fn choose(
        service: &Service,
        task: Task,
        endpoints: &EndpointList,
        admit: impl Fn(&Endpoint) -> bool,
    ) -> Self {
        let list = endpoints.as_slice();
        let (order, size): (Box<dyn Iterator<Item = u32>>, usize) = match service.subset {
            Subset::All => (Box::new(list.iter().map(|endpoint| endpoint.index)), list.len()),
            Subset::Sized { algorithm, size } => {
                let position = Position {
                    client: task.index,
                    clients: task.count,
                    backends: endpoints.index_space(),
                    size,
                    seed: service.seed,
                };
                (subset::order(algorithm, position), size as usize)
            }
        };
        let mut membership = Self { members: Vec::new(), walk: Vec::new() };
        // Bound: the order is a permutation of fewer than `MAX_INDEXES` indexes.
        for index in order {
            if membership.members.len() == size {
                break;
            }
            let verdict = match list.binary_search_by_key(&index, |endpoint| endpoint.index) {
                Err(_) => Verdict::Hole,
                Ok(at) if admit(&list[at]) => {
                    membership.members.push(list[at].clone());
                    Verdict::Member
                }
                Ok(at) if list[at].weight == 0 => Verdict::Unweighted,
                Ok(_) => Verdict::LameDuck,
            };
            membership.walk.push((index, verdict));
        }
        membership
    }
}

/// What the state word of an endpoint says that is in the source's list.
pub fn state(endpoint: &Endpoint) -> BackendState {
    match (endpoint.weight, endpoint.state) {
        (0, _) => BackendState::Unweighted,
        (_, EndpointState::LameDuck) => BackendState::LameDuck,
        (_, EndpointState::Healthy) => BackendState::Healthy,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::{Algorithm, Policy, Protocol};

    fn service(subset: Subset) -> Service {
        Service {
            name: "users".into(),
            address: "10.96.0.10:80".parse().unwrap(),
            protocol: Protocol::Tcp,
            policy: Policy::WeightedRoundRobin,
            subset,
            seed: 7,
            errno: 113,
        }
    }

    /// Endpoints by index: `h` healthy, `l` lame duck, `0` weight 0, `.` hole.
    fn endpoints(pattern: &str) -> EndpointList {
        let endpoint = |index: usize, kind: char| Endpoint {
            address: format!("10.0.{}.{}:80", index / 250, index % 250 + 1).parse().unwrap(),
            index: u32::try_from(index).unwrap(),
            weight: u16::from(kind != '0'),
            state: if kind == 'l' { EndpointState::LameDuck } else { EndpointState::Healthy },
            zone: None,
        };
        let list = pattern.chars().enumerate().filter(|(_, kind)| *kind != '.');
        let list = list.map(|(index, kind)| endpoint(index, kind)).collect();
        EndpointList::new(list, "10.96.0.10:80".parse().unwrap(), &[]).unwrap()
    }

    #[track_caller]
    fn check(subset: Subset, pattern: &str, members: &[u32]) {
        let task = Task { index: 3, count: 10 };
        let membership = Membership::of(&service(subset), task, &endpoints(pattern));
        let indexes: Vec<_> = membership.members.iter().map(|member| member.index).collect();
        assert_eq!(indexes, members, "{pattern}");
        let walked = membership.walk.iter().filter(|(_, verdict)| *verdict == Verdict::Member);
        assert_eq!(walked.map(|(index, _)| *index).collect::<Vec<_>>(), members);
    }

    #[test]
    fn all_takes_every_wanted_endpoint() {
        check(Subset::All, "hhh", &[0, 1, 2]);
        check(Subset::All, "h.0lh", &[0, 4]);
        check(Subset::All, "", &[]);
    }

    #[test]
    fn lame_ducks_serve_only_when_nothing_else_does() {
        check(Subset::All, "ll0.", &[0, 1]);
        check(Subset::All, "00", &[]);
        check(Subset::All, "ll0h", &[3]);
    }

    #[test]
    fn a_lost_member_is_replaced_by_the_next_of_the_order() {
        let subset = Subset::Sized { algorithm: Algorithm::Rocksteadier, size: 4 };
        let task = Task { index: 3, count: 10 };
        let whole = "h".repeat(20);
        let before = Membership::of(&service(subset), task, &endpoints(&whole)).members;
        for lost in &before {
            for kind in ['.', 'l', '0'] {
                let mut pattern: Vec<char> = whole.chars().collect();
                pattern[lost.index as usize] = kind;
                let pattern: String = pattern.into_iter().collect();
                let after = Membership::of(&service(subset), task, &endpoints(&pattern)).members;
                let kept = before.iter().filter(|member| after.contains(member)).count();
                assert_eq!((after.len(), kept), (4, 3), "{pattern}");
            }
        }
    }
}
