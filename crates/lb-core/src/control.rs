//! Weights that change while a list stays: with load, by what backends report, and in slow start. How much more or less than its
//! structural share each member of one client task gets.
//!
//! In reading order: how much that is ([`factor`]), what is known of a member ([`MemberObservation`]), the two laws, gRPC's ([`a58`]) and our own
//! ([`feedback`]), slow start ([`slow_start`]), how a task's flows behave ([`flows`]), and when a change is worth a table
//! ([`publication`]). A law knows one row: the members of one service that this task uses. It needs neither other tasks nor their
//! subsets, because a report is of all that a backend gets. Reads no clock, and no function whose last bit differs from one machine to
//! the next.

pub mod by_address;

pub mod factor;

pub mod a58;

pub mod feedback;

pub mod slow_start;

pub mod flows;

pub mod publication;

pub mod error_load;

pub mod reported_errors;

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
use slow_start::Readiness;

/// From one look at the reports to the next.
pub const TICK: Duration = Duration::from_secs(1);

/// A report counts until so many have not come that should have, and two ticks: whoever falls silent keeps what it has, and makes
/// nobody else wait for it.
const FRESH_PERIODS: u32 = 3;

/// If a change is seen only after so long, the report is as good as none.
const MOST_DELAY: Duration = Duration::from_secs(60);

/// Which law decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Law {
    /// That of gRPC's `weighted_round_robin` (gRFC A58), for comparison.
    A58,
    /// Our own: [`feedback`].
    Feedback,
}

impl Law {
    /// Both.
    pub const ALL: [Self; 2] = [Self::A58, Self::Feedback];

    /// The word for it in configurations and scenarios.
    pub const fn name(self) -> &'static str {
        match self {
            Self::A58 => "a58",
            Self::Feedback => "feedback",
        }
    }
}

/// What becomes of what a law says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Tables follow it.
    #[default]
    Enforce,
    /// It is shown.
    Observe,
}

impl Mode {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Enforce, Self::Observe];

    /// The word for it in configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Enforce => "enforce",
            Self::Observe => "observe",
        }
    }
}

/// What changes the weights of a service's members.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ControlRules {
    /// By which law they follow load, if they do.
    pub law: Option<Law>,
    /// What becomes of what it says.
    pub mode: Mode,
    /// Over how long a member that is new, or available again, comes to its share.
    pub slow_start: Option<Duration>,
}

/// What an operator has said of a service's law, for a while.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Switch {
    /// It works as it is configured.
    #[default]
    On,
    /// Factors stay as they are.
    Frozen,
    /// Every member has its structural share.
    Off,
}

impl Switch {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::On, Self::Frozen, Self::Off];

    /// The word for it in commands and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::Frozen => "freeze",
            Self::Off => "off",
        }
    }
}

/// What a backend has reported, and since when this host knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heard {
    /// What.
    pub load: ReportedLoad,
    /// When, by the caller's clock.
    pub at: Duration,
    /// How long after one report the next one is asked for.
    pub interval: Duration,
}

impl Heard {
    /// The report's age: when what it tells was measured.
    pub fn age(&self, now: Duration) -> Duration {
        now.saturating_sub(self.at) + self.load.age
    }

    /// Its utilization, if it tells that.
    pub fn utilization(&self) -> Option<f64> {
        self.load.utilization.map(thousandths)
    }

    /// Until there is something new to tell, and it is asked for.
    fn period(&self) -> Duration {
        self.load.window.max(self.interval)
    }

    /// Whether it tells a utilization that is new: of three that should have come since none has, nor in two ticks more, and what
    /// follows from it would be seen within a minute. Anything older would slow down all others.
    pub fn is_fresh(&self, now: Duration) -> bool {
        self.load.utilization.is_some() && self.is_recent(now)
    }

    /// Whether it tells something that is new, utilization or not.
    pub fn is_recent(&self, now: Duration) -> bool {
        let fresh = self.period() * FRESH_PERIODS + 2 * TICK;
        now.saturating_sub(self.at) <= fresh && self.delay(now) <= MOST_DELAY
    }

    /// Until a change that is made now is seen: it has to be measured, told, and looked at.
    fn delay(&self, now: Duration) -> Duration {
        let next = self.period().max(TICK);
        self.load.window.saturating_add(self.age(now)).saturating_add(next).saturating_add(TICK)
    }
}

/// What is known of a member when a law looks at it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemberObservation {
    /// Its structural weight: without any control.
    pub weight: u64,
    /// Its newest report, if there is one.
    pub heard: Option<Heard>,
    /// The part of this task's own flows to it that failed, of those that began of late, if these are enough.
    pub errors: Option<f64>,
    /// How long this task's own flows to it live, if enough of them began of late.
    pub life: Option<Life>,
    /// Whether it takes new flows: it is not ejected, on trial, refusing, or a lame duck.
    pub is_available: bool,
    /// Whether it has as many open flows as it may.
    pub is_at_limit: bool,
}

/// The members of a row by their addresses.
pub type SeenRow = ByAddress<MemberObservation>;

/// A row, as it is when a law looks at it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Look {
    /// Its members.
    pub row: SeenRow,
    /// How its flows behave.
    pub flows: Flows,
    /// Whether so few are available that unavailable ones are chosen as well.
    pub is_panic: bool,
    /// Whether this task hardly sends anything there: nobody is asked for reports often then.
    pub is_idle: bool,
    /// How many entries its table has.
    pub entries: u32,
}

/// Why a member keeps the factor that it has, or gets no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Hold {
    /// An operator has said so.
    Operator,
    /// The service is in panic.
    Panic,
    /// It has not reported for a while, because this task hardly uses the service and asks seldom.
    Idle,
    /// It is ejected, on trial, refusing, or a lame duck.
    Unavailable,
    /// It is in slow start.
    SlowStart,
    /// It is at `active_limit`.
    ActiveLimit,
    /// It has not reported for a while, or what it reports is too old.
    NoReport,
    /// So many of its requests or connects fail that it gets no more.
    Errors,
    /// This task's flows to it live so much longer than those to others that it gets no more: it may hang.
    LongFlows,
    /// Fewer than half of the row have reported.
    FewReports,
}

impl Hold {
    /// The word for it in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Operator => "operator",
            Self::Panic => "panic",
            Self::Idle => "idle",
            Self::Unavailable => "unavailable",
            Self::SlowStart => "slow-start",
            Self::ActiveLimit => "active-limit",
            Self::NoReport => "no-report",
            Self::Errors => "errors",
            Self::LongFlows => "long-flows",
            Self::FewReports => "few-reports",
        }
    }
}

/// How many members report a load that is new, of how many that count: those that have a weight and are available.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reporting {
    /// Those.
    pub fresh: u32,
    /// All that count.
    pub members: u32,
}

impl Reporting {
    /// Whether these are too few for anything to be learnt.
    pub const fn is_blind(self) -> bool {
        self.fresh * 2 < self.members
    }
}

/// What a law has learnt, as it is kept for the next daemon.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LearntWeights {
    /// What an operator has said.
    pub switch: Switch,
    /// Whether tables followed it.
    pub mode: Mode,
    /// The factors.
    pub factors: Factors,
    /// The members in slow start, each with the time for which it has been available.
    pub starting: BTreeMap<SocketAddr, Duration>,
}

/// A law at work on the row of one service, with what it remembers.
#[derive(Clone, Debug)]
pub struct Control {
    rules: ControlRules,
    switch: Switch,
    law: LawState,
    readiness: Readiness,
    holds: BTreeMap<SocketAddr, Hold>,
    reporting: Reporting,
    /// What the law says.
    wanted: Factors,
    /// What tables follow, slow start included.
    in_force: Factors,
}

#[derive(Clone, Debug)]
enum LawState {
    None,
    A58(A58),
    Feedback(Feedback),
}

impl Control {
    /// Nothing is known yet, and everybody has their structural share.
    pub fn new(rules: ControlRules) -> Self {
        Self {
            rules,
            switch: Switch::On,
            law: LawState::new(rules.law),
            readiness: Readiness::default(),
            holds: BTreeMap::new(),
            reporting: Reporting::default(),
            wanted: Factors::default(),
            in_force: Factors::default(),
        }
    }

    /// Takes up what an earlier daemon had learnt so long ago. What A58 knows is taken up only if it is frozen: otherwise its weights
    /// come anew within its blackout. Returns the factors that shall be in force from the first table on.
    pub fn adopt(&mut self, learnt: &LearntWeights, age: Duration) -> Factors {
        // What was said of a law ends with it.
        if self.rules.law.is_none() {
            return self.in_force.clone();
        }
        self.switch = learnt.switch;
        // What was shown and never acted would be in force at once: the law begins anew, as after a reload.
        if (learnt.mode, self.rules.mode) == (Mode::Observe, Mode::Enforce) {
            return self.in_force.clone();
        }
        self.wanted = match (&mut self.law, self.switch) {
            (LawState::None, _) | (_, Switch::Off) | (LawState::A58(_), Switch::On) => Factors::default(),
            (LawState::A58(_), Switch::Frozen) => learnt.factors.clone(),
            (LawState::Feedback(feedback), Switch::Frozen) => feedback.adopt_frozen(&learnt.factors),
            (LawState::Feedback(feedback), Switch::On) => feedback.adopt(&learnt.factors, age),
        };
        if self.rules.mode == Mode::Enforce {
            self.in_force = self.wanted.clone();
        }
        self.in_force.clone()
    }

    /// Whether a slow start has begun, or was cut short, since this was last called.
    pub fn take_slow_starts_changed(&mut self) -> bool {
        self.readiness.take_changed() && self.rules.slow_start.is_some()
    }

    /// Resumes the slow starts of an earlier daemon ([`LearntWeights::starting`]). Returns the factors that shall be in force.
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

    /// Works by other rules from now on. What was learnt stays, unless the law is another one, or begins to be enforced.
    pub fn set_rules(&mut self, rules: ControlRules) {
        let is_another = rules.law != self.rules.law;
        let is_enforced_now = (self.rules.mode, rules.mode) == (Mode::Observe, Mode::Enforce);
        self.rules = rules;
        if rules.law.is_none() {
            // What was said of a law ends with it.
            self.switch = Switch::On;
        }
        if is_another || is_enforced_now {
            self.law = LawState::new(rules.law);
        }
        if is_enforced_now {
            self.wanted = Factors::default();
        }
        if is_another && self.switch == Switch::Frozen {
            // Whatever law there is, an operator has said that weights stay.
            let factors = self.wanted.clone();
            let learnt =
                LearntWeights { switch: self.switch, mode: rules.mode, factors, ..LearntWeights::default() };
            self.adopt(&learnt, Duration::ZERO);
        }
    }

    /// What is kept for the next daemon.
    pub fn learnt(&self, now: Duration) -> LearntWeights {
        let factors = match &self.law {
            LawState::Feedback(feedback) if self.switch != Switch::Off => feedback.learnt(),
            _ if self.switch == Switch::Frozen => self.wanted.clone(),
            LawState::None | LawState::A58(_) | LawState::Feedback(_) => Factors::default(),
        };
        let starting = self.rules.slow_start.map(|window| self.readiness.starting(window, now));
        LearntWeights {
            switch: self.switch,
            mode: self.rules.mode,
            factors,
            starting: starting.unwrap_or_default(),
        }
    }

    /// An operator says what becomes of the law.
    pub fn set_switch(&mut self, switch: Switch) {
        self.switch = switch;
    }

    /// What an operator has said.
    pub const fn switch(&self) -> Switch {
        self.switch
    }

    /// What it was made for.
    pub const fn rules(&self) -> ControlRules {
        self.rules
    }

    /// Looks at the reports, [`TICK`] after the last time. Proposes factors if they differ enough from those in force to be worth a
    /// table. They are in force once [`Control::publish`] is called with them; until then they are proposed again.
    pub fn tick(&mut self, now: Duration, look: &Look) -> Option<Proposal> {
        if self.rules.slow_start.is_some() || self.rules.law == Some(Law::A58) {
            self.readiness.look(now, look.row.iter().map(|(address, seen)| (*address, seen.is_available)));
        }
        let holds = self.holds_of(now, look);
        // Of a service that is idle nobody has to be heard often.
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
                a58.factors(now, &look.row, ready_since)
            }
            (LawState::Feedback(feedback), Switch::Frozen) => feedback.freeze(look, acts),
            (LawState::Feedback(feedback), Switch::On) => feedback.tick(now, look, &holds, acts),
        };
        self.holds = holds;
        if let LawState::Feedback(feedback) = &self.law {
            for (address, hold) in feedback.holds() {
                let is_silent = matches!(hold, Hold::NoReport | Hold::FewReports);
                let hold = if look.is_idle && is_silent { Hold::Idle } else { hold };
                self.holds.entry(address).or_insert(hold);
            }
        }
        let factors = self.factors(now, look);
        let distance = distance(&look.row, &self.in_force, &factors);
        // The yardstick makes its tables as often as its source does; and whatever has ended, ends whole.
        let least = match self.law {
            LawState::A58(_) => 0.0,
            _ if factors == Factors::default() => 0.0,
            LawState::None | LawState::Feedback(_) => threshold(look.entries),
        };
        (factors != self.in_force && distance.is_some_and(|distance| distance.is_over(least)))
            .then(|| Proposal { off_by: distance.map_or(0.0, |distance| distance.part), factors })
    }

    /// Who is in the row, and whether each is available: what slow start makes at once of those of whom that is news, if anything. All
    /// else waits for the next tick.
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

    /// Factors with slow start for these members.
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

    /// Whether tables follow what the law says.
    fn acts(&self) -> bool {
        self.rules.mode == Mode::Enforce && self.switch != Switch::Off
    }

    /// These factors are in force from now on.
    pub fn publish(&mut self, factors: Factors) {
        self.in_force = factors;
    }

    /// What the law says, as far as it acts, times slow start.
    fn factors(&self, now: Duration, look: &Look) -> Factors {
        let law = if self.acts() { self.wanted.clone() } else { Factors::default() };
        match self.rules.slow_start.filter(|_| !look.is_panic) {
            Some(window) => self.in_slow_start(&law, look.row.keys().copied(), window, now),
            None => law,
        }
    }

    /// What is decided by something else than load.
    fn holds_of(&self, now: Duration, look: &Look) -> BTreeMap<SocketAddr, Hold> {
        let slow = |address| {
            self.rules.slow_start.is_some_and(|window| self.readiness.part(address, window, now) < 1.0)
        };
        let hold = |(&address, seen): (&SocketAddr, &MemberObservation)| {
            let hold = match seen {
                _ if self.switch == Switch::Frozen => Hold::Operator,
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

    /// Why a member keeps what it has, or gets no more, as of the last tick.
    pub fn hold(&self, address: SocketAddr) -> Option<Hold> {
        self.holds.get(&address).copied()
    }

    /// How many members reported at the last tick.
    pub const fn reporting(&self) -> Reporting {
        self.reporting
    }

    /// Whether a member's factor is as small or large as feedback makes one.
    pub fn is_at_clamp(&self, address: SocketAddr) -> bool {
        matches!(&self.law, LawState::Feedback(feedback) if feedback.is_at_clamp(address))
    }

    /// What the law says, whether or not it acts.
    pub const fn wanted(&self) -> &Factors {
        &self.wanted
    }

    /// The factors that are in force.
    pub const fn in_force(&self) -> &Factors {
        &self.in_force
    }

    /// About how long it takes until a change is made good; `None` without a law.
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
    let is_fresh = |seen: &MemberObservation| seen.heard.is_some_and(|heard| heard.is_fresh(now));
    Reporting { fresh: count(&is_fresh), members: count(&|_| true) }
}

/// A number of a report.
fn thousandths(number: u32) -> f64 {
    f64::from(number) / 1000.0
}

#[expect(clippy::cast_precision_loss, reason = "structural weights are below 2^33")]
fn float(weight: u64) -> f64 {
    weight as f64
}

#[cfg(test)]
mod tests;
