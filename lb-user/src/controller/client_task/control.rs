//! Weights that change without a new list: weights that follow load, and slow start. Each service's
//! [`Control`] receives the state of the service's [`Row`] and returns factors; the factors become
//! a fact for the balancer.
//!
//! Once a second, the controller evaluates the reports of the backends of all client tasks. Then it
//! rebuilds the tables that differ most from the wanted weights, up to the maximum number of tables
//! per tick.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lb_common::abi::{Outcome, Outcomes};
use lb_common::ending::Ending;
use lb_core::balancer::{Balancer, Fact, Row};
use lb_core::control::by_address::{ByAddress, Next};
use lb_core::control::factor::{Factor, Factors};
use lb_core::control::flows::{Activity, Lives, OfLate};
use lb_core::control::publication::{Proposal, within_budget};
use lb_core::control::{
    Control, ControlRules, ControlSnapshot, Hold, Look, MemberObservation, ReceivedReport, SeenRow, Switch,
};
use lb_core::health::Health;
use lb_core::ids::{BackendRef, ServiceIndex, Slot};
use lb_core::service::Protocol;
use lb_kernel::Tables;
use lb_report::client::senders::Senders;
use lb_view::load;

use super::errors::error_decay;
use super::{ClientTask, ServiceTask};
use crate::config::{ClientService, ProbeConfig};
use crate::controller::Controller;
use crate::controller::probe_targets::{Probing, name_of};

/// The [`Control`] of one service, with the counts that it needs.
pub struct Controlled {
    control: Control,
    lives: Lives,
    activity: Activity,
    /// The number of flows that had begun by the last tick; `None` before the first tick.
    begun: Option<u64>,
    counted: ByAddress<BackendFlows>,
    /// The state of the service's [`Row`] at the last tick.
    look: Look,
    /// The CLOCK_MONOTONIC time of the last tick.
    looked: Duration,
    /// The number of tables that were built because of the control law or slow start.
    tables: u64,
    /// Whether an operator has set the switch since this [`Control`] was created.
    is_switched: bool,
}

/// The flows to one backend, as of the last count.
struct BackendFlows {
    at: BackendRef,
    begun: u64,
    failed: u64,
    of_late: OfLate,
}

/// The number of ticks between two counts of failed flows. Failed flows are counted rarely, because
/// each count reads half a kilobyte per backend and CPU.
const COUNTED_TICKS: u32 = 5;

impl Controlled {
    fn new(rules: ControlRules) -> Self {
        Self {
            control: Control::new(rules),
            lives: Lives::default(),
            activity: Activity::default(),
            begun: None,
            counted: ByAddress::default(),
            look: Look::default(),
            looked: Duration::ZERO,
            tables: 0,
            is_switched: false,
        }
    }
}

impl Controller {
    /// Adapts weights to the reports, and rebuilds at most the maximum number of tables per tick.
    pub fn follow_load(&mut self, now: Instant) {
        let mut proposals: Vec<((usize, usize), Proposal)> = Vec::new();
        let Self { clients, probing, ticks, .. } = self;
        for (number, client_task) in clients.tasks.iter_mut().enumerate() {
            let member_reports = MemberReports::of(client_task, probing);
            let report_of = |position, member| member_reports.report_of(position, member);
            // The client's number is added, so that clients count their failed flows in different
            // ticks.
            let tick = ticks.wrapping_add(u32::try_from(number).unwrap_or_default());
            client_task.weigh_errors(now);
            client_task.count_reported_errors(report_of, now);
            let proposed = client_task.tick_controls(tick, report_of, now);
            proposals.extend(proposed.into_iter().map(|(position, proposal)| ((number, position), proposal)));
        }
        for ((number, position), proposal) in within_budget(proposals) {
            self.clients.tasks[number].publish_factors(position, proposal.factors, now);
        }
        self.settle_if_needed(now);
        // The regions of replaced tables are free only when no program reads them any more.
        self.wait_for_readers();
        self.store_loads(now);
    }
}

/// The reports of a client task's backends: one list for each service, in the order of the table's
/// members.
struct MemberReports(Vec<Vec<Option<ReceivedReport>>>);

impl MemberReports {
    /// Collects reports for services with weights that follow load, or with a policy that counts
    /// reported errors as load. The reports are locked for only one service at a time, so that the
    /// thread that receives reports does not wait long.
    fn of(client_task: &ClientTask, probing: &Probing) -> Self {
        let services = client_task.client.services.iter().enumerate();
        let of_service = |(position, configured): (usize, &ClientService)| {
            let mut reports = Vec::new();
            let service = &configured.service;
            if (service.control.law.is_some() || error_decay(service).is_some())
                && let Some(probe) = configured.probe.as_ref().filter(|probe| probe.is_by_report())
                && let Some(listener) = probing.listener()
            {
                let members = client_task.balancer().weights(position);
                listener.look(|senders, _, _| {
                    reports = members
                        .iter()
                        .map(|(address, _)| one(*address, service.protocol, probe, senders))
                        .collect();
                });
            }
            reports
        };
        Self(services.map(of_service).collect())
    }

    fn report_of(&self, position: usize, member: usize) -> Option<ReceivedReport> {
        *self.0.get(position)?.get(member)?
    }
}

/// The newest report of a backend; `None` if no report has arrived.
fn one(
    address: SocketAddr,
    protocol: Protocol,
    probe: &ProbeConfig,
    senders: &Senders<Duration>,
) -> Option<ReceivedReport> {
    let (_, reported) = senders.get(name_of(protocol, address))?;
    let report = reported.report()?;
    // The report was sent half a round trip before it arrived.
    let transit = reported.round_trip().unwrap_or_default() / 2;
    let at = report.received.saturating_sub(transit);
    Some(ReceivedReport { load: report.load, at, interval: probe.interval })
}

impl ClientTask {
    /// Creates a [`Control`] for each service with a control law or slow start. For a service name,
    /// `snapshot` returns the stored learnt weights and their age.
    pub fn make_controls(
        &mut self,
        snapshot: impl Fn(&str) -> Option<(ControlSnapshot, Duration)>,
        now: Instant,
    ) {
        for position in 0..self.services.len() {
            let service = &self.client.services[position].service;
            let (rules, known) = (service.control, self.services[position].control.take());
            if rules.law.is_none() && rules.slow_start.is_none() {
                continue;
            }
            let controlled = match known {
                Some(mut known) => {
                    known.control.set_rules(rules);
                    known
                }
                None => {
                    let mut new = Controlled::new(rules);
                    if let Some((snapshot, age)) = snapshot(&service.name) {
                        new.control.adopt(&snapshot, age);
                        new.control.resume_slow_starts(&snapshot.starting, self.clock.monotonic(now));
                    }
                    new
                }
            };
            let factors = controlled.control.in_force().clone();
            self.services[position].control = Some(controlled);
            // A new balancer has no factors yet.
            self.apply_factors(position, factors, now);
        }
    }

    /// Applies stored learnt weights that could not be read at the start. A switch that an operator
    /// has set in the meantime has precedence. Factors that were learnt in the meantime are newer,
    /// so they also have precedence, unless the stored switch freezes the weights or turns the
    /// control law off.
    pub fn adopt_late(
        &mut self,
        snapshot: impl Fn(&str) -> Option<(ControlSnapshot, Duration)>,
        now: Instant,
    ) {
        for position in 0..self.services.len() {
            let Some(controlled) = &mut self.services[position].control else { continue };
            let name = &self.client.services[position].service.name;
            let Some((snapshot, age)) = snapshot(name) else { continue };
            let has_factors = controlled.control.wanted().iter().any(|(_, factor)| factor != Factor::ONE);
            if !(controlled.is_switched || has_factors && snapshot.switch == Switch::On) {
                controlled.control.adopt(&snapshot, age);
            }
            let at = self.clock.monotonic(now);
            let factors = controlled.control.resume_slow_starts(&snapshot.starting, at);
            self.apply_factors(position, factors, now);
        }
    }

    /// Runs the control laws on the current reports and counts, once per tick. Returns each
    /// proposal that differs enough to justify a new table, with the position of its service.
    /// `report` returns a member's report; its arguments are the positions of the service and of
    /// the member in the table. `tick` is the number of this tick.
    pub fn tick_controls(
        &mut self,
        tick: u32,
        report: impl Fn(usize, usize) -> Option<ReceivedReport>,
        now: Instant,
    ) -> Vec<(usize, Proposal)> {
        if self.services.iter().all(|service| service.control.is_none()) {
            return Vec::new();
        }
        let now = self.clock.monotonic(now);
        if tick.is_multiple_of(COUNTED_TICKS) {
            self.count_failed();
        }
        self.count_begun();
        let Self { client, balancer, datapath, services, .. } = self;
        let tables = datapath.tables();
        let mut proposals = Vec::new();
        for (position, service) in services.iter_mut().enumerate() {
            let Some(controlled) = &mut service.control else { continue };
            for counted in controlled.counted.values_mut() {
                counted.of_late.tick(float(tables.active(counted.at.slot)));
            }
            let limit = client.services[position].service.active_limit;
            let report = |member| report(position, member);
            let Some(look) = controlled.look(position, limit, balancer, tables, report) else { continue };
            (controlled.look, controlled.looked) = (look, now);
            let proposal = controlled.control.tick(now, &controlled.look);
            proposals.extend(proposal.map(|proposal| (position, proposal)));
        }
        proposals
    }

    /// If slow start is configured, begins slow start for members that are new or available again,
    /// and ends slow start for members that are no longer available.
    pub fn start_slowly(&mut self, now: Instant) {
        let at = self.clock.monotonic(now);
        for position in 0..self.services.len() {
            let (Some(controlled), Some(row)) =
                (&mut self.services[position].control, self.balancer.row(position))
            else {
                continue;
            };
            let members = row.members.iter().map(|(address, _)| (*address, is_available(row, *address)));
            if let Some(factors) = controlled.control.arrange(at, members, row.is_panic) {
                self.publish_factors(position, factors, now);
            }
        }
    }

    /// Makes the table of the service at this position follow these factors.
    pub fn publish_factors(&mut self, position: usize, factors: Factors, now: Instant) {
        let is_new = self.apply_factors(position, factors.clone(), now);
        if let Some(controlled) = &mut self.services[position].control {
            controlled.control.publish(factors);
            controlled.tables += u64::from(is_new);
        }
    }

    /// Applies factors to a table. Returns whether the table changed. If the maps already match the
    /// rest of the plan, the table is written to the maps at once, without a new plan. A new plan
    /// computes all other services and backends again, which takes too much CPU time: weights that
    /// follow load change tables often.
    fn apply_factors(&mut self, position: usize, factors: Factors, now: Instant) -> bool {
        let is_new =
            self.balancer.handle(now, Fact::Factors(position, factors)).expect("only a list can be refused");
        if !is_new {
            return false;
        }
        let table = self.balancer.schedule(position).filter(|_| self.is_settled());
        let is_done = table.is_some_and(|(index, table)| self.datapath.reschedule(index, Arc::clone(table)));
        if !is_done {
            self.settled = None;
        }
        true
    }

    /// Whether a service with weights that follow load has had a flow recently, according to the
    /// ticks of its [`Control`].
    pub fn is_in_use(&self, position: usize) -> bool {
        let control = self.services[position].control.as_ref();
        control.is_some_and(|controlled| controlled.activity.is_used())
    }

    /// For each service with a [`Control`], counts the flows that have begun since the last tick,
    /// and the flows that are open.
    fn count_begun(&mut self) {
        let tables = self.datapath.tables();
        let mut followed: Vec<(ServiceIndex, &mut Controlled)> = Vec::new();
        for ((_, index, _), service) in self.balancer.services().zip(&mut self.services) {
            if let Some(controlled) = &mut service.control
                && !controlled.counted.is_empty()
            {
                followed.push((index, controlled));
            }
        }
        followed.sort_by_key(|(index, _)| *index);
        let indexes: Vec<ServiceIndex> = followed.iter().map(|(index, _)| *index).collect();
        // If the read fails, the next tick reads again; `sample` logs the error.
        let Ok(outcomes) = tables.outcomes_of(&indexes) else { return };
        for ((_, controlled), outcomes) in followed.into_iter().zip(outcomes) {
            let begun = flows_begun(&outcomes);
            let open: u64 = controlled.counted.values().map(|counted| tables.active(counted.at.slot)).sum();
            // Flows that existed before the first count began at an unknown time.
            if let Some(before) = controlled.begun.replace(begun) {
                let new = begun.saturating_sub(before);
                controlled.lives.tick(float(new), float(open));
                controlled.activity.tick(new + open > 0);
            }
        }
    }

    /// For each member of a service with a control law, counts the failed flows and all flows.
    fn count_failed(&mut self) {
        let mut slots = BTreeMap::new();
        for (position, service) in self.services.iter_mut().enumerate() {
            let Some(controlled) = &mut service.control else { continue };
            let mut before = std::mem::take(&mut controlled.counted);
            if controlled.control.rules().law.is_none() {
                continue;
            }
            for (address, _) in self.balancer.weights(position) {
                if let Some(at) = self.balancer.slot(position, *address) {
                    let known = before.remove(address).filter(|known| known.at == at);
                    slots.insert(at.slot, (position, *address, at, known));
                }
            }
        }
        let order: Vec<Slot> = slots.keys().copied().collect();
        let _ = self.datapath.tables().visit_counts(&order, |slot, counts| {
            let Some((position, address, at, known)) = slots.remove(&slot) else { return };
            let Some(controlled) = &mut self.services[position].control else { return };
            let failed = Ending::ALL.into_iter().filter(|ending| ending.is_error());
            let failed: u64 = failed.map(|ending| counts.sums.endings[ending as usize]).sum();
            let begun = counts.sums.chosen;
            // The first count includes all earlier flows, so it is only the baseline for the next
            // count.
            let known = known.unwrap_or(BackendFlows { at, begun, failed, of_late: OfLate::default() });
            let mut of_late = known.of_late;
            let since = |now: u64, before: u64| float(now.saturating_sub(before));
            of_late.add(since(begun, known.begun), since(failed, known.failed));
            controlled.counted.insert(address, BackendFlows { at, begun, failed, of_late });
        });
    }

    /// Sets the switch of a service's control law, as an operator has requested. Returns the
    /// earlier switch; `None` if this client's service has no control law.
    pub fn switch_control(&mut self, service: &str, switch: Switch) -> Option<Switch> {
        let position = self.position(service)?;
        let control = self.services[position].control.as_mut();
        let controlled = control.filter(|controlled| controlled.control.rules().law.is_some())?;
        let before = controlled.control.switch();
        controlled.control.set_switch(switch);
        controlled.is_switched = true;
        Some(before)
    }

    /// The name and learnt weights of each service, to be stored for the next daemon.
    pub fn snapshots(&self, now: Instant) -> impl Iterator<Item = (&str, ControlSnapshot)> {
        let now = self.clock.monotonic(now);
        self.named().filter_map(move |(name, service)| {
            let controlled = service.control.as_ref()?;
            let has_law = controlled.control.rules().law.is_some();
            let snapshot = controlled.control.snapshot(now);
            (has_law || !snapshot.starting.is_empty()).then_some((name, snapshot))
        })
    }

    /// Whether a member has begun or ended a slow start since the last call because it became
    /// available or unavailable.
    pub fn take_slow_starts_changed(&mut self) -> bool {
        let mut has_changed = false;
        for controlled in self.services.iter_mut().filter_map(|service| service.control.as_mut()) {
            has_changed |= controlled.control.take_slow_starts_changed();
        }
        has_changed
    }

    /// The part of status about weights that change, keyed by service name.
    pub fn loads(&self) -> BTreeMap<String, load::ServiceLoadStatus> {
        let view =
            |(name, service): (&str, &ServiceTask)| Some((name.to_owned(), service.control.as_ref()?.view()));
        self.named().filter_map(view).collect()
    }
}

impl Controlled {
    /// The state of the [`Row`] of the service at this position; `None` before the service has a
    /// list.
    fn look(
        &self,
        position: usize,
        limit: Option<u32>,
        balancer: &Balancer,
        tables: &Tables,
        report: impl Fn(usize) -> Option<ReceivedReport>,
    ) -> Option<Look> {
        let row = balancer.row(position)?;
        let overridden = balancer.operator_weights(position);
        let mut next = Next::default();
        let seen = |(member, &(address, weight)): (usize, &(SocketAddr, u64))| {
            let open = || balancer.slot(position, address).map_or(0, |at| tables.active(at.slot));
            let of_late = self.counted.get_next(&mut next, &address);
            let of_late = of_late.map(|counted| &counted.of_late);
            let seen = MemberObservation {
                weight,
                report: report(member),
                errors: of_late.and_then(OfLate::errors),
                life: of_late.and_then(OfLate::life),
                is_available: is_available(row, address),
                is_at_limit: limit.is_some_and(|limit| open() >= limit.into()),
                is_overridden: overridden.contains(address),
            };
            (address, seen)
        };
        let seen: SeenRow = row.members.iter().enumerate().map(seen).collect();
        Some(Look {
            row: seen,
            flows: self.lives.flows(),
            is_panic: row.is_panic,
            is_idle: self.activity.is_idle(),
            entries: u32::try_from(balancer.entries(position)).unwrap_or(u32::MAX),
        })
    }

    /// Why the control law does not change a member's factor.
    pub(super) fn hold(&self, address: SocketAddr) -> Option<Hold> {
        self.control.hold(address)
    }

    fn view(&self) -> load::ServiceLoadStatus {
        let (rules, flows) = (self.control.rules(), self.look.flows);
        let weighed = |factors: &Factors, address: &SocketAddr, seen: &MemberObservation| {
            float(factors.of(*address).times(seen.weight))
        };
        let sum: f64 =
            self.look.row.iter().map(|(address, seen)| weighed(self.control.in_force(), address, seen)).sum();
        let member = |(address, seen): (&SocketAddr, &MemberObservation)| load::MemberLoadStatus {
            address: *address,
            utilization: seen.report.and_then(|report| report.utilization()),
            age_s: seen.report.map(|report| report.age(self.looked).as_secs_f64()),
            wanted: self.control.wanted().of(*address).number(),
            factor: self.control.in_force().of(*address).number(),
            is_at_clamp: self.control.is_at_clamp(*address),
            share: if sum > 0.0 { weighed(self.control.in_force(), address, seen) / sum } else { 0.0 },
            held_by: self.control.hold(*address).map(|hold| hold.name().to_owned()),
        };
        load::ServiceLoadStatus {
            control: rules.law.map(|law| law.name().to_owned()),
            mode: rules.mode.name().to_owned(),
            switch: self.control.switch().name().to_owned(),
            slow_start_s: rules.slow_start.map(|time| time.as_secs_f64()),
            flows_live_s: flows.life.as_secs_f64(),
            settling_s: self.control.settling(flows).map(|time| time.as_secs_f64()),
            tables: self.tables,
            is_idle: self.look.is_idle,
            reporting: self.control.reporting().fresh,
            expected: self.control.reporting().members,
            members: self.look.row.iter().map(member).collect(),
        }
    }
}

/// Whether a member accepts new flows, as far as is known.
pub(super) fn is_available(row: &Row, address: SocketAddr) -> bool {
    // In the usual case, all members are healthy, and no lookup is needed.
    if !row.is_unsettled() && row.available.1 > 0 {
        return true;
    }
    row.usable.get(&address).is_none_or(|(_, health)| *health == Health::Healthy)
}

/// The number of calls that have begun a tracked flow, that is, a flow that is counted while it is
/// open.
pub(super) fn flows_begun(outcomes: &Outcomes) -> u64 {
    let begins_a_flow =
        |outcome: &Outcome| outcome.is_balanced() && !matches!(outcome, Outcome::Reused | Outcome::Untracked);
    Outcome::OF_A_SERVICE.into_iter().filter(begins_a_flow).map(|outcome| outcomes.of(outcome)).sum()
}

#[expect(
    clippy::cast_precision_loss,
    reason = "the counts of one second are small, and only ratios of weights are shown"
)]
fn float(number: u64) -> f64 {
    number as f64
}
