//! One backend: what is said of it, what the agent reports, and who is told when that changes.

use std::time::{Duration, Instant};

use bytemuck::Zeroable as _;
use lb_common::abi::host::SenderKey;
use lb_common::abi::responder::PreparedAnswer;
use lb_common::net::{Be16, Be32};

use super::load::{Load, Loads};
use super::name::Name;
use super::pushes::Pushes;
use super::readiness::{Health, Said};
use super::streak::{Outcome, Streak};
use super::subscribers::{Asker, MAX_SUBSCRIBERS, Subscribers};
use super::{ms16, ms32};
use crate::keys::{BackendKey, Keys};
use crate::wire::{Datagram, Key, Kind, Readiness, UNKNOWN};

/// What is configured of a backend's reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// How long a report is valid.
    pub valid_for: Duration,
    /// For how long a lame duck that falls silent stays one.
    pub hold: Duration,
    /// Of its health check, if it has one.
    pub check: Option<CheckRules>,
}

/// How results of a health check count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckRules {
    /// Results in a row that make it healthy.
    pub rise: u32,
    /// Results in a row that make it unhealthy.
    pub fall: u32,
    /// How long one counts without another.
    pub stale_after: Duration,
}

/// Who uses a backend asks its agent every 2 s, unless configured otherwise, a tenth later at most: a new agent then knows all of
/// them.
const ALL_HAVE_ASKED: Duration = Duration::from_millis(2500);

/// For how long it is answered by the kernel that a backend is ready, by what an agent has prepared that does not get to a processor
/// any more: five times as long as it takes until it prepares anew.
const ANSWERED_FOR: Duration = Duration::from_secs(5);

/// From one time that all answers are prepared to the next.
pub const PREPARED_EVERY: Duration = Duration::from_secs(1);

/// A backend.
pub struct Entry {
    name: Name,
    keys: Keys<BackendKey>,
    rules: Rules,
    lame_duck: bool,
    runner: Option<Readiness>,
    streak: Streak,
    loads: Loads,
    readiness: Readiness,
    why: String,
    since: Instant,
    /// Since when the agent speaks for it.
    begun: Instant,
    /// The incarnation above the counter: a counter that is full goes on in the next incarnation, which the wall clock has passed by then.
    version: u64,
    /// How often the readiness has changed, modulo 65,536.
    change: u16,
    subscribers: Subscribers,
    pushes: Pushes,
}

impl Entry {
    /// A backend of which nothing is known. Its reports are later than this version, and its changes than that of this number.
    pub fn new(
        name: Name,
        keys: Keys<BackendKey>,
        rules: Rules,
        (version, change): (u64, u16),
        now: Instant,
    ) -> Self {
        let (rise, fall) = rules.check.map_or((1, 1), |check| (check.rise, check.fall));
        let mut entry = Self {
            name,
            keys,
            rules,
            lame_duck: false,
            runner: None,
            streak: Streak::new(rise, fall),
            loads: Loads::default(),
            readiness: Readiness::Unknown,
            why: String::new(),
            since: now,
            begun: now,
            version,
            change,
            subscribers: Subscribers::new(MAX_SUBSCRIBERS),
            pushes: Pushes::new(),
        };
        entry.refresh(now);
        entry
    }

    /// Gives it other keys and rules. What a check has shown that is no more, or is another one, is for the caller to forget.
    pub fn set(&mut self, keys: Keys<BackendKey>, rules: Rules, now: Instant) {
        let (rise, fall) = rules.check.map_or((1, 1), |check| (check.rise, check.fall));
        self.streak.set(rise, fall);
        self.keys = keys;
        self.rules = rules;
        self.refresh(now);
    }

    /// Forgets what the health check has shown.
    pub fn check_anew(&mut self, now: Instant) {
        let (rise, fall) = self.rules.check.map_or((1, 1), |check| (check.rise, check.fall));
        self.streak = Streak::new(rise, fall);
        self.refresh(now);
    }

    /// The operator says that it is a lame duck, or takes that back.
    pub fn operator(&mut self, lame_duck: bool, now: Instant) {
        self.lame_duck = lame_duck;
        self.refresh(now);
    }

    /// The program that runs it says how it is; nothing, if there is none any more.
    pub fn runner(&mut self, says: Option<Readiness>, now: Instant) {
        self.runner = says;
        self.refresh(now);
    }

    /// What the program says that runs it, if there is one.
    pub const fn runner_says(&self) -> Option<Readiness> {
        self.runner
    }

    /// Its health check has ended.
    pub fn checked(&mut self, outcome: Outcome, now: Instant) {
        self.streak.take(outcome, now);
        self.refresh(now);
    }

    /// Its application says how loaded it is.
    pub fn loaded(&mut self, load: Load, until: Instant, now: Instant) {
        self.loads.said(load, until);
        self.refresh(now);
    }

    /// It was measured how loaded it is, or could not be.
    pub fn measured(&mut self, load: Option<Load>, now: Instant) {
        self.loads.measured(load);
        self.refresh(now);
    }

    /// Lets time pass.
    pub fn expire(&mut self, now: Instant) {
        self.subscribers.forget(now);
        if self.stale_at().is_some_and(|at| at <= now) {
            let why = match self.streak.health() {
                Health::Unknown(why) => why.clone(),
                Health::Unchecked | Health::Up | Health::Down(_) => {
                    "its health check was not completed in time".to_owned()
                }
            };
            self.streak.grow_old(why);
            self.refresh(now);
        }
    }

    /// When [`Entry::expire`] has something to do.
    pub fn expires_at(&self) -> Option<Instant> {
        self.stale_at().into_iter().chain(self.subscribers.forget_at()).min()
    }

    fn stale_at(&self) -> Option<Instant> {
        Some(self.streak.completed()? + self.rules.check?.stale_after)
    }

    /// A new version of the report. If the readiness is another one, all subscribers are told.
    fn refresh(&mut self, now: Instant) {
        self.version = self.version.saturating_add(1);
        let health =
            if self.rules.check.is_some() { self.streak.health().clone() } else { Health::Unchecked };
        let said = Said { lame_duck: self.lame_duck, runner: self.runner, health };
        let (readiness, why) = said.readiness();
        self.why = why;
        if readiness != self.readiness {
            self.readiness = readiness;
            self.since = now;
            self.change = self.change.wrapping_add(1);
            self.pushes.begin(self.subscribers.changed(self.change), now);
        }
    }

    /// The number of the last version of its report: the incarnation above the counter.
    pub const fn version(&self) -> u64 {
        self.version
    }

    /// How it is.
    pub const fn readiness(&self) -> Readiness {
        self.readiness
    }

    /// Why it is so, in words.
    pub fn why(&self) -> &str {
        &self.why
    }

    /// Since when it is so.
    pub const fn since(&self) -> Instant {
        self.since
    }

    /// Whether the operator has called it a lame duck.
    pub const fn is_lame_duck(&self) -> bool {
        self.lame_duck
    }

    /// How loaded it is, as far as that is known, and whether the application says so.
    pub fn load(&self, now: Instant) -> (Option<Load>, bool) {
        (self.loads.at(now), self.loads.is_said(now))
    }

    /// How many are told of changes.
    pub fn subscribers(&self) -> usize {
        self.subscribers.len()
    }

    /// How many that have asked lately have not acknowledged the last change.
    pub fn unheard(&self, now: Instant) -> usize {
        self.subscribers.unheard_lately(now)
    }

    /// Whether clients that use it may not have asked yet, because the agent has spoken for it for so short a time.
    pub fn is_new(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.begun) < ALL_HAVE_ASKED
    }

    /// Its keys.
    pub const fn keys(&self) -> &Keys<BackendKey> {
        &self.keys
    }

    /// The number of the last change.
    pub const fn change(&self) -> u16 {
        self.change
    }

    /// Its key of this number.
    pub fn key(&self, id: u16) -> Option<Key> {
        self.keys.get(id).map(BackendKey::wire)
    }

    /// An asker has shown that it has heard of a change. Returns whether another subscriber made room for it.
    pub fn subscribe(&mut self, asker: Asker, key_id: u16, heard: u16, now: Instant) -> bool {
        self.subscribers.asked(asker, key_id, heard, now)
    }

    /// The same, of one that was answered in the agent's place: if it is not known yet and has not heard of the last change, nobody has
    /// told it of that, and it is pushed to.
    pub fn subscribe_late(&mut self, asker: Asker, key_id: u16, heard: u16, asked: Instant) -> bool {
        let is_new = !self.subscribers.has(asker.address);
        let has_replaced = self.subscribers.asked(asker, key_id, heard, asked);
        if is_new && heard != self.change {
            self.pushes.add(asker.address, asked);
        }
        has_replaced
    }

    /// Whom to push the report to now, and under which key.
    pub fn next_push(&mut self, now: Instant) -> Option<(Asker, u16)> {
        let subscribers = &self.subscribers;
        let address = self.pushes.next(now, |address| subscribers.unheard_by(address).is_some())?;
        subscribers.unheard_by(address)
    }

    /// When the next push is due.
    pub fn push_at(&self) -> Option<Instant> {
        self.pushes.at()
    }

    /// A report with its code, under the key of this number, or under the one in use if that is no more.
    pub fn sealed(&self, mut report: Datagram, key_id: u16) -> Datagram {
        let current = self.keys.current();
        let (id, key) = self.key(key_id).map_or((current.id, current.key.wire()), |key| (key_id, key));
        report.key_id = Be16::from_host(id);
        report.sealed(key)
    }

    /// What is answered to requests from now on, for a while at most, and not longer than what was learnt holds. `now_ns` is this time
    /// by the clock of whoever answers.
    pub fn prepared(&self, now: Instant, now_ns: u64) -> PreparedAnswer {
        let holds_for = self.stale_at().map(|at| at.saturating_duration_since(now));
        // A report is valid for no longer either, but as long as it takes until the next is prepared, and again.
        let longest = ANSWERED_FOR.min(self.rules.valid_for.max(2 * PREPARED_EVERY));
        let holds_for = holds_for.map_or(longest, |holds_for| holds_for.min(longest));
        let mut keys = [SenderKey::default(); 2];
        for (key, own) in keys.iter_mut().zip(self.keys.all()) {
            *key = SenderKey { id: own.id, key: own.key.bytes(), ..SenderKey::default() };
        }
        PreparedAnswer {
            written_ns: now_ns,
            deadline_ns: now_ns.saturating_add(u64::try_from(holds_for.as_nanos()).unwrap_or(u64::MAX)),
            change: self.change,
            keys,
            report: self.report(Kind::Answer, now).words(),
            ..PreparedAnswer::zeroed()
        }
    }

    /// What there is to report, without a code.
    pub fn report(&self, kind: Kind, now: Instant) -> Datagram {
        let (load, _) = self.load(now);
        let number =
            |of: fn(&Load) -> Option<u32>| Be32::from_host(load.as_ref().and_then(of).unwrap_or(UNKNOWN));
        let time = |of: fn(&Load, Instant) -> Duration| {
            Be16::from_host(load.as_ref().map_or(0, |load| ms16(of(load, now))))
        };
        #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
        let (incarnation, counter) = ((self.version >> 32) as u32, self.version as u32);
        let mut report = Datagram::about(kind, self.name.protocol().number(), self.name.address());
        report.readiness = self.readiness as u8;
        report.incarnation = Be32::from_host(incarnation);
        report.counter = Be32::from_host(counter);
        report.qps = number(|load| load.qps);
        report.eps = number(|load| load.eps);
        report.utilization = number(|load| load.utilization);
        report.valid_for = Be32::from_host(ms32(self.rules.valid_for));
        report.hold = Be32::from_host(ms32(self.rules.hold));
        report.window = time(|load, _| load.window);
        report.age = time(|load, now| now.saturating_duration_since(load.measured));
        report
    }
}
