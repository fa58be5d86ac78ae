//! Which of a service's endpoints this client task uses, why it does not use the other endpoints,
//! and how much it sends to each member.
//!
//! The members are the first endpoints of the subset's order. Holes, and endpoints that should get
//! no new connections according to the source, are skipped, so that the loss of one endpoint
//! changes only one member. Lame ducks are members only if no healthy endpoint has a positive
//! weight. Endpoints that are down are members only if no lame duck has a positive weight either.
//! Endpoints with weight 0 are never members.
//!
//! Shares come from the subsets of the whole job. The time to compute them is proportional to the
//! size of the job, so they must not be computed in an event loop. Under a policy that ignores
//! weights, all members have the same share.

mod pool;

use std::collections::BTreeSet;
use std::sync::Arc;

use lb_common::abi::MAX_SUBSET;

use super::subset::{self, Algorithm, Position};
use super::weights;
use crate::endpoint::{Endpoint, EndpointList, EndpointState};
use crate::service::{Service, Size, Subset, Task};

pub use self::pool::{Evenness, Unused};
use self::pool::{Job, Shares};

named! {
    /// Whether an endpoint is a member of a client task's subset; if not, the reason.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum MembershipVerdict {
        /// The endpoint is a member.
        Member = "member",
        /// The endpoint is a lame duck.
        LameDuck = "lame-duck",
        /// The endpoint is down.
        Down = "down",
        /// The endpoint has weight 0.
        Unweighted = "weight 0",
    }
}

/// An endpoint that a client task uses.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    /// The member's endpoint.
    pub endpoint: Endpoint,
    /// The member's weight for the schedule: the endpoint's own weight or, if shares come from the
    /// subsets of the whole job, a number in proportion to `share`. If the policy ignores weights,
    /// all members have the same weight.
    pub weight: u64,
    /// The part of the task's connects that the member receives.
    pub share: f64,
    /// The number of the job's tasks that use the member.
    pub connections: u32,
    /// The member's load from all tasks of the job. A load of 1 is all connects of one task.
    pub load: f64,
    /// The load that the member would have if connects were divided in proportion to weight among
    /// all endpoints that may be members, including endpoints that no task uses.
    pub target: f64,
}

/// The endpoints that a client task uses.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Membership {
    /// The members, best first.
    pub members: Vec<Member>,
    /// The possible substitutes for unavailable members: the next endpoints of the order, each with
    /// the weight that it has as a substitute.
    pub next: Vec<Member>,
    /// All further endpoints of the order, if the size follows load. They become members when the
    /// subset grows ([`Membership::resized`]).
    pub reserve: Vec<Member>,
    /// Lame ducks, which serve if no member serves: the best in the order first, with the weights
    /// that they have when they serve.
    pub lame_ducks: Vec<Member>,
    /// The examined part of the algorithm's order: the index of each examined endpoint, and the
    /// verdict on it. If the size follows load, this is the whole order.
    pub order: Vec<(u32, MembershipVerdict)>,
    /// The wanted size, from the operator, from `auto` or from load; `None` without a subset.
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
    /// `size` endpoints of the present members and the reserve. Growing by one adds the next
    /// endpoint of the order, and shrinking by one removes the last member.
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
        let next = reserve.iter().take(most_next(members.len())).map(alone).collect();
        let members = members.iter().map(alone).collect();
        let reserve = reserve.iter().map(|member| (*member).clone()).collect();
        Self { members, next, reserve, size: Some(size), ..self.clone() }
    }
}

#[expect(clippy::cast_precision_loss, reason = "weights are below 2^33")]
fn float(weight: u64) -> f64 {
    weight as f64
}

/// Every index of a list, and whether its endpoint may be a member.
#[derive(Debug)]
struct CandidatePool<'a> {
    endpoints: &'a [Endpoint],
    /// For each index: the position in `endpoints`, and whether the endpoint may be a member;
    /// `None` if no endpoint has the index.
    by_index: Vec<Option<(usize, MembershipVerdict)>>,
    /// The number of endpoints that may be members.
    admitted: usize,
    /// The total capacity of the endpoints that may be members.
    capacity: f64,
    /// Whether weights determine shares.
    is_weighted: bool,
}

impl<'a> CandidatePool<'a> {
    fn of(list: &'a EndpointList, admit: impl Fn(&Endpoint) -> bool, is_weighted: bool) -> Self {
        let endpoints = list.as_slice();
        let mut by_index = vec![None; list.index_space() as usize];
        let (mut admitted, mut capacity) = (0, 0.0);
        for (at, endpoint) in endpoints.iter().enumerate() {
            let verdict = match (endpoint.weight, endpoint.state) {
                _ if admit(endpoint) => MembershipVerdict::Member,
                (0, _) => MembershipVerdict::Unweighted,
                (_, EndpointState::Down) => MembershipVerdict::Down,
                (_, EndpointState::LameDuck | EndpointState::Healthy) => MembershipVerdict::LameDuck,
            };
            if verdict == MembershipVerdict::Member {
                admitted += 1;
                capacity += f64::from(endpoint.weight);
            }
            by_index[endpoint.index as usize] = Some((at, verdict));
        }
        Self { endpoints, by_index, admitted, capacity, is_weighted }
    }

    /// The membership of each of `clients` tasks if all tasks use all endpoints that may be
    /// members.
    fn everything(&self, clients: u32) -> Membership {
        let indexes = self.endpoints.iter().map(|endpoint| endpoint.index);
        let order: Vec<_> = indexes.filter_map(|index| Some((index, self.verdict(index)?))).collect();
        let members = self.by_weight(&order, clients);
        Membership { members, order, ..Membership::default() }
    }

    fn endpoint(&self, index: u32) -> &Endpoint {
        let (at, _) = self.by_index[index as usize].expect("a member has an endpoint");
        &self.endpoints[at]
    }

    /// The members of an order, if each of `clients` tasks uses the same members. Shares follow the
    /// weights, or are equal if the policy ignores weights.
    fn by_weight(&self, order: &[(u32, MembershipVerdict)], clients: u32) -> Vec<Member> {
        let members = order.iter().filter(|(_, verdict)| *verdict == MembershipVerdict::Member);
        let endpoints: Vec<&Endpoint> = members.map(|&(index, _)| self.endpoint(index)).collect();
        let sum: f64 = endpoints.iter().map(|endpoint| f64::from(endpoint.weight)).sum();
        let equal = pool::part(endpoints.len());
        let member = |endpoint: &Endpoint| {
            let share = if self.is_weighted { f64::from(endpoint.weight) / sum } else { equal };
            Member {
                endpoint: endpoint.clone(),
                weight: if self.is_weighted { endpoint.weight.into() } else { 1 },
                share,
                connections: clients,
                load: share * f64::from(clients),
                target: f64::from(clients) * f64::from(endpoint.weight) / self.capacity,
            }
        };
        endpoints.into_iter().map(member).collect()
    }

    fn members(&self, row: &[u32], shares: &[f64], job: &Job) -> Vec<Member> {
        let member = |(&index, &share): (&u32, &f64)| {
            let at = index as usize;
            Member {
                endpoint: self.endpoint(index).clone(),
                weight: whole(share),
                share,
                connections: job.connections[at],
                load: job.loads[at],
                target: job.targets[at],
            }
        };
        row.iter().zip(shares).map(member).collect()
    }

    /// The substitutes for these members, from this order. There are no substitutes if the members
    /// fill the kernel's list, or if the members are not healthy.
    ///
    /// A substitute gets the mean weight of the members. In an arc, weights are overlap times
    /// capacity, so a substitute gets the mean weight per unit of capacity, times its own capacity.
    fn standby(&self, members: &[Member], order: impl IntoIterator<Item = u32>, is_arc: bool) -> Standby {
        let mut standby = Standby::default();
        let room = (MAX_SUBSET as usize).saturating_sub(members.len());
        if members.is_empty() || room == 0 || !members[0].endpoint.is_wanted() {
            return standby;
        }
        let taken: BTreeSet<u32> = members.iter().map(|member| member.endpoint.index).collect();
        let mean = MeanWeight::of(members, is_arc);
        let (most_next, most_lame_ducks) = (most_next(members.len()), members.len().min(room));
        // Bound: the order is a permutation of the indexes.
        for index in order {
            if standby.next.len() == most_next && standby.lame_ducks.len() == most_lame_ducks {
                break;
            }
            let Some((at, verdict)) = self.by_index[index as usize] else { continue };
            let endpoint = &self.endpoints[at];
            let (list, most) = match verdict {
                MembershipVerdict::Member => (&mut standby.next, most_next),
                MembershipVerdict::LameDuck => (&mut standby.lame_ducks, most_lame_ducks),
                MembershipVerdict::Down | MembershipVerdict::Unweighted => continue,
            };
            if list.len() < most && !taken.contains(&index) {
                list.push(mean.member(endpoint));
            }
        }
        standby
    }
}

/// The substitutes for members, best first.
#[derive(Default)]
struct Standby {
    /// Endpoints that can replace one member each.
    next: Vec<Member>,
    /// Lame ducks, which serve if no member is available.
    lame_ducks: Vec<Member>,
}

/// The number of substitutes in addition to one per member. They are needed because substitutes may
/// be unavailable, too.
const SPARE: usize = 8;

/// The largest number of substitutes for `members` members.
const fn most_next(members: usize) -> usize {
    members + SPARE
}

/// The mean weight of a task's members, from which the weight of a substitute is computed. If
/// `is_by_capacity`, it is the mean weight per unit of capacity.
struct MeanWeight {
    weight: f64,
    share: f64,
    is_by_capacity: bool,
}

impl MeanWeight {
    #[expect(clippy::cast_precision_loss, reason = "weights are below 2^33")]
    fn of(members: &[Member], is_by_capacity: bool) -> Self {
        let unit =
            |member: &Member| if is_by_capacity { f64::from(member.endpoint.weight.max(1)) } else { 1.0 };
        let count = members.len() as f64;
        let weight = members.iter().map(|member| member.weight as f64 / unit(member)).sum::<f64>() / count;
        let share = members.iter().map(|member| member.share / unit(member)).sum::<f64>() / count;
        Self { weight, share, is_by_capacity }
    }

    fn member(&self, endpoint: &Endpoint) -> Member {
        let unit = if self.is_by_capacity { f64::from(endpoint.weight) } else { 1.0 };
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a mean of whole numbers"
        )]
        let weight = (self.weight * unit).round() as u64;
        let share = self.share * unit;
        let endpoint = endpoint.clone();
        // The sums over the job do not include the substitute, because other tasks do not know that
        // this task uses it.
        Member { endpoint, weight: weight.max(1), share, connections: 0, load: 0.0, target: 0.0 }
    }
}

/// A share in units of 2^-32, so that further arithmetic is exact. A positive share remains
/// positive.
fn whole(share: f64) -> u64 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share is between 0 and 1")]
    let whole = (share * 4_294_967_296.0).round() as u64;
    whole.max(u64::from(share > 0.0))
}

/// The memberships of all tasks of a job. Nearly all of the computation is common to the tasks, and
/// runs once.
#[derive(Debug)]
pub struct Memberships<'a> {
    pool: CandidatePool<'a>,
    /// The number of tasks in the job.
    clients: u32,
    /// `None` if the service has no subset. [`Position::client`] is ignored.
    subset: Option<(Algorithm, Position)>,
    /// Whether the size follows load. If it does, the position contains the size for a task without
    /// load.
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
        // no lame ducks either, endpoints that are down are admitted, because they may serve
        // although the source reports them as down.
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

    /// The membership of a task with a size that follows its load. The result has the members of a
    /// task without load, and all other endpoints are in reserve.
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

/// A client task that dials a service. Its membership depends only on these fields and the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Consumer {
    /// The task. This is the first field because it decides most comparisons of two consumers.
    pub task: Task,
    /// The service with the task's settings.
    pub service: Service,
}

/// A list, and one task's members of this list. Cheap to clone.
#[derive(Clone, Debug, PartialEq)]
pub struct Assignment {
    /// The list.
    pub list: Arc<EndpointList>,
    /// The task's members.
    pub membership: Arc<Membership>,
}

impl Assignment {
    /// The assignment of `task` for `service` and this list. For several tasks, use
    /// [`Assignments`].
    pub fn of(service: &Service, task: Task, list: EndpointList) -> Self {
        let membership = Arc::new(Membership::of(service, task, &list));
        Self { list: Arc::new(list), membership }
    }

    /// The largest number of members that the subset may have, if its size follows load.
    pub fn most(&self) -> usize {
        self.membership.members.len() + self.membership.reserve.len()
    }

    /// This assignment, resized to `size` members if the size of its subset follows load.
    #[must_use]
    pub fn resized(&self, size: u32) -> Self {
        Self { list: Arc::clone(&self.list), membership: Arc::new(self.membership.resized(size)) }
    }
}

/// A list, and the memberships that were computed for tasks. Cheap to clone.
///
/// The shares of one task depend on the subsets of the whole job. For a large job, this computation
/// may take seconds, so other threads than the event loop compute. A look-up needs the service and
/// the task for which a membership was computed. A result that arrives after a reload can therefore
/// not be applied to another configuration.
#[derive(Clone, Debug)]
pub struct Assignments {
    list: Arc<EndpointList>,
    memberships: Vec<(Consumer, Arc<Membership>)>,
}

impl Assignments {
    /// Creates a value with the list and no memberships.
    pub fn new(list: EndpointList) -> Self {
        Self { list: Arc::new(list), memberships: Vec::new() }
    }

    /// The list.
    pub fn list(&self) -> &Arc<EndpointList> {
        &self.list
    }

    /// Whether both have the same list object, not only equal lists. They have the same object if
    /// the list was read once for both, or after [`Self::follow`].
    pub fn is_of_the_same_reading(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.list, &other.list)
    }

    /// The assignment of a task; `None` if it was not computed.
    pub fn assignment(&self, service: &Service, task: Task) -> Option<Assignment> {
        let mut memberships = self.memberships.iter();
        let found = memberships.find(|(other, _)| other.task == task && other.service == *service);
        found.map(|(_, membership)| Assignment { list: self.list.clone(), membership: membership.clone() })
    }

    /// The membership of a consumer; `None` if it was not computed.
    pub fn membership(&self, consumer: &Consumer) -> Option<&Membership> {
        let mut memberships = self.memberships.iter();
        memberships.find(|(other, _)| other == consumer).map(|(_, membership)| &**membership)
    }

    /// If the earlier assignments have an equal list, reuses their list and memberships. Both then
    /// share one list object (see [`Self::is_of_the_same_reading`]).
    pub fn follow(&mut self, before: &Self) {
        if self.list == before.list {
            self.list = before.list.clone();
            self.take_over(before);
        }
    }

    /// Adds the memberships of other assignments, if the lists are equal.
    pub fn take_over(&mut self, other: &Self) {
        if Arc::ptr_eq(&self.list, &other.list) || self.list == other.list {
            let unknown =
                other.memberships.iter().filter(|(consumer, _)| self.membership(consumer).is_none());
            let unknown: Vec<_> = unknown.cloned().collect();
            self.memberships.extend(unknown);
        }
    }

    /// Drops the memberships of all tasks except these. Returns the tasks without a membership,
    /// grouped by job, for [`Self::compute`].
    pub fn missing(&mut self, consumers: &[Consumer]) -> Vec<Vec<Consumer>> {
        self.memberships.retain(|(consumer, _)| consumers.contains(consumer));
        let mut jobs: Vec<Vec<Consumer>> = Vec::new();
        for consumer in consumers.iter().filter(|consumer| self.membership(consumer).is_none()) {
            let is_the_job = |job: &&mut Vec<Consumer>| {
                job[0].service == consumer.service && job[0].task.count == consumer.task.count
            };
            match jobs.iter_mut().find(is_the_job) {
                Some(job) if job.contains(consumer) => {}
                Some(job) => job.push(consumer.clone()),
                None => jobs.push(vec![consumer.clone()]),
            }
        }
        jobs
    }

    /// Computes the memberships of tasks of one job. Results that the tasks share are computed
    /// once.
    pub fn compute(&mut self, job: Vec<Consumer>) {
        let Some(Consumer { task, service }) = job.first() else { return };
        let memberships = Memberships::new(service, task.count, &self.list);
        let of = |consumer: Consumer| {
            let membership = memberships.of(consumer.task.index);
            (consumer, Arc::new(membership))
        };
        self.memberships.extend(job.into_iter().map(of));
    }
}

#[cfg(test)]
mod tests;
