//! Changes of weights while a list is unchanged: weights follow the load that backends report, and
//! change during slow start. The result is one factor per member, by which one client task
//! multiplies the member's structural weight.
//!
//! In reading order: the factor ([`factor`]), the observations of a member ([`MemberObservation`]),
//! the laws of gRPC ([`a58`]) and of socklb ([`feedback`]), slow start ([`slow_start`]), the
//! behaviour of a task's flows ([`flows`]), and which changes of factors require a new table
//! ([`publication`]).
//!
//! A law acts on one row: the members of one service at this task. It does not depend on other
//! tasks or their subsets, because a report covers the load from all clients of a backend. This
//! module reads no clock, and computes the same results, to the last bit, on all machines.

pub mod a58;
pub mod by_address;
pub mod error_load;
pub mod factor;
pub mod feedback;
pub mod flows;
pub mod publication;
pub mod reported_errors;
pub mod slow_start;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use crate::reports::ReportedLoad;

use a58::A58;
use by_address::ByAddress;
use factor::{Factor, Factors};
use feedback::Feedback;
use flows::{Flows, Life};
use publication::{Proposal, distance, threshold};
use slow_start::MemberAvailability;

/// The time between two calls of [`Control::tick`].
pub const TICK: Duration = Duration::from_secs(1);

/// A report is used until this many report periods and two ticks have passed since its arrival. If
/// no other report has arrived by then, the member retains its factor, and the law continues with
/// the other members.
const FRESH_PERIODS: u32 = 3;

/// If a change of weights takes longer than this to appear in a member's reports, the member's
/// reports are not used.
const MOST_DELAY: Duration = Duration::from_secs(60);

named! {
    /// The control law that computes the factors of structural weights.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Law {
        /// The weights of gRPC's `weighted_round_robin` (gRFC A58), for comparison.
        A58 = "a58",
        /// The law of socklb: [`feedback`].
        Feedback = "feedback",
    }
}

named! {
    /// Whether tables follow the factors that a [`Law`] computes.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub enum Mode {
        /// Tables follow the factors.
        #[default]
        Enforce = "enforce",
        /// The factors are shown, but tables do not follow them.
        Observe = "observe",
    }
}

/// The configuration of load control and slow start for a service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ControlRules {
    /// The law by which weights follow load; `None` if weights do not follow load.
    pub law: Option<Law>,
    /// Whether tables follow the law's factors.
    pub mode: Mode,
    /// The time in which a member that is new, or available again, reaches its full share; `None`
    /// without slow start.
    pub slow_start: Option<Duration>,
}

named! {
    /// An operator's temporary override of a service's load control.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub enum Switch {
        /// Load control works as configured.
        #[default]
        On = "on",
        /// Factors do not change.
        Frozen = "freeze",
        /// Every member has its structural share.
        Off = "off",
    }
}

/// A backend's report, and the time at which this host received it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedReport {
    /// The reported load.
    pub load: ReportedLoad,
    /// The time at which the report arrived, by the caller's clock.
    pub at: Duration,
    /// The interval between requests for reports.
    pub interval: Duration,
}

impl ReceivedReport {
    /// The age of the measurement that the report contains.
    pub fn age(&self, now: Duration) -> Duration {
        now.saturating_sub(self.at) + self.load.age
    }

    /// The reported utilization, 1 for a fully used backend; `None` if the report does not contain
    /// it.
    pub fn utilization(&self) -> Option<f64> {
        self.load.utilization.map(thousandths)
    }

    /// The shortest interval at which reports with new measurements can arrive.
    fn period(&self) -> Duration {
        self.load.window.max(self.interval)
    }

    /// Whether the report contains a utilization and is recent ([`ReceivedReport::is_recent`]).
    pub fn is_fresh(&self, now: Duration) -> bool {
        self.load.utilization.is_some() && self.is_recent(now)
    }

    /// Whether the report arrived at most three report periods and two ticks ago, and `delay` is at
    /// most a minute. Other reports are not used, because the longest delay of any member limits
    /// the step of all members.
    pub fn is_recent(&self, now: Duration) -> bool {
        let fresh = self.period() * FRESH_PERIODS + 2 * TICK;
        now.saturating_sub(self.at) <= fresh && self.delay(now) <= MOST_DELAY
    }

    /// The time until reports show a change of weights that is made now. The backend must first
    /// measure and report its effect, and this host must read the report.
    fn delay(&self, now: Duration) -> Duration {
        let next = self.period().max(TICK);
        self.load.window.saturating_add(self.age(now)).saturating_add(next).saturating_add(TICK)
    }
}

/// The observations of a member at a tick.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemberObservation {
    /// The member's structural weight: its weight before load control and slow start.
    pub weight: u64,
    /// The member's newest report, if there is one.
    pub report: Option<ReceivedReport>,
    /// The failed part of this task's recent flows to the member, 0 to 1; `None` if there were too
    /// few flows.
    pub errors: Option<f64>,
    /// The lifetime of this task's flows to the member; `None` if too few flows began recently.
    pub life: Option<Life>,
    /// Whether the member receives new flows: it is not ejected, on trial, refusing, or a lame
    /// duck.
    pub is_available: bool,
    /// Whether the member's open flows have reached `active_limit`.
    pub is_at_limit: bool,
    /// Whether an operator has set the member's weight. The member's factor then does not change.
    pub is_overridden: bool,
}

/// The observations of a service's members, keyed by address.
pub type SeenRow = ByAddress<MemberObservation>;

/// The input of [`Control::tick`]: observations of one service at this client task.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Look {
    /// The observations of each member.
    pub row: SeenRow,
    /// The lifetime of the service's flows.
    pub flows: Flows,
    /// Whether the service is in panic: so few members are available that connects may choose
    /// unavailable members, too.
    pub is_panic: bool,
    /// Whether the service is idle. The daemon then rarely requests reports from its backends.
    pub is_idle: bool,
    /// The number of entries in the service's table.
    pub entries: u32,
}

named! {
    /// Why a member's factor does not change, or may not rise.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Hold {
        /// An operator has frozen the factors, or has set the member's weight.
        Operator = "operator",
        /// The service is in panic.
        Panic = "panic",
        /// The member has no recent report, because the service is idle, and the daemon rarely
        /// requests reports from the backends of an idle service.
        Idle = "idle",
        /// The member is ejected, on trial, refusing, or a lame duck.
        Unavailable = "unavailable",
        /// The member is in slow start.
        SlowStart = "slow-start",
        /// The member's open flows have reached `active_limit`.
        ActiveLimit = "active-limit",
        /// The member has no recent report.
        NoReport = "no-report",
        /// The factor may not rise, because too many of the member's requests or connects fail.
        Errors = "errors",
        /// The factor may not rise, because this task's flows to the member live much longer than
        /// flows to other members: the member may hang.
        LongFlows = "long-flows",
        /// Fewer than half of the service's members have a recent report.
        FewReports = "few-reports",
    }
}

/// How many members have a recent report. Only available members with a positive weight are
/// counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reporting {
    /// The number of available members with a positive weight and a recent report.
    pub fresh: u32,
    /// The number of available members with a positive weight.
    pub members: u32,
}

impl Reporting {
    /// Whether fewer than half of the members have a recent report. The feedback law then makes no
    /// step.
    pub const fn is_blind(self) -> bool {
        self.fresh * 2 < self.members
    }
}

/// The state of load control and slow start, as the daemon stores it for the next daemon.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ControlSnapshot {
    /// The operator's override.
    pub switch: Switch,
    /// The mode in which the law ran.
    pub mode: Mode,
    /// The factors that the law has computed.
    pub factors: Factors,
    /// The members in slow start, each with the time for which it has been available.
    pub starting: BTreeMap<SocketAddr, Duration>,
}

/// Load control and slow start for one service at one client task.
#[derive(Clone, Debug)]
pub struct Control {
    rules: ControlRules,
    switch: Switch,
    law: LawState,
    readiness: MemberAvailability,
    holds: BTreeMap<SocketAddr, Hold>,
    reporting: Reporting,
    /// The factors that the law has computed last.
    wanted: Factors,
    /// The factors that tables follow, including slow start.
    in_force: Factors,
}

#[derive(Clone, Debug)]
enum LawState {
    None,
    A58(A58),
    Feedback(Feedback),
}

impl Control {
    /// Starts without observations: every member has its structural share.
    pub fn new(rules: ControlRules) -> Self {
        Self {
            rules,
            switch: Switch::On,
            law: LawState::new(rules.law),
            readiness: MemberAvailability::default(),
            holds: BTreeMap::new(),
            reporting: Reporting::default(),
            wanted: Factors::default(),
            in_force: Factors::default(),
        }
    }

    /// Adopts an earlier daemon's state that is `age` old. The factors of A58 are adopted only if
    /// they are frozen; otherwise A58 recomputes them after its blackout. Returns the factors for
    /// the first table.
    pub fn adopt(&mut self, snapshot: &ControlSnapshot, age: Duration) -> Factors {
        // Without load control, an operator's override of it is dropped.
        if self.rules.law.is_none() {
            return self.in_force.clone();
        }
        self.switch = snapshot.switch;
        // The earlier daemon only showed its factors. Enforcing them at once would be a sudden
        // change, so the law starts with factor 1, as it does after a reload that changes the mode.
        if (snapshot.mode, self.rules.mode) == (Mode::Observe, Mode::Enforce) {
            return self.in_force.clone();
        }
        self.wanted = match (&mut self.law, self.switch) {
            (LawState::None, _) | (_, Switch::Off) | (LawState::A58(_), Switch::On) => Factors::default(),
            (LawState::A58(_), Switch::Frozen) => snapshot.factors.clone(),
            (LawState::Feedback(feedback), Switch::Frozen) => feedback.adopt_frozen(&snapshot.factors),
            (LawState::Feedback(feedback), Switch::On) => feedback.adopt(&snapshot.factors, age),
        };
        if self.rules.mode == Mode::Enforce {
            self.in_force = self.wanted.clone();
        }
        self.in_force.clone()
    }

    /// Whether, since the last call, a member has been added or has changed its availability, so
    /// that slow starts may have begun or ended.
    pub fn take_slow_starts_changed(&mut self) -> bool {
        self.readiness.take_changed() && self.rules.slow_start.is_some()
    }

    /// Resumes the slow starts of an earlier daemon ([`ControlSnapshot::starting`]). Returns the
    /// factors that are in force from now on.
    pub fn resume_slow_starts(
        &mut self,
        starting: &BTreeMap<SocketAddr, Duration>,
        now: Duration,
    ) -> Factors {
        if let Some(window) = self.rules.slow_start {
            self.readiness.resume(starting, window, now);
            let starting = self.readiness.starting(window, now);
            let law = if self.acts() { self.wanted.clone() } else { Factors::default() };
            self.in_force = self.in_slow_start(&law, starting.into_keys(), window, now);
        }
        self.in_force.clone()
    }

    /// Replaces the rules. The law retains its state, unless another law replaces it, or its mode
    /// changes from observe to enforce.
    pub fn set_rules(&mut self, rules: ControlRules) {
        let is_another = rules.law != self.rules.law;
        let is_enforced_now = (self.rules.mode, rules.mode) == (Mode::Observe, Mode::Enforce);
        self.rules = rules;
        if rules.law.is_none() {
            // Without load control, an operator's override of it is dropped.
            self.switch = Switch::On;
        }
        if is_another || is_enforced_now {
            self.law = LawState::new(rules.law);
        }
        if is_enforced_now {
            self.wanted = Factors::default();
        }
        if is_another && self.switch == Switch::Frozen {
            // The operator has frozen the weights, so the new law must not change them.
            let factors = self.wanted.clone();
            let snapshot = ControlSnapshot {
                switch: self.switch,
                mode: rules.mode,
                factors,
                ..ControlSnapshot::default()
            };
            self.adopt(&snapshot, Duration::ZERO);
        }
    }

    /// The state to store for the next daemon.
    pub fn snapshot(&self, now: Duration) -> ControlSnapshot {
        let factors = match &self.law {
            LawState::Feedback(feedback) if self.switch != Switch::Off => feedback.snapshot(),
            _ if self.switch == Switch::Frozen => self.wanted.clone(),
            LawState::None | LawState::A58(_) | LawState::Feedback(_) => Factors::default(),
        };
        let starting = self.rules.slow_start.map(|window| self.readiness.starting(window, now));
        ControlSnapshot {
            switch: self.switch,
            mode: self.rules.mode,
            factors,
            starting: starting.unwrap_or_default(),
        }
    }

    /// Sets an operator's override.
    pub fn set_switch(&mut self, switch: Switch) {
        self.switch = switch;
    }

    /// The operator's override.
    pub const fn switch(&self) -> Switch {
        self.switch
    }

    /// The rules in use.
    pub const fn rules(&self) -> ControlRules {
        self.rules
    }

    /// Evaluates the observations. Call this every [`TICK`]. Returns factors if they differ enough
    /// from the factors in force to require a new table. The factors come into force when the
    /// caller passes them to [`Control::publish`]; until then each tick proposes factors again.
    pub fn tick(&mut self, now: Duration, look: &Look) -> Option<Proposal> {
        if self.rules.slow_start.is_some() || self.rules.law == Some(Law::A58) {
            self.readiness.look(now, look.row.iter().map(|(address, seen)| (*address, seen.is_available)));
        }
        let holds = self.holds_of(now, look);
        // The backends of an idle service are not expected to report.
        self.reporting = if look.is_idle { Reporting::default() } else { reporting(now, &look.row) };
        let acts = self.acts();
        self.wanted = match (&mut self.law, self.switch) {
            (LawState::Feedback(feedback), Switch::Off) => {
                feedback.forget(&look.row, look.flows);
                Factors::default()
            }
            (LawState::None, _) | (LawState::A58(_), Switch::Off) => Factors::default(),
            (LawState::A58(_), Switch::Frozen) => self.wanted.clone(),
            (LawState::A58(a58), Switch::On) => {
                let ready_since = |address| self.readiness.since(address).unwrap_or(now);
                let factors = a58.factors(now, &look.row, ready_since);
                let is_overridden =
                    |address: SocketAddr| look.row.get(&address).is_some_and(|seen| seen.is_overridden);
                let held = |(address, factor)| {
                    (address, if is_overridden(address) { self.wanted.of(address) } else { factor })
                };
                factors.iter().map(held).collect()
            }
            (LawState::Feedback(feedback), Switch::Frozen) => feedback.freeze(look, acts),
            (LawState::Feedback(feedback), Switch::On) => feedback.tick(now, look, &holds, acts),
        };
        self.holds = holds;
        if let LawState::Feedback(feedback) = &self.law {
            for (address, hold) in feedback.holds() {
                let has_no_report = matches!(hold, Hold::NoReport | Hold::FewReports);
                let hold = if look.is_idle && has_no_report { Hold::Idle } else { hold };
                self.holds.entry(address).or_insert(hold);
            }
        }
        let factors = self.factors(now, look);
        let distance = distance(&look.row, &self.in_force, &factors);
        // A58 is the reference, so it publishes tables as often as gRPC changes weights. If all
        // factors become 1 again, even the smallest difference is published.
        let least = match self.law {
            LawState::A58(_) => 0.0,
            _ if factors == Factors::default() => 0.0,
            LawState::None | LawState::Feedback(_) => threshold(look.entries),
        };
        (factors != self.in_force && distance.is_some_and(|distance| distance.is_over(least)))
            .then(|| Proposal { off_by: distance.map_or(0.0, |distance| distance.part), factors })
    }

    /// Updates the service's members and their availability between ticks. If slow start begins or
    /// ends for any member, returns factors for an immediate table. All other changes wait for the
    /// next tick.
    pub fn arrange(
        &mut self,
        now: Duration,
        row: impl Iterator<Item = (SocketAddr, bool)>,
        is_panic: bool,
    ) -> Option<Factors> {
        let window = self.rules.slow_start?;
        let changed = self.readiness.look(now, row);
        if changed.is_empty() || is_panic {
            return None;
        }
        let mut factors: BTreeMap<SocketAddr, Factor> = self.in_force.iter().collect();
        for address in &changed {
            let law = if self.acts() { self.wanted.of(*address) } else { Factor::ONE };
            factors.insert(*address, law);
        }
        let factors = self.in_slow_start(&factors.into_iter().collect(), changed.into_iter(), window, now);
        (factors != self.in_force).then_some(factors)
    }

    /// `factors`, with slow start applied to `members`.
    fn in_slow_start(
        &self,
        factors: &Factors,
        members: impl Iterator<Item = SocketAddr>,
        window: Duration,
        now: Duration,
    ) -> Factors {
        let mut slow: BTreeMap<SocketAddr, Factor> = factors.iter().collect();
        for address in members {
            let part = self.readiness.part(address, window, now);
            if part < 1.0 {
                slow.insert(address, Factor::of(factors.of(address).number() * part));
            }
        }
        slow.into_iter().collect()
    }

    /// Whether tables follow the law's factors.
    fn acts(&self) -> bool {
        self.rules.mode == Mode::Enforce && self.switch != Switch::Off
    }

    /// Sets the factors that are in force from now on.
    pub fn publish(&mut self, factors: Factors) {
        self.in_force = factors;
    }

    /// The factors for tables: the law's factors, or 1 if tables do not follow the law. Each factor
    /// is multiplied by the part of the full share that the member gets in slow start.
    fn factors(&self, now: Duration, look: &Look) -> Factors {
        let law = if self.acts() { self.wanted.clone() } else { Factors::default() };
        match self.rules.slow_start.filter(|_| !look.is_panic) {
            Some(window) => self.in_slow_start(&law, look.row.keys().copied(), window, now),
            None => law,
        }
    }

    /// The members with factors that the law must not change now, each with the reason.
    fn holds_of(&self, now: Duration, look: &Look) -> BTreeMap<SocketAddr, Hold> {
        let slow = |address| {
            self.rules.slow_start.is_some_and(|window| self.readiness.part(address, window, now) < 1.0)
        };
        let hold = |(&address, seen): (&SocketAddr, &MemberObservation)| {
            let hold = match seen {
                _ if self.switch == Switch::Frozen || seen.is_overridden => Hold::Operator,
                _ if look.is_panic => Hold::Panic,
                MemberObservation { is_available: false, .. } => Hold::Unavailable,
                _ if slow(address) => Hold::SlowStart,
                MemberObservation { is_at_limit: true, .. } => Hold::ActiveLimit,
                MemberObservation { .. } => return None,
            };
            Some((address, hold))
        };
        look.row.iter().filter_map(hold).collect()
    }

    /// Why a member's factor did not change, or may not rise, according to the last tick.
    pub fn hold(&self, address: SocketAddr) -> Option<Hold> {
        self.holds.get(&address).copied()
    }

    /// How many members had a recent report at the last tick.
    pub const fn reporting(&self) -> Reporting {
        self.reporting
    }

    /// Whether a member's factor is at the lower or upper bound of feedback.
    pub fn is_at_clamp(&self, address: SocketAddr) -> bool {
        matches!(&self.law, LawState::Feedback(feedback) if feedback.is_at_clamp(address))
    }

    /// The law's factors, whether or not tables follow them.
    pub const fn wanted(&self) -> &Factors {
        &self.wanted
    }

    /// The factors that are in force.
    pub const fn in_force(&self) -> &Factors {
        &self.in_force
    }

    /// The approximate time in which load control corrects a difference of utilization; `None`
    /// without load control.
    pub fn settling(&self, flows: Flows) -> Option<Duration> {
        match &self.law {
            LawState::None => None,
            LawState::A58(_) => Some(a58::settling(flows)),
            LawState::Feedback(feedback) => Some(feedback.settling(flows)),
        }
    }
}

impl LawState {
    fn new(law: Option<Law>) -> Self {
        match law {
            None => Self::None,
            Some(Law::A58) => Self::A58(A58::default()),
            Some(Law::Feedback) => Self::Feedback(Feedback::default()),
        }
    }
}

fn reporting(now: Duration, row: &SeenRow) -> Reporting {
    let counts = |seen: &&MemberObservation| seen.weight > 0 && seen.is_available;
    let count = |is: &dyn Fn(&MemberObservation) -> bool| {
        u32::try_from(row.values().filter(counts).filter(|seen| is(seen)).count()).unwrap_or(u32::MAX / 2)
    };
    let is_fresh = |seen: &MemberObservation| seen.report.is_some_and(|report| report.is_fresh(now));
    Reporting { fresh: count(&is_fresh), members: count(&|_| true) }
}

/// Converts a number from a report, where numbers are in thousandths.
fn thousandths(number: u32) -> f64 {
    f64::from(number) / 1000.0
}

#[expect(clippy::cast_precision_loss, reason = "structural weights are below 2^33")]
fn float(weight: u64) -> f64 {
    weight as f64
}

#[cfg(test)]
mod tests;
