//! Which of a service's endpoints this client task uses, why it does not use the others, and how
//! much it sends to each.
//!
//! The members are the first endpoints of the subset's order. Holes, and endpoints that should get
//! no new connections according to the source, are skipped, so that the loss of one endpoint
//! changes only one member. Lame ducks are members only if no healthy endpoint has a weight, and
//! endpoints that are down only if no lame duck has a weight either; endpoints with weight 0 are
//! never members.
//!
//! Shares come from the subsets of the whole job. The time to compute them is proportional to the
//! size of the job, so they must not be computed in an event loop. Under a policy that ignores
//! weights, all members have the same share.

mod pool;

use crate::endpoint::{Endpoint, EndpointList};
use crate::service::{Service, Size, Subset, Task};
use crate::subset::{self, Algorithm, Position};
use crate::weights;

use self::pool::{CandidatePool, Shares, Standby};

/// Whether the endpoint at an index of the order is a member, and if not, why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MembershipVerdict {
    /// Its endpoint is a member.
    Member,
    /// Its endpoint is a lame duck.
    LameDuck,
    /// Its endpoint is down.
    Down,
    /// Its endpoint has weight 0.
    Unweighted,
}

impl MembershipVerdict {
    /// Its name in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Member => "member",
            Self::LameDuck => "lame-duck",
            Self::Down => "down",
            Self::Unweighted => "weight 0",
        }
    }
}

/// An endpoint that a client task uses.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    /// The endpoint.
    pub endpoint: Endpoint,
    /// The weight for the schedule: the endpoint's own weight if shares follow the weights, else
    /// proportional to the share. If the policy ignores weights, all members have the same weight.
    pub weight: u64,
    /// The part of the task's connects that it receives.
    pub share: f64,
    /// The number of the job's tasks that use it.
    pub connections: u32,
    /// Its load from all tasks of the job. The unit is the connects of one task.
    pub load: f64,
    /// The load that it would have if all endpoints that may be members, including those that no
    /// task uses, shared the connects in proportion to their weights.
    pub target: f64,
}

/// Endpoints that accept connections but that no task of a job uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unused {
    /// The number of such endpoints.
    pub endpoints: u32,
    /// The number of all endpoints that accept connections.
    pub of: u32,
    /// The smallest size at which every endpoint is used by some task; `None` if no size is large
    /// enough.
    pub size: Option<u32>,
}

/// How evenly the tasks of a job connect to a list without indexes: the mean number of tasks per
/// endpoint divided by the largest number; 1 is even. Even if this ratio is below 1, structural
/// weights make the loads even, unless the policy ignores weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evenness {
    /// The evenness with the indexes that are derived from the addresses.
    pub by_address: f64,
    /// The evenness with the indexes 0, 1, 2 and so on.
    pub dense: f64,
}

/// The endpoints that a client task uses.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Membership {
    /// The members, best first.
    pub members: Vec<Member>,
    /// The possible substitutes for members that only this task has lost: the next endpoints of the
    /// order, with their weights as substitutes.
    pub next: Vec<Member>,
    /// All further endpoints of the order, if the size follows load. They become members when the
    /// subset grows ([`Membership::resized`]).
    pub reserve: Vec<Member>,
    /// Lame ducks, which serve if no member does: the best in the order first, with the weights
    /// that they have when they serve.
    pub lame_ducks: Vec<Member>,
    /// The examined part of the algorithm's order: the index of each examined endpoint, and the
    /// verdict on it. If the size follows load, this is the whole order.
    pub order: Vec<(u32, MembershipVerdict)>,
    /// The wanted size, from the operator or from `auto`; `None` without a subset.
    pub size: Option<u32>,
    /// The sizes that `auto` tried ([`weights::Choice::tried`]).
    pub tried: Vec<(u32, f64)>,
    /// Endpoints that no task of the job uses; `None` if every endpoint is used, or if the size
    /// follows load.
    pub unused: Option<Unused>,
    /// How evenly tasks connect to a list without indexes; `None` if the list has indexes, if the
    /// job has one task, if every task uses all endpoints, or if the size follows load.
    pub evenness: Option<Evenness>,
}

impl Membership {
    /// The membership of `task` for `service` and `endpoints`. For several tasks of a job, use
    /// [`Memberships`].
    pub fn of(service: &Service, task: Task, endpoints: &EndpointList) -> Self {
        Memberships::new(service, task.count, endpoints).of(task.index)
    }

    /// This membership with another size, if its size follows load: the members are the first
    /// `size` endpoints of its members and its reserve. Growing by one adds the next endpoint of
    /// the order, and shrinking by one removes the last member.
    pub fn resized(&self, size: u32) -> Self {
        let in_order: Vec<&Member> = self.members.iter().chain(&self.reserve).collect();
        let (members, reserve) = in_order.split_at(in_order.len().min(size as usize));
        let weights: f64 = members.iter().map(|member| float(member.weight)).sum();
        let capacities: f64 = members.iter().map(|member| f64::from(member.endpoint.weight)).sum();
        // The sizes of the other tasks' subsets are unknown, so the shares consider only this task.
        let alone = |member: &&Member| {
            let share = float(member.weight) / weights;
            let target = f64::from(member.endpoint.weight) / capacities;
            Member { share, load: share, target, ..(*member).clone() }
        };
        let next = reserve.iter().take(pool::most_next(members.len())).map(alone).collect();
        let members = members.iter().map(alone).collect();
        let reserve = reserve.iter().map(|member| (*member).clone()).collect();
        Self { members, next, reserve, size: Some(size), ..self.clone() }
    }
}

#[expect(clippy::cast_precision_loss, reason = "weights are below 2^33")]
fn float(weight: u64) -> f64 {
    weight as f64
}

/// The memberships of all tasks of a job. Nearly all of the computation is common to the tasks, and
/// runs once.
#[derive(Debug)]
pub struct Memberships<'a> {
    pool: CandidatePool<'a>,
    /// The number of tasks in the job.
    clients: u32,
    /// `None` if the service has no subset. The client of the position is not used.
    subset: Option<(Algorithm, Position)>,
    /// Whether the size follows load. Then the position contains the size that a task without load
    /// has.
    follows_load: bool,
    tried: Vec<(u32, f64)>,
    shares: Shares,
    unused: Option<Unused>,
    evenness: Option<Evenness>,
}

impl<'a> Memberships<'a> {
    /// The memberships for `service` and `endpoints`, in a job of `count` tasks.
    pub fn new(service: &Service, count: u32, endpoints: &'a EndpointList) -> Self {
        // If no endpoint is healthy, lame ducks are admitted, because they can serve. If there are
        // no lame ducks either, endpoints that are down are admitted: they may serve after all.
        let with_weight = endpoints.as_slice().iter().filter(|endpoint| endpoint.weight > 0);
        let best = with_weight.map(|endpoint| endpoint.state).min();
        let admit = |endpoint: &Endpoint| endpoint.weight > 0 && Some(endpoint.state) == best;
        let pool = CandidatePool::of(endpoints, admit, service.policy.is_weighted());
        let Subset::Sized { algorithm, size } = service.subset else {
            let (subset, tried, shares) = (None, Vec::new(), Shares::Weights);
            let (follows_load, unused, evenness) = (false, None, None);
            return Self { pool, clients: count, subset, follows_load, tried, shares, unused, evenness };
        };
        let mut position = Position {
            client: 0,
            clients: count,
            backends: endpoints.index_space(),
            size: 0,
            seed: service.seed,
        };
        let mut tried = Vec::new();
        position.size = match size {
            Size::Fixed(size) => size,
            Size::Band(band) => band.min,
            Size::Auto { min } => {
                // The size is chosen by the number of endpoints, so that gaps between indexes do
                // not make it larger.
                let dense = Position { backends: endpoints.count(), ..position };
                let choice = weights::choose_size(algorithm, dense, min);
                tried = choice.tried;
                choice.size
            }
        };
        let band = match size {
            Size::Band(band) => Some(band),
            Size::Fixed(_) | Size::Auto { .. } => None,
        };
        // With a load band, a task does not know the sizes of other subsets, so its shares cannot
        // be fitted to them.
        let shares = if band.is_some() { Shares::Weights } else { pool.shares(algorithm, position) };
        let unused = if band.is_some() { None } else { pool.unused(algorithm, position, &shares) };
        let evenness =
            endpoints.has_address_indexes().then(|| pool.evenness(algorithm, position, &shares)).flatten();
        Self {
            pool,
            clients: count,
            subset: Some((algorithm, position)),
            follows_load: band.is_some(),
            tried,
            shares,
            unused,
            evenness,
        }
    }

    /// The membership of the task with this number.
    ///
    /// # Panics
    /// If the job has no such task.
    pub fn of(&self, index: u32) -> Membership {
        assert!(index < self.clients, "the job has no task {index}, only {} tasks", self.clients);
        let Some((algorithm, position)) = self.subset else {
            let membership = self.pool.everything(self.clients);
            let order = membership.order.iter().map(|(index, _)| *index).collect::<Vec<_>>();
            let Standby { next, lame_ducks } = self.pool.standby(&membership.members, order, false);
            return Membership { next, lame_ducks, ..membership };
        };
        let position = Position { client: index, ..position };
        if self.follows_load {
            return self.of_load(algorithm, position);
        }
        let order = self.pool.order(algorithm, position);
        let members = match &self.shares {
            Shares::Weights => self.pool.by_weight(&order, self.clients),
            Shares::Equal(job) => {
                let (row, shares) = self.pool.equal(algorithm, position);
                self.pool.members(&row, &shares, job)
            }
            Shares::Solution(graph, solution, job) => {
                let row = graph.row(index);
                self.pool.members(row, solution.weights(graph, index), job)
            }
        };
        let whole = subset::order(algorithm, position);
        let Standby { next, lame_ducks } = self.pool.standby(&members, whole, algorithm.is_aperture());
        let size = Some(position.size);
        let (tried, unused, evenness) = (self.tried.clone(), self.unused, self.evenness);
        Membership {
            members,
            next,
            lame_ducks,
            order,
            size,
            tried,
            unused,
            evenness,
            ..Membership::default()
        }
    }

    /// The membership of a task with a size that follows its load. It has the members of a task
    /// without load, and all other endpoints are in reserve.
    fn of_load(&self, algorithm: Algorithm, position: Position) -> Membership {
        let all = Position { size: position.backends, ..position };
        let order = self.pool.order(algorithm, all);
        let members = self.pool.by_weight(&order, 1);
        let membership = Membership { members, order, ..Membership::default() }.resized(position.size);
        let whole = subset::order(algorithm, position);
        let Standby { lame_ducks, .. } = self.pool.standby(&membership.members, whole, false);
        Membership { lame_ducks, ..membership }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::EndpointState;
    use crate::load_band::LoadBand;
    use crate::service::Policy;

    fn service(subset: Subset) -> Service {
        service_by(Policy::WeightedRoundRobin, subset)
    }

    fn service_by(policy: Policy, subset: Subset) -> Service {
        Service { policy, ..Service::new("users", "10.96.0.10:80".parse().unwrap(), subset, 7) }
    }

    /// Endpoints by index: `h` healthy, `l` lame duck, `d` down, `0` weight 0, `.` hole.
    fn endpoints(pattern: &str) -> EndpointList {
        let endpoint = |index: usize, kind: char| Endpoint {
            address: format!("10.0.{}.{}:80", index / 250, index % 250 + 1).parse().unwrap(),
            index: u32::try_from(index).unwrap(),
            weight: u16::from(kind != '0'),
            state: match kind {
                'l' => EndpointState::LameDuck,
                'd' => EndpointState::Down,
                _ => EndpointState::Healthy,
            },
            zone: None,
            agent: None,
        };
        let list = pattern.chars().enumerate().filter(|(_, kind)| *kind != '.');
        let list = list.map(|(index, kind)| endpoint(index, kind)).collect();
        EndpointList::new(list, "10.96.0.10:80".parse().unwrap(), &[]).unwrap()
    }

    #[track_caller]
    fn check(subset: Subset, pattern: &str, members: &[u32]) {
        let task = Task { index: 3, count: 10 };
        let membership = Membership::of(&service(subset), task, &endpoints(pattern));
        let indexes: Vec<_> = membership.members.iter().map(|member| member.endpoint.index).collect();
        assert_eq!(indexes, members, "{pattern}");
        let taken = membership.order.iter().filter(|(_, verdict)| *verdict == MembershipVerdict::Member);
        assert_eq!(taken.map(|(index, _)| *index).collect::<Vec<_>>(), members);
    }

    #[test]
    fn subset_all_contains_every_healthy_endpoint_with_a_weight() {
        check(Subset::All, "hhh", &[0, 1, 2]);
        check(Subset::All, "h.0lh", &[0, 4]);
        check(Subset::All, "", &[]);
    }

    #[test]
    fn lame_ducks_are_members_only_without_healthy_endpoints() {
        check(Subset::All, "ll0.", &[0, 1]);
        check(Subset::All, "00", &[]);
        check(Subset::All, "ll0h", &[3]);
    }

    #[test]
    fn a_down_endpoint_is_a_last_resort_and_never_a_substitute() {
        check(Subset::All, "dd0.", &[0, 1]);
        check(Subset::All, "dl0d", &[1]);
        check(Subset::All, "dlhd", &[2]);
        for subset in
            [Subset::All, Subset::Sized { algorithm: Algorithm::Rocksteadier, size: Size::Fixed(2) }]
        {
            let task = Task { index: 3, count: 10 };
            let membership = Membership::of(&service(subset), task, &endpoints("hdlhdhdlhd"));
            let others = membership.next.iter().chain(&membership.lame_ducks).chain(&membership.members);
            assert!(others.map(|member| member.endpoint.state).all(|state| state != EndpointState::Down));
            assert!(!membership.lame_ducks.is_empty());
        }
    }

    #[test]
    fn a_load_is_the_sum_over_all_tasks() {
        let list = endpoints("hhhhh.hhhlhh0hhhhhhh");
        let policies = [Policy::WeightedRoundRobin, Policy::RoundRobin];
        for (algorithm, policy) in Algorithm::ALL.into_iter().flat_map(|a| policies.map(|p| (a, p))) {
            let service = service_by(policy, Subset::Sized { algorithm, size: Size::Fixed(4) });
            let memberships = Memberships::new(&service, 10, &list);
            let tasks: Vec<_> = (0..10).map(|index| memberships.of(index)).collect();
            let mut sent = vec![(0, 0.0); list.index_space() as usize];
            for member in tasks.iter().flat_map(|task| &task.members) {
                let (connections, load) = &mut sent[member.endpoint.index as usize];
                *connections += 1;
                *load += member.share;
            }
            for (task, index) in tasks.iter().zip(0..) {
                assert_eq!(*task, Membership::of(&service, Task { index, count: 10 }, &list), "{algorithm}");
                assert!((task.members.iter().map(|member| member.share).sum::<f64>() - 1.0).abs() < 1e-9);
                for member in &task.members {
                    let (connections, load) = sent[member.endpoint.index as usize];
                    assert_eq!(member.connections, connections, "{algorithm}");
                    assert!((member.load - load).abs() < 1e-9, "{algorithm}: {member:?}");
                    assert!(member.weight > 0);
                }
            }
        }
    }

    #[test]
    fn round_robin_gives_all_members_equal_shares() {
        let weighted: Vec<Endpoint> = endpoints("hhhhh.hhhlhh0hhhhhhh").as_slice().to_vec();
        let weighted: Vec<Endpoint> = (1..)
            .zip(weighted)
            .map(|(n, endpoint)| Endpoint { weight: endpoint.weight * n * n, ..endpoint })
            .collect();
        let list = EndpointList::new(weighted, "10.96.0.10:80".parse().unwrap(), &[]).unwrap();
        let sized = |algorithm| Subset::Sized { algorithm, size: Size::Fixed(4) };
        let subsets = std::iter::once(Subset::All).chain(Algorithm::ALL.map(sized));
        for (subset, count) in subsets.flat_map(|subset| [1, 10].map(|count| (subset, count))) {
            let task = Task { index: 0, count };
            let of = |policy| Membership::of(&service_by(policy, subset), task, &list).members;
            let (equal, by_weight) = (of(Policy::RoundRobin), of(Policy::WeightedRoundRobin));
            let first = equal.first().unwrap().clone();
            for (member, weighted) in equal.iter().zip(&by_weight) {
                assert_eq!(
                    member.endpoint, weighted.endpoint,
                    "{subset:?}: the policy must not change the subset"
                );
                assert_eq!((member.weight, member.share), (first.weight, first.share), "{subset:?}");
            }
            assert!((equal.iter().map(|member| member.share).sum::<f64>() - 1.0).abs() < 1e-9);
            assert_eq!(equal.len(), by_weight.len());
            assert!(by_weight.iter().any(|member| member.share < first.share), "{subset:?}");
            // The other policies have the table that follows the weights.
            for policy in [Policy::LeastLoaded, Policy::P2c, Policy::Random] {
                assert_eq!(of(policy), by_weight, "{subset:?}");
            }
        }
    }

    #[test]
    fn a_subset_never_exceeds_its_maximum_number_of_members() {
        let list = endpoints(&"h".repeat(600));
        for algorithm in Algorithm::ALL {
            for size in [Size::Fixed(1), Size::Fixed(256), Size::Auto { min: 12 }] {
                let subset = Subset::Sized { algorithm, size };
                for count in [1, 3, 2000] {
                    let members = Membership::of(&service(subset), Task { index: 0, count }, &list).members;
                    assert!(members.len() <= subset.most_members() as usize, "{subset:?} of {count}");
                }
            }
            // `most_members` is above the size only for subsets that really have more members.
            let subset = Subset::Sized { algorithm, size: Size::Fixed(256) };
            let alone = Membership::of(&service(subset), Task { index: 0, count: 1 }, &list).members;
            assert_eq!(alone.len() > 256, subset.most_members() > 256, "{algorithm}");
        }
    }

    #[test]
    fn auto_reports_the_sizes_that_it_tried() {
        let service = service(Subset::Sized { algorithm: Algorithm::Random, size: Size::Auto { min: 12 } });
        let membership = Membership::of(&service, Task { index: 0, count: 40 }, &endpoints(&"h".repeat(200)));
        let (chosen, before) = membership.tried.split_last().unwrap();
        assert_eq!(membership.size, Some(chosen.0));
        assert!(chosen.1 >= 0.99 && !before.is_empty() && before.iter().all(|(_, part)| *part < 0.99));
        let alone = Membership::of(&service, Task { index: 0, count: 1 }, &endpoints(&"h".repeat(20)));
        assert_eq!((alone.members.len(), alone.tried), (20, Vec::new()));
    }

    #[test]
    fn a_subset_that_follows_load_grows_and_shrinks_along_its_order() {
        let list = endpoints("hhhhh.hhhlhh0hhhhhhhhhhhhhhhh");
        let band = LoadBand { min: 3, ..LoadBand::default() };
        let sized = |size| Subset::Sized { algorithm: Algorithm::Random, size };
        for policy in [Policy::WeightedRoundRobin, Policy::RoundRobin] {
            let task = Task { index: 3, count: 10 };
            let idle = Membership::of(&service_by(policy, sized(Size::Band(band))), task, &list);
            let indexes = |membership: &Membership| {
                membership.members.iter().map(|member| member.endpoint.index).collect::<Vec<_>>()
            };
            // The members are those of a fixed size, at every size and in every order of sizes.
            let mut membership = idle.clone();
            for size in (3..=26).chain((3..26).rev()).chain([20, 5, 40]) {
                membership = membership.resized(size);
                let fixed = Membership::of(&service_by(policy, sized(Size::Fixed(size))), task, &list);
                assert_eq!(indexes(&membership), indexes(&fixed), "{size}");
                let sum: f64 = membership.members.iter().map(|member| member.share).sum();
                assert!(
                    (sum - 1.0).abs() < 1e-9 && membership.members.iter().all(|member| member.weight == 1)
                );
                let next = |membership: &Membership| {
                    membership.next.iter().map(|member| member.endpoint.index).collect::<Vec<_>>()
                };
                assert_eq!(next(&membership), next(&fixed), "{size}");
                assert_eq!(membership.members.len() + membership.reserve.len(), 26, "{size}");
            }
            assert_eq!(membership.resized(3), idle);
        }
    }

    #[test]
    fn auto_counts_endpoints_and_not_indexes() {
        let auto = Subset::Sized { algorithm: Algorithm::Rocksteadier, size: Size::Auto { min: 12 } };
        let dense = endpoints(&"h".repeat(300)).as_slice().to_vec();
        let sparse: Vec<Endpoint> =
            dense.iter().map(|one| Endpoint { index: one.index * 218, ..one.clone() }).collect();
        let sparse = EndpointList::new(sparse, "10.96.0.10:80".parse().unwrap(), &[]).unwrap();
        assert_eq!((sparse.count(), sparse.index_space()), (300, 65_183));
        let of = |list: &EndpointList| {
            let membership = Memberships::new(&service(auto), 300, list).of(7);
            (membership.size, membership.tried.clone(), membership.members.len(), membership.unused)
        };
        assert_eq!(of(&sparse), of(&endpoints(&"h".repeat(300))));
        assert_eq!(of(&sparse).0, Some(12));
    }

    #[test]
    fn unused_endpoints_are_counted_with_the_size_that_uses_all() {
        let list = endpoints("hhhhhlhhhhhhhh.hhhhhhhh0hhhhhhhhhhhhhhhhhhhh");
        for (algorithm, policy) in
            Algorithm::ALL.into_iter().flat_map(|a| [Policy::Random, Policy::RoundRobin].map(|p| (a, p)))
        {
            let of = |size| {
                let subset = Subset::Sized { algorithm, size: Size::Fixed(size) };
                let memberships = Memberships::new(&service_by(policy, subset), 3, &list);
                let tasks: Vec<_> = (0..3).map(|index| memberships.of(index)).collect();
                let used: std::collections::BTreeSet<u32> =
                    tasks.iter().flat_map(|task| &task.members).map(|member| member.endpoint.index).collect();
                assert!(tasks.iter().all(|task| task.unused == tasks[0].unused));
                // The members' load is compared with a target over the whole list.
                let target = 3.0 / 41.0;
                assert!(tasks[0].members.iter().all(|member| (member.target - target).abs() < 1e-12));
                (u32::try_from(used.len()).unwrap(), tasks[0].unused)
            };
            let (used, unused) = of(4);
            if algorithm.is_aperture() {
                // Arcs cover all endpoints.
                assert_eq!((used, unused), (41, None), "{algorithm}");
                continue;
            }
            let Unused { endpoints, of: all, size } = unused.unwrap();
            assert_eq!((endpoints + used, all), (41, 41), "{algorithm}");
            let size = size.unwrap();
            assert_eq!(of(size), (41, None), "{algorithm}: {size}");
            assert!(of(size - 1).1.is_some(), "{algorithm}: {size} is the smallest");
        }
    }

    #[test]
    fn no_size_is_proposed_if_none_is_large_enough() {
        let subset = Subset::Sized { algorithm: Algorithm::Rocksteadier, size: Size::Fixed(4) };
        let membership =
            Membership::of(&service(subset), Task { index: 0, count: 2 }, &endpoints(&"h".repeat(600)));
        assert_eq!(membership.unused, Some(Unused { endpoints: 592, of: 600, size: None }));
        let alone =
            Membership::of(&service(subset), Task { index: 0, count: 1 }, &endpoints(&"h".repeat(40)));
        assert_eq!(alone.unused, Some(Unused { endpoints: 36, of: 40, size: Some(40) }));
        let by_weight = alone.members.iter().map(|member| member.load / member.target);
        assert!(by_weight.into_iter().all(|load| (load - 10.0).abs() < 1e-9));
    }

    #[test]
    fn a_lost_member_is_replaced_by_the_next_of_the_order() {
        let subset = Subset::Sized { algorithm: Algorithm::Rocksteadier, size: Size::Fixed(4) };
        let task = Task { index: 3, count: 10 };
        let whole = "h".repeat(20);
        let before = Membership::of(&service(subset), task, &endpoints(&whole)).members;
        for lost in &before {
            for kind in ['.', 'l', '0'] {
                let mut pattern: Vec<char> = whole.chars().collect();
                pattern[lost.endpoint.index as usize] = kind;
                let pattern: String = pattern.into_iter().collect();
                let after = Membership::of(&service(subset), task, &endpoints(&pattern)).members;
                let still = |member: &&Member| after.iter().any(|now| now.endpoint == member.endpoint);
                let retained = before.iter().filter(still).count();
                assert_eq!((after.len(), retained), (4, 3), "{pattern}");
            }
        }
    }
}
