//! Pools of long connections after the restart of a backend, in virtual time: how fast `rebalance`
//! restores the backend's share, and how many connections it closes.
//!
//! Each task has a pool with a fixed number of connections, all of them idle. When a connection is
//! closed, the task opens another one at once. No backend is ejected: the restarted backend is
//! unavailable while it is away, and then returns. The daemon's own code decides:
//! [`lb_core::rebalance`] selects the connections to close; the tables and the kernel's choice (in
//! [`SimulatedClient`]) select the backends of new connections.

use std::time::Duration;

use lb_core::endpoint::{Endpoint, EndpointList, EndpointState};
use lb_core::membership::Memberships;
use lb_core::rebalance::{ClosingOutcome, MIN_AGE, MemberFlows, MemberState, Rebalance, RebalanceRules};
use lb_core::service::{Policy, Service, Subset, Task};
use lb_core::subset::random::SplitMix64;

use crate::traffic::client::{LinkState, SERVICE, SimulatedClient, SlotConnections, address};

/// The restarted backend is expected to reach this part of its share, summed over all pools.
pub const GOAL: f64 = 0.75;

/// The number of seconds between the opening of the pools and the stop of the backend. This is long
/// enough to show whether `rebalance` closes connections of even pools, which is wrong.
const EVEN: u64 = 3 * MIN_AGE.as_secs();

/// The number of seconds for which the backend is away.
const AWAY: u64 = 10;

/// The number of seconds for which the simulation continues after [`Pools::bound`]. In this time,
/// all connections become old enough to be closed.
const QUIET: u64 = 10 * MIN_AGE.as_secs();

/// The backend that restarts.
const RESTARTED: u32 = 0;

/// The pools of a job, all to the same backends.
#[derive(Clone, Copy, Debug)]
pub struct Pools {
    pub tasks: u32,
    /// The connections of each pool.
    pub connections: u32,
    pub backends: u32,
    pub policy: Policy,
    /// The number of CPUs on which each task dials.
    pub cpus: u32,
    pub rules: RebalanceRules,
    /// The seed for the backends of the first connections.
    pub seed: u64,
}

/// The result of a simulation. Times are in seconds since the backend's return.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Course {
    /// The connections closed before the restart.
    pub closed_before: u64,
    /// The part of its share that the restarted backend had when it returned, over all pools.
    pub at_return: f64,
    /// When the restarted backend reached [`GOAL`]; `None` if it never reached it.
    pub goal_reached: Option<u64>,
    /// When the last pool stopped refilling members ([`Rebalance::is_refilling`]); `None` if a pool
    /// is still refilling at the end.
    pub settled: Option<u64>,
    /// The connections closed since the backend stopped, and the time of the last closing.
    pub closed: u64,
    pub last_closing: u64,
    /// The part of its share that the restarted backend had at the end of the simulation.
    pub at_end: f64,
    /// The smallest and the largest part of its share that any other backend had after the return.
    pub lowest_other: f64,
    pub highest_other: f64,
}

impl Pools {
    /// The number of connections that each pool should have to each backend.
    fn share(&self) -> f64 {
        f64::from(self.connections) / f64::from(self.backends)
    }

    /// The number of seconds after its return in which the restarted backend reaches [`GOAL`] and
    /// closings end. `None` if the pools are so small that `rebalance` closes no connections even
    /// for a backend without connections. With more than 16 CPUs, the backend may reach [`GOAL`]
    /// later.
    ///
    /// Of every `backends` connections that are dialled again, one goes to the restarted backend.
    /// Each task closes connections at its part of the configured rate. In small pools it closes at
    /// most one per second, because the other backends have few connections above their shares. The
    /// task closes only connections that are old enough, so it waits at first, and again after it
    /// has closed many connections.
    pub fn bound(&self) -> Option<u64> {
        let below = f64::from(self.rules.below_thousandths) / 1000.0;
        let limit = below * self.share();
        // `rebalance` closes no connection for a smaller difference (`lb_core::rebalance`).
        if limit < 2.0 {
            return None;
        }
        let closings = (limit.ceil() + 1.0) * f64::from(self.backends);
        let per_second = self.rules.rate.of_task(self.tasks).min(1.0);
        // The cursors of many CPUs advance independently, so their choices together resemble random
        // choices.
        let chance = if self.policy == Policy::Random || self.cpus > 4 { 3.0 } else { 1.25 };
        let seconds = chance * closings / per_second + 3.0 * MIN_AGE.as_secs_f64();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "positive, and below 2^53"
        )]
        Some(seconds.ceil() as u64)
    }

    /// The number of decisions of a simulation. The CPU time is proportional to this number.
    pub fn cost(&self) -> u64 {
        let seconds = EVEN + AWAY + self.bound().unwrap_or(0) + QUIET;
        seconds.saturating_mul(self.tasks.into()).saturating_mul(self.backends.into())
    }

    /// Simulates the restart of one backend.
    pub fn play(&self) -> Course {
        let mut fleet: Vec<Pool> = (0..self.tasks).map(|index| Pool::open(self, index)).collect();
        let part = |fleet: &[Pool], backend| {
            let open: u32 = fleet.iter().map(|pool| pool.open_to(backend)).sum();
            f64::from(open) / (self.share() * f64::from(self.tasks))
        };
        let tick = |fleet: &mut Vec<Pool>, second| -> u64 {
            fleet.iter_mut().map(|pool| u64::from(pool.tick(second))).sum()
        };
        let closed_before = (0..EVEN).map(|second| tick(&mut fleet, second)).sum();
        let change = |fleet: &mut Vec<Pool>, second, is_away| {
            fleet.iter_mut().for_each(|pool| pool.restart(second, is_away));
        };
        change(&mut fleet, EVEN, true);
        let closed = (EVEN..EVEN + AWAY).map(|second| tick(&mut fleet, second)).sum();
        change(&mut fleet, EVEN + AWAY, false);
        let at_return = part(&fleet, RESTARTED);
        let mut course = Course {
            closed_before,
            at_return,
            goal_reached: None,
            settled: None,
            closed,
            last_closing: 0,
            at_end: at_return,
            lowest_other: f64::INFINITY,
            highest_other: 0.0,
        };
        for passed in 0..self.bound().unwrap_or(0) + QUIET {
            let closed = tick(&mut fleet, EVEN + AWAY + passed);
            course.closed += closed;
            if closed > 0 {
                course.last_closing = passed;
            }
            course.at_end = part(&fleet, RESTARTED);
            if course.at_end >= GOAL {
                course.goal_reached.get_or_insert(passed);
            }
            if fleet.iter().any(|pool| pool.rebalance.is_refilling()) {
                course.settled = None;
            } else {
                course.settled.get_or_insert(passed);
            }
            for other in (0..self.backends).filter(|backend| *backend != RESTARTED) {
                let other = part(&fleet, other);
                course.lowest_other = course.lowest_other.min(other);
                course.highest_other = course.highest_other.max(other);
            }
        }
        course
    }
}

/// One task and its connections.
struct Pool {
    client: SimulatedClient,
    rebalance: Rebalance,
    /// The slot of each connection, and the second in which it was dialled; the oldest connection
    /// is first.
    connections: Vec<(u32, u64)>,
    /// Whether the restarted backend is away.
    is_away: bool,
    reports: u32,
}

impl Pool {
    fn open(pools: &Pools, index: u32) -> Self {
        let service = Service { policy: pools.policy, ..Service::new("users", SERVICE, Subset::All, 0) };
        let endpoint = |index| Endpoint {
            address: address(index),
            index,
            weight: 1,
            state: EndpointState::Healthy,
            zone: None,
            agent: None,
        };
        let endpoints: Vec<Endpoint> = (0..pools.backends).map(endpoint).collect();
        let list = EndpointList::new(endpoints, SERVICE, &[]).expect("the addresses differ");
        let membership = Memberships::new(&service, pools.tasks, &list).of(index);
        let mut client = SimulatedClient::new(service, (0, "job"), index, pools.cpus, pools.backends, false);
        client.apply_list(Duration::ZERO, 1, list, membership);
        // These choices represent earlier connects of the task, which have advanced the cursors.
        let mut rng = SplitMix64::new(pools.seed.wrapping_mul(0x1_0001).wrapping_add(index.into()));
        for _ in 0..rng.below(1024) {
            let _ = client.pick(0);
        }
        let task = Task { index, count: pools.tasks };
        let rebalance = Rebalance::new(pools.rules, task);
        let mut pool = Self { client, rebalance, connections: Vec::new(), is_away: false, reports: 0 };
        (0..pools.connections).for_each(|_| pool.dial(0));
        pool
    }

    fn dial(&mut self, second: u64) {
        let slot = self.client.pick(0).slot;
        let backend = self.client.slots[slot as usize].expect("the slot has a backend").backend;
        let none = SlotConnections { backend, serial: 0, state: LinkState::Ready, flows: 0 };
        self.client.links[slot as usize].get_or_insert(none).flows += 1;
        self.connections.push((slot, second));
    }

    /// Closes at most `most` connections of `slot`, the oldest first, and opens the same number.
    /// Closes only connections that were dialled before the second `before`. Returns the number of
    /// closed connections.
    fn close(&mut self, slot: u32, before: u64, most: u32, second: u64) -> u32 {
        let mut closed = 0;
        self.connections.retain(|(at, begun)| {
            let is_closed = *at == slot && *begun < before && closed < most;
            closed += u32::from(is_closed);
            !is_closed
        });
        if let Some(link) = &mut self.client.links[slot as usize] {
            link.flows -= closed;
        }
        (0..closed).for_each(|_| self.dial(second));
        closed
    }

    /// Each slot that has a backend, with the index of the backend.
    fn slots(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        (0..).zip(&self.client.slots).filter_map(|(slot, backend)| Some((slot, (*backend)?.backend)))
    }

    fn open_to(&self, backend: u32) -> u32 {
        let slot = self.slots().find(|(_, other)| *other == backend);
        slot.and_then(|(slot, _)| self.client.links[slot as usize]).map_or(0, |link| link.flows)
    }

    /// If `is_away` is true, the restarted backend stops, and its connections end. If `is_away` is
    /// false, the backend returns.
    fn restart(&mut self, second: u64, is_away: bool) {
        self.is_away = is_away;
        self.reports += 1;
        self.client.on_report(Duration::from_secs(second), RESTARTED, self.reports, is_away);
        let slot = self.slots().find(|(_, backend)| *backend == RESTARTED);
        if let Some((slot, _)) = slot.filter(|_| is_away) {
            self.close(slot, u64::MAX, u32::MAX, second);
        }
    }

    fn tick(&mut self, second: u64) -> u32 {
        let member = |(slot, backend): (u32, u32)| MemberFlows {
            address: address(backend),
            entries: self.client.entries()[slot as usize],
            open: self.client.links[slot as usize].map_or(0, |link| link.flows),
            state: if self.is_away && backend == RESTARTED { MemberState::Held } else { MemberState::Warm },
            is_at_limit: false,
        };
        let members: Vec<MemberFlows> = self.slots().map(member).collect();
        let now = Duration::from_secs(second);
        let Some(closing) = self.rebalance.tick(now, &members, false) else { return 0 };
        let slot = self.slots().find(|(_, backend)| address(*backend) == closing.address);
        let old = second.saturating_sub(MIN_AGE.as_secs());
        let closed = slot.map_or(0, |(slot, _)| self.close(slot, old, closing.most, second));
        self.rebalance.handle_outcome(now, ClosingOutcome::Closed(closed));
        closed
    }
}
