//! Which of a service's endpoints this client task uses, why not the others, and how much it sends to each.
//!
//! The subset's order is looked at from its best; holes and endpoints that the shared source does not want count as lost
//! and are replaced by the next of the order, so that one loss is one change. Only if nothing wanted remains do lame
//! ducks serve; weight 0 never does. Shares come from the subsets of the whole job, which costs as much as the job is
//! large: not for an event loop. Under a policy that ignores weights all members have the same. Knows nothing of slots or
//! tables.

mod pool;

use crate::endpoint::{Endpoint, EndpointList};
use crate::service::{Service, Size, Subset, Task};
use crate::subset::{self, Algorithm, Position};
use crate::weights;

use self::pool::{Pool, Shares, Standby};

/// Why an index of the order was taken or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MembershipVerdict {
    /// It is a member.
    Member,
    /// Its endpoint is a lame duck.
    LameDuck,
    /// Its endpoint is down.
    Down,
    /// Its endpoint has weight 0.
    Unweighted,
}

impl MembershipVerdict {
    /// The word for it in tables and JSON.
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
    /// What goes into the schedule: proportional to the share, and the endpoint's own weight where shares are the weights'.
    /// The same for all members where the policy ignores weights.
    pub weight: u64,
    /// The part of the task's connects that it gets.
    pub share: f64,
    /// How many tasks of the job use it.
    pub connections: u32,
    /// What it gets from all tasks of the job, in tasks' worth of connects.
    pub load: f64,
    /// What it would get if every endpoint that may be used got its part by weight, also those that no task uses.
    pub target: f64,
}

/// Endpoints that take connections, and that no task of a job uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unused {
    /// How many.
    pub endpoints: u32,
    /// Of how many that take connections.
    pub of: u32,
    /// The smallest size of a subset with which each endpoint has a task; `None` if that is larger than a subset can be.
    pub size: Option<u32>,
}

/// How evenly the tasks of a job connect to a list without indexes: mean over largest number of tasks of an endpoint, 1 is even.
/// Structural weights make loads even all the same, where the policy heeds them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evenness {
    /// With the indexes that the addresses give.
    pub by_address: f64,
    /// As it would be with the indexes from 0 on.
    pub dense: f64,
}

/// The endpoints that a client task uses.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Membership {
    /// The members, best first.
    pub members: Vec<Member>,
    /// Who stands in for members that are lost to this task alone: the next of the order, with the weight they get then.
    pub next: Vec<Member>,
    /// All further ones of the order, where the size follows load: whoever comes when it grows, see [`Membership::resized`].
    pub reserve: Vec<Member>,
    /// Lame ducks, the best of the order first, with the weight they get if they serve because no member does.
    pub lame_ducks: Vec<Member>,
    /// The order of the algorithm, as far as it was looked at: the index of each endpoint looked at, and what became of it. Where the size
    /// follows load that is to its end.
    pub order: Vec<(u32, MembershipVerdict)>,
    /// The size that was asked for, by the operator or by `auto`; `None` without a subset.
    pub size: Option<u32>,
    /// The sizes that `auto` looked at, see [`weights::Choice::tried`].
    pub tried: Vec<(u32, f64)>,
    /// Endpoints that no task of the job uses; `None` if each is used, or if the size follows load.
    pub unused: Option<Unused>,
    /// Of a list without indexes of which not every task uses all; `None` if the size follows load.
    pub evenness: Option<Evenness>,
}

impl Membership {
    /// The members of `service` that `task` uses, out of `endpoints`. Of several tasks of a job, ask [`Memberships`].
    pub fn of(service: &Service, task: Task, endpoints: &EndpointList) -> Self {
        Memberships::new(service, task.count, endpoints).of(task.index)
    }

    /// The same with so many members, of one whose size follows load: the first of those that it has and of its reserve, so that growing
    /// by one adds the next of the order and shrinking removes the last.
    pub fn resized(&self, size: u32) -> Self {
        let in_order: Vec<&Member> = self.members.iter().chain(&self.reserve).collect();
        let (members, reserve) = in_order.split_at(in_order.len().min(size as usize));
        let weights: f64 = members.iter().map(|member| float(member.weight)).sum();
        let capacities: f64 = members.iter().map(|member| f64::from(member.endpoint.weight)).sum();
        // Of the other tasks nobody knows how large their subsets are, so this one is reckoned with alone.
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

/// What every task of a job uses of a list. What the tasks have in common, which is nearly all of the work, is computed
/// once.
#[derive(Debug)]
pub struct Memberships<'a> {
    pool: Pool<'a>,
    /// How many tasks the job has.
    clients: u32,
    /// `None` without a subset. The client of the position means nothing.
    subset: Option<(Algorithm, Position)>,
    /// Whether the size of the position is only that of a task without load.
    follows_load: bool,
    tried: Vec<(u32, f64)>,
    shares: Shares,
    unused: Option<Unused>,
    evenness: Option<Evenness>,
}

impl<'a> Memberships<'a> {
    /// Of `service`, in a job of `count` tasks, out of `endpoints`.
    pub fn new(service: &Service, count: u32, endpoints: &'a EndpointList) -> Self {
        // Lame ducks can serve, which is better than refusing everybody; and so, perhaps, can those that are down.
        let with_weight = endpoints.as_slice().iter().filter(|endpoint| endpoint.weight > 0);
        let best = with_weight.map(|endpoint| endpoint.state).min();
        let admit = |endpoint: &Endpoint| endpoint.weight > 0 && Some(endpoint.state) == best;
        let pool = Pool::of(endpoints, admit, service.policy.is_weighted());
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
                // Sparse indexes must not ask for more members than there are endpoints.
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
        // Subsets of sizes that nobody else knows cannot be fitted to each other.
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

    /// The members that the task with this number uses.
    ///
    /// # Panics
    /// If the job has no such task.
    pub fn of(&self, index: u32) -> Membership {
        assert!(index < self.clients, "task {index} is one of {}", self.clients);
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

    /// Of a task whose size follows its load: without any, and with all that it may grow to in reserve.
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
    fn an_endpoint_that_is_down_serves_only_while_no_other_has_a_weight_and_is_no_substitute() {
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
    fn loads_are_what_all_tasks_send_together() {
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
    fn round_robin_gives_all_members_the_same_whatever_their_weights() {
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
                assert_eq!(member.endpoint, weighted.endpoint, "{subset:?}: the policy changes no subset");
                assert_eq!((member.weight, member.share), (first.weight, first.share), "{subset:?}");
            }
            assert!((equal.iter().map(|member| member.share).sum::<f64>() - 1.0).abs() < 1e-9);
            assert_eq!(equal.len(), by_weight.len());
            assert!(by_weight.iter().any(|member| member.share < first.share), "{subset:?}");
            // The other policies have the table that weights give.
            for policy in [Policy::LeastLoaded, Policy::P2c, Policy::Random] {
                assert_eq!(of(policy), by_weight, "{subset:?}");
            }
        }
    }

    #[test]
    fn no_list_gives_a_subset_more_members_than_it_can_have() {
        let list = endpoints(&"h".repeat(600));
        for algorithm in Algorithm::ALL {
            for size in [Size::Fixed(1), Size::Fixed(256), Size::Auto { min: 12 }] {
                let subset = Subset::Sized { algorithm, size };
                for count in [1, 3, 2000] {
                    let members = Membership::of(&service(subset), Task { index: 0, count }, &list).members;
                    assert!(members.len() <= subset.most_members() as usize, "{subset:?} of {count}");
                }
            }
            // Those that are known not to be bounded are not.
            let subset = Subset::Sized { algorithm, size: Size::Fixed(256) };
            let alone = Membership::of(&service(subset), Task { index: 0, count: 1 }, &list).members;
            assert_eq!(alone.len() > 256, subset.most_members() > 256, "{algorithm}");
        }
    }

    #[test]
    fn what_auto_looked_at_is_told() {
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
            // The same members as of a fixed size, at every size and in every order of sizes.
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
    fn whom_no_task_uses_is_counted_and_the_size_named_that_uses_all() {
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
                // What the members get is measured against the whole list.
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
    fn no_size_is_named_if_none_is_large_enough() {
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
                let kept = before.iter().filter(still).count();
                assert_eq!((after.len(), kept), (4, 3), "{pattern}");
            }
        }
    }
}
