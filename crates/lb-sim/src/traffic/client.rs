//! One client task: the daemon's controller, the tables that it would write for the kernel, and its
//! connections.
//!
//! The controller is a real [`Balancer`]. The kernel's own [`pick`] decides each connect, with a
//! cursor for each CPU on which the task runs. An [`Ejector`] ejects failing backends. If the
//! policy considers errors, recent errors are added to a backend's load. The caller decides when
//! events occur. This module must not depend on any property of a backend except its index.

mod load;
mod size;
mod tables;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use lb_common::abi::{
    Cursor, DaemonState, EjectionRules, MAX_SCHEDULE_LOG2, MAX_SUBSET, NO_MEMBERS, NO_SLOT, Policy,
    RecentErrors, Rules, TableRef, Usable,
};
use lb_common::ejection::{self, Evidence};
use lb_common::load::{HalfLife, peak_of, with_another};
use lb_common::pick::{self, How, Pick, scattered};
use lb_core::balancer::{Adopted, Balancer, Fact};
use lb_core::control::ControlRules;
use lb_core::control::error_load::{MemberLoad, peak_flows};
use lb_core::cursor;
use lb_core::ejection::{Ejector, Judgement};
use lb_core::endpoint::EndpointList;
use lb_core::health::{Health, Who, Why};
use lb_core::ids::Slot;
use lb_core::limits::Limits;
use lb_core::membership::{Assignment, Membership};
use lb_core::plan::entries_by_slot;
use lb_core::rules;
use lb_core::service::Service;
use lb_core::subset::random::SplitMix64;

use super::ejections::PairCounts;
use load::Following;
use size::GrowingSize;
use tables::ClientTables;

/// A *link*: a client's connections to the backend in one slot. With traffic `requests`, a link is
/// the one connection that carries the requests. With traffic `connections`, a link consists of the
/// connections that arrivals have opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotConnections {
    /// The index of the backend.
    pub backend: u32,
    /// A number that distinguishes this link from all earlier links in this slot.
    pub serial: u32,
    pub state: LinkState,
    /// The number of requests that have not ended, or the number of open connections.
    pub flows: u32,
}

/// The state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// The connection is being established.
    Establishing,
    /// The connection can be used.
    Ready,
    /// The backend is down; the client re-establishes the connection when the backend is back.
    Lost,
    /// The connection ends with its last request, because the backend is no longer in the subset or
    /// the service.
    Draining {
        /// Whether the backend is still part of the service, and has left only the subset.
        is_moved: bool,
    },
}

impl LinkState {
    /// Returns whether the connection exists or is being established.
    pub const fn is_connected(self) -> bool {
        !matches!(self, Self::Lost)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotBackend {
    pub backend: u32,
    /// Whether a connect may choose the backend.
    pub usable: bool,
}

#[derive(Debug)]
pub struct SimulatedClient {
    /// The position of the client's job in the scenario.
    pub job: usize,
    pub index: u32,
    /// The version of the newest list that the client has received.
    pub version: u64,
    /// Draws the times of the client's arrivals, and their lifetimes.
    pub rng: SplitMix64,
    /// Draws the events of connections that carry several requests. Arrivals use only `rng`, so
    /// they are the same in all runs.
    pub lasting_rng: SplitMix64,
    /// The daemon's controller, with the scenario's clock.
    balancer: Balancer<Duration>,
    schedule: Arc<[Slot]>,
    /// The number of schedule entries of each slot.
    entries: Vec<u32>,
    /// The slots that the schedule contains, each once; `None` if there are more than
    /// [`MAX_SUBSET`].
    members: Option<Vec<u32>>,
    fallback: u32,
    rules: Rules,
    /// The cursor of each CPU.
    cursors: Vec<Cell<Cursor>>,
    /// Draws the CPU for each connect.
    scheduler: SplitMix64,
    /// The recent errors of the backend in each slot.
    errors: Vec<RecentErrors>,
    /// For the backend in each slot, whether its own report marks it as a lame duck. [`Self::pick`]
    /// reads this value.
    lame: Vec<bool>,
    /// The backends that report that they are lame ducks.
    lame_ducks: BTreeSet<u32>,
    /// The number of the newest report received from each backend.
    newest_reports: BTreeMap<u32, u32>,
    /// The backend in each slot.
    pub slots: Vec<Option<SlotBackend>>,
    /// The connections to the backend in each slot.
    pub links: Vec<Option<SlotConnections>>,
    /// Unanswered connects to the backend in each slot.
    pub pending: Vec<u32>,
    /// The ejection counts of the backend in each slot.
    pub pairs: Vec<PairCounts>,
    /// The ejection counts of backends that have lost their slots. The caller collects these
    /// counts.
    pub freed: Vec<PairCounts>,
    /// How many members were ejected when [`Self::count_ejected`] was last evaluated.
    pub ejected: u32,
    /// `None` if the client's weights do not follow load.
    following: Option<Following>,
    /// `None` if the client's size does not follow load.
    growing: Option<GrowingSize>,
    /// `None` if the service does not eject backends.
    ejector: Option<Ejector>,
    ejection_rules: EjectionRules,
    serial: u32,
    /// Whether the client has a connection to every member (traffic `requests`). Such a client
    /// chooses only members with an established connection.
    needs_links: bool,
}

impl SimulatedClient {
    /// Creates a client without backends. The lists that it receives have at most `most_backends`
    /// different addresses.
    ///
    /// # Panics
    /// There are more backends than slots.
    pub fn new(
        service: Service,
        job: (usize, &str),
        index: u32,
        cpus: u32,
        most_backends: u32,
        needs_links: bool,
    ) -> Self {
        // The limits permit one table of the maximum length, and a slot for every backend that the
        // client can ever receive.
        let limits =
            Limits { schedule_entries: 1 << MAX_SCHEDULE_LOG2, slots: most_backends, ..Limits::default() };
        let task = format!("{}/{index}", job.1);
        let start = |cpu| cursor::start(&task, &service.name, cpu, cpus);
        let cursors = (0..cpus).map(|cpu| Cell::new(Cursor { phase: 0, start: start(cpu) })).collect();
        let ejection_rules = rules::of_ejection(&service);
        let ejector = service.ejection.map(|_| Ejector::new(ejection_rules));
        let balancer = Balancer::new(vec![service], limits, Adopted::default(), Duration::ZERO);
        Self {
            job: job.0,
            index,
            version: 0,
            rng: SplitMix64::new(0),
            lasting_rng: SplitMix64::new(0),
            balancer: balancer.expect("the limits have room for one service"),
            schedule: Arc::from([]),
            entries: Vec::new(),
            members: None,
            fallback: NO_SLOT,
            rules: Rules::default(),
            cursors,
            scheduler: SplitMix64::new(u64::from(index)),
            errors: Vec::new(),
            lame: Vec::new(),
            lame_ducks: BTreeSet::new(),
            newest_reports: BTreeMap::new(),
            slots: Vec::new(),
            links: Vec::new(),
            pending: Vec::new(),
            pairs: Vec::new(),
            freed: Vec::new(),
            ejected: 0,
            following: None,
            growing: None,
            ejector,
            ejection_rules,
            serial: 0,
            needs_links,
        }
    }

    /// Applies a list and updates the tables. The caller opens and closes links.
    ///
    /// # Panics
    /// A backend's address is not the [`address`] of its index.
    pub fn apply_list(&mut self, now: Duration, version: u64, list: EndpointList, membership: Membership) {
        self.version = version;
        let idle = self.balancer.unneeded().into_iter();
        let is_idle = |slot: &Slot| self.links[slot.index()].is_none() && self.pending[slot.index()] == 0;
        let idle: BTreeSet<Slot> = idle.filter(is_idle).collect();
        for slot in &idle {
            self.freed.push(std::mem::take(&mut self.pairs[slot.index()]));
            self.errors[slot.index()] = RecentErrors::default();
            self.following.iter_mut().for_each(|following| following.forget(slot.number()));
            self.ejector.iter_mut().for_each(|ejector| ejector.clear(slot.number()));
        }
        self.balancer.handle(now, Fact::Idle(idle)).expect("releasing slots cannot fail");
        let assignment = Assignment { list: Arc::new(list), membership: Arc::new(membership) };
        let fits = self.balancer.handle(now, Fact::Endpoints(0, assignment));
        fits.expect("there are slots for all backends, and entries for all members");
        self.publish();
        self.start_slowly(now);
    }

    /// Handles a backend's report that it is a lame duck, or no longer a lame duck. [`Self::pick`]
    /// uses the report at once, and the daemon builds new tables from it. Returns false if the
    /// report is not newer than all reports received before.
    pub fn on_report(&mut self, now: Duration, backend: u32, report: u32, is_lame: bool) -> bool {
        let newest = self.newest_reports.entry(backend).or_default();
        if report <= *newest {
            return false;
        }
        *newest = report;
        if is_lame {
            self.lame_ducks.insert(backend);
        } else {
            self.lame_ducks.remove(&backend);
        }
        let verdict = |backend: &u32| (address(*backend), (Health::LameDuck, Why::Report));
        let verdicts: BTreeMap<_, _> = self.lame_ducks.iter().map(verdict).collect();
        self.balancer
            .handle(now, Fact::Verdicts(0, Who::Report, verdicts))
            .expect("only a list of endpoints can be refused");
        self.publish();
        self.start_slowly(now);
        true
    }

    /// Copies the plan into the data that [`Self::pick`] reads.
    fn publish(&mut self) {
        let plan = self.balancer.plan();
        let service = plan.services.values().next().expect("the plan has the service");
        self.schedule = Arc::clone(&service.schedule);
        self.fallback = Slot::number_or_none(service.fallback);
        self.rules = service.rules;
        let slots = plan.backends.last_key_value().map_or(0, |(slot, _)| slot.index() + 1);
        self.slots = vec![None; slots];
        for (slot, backend) in &plan.backends {
            let (backend, usable) = (index_of(backend.address), backend.usable.is_usable());
            self.slots[slot.index()] = Some(SlotBackend { backend, usable });
        }
        self.links.resize(slots, None);
        self.pending.resize(slots, 0);
        self.pairs.resize(slots, PairCounts::default());
        self.errors.resize(slots, RecentErrors::default());
        let is_lame =
            |slot: &Option<SlotBackend>| slot.is_some_and(|slot| self.lame_ducks.contains(&slot.backend));
        self.lame = self.slots.iter().map(is_lame).collect();
        let entries = entries_by_slot(&self.schedule);
        let members: Vec<u32> = entries.keys().map(|slot| slot.number()).collect();
        self.entries = vec![0; slots];
        entries.into_iter().for_each(|(slot, entries)| self.entries[slot.index()] = entries);
        self.members = (members.len() <= MAX_SUBSET as usize).then_some(members);
        if let Some(ejector) = &mut self.ejector {
            ejector.publish(Arc::clone(&self.schedule), &[], service.fallback);
            for (slot, backend) in &plan.backends {
                ejector.set_state(slot.number(), DaemonState::new(backend.usable, backend.state));
            }
        }
    }

    /// The number of schedule entries of each slot.
    pub fn entries(&self) -> &[u32] {
        &self.entries
    }

    /// Chooses the backend for the next connect or request.
    pub fn pick(&mut self, now: u32) -> Pick {
        let (links, pending, limit) = (&self.links, &self.pending, self.rules.active_limit);
        let is_at_limit = |slot: u32| {
            let flows = links[slot as usize].map_or(0, |link| link.flows) + pending[slot as usize];
            limit != 0 && flows >= limit
        };
        let trial = self.ejector.as_mut().and_then(|ejector| ejector.due_trial(now, is_at_limit));
        let length = self.schedule.len();
        let length_log2 = length.checked_ilog2().map_or(0, |log2| u8::try_from(log2).unwrap_or(u8::MAX));
        let is_listed = self.members.is_some();
        let members = if is_listed { NO_MEMBERS + 1 } else { NO_MEMBERS };
        let table = TableRef { base: 0, generation: 0, length_log2, members };
        let cpu = if trial.is_some() || self.cursors.len() == 1 {
            0
        } else {
            self.scheduler.below(self.cursors.len() as u64)
        };
        let cpu = usize::try_from(cpu).expect("the number of a CPU fits into usize");
        let tables = ClientTables { client: self };
        let (mut picked, sample) = match trial {
            Some(slot) => (Pick { how: How::Trial, slot }, 0),
            None => pick::pick(&tables, &self.cursors[cpu], table, self.rules, now),
        };
        let is_lame = |slot: u32| self.lame[slot as usize];
        // Every choice of a lame duck is diverted, including trials and the fallback.
        if self.lame.get(picked.slot as usize) == Some(&true) {
            let limit = pick::limit_of_diversion(picked.how, self.rules);
            let other = pick::other_than_lame(&tables, table, sample, limit, picked.slot, is_lame);
            picked = pick::diverted(picked, other);
        }
        self.following.iter_mut().for_each(|following| following.begin(picked.slot));
        picked
    }

    /// The client's open flows and unanswered connects to the backend in a slot.
    fn flows(&self, slot: u32) -> u32 {
        self.links[slot as usize].map_or(0, |link| link.flows) + self.pending[slot as usize]
    }

    /// Resets the count of begun flows. The mean lifetime of a flow is estimated from this count,
    /// and flows that existed before the first tick would distort the estimate.
    pub fn forget_begun(&mut self) {
        self.following.iter_mut().for_each(Following::forget_begun);
    }

    /// Makes the client's weights follow load from now on, according to `rules`.
    pub fn follow(&mut self, rules: ControlRules) {
        self.following = Some(Following::new(rules));
    }

    /// Reports the result of a connect to the backend in a slot.
    pub fn report(&mut self, slot: u32, evidence: Evidence, now: u32) -> Judgement {
        let random = scattered(self.cursors[0].get());
        let ejector = self.ejector.as_mut();
        let judgement =
            ejector.map_or(Judgement::Unchanged, |ejector| ejector.report(slot, evidence, now, random));
        if judgement == Judgement::Readmitted {
            self.errors[slot as usize] = RecentErrors::default();
        }
        judgement
    }

    /// Counts an error of a flow to the backend in a slot. For a while, the error adds to the
    /// backend's load. The daemon does two things that the planner leaves out: it delays the
    /// halving of errors while connects are rare, and it limits the number of errors when other
    /// flows end.
    pub fn count_error(&mut self, slot: u32, now: u32) {
        self.following.iter_mut().for_each(|following| following.fail(slot));
        let half_life = self.rules.error_half_life;
        if half_life != 0 {
            let half_life = HalfLife::new(half_life);
            let policy = Policy::from_u8(self.rules.policy).expect("the rules name a policy");
            let members = (0..).zip(&self.entries).map(|(slot, &entries)| MemberLoad {
                flows: self.flows(slot).into(),
                entries,
                is_usable: entries > 0,
            });
            let length = self.schedule.len();
            let peak = peak_flows(policy, length, members);
            let log2 = u8::try_from(length.ilog2()).expect("the logarithm is less than 64");
            let peak = peak_of(self.rules.policy, peak, self.entries[slot as usize], log2);
            let flows = self.flows(slot);
            let errors = &mut self.errors[slot as usize];
            *errors = with_another(*errors, flows, peak, now, half_life);
        }
    }

    /// Returns the number of members that are usable or ejected, and the number of ejected members.
    pub fn count_ejected(&self) -> (u32, u32) {
        let Some(ejector) = &self.ejector else { return (0, 0) };
        let states = (0..).zip(&self.slots).map(|(slot, _)| ejector.state(slot));
        states.fold((0, 0), |(members, ejected), state| {
            (members + u32::from(Usable::from_u8(state.usable).is_usable()), ejected + state.is_held_back())
        })
    }

    /// The number of ticks until the last of the client's ejections ends.
    pub fn longest_left(&self, now: u32) -> u32 {
        let Some(ejector) = &self.ejector else { return 0 };
        let held_back = (0..).zip(&self.slots).map(|(slot, _)| slot);
        let held_back = held_back.filter(|&slot| ejector.state(slot).is_held_back() != 0);
        let left = held_back.map(|slot| ejection::left(ejector.standing(slot).at, self.ejection_rules, now));
        left.max().unwrap_or(0)
    }

    /// Returns a serial number for the next link.
    pub fn next_serial(&mut self) -> u32 {
        self.serial = self.serial.wrapping_add(1);
        self.serial
    }

    /// The link in a slot, if it still has this serial number.
    pub fn link(&mut self, slot: u32, serial: u32) -> Option<&mut SlotConnections> {
        self.links.get_mut(slot as usize)?.as_mut().filter(|link| link.serial == serial)
    }
}

/// The address of the service. It is fictitious: nothing is ever sent.
pub const SERVICE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 80);

/// The first backend's address as a number: 10.0.0.0.
const FIRST: u32 = 0x0a00_0000;

/// The fictitious address of a backend.
pub const fn address(index: u32) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::from_bits(FIRST + index)), 80)
}

fn index_of(address: SocketAddr) -> u32 {
    let IpAddr::V4(ip) = address.ip() else { panic!("{address} is not the address of a scenario's backend") };
    ip.to_bits() - FIRST
}
