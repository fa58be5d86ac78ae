//! One backend: the inputs to its readiness, its report, and the pushes to its subscribers when the
//! readiness changes.

use std::time::{Duration, Instant};

use bytemuck::Zeroable as _;
use lb_common::abi::host::SenderKey;
use lb_common::abi::responder::PreparedAnswer;
use lb_common::net::{Be16, Be32};

use super::load::{Load, Loads};
use super::name::Name;
use super::pushes::Pushes;
use super::streak::{Health, Outcome, Streak};
use super::subscribers::{MAX_SUBSCRIBERS, Requester, Subscribers};
use super::{ms16, ms32};
use crate::keys::{BackendKey, Keys};
use crate::wire::{Datagram, Key, Kind, Readiness, UNKNOWN};

/// The configuration of a backend's reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// How long a report is valid.
    pub valid_for: Duration,
    /// How long a silent backend remains a lame duck.
    pub hold: Duration,
    /// The rules of its health check; `None` if it has no health check.
    pub check: Option<CheckRules>,
}

/// The rules by which results of a health check change the readiness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckRules {
    /// Passed checks in a row that make the backend healthy.
    pub rise: u32,
    /// Failed checks in a row that make the backend unhealthy.
    pub fall: u32,
    /// How long a result is valid if no other check completes.
    pub stale_after: Duration,
}

/// After this time, a new agent has received a request from each client, because by default each
/// client sends a request at least every 2.2 s (2 s and a tenth).
const ALL_REQUESTED_WITHIN: Duration = Duration::from_millis(2500);

/// The maximum time for which the responder may use a prepared answer while the agent gets no CPU
/// time to prepare a new one. It is five times [`PREPARED_EVERY`].
const ANSWERED_FOR: Duration = Duration::from_secs(5);

/// The interval at which the agent prepares all answers.
pub const PREPARED_EVERY: Duration = Duration::from_secs(1);

/// One backend of the agent.
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
    /// When the agent began to report this backend.
    begun: Instant,
    /// The incarnation in the upper half, the counter in the lower half. If the counter overflows,
    /// the version continues with the next incarnation, a number that the wall clock has already
    /// passed.
    version: u64,
    /// How often the readiness has changed, modulo 65,536.
    change: u16,
    subscribers: Subscribers,
    pushes: Pushes,
}

impl Entry {
    /// A backend with unknown readiness. Its reports have versions above `version`, and its changes
    /// have numbers above `change`.
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

    /// Replaces the backend's keys and rules. If the check was removed or replaced, the caller must
    /// discard the results of the old check ([`Entry::restart_check`]).
    pub fn set(&mut self, keys: Keys<BackendKey>, rules: Rules, now: Instant) {
        let (rise, fall) = rules.check.map_or((1, 1), |check| (check.rise, check.fall));
        self.streak.set(rise, fall);
        self.keys = keys;
        self.rules = rules;
        self.refresh(now);
    }

    /// Discards the results of the health check.
    pub fn restart_check(&mut self, now: Instant) {
        let (rise, fall) = self.rules.check.map_or((1, 1), |check| (check.rise, check.fall));
        self.streak = Streak::new(rise, fall);
        self.refresh(now);
    }

    /// Records whether the operator makes the backend a lame duck.
    pub fn operator(&mut self, lame_duck: bool, now: Instant) {
        self.lame_duck = lame_duck;
        self.refresh(now);
    }

    /// Records the readiness that the runner (the program that runs the backend) reports; `None` if
    /// there is no longer a runner.
    pub fn runner(&mut self, readiness: Option<Readiness>, now: Instant) {
        self.runner = readiness;
        self.refresh(now);
    }

    /// The readiness that its runner reports, if there is a runner.
    pub const fn runner_readiness(&self) -> Option<Readiness> {
        self.runner
    }

    /// Records the result of a health check.
    pub fn checked(&mut self, outcome: Outcome, now: Instant) {
        self.streak.take(outcome, now);
        self.refresh(now);
    }

    /// Records the load that the application reports, valid until `until`.
    pub fn loaded(&mut self, load: Load, until: Instant, now: Instant) {
        self.loads.set_reported(load, until);
        self.refresh(now);
    }

    /// Records the measured load; `None` if it could not be measured.
    pub fn measured(&mut self, load: Option<Load>, now: Instant) {
        self.loads.measured(load);
        self.refresh(now);
    }

    /// Applies the effects of elapsed time: removes silent subscribers, and makes the health
    /// unknown if the last result is too old.
    pub fn expire(&mut self, now: Instant) {
        self.subscribers.forget(now);
        if self.stale_at().is_some_and(|at| at <= now) {
            let why = match self.streak.health() {
                Health::Unknown(why) => why.clone(),
                Health::Up | Health::Down(_) => "its health check did not complete in time".to_owned(),
            };
            self.streak.grow_old(why);
            self.refresh(now);
        }
    }

    /// The next time at which [`Entry::expire`] has an effect.
    pub fn expires_at(&self) -> Option<Instant> {
        self.stale_at().into_iter().chain(self.subscribers.forget_at()).min()
    }

    fn stale_at(&self) -> Option<Instant> {
        Some(self.streak.completed()? + self.rules.check?.stale_after)
    }

    /// Makes a new version of the report. If the readiness has changed, starts a push to all
    /// subscribers.
    fn refresh(&mut self, now: Instant) {
        self.version = self.version.saturating_add(1);
        let health = self.rules.check.map(|_| self.streak.health());
        let (readiness, why) = readiness_from(self.lame_duck, self.runner, health);
        self.why = why;
        if readiness != self.readiness {
            self.readiness = readiness;
            self.since = now;
            self.change = self.change.wrapping_add(1);
            self.pushes.begin(self.subscribers.changed(self.change), now);
        }
    }

    /// The version of its latest report: incarnation in the upper half, counter in the lower half.
    pub const fn version(&self) -> u64 {
        self.version
    }

    /// The current readiness.
    pub const fn readiness(&self) -> Readiness {
        self.readiness
    }

    /// The reason for the current readiness, in words.
    pub fn why(&self) -> &str {
        &self.why
    }

    /// When the readiness last changed.
    pub const fn since(&self) -> Instant {
        self.since
    }

    /// Whether the operator has made the backend a lame duck.
    pub const fn is_lame_duck(&self) -> bool {
        self.lame_duck
    }

    /// The known load, and whether the application reports it.
    pub fn load(&self, now: Instant) -> (Option<Load>, bool) {
        (self.loads.at(now), self.loads.is_reported(now))
    }

    /// The number of subscribers.
    pub fn subscribers(&self) -> usize {
        self.subscribers.len()
    }

    /// The number of subscribers with a recent request that have not acknowledged the last change.
    pub fn unacknowledged(&self, now: Instant) -> usize {
        self.subscribers.recent_unacknowledged(now)
    }

    /// Whether the agent began to report this backend so recently that some clients may not have
    /// sent a request yet.
    pub fn is_new(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.begun) < ALL_REQUESTED_WITHIN
    }

    /// The backend's keys.
    pub const fn keys(&self) -> &Keys<BackendKey> {
        &self.keys
    }

    /// The number of the last change of the readiness.
    pub const fn change(&self) -> u16 {
        self.change
    }

    /// The backend's key with this number.
    pub fn key(&self, id: u16) -> Option<Key> {
        self.keys.get(id).map(BackendKey::wire)
    }

    /// Records a subscriber that has acknowledged the change with the number `acknowledged`.
    /// Returns whether another subscriber was removed to make room.
    pub fn subscribe(&mut self, requester: Requester, key_id: u16, acknowledged: u16, now: Instant) -> bool {
        self.subscribers.on_request(requester, key_id, acknowledged, now)
    }

    /// Like [`Entry::subscribe`], for a client that the responder has answered. If the client is
    /// new and has not acknowledged the last change, no push was sent to it, so it is added to the
    /// receivers of the pushes.
    pub fn subscribe_late(
        &mut self,
        requester: Requester,
        key_id: u16,
        acknowledged: u16,
        requested_at: Instant,
    ) -> bool {
        let is_new = !self.subscribers.has(requester.address);
        let has_replaced = self.subscribers.on_request(requester, key_id, acknowledged, requested_at);
        if is_new && acknowledged != self.change {
            self.pushes.add(requester.address, requested_at);
        }
        has_replaced
    }

    /// The subscriber that must receive a push now, and the number of its key; `None` if no push is
    /// due.
    pub fn next_push(&mut self, now: Instant) -> Option<(Requester, u16)> {
        let subscribers = &self.subscribers;
        let address = self.pushes.next(now, |address| subscribers.unacknowledged_by(address).is_some())?;
        subscribers.unacknowledged_by(address)
    }

    /// When the next push is due.
    pub fn push_at(&self) -> Option<Instant> {
        self.pushes.at()
    }

    /// Adds the MAC to a report: under the key with this number or, if the backend no longer has
    /// that key, under the current key.
    pub fn sealed(&self, mut report: Datagram, key_id: u16) -> Datagram {
        let current = self.keys.current();
        let (id, key) = self.key(key_id).map_or((current.id, current.key.wire()), |key| (key_id, key));
        report.key_id = Be16::from_host(id);
        report.sealed(key)
    }

    /// The answer that the responder must send from now on. The answer is valid for at most 5 s,
    /// and not longer than the last result of the health check. `now_ns` is the current time by the
    /// responder's clock.
    pub fn prepared(&self, now: Instant, now_ns: u64) -> PreparedAnswer {
        let holds_for = self.stale_at().map(|at| at.saturating_duration_since(now));
        // The answer is valid for as long as a report, but for at least two of the intervals at
        // which the agent prepares answers, and for at most `ANSWERED_FOR`. The age of the health
        // check's last result may shorten this time.
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

    /// The current report, without a MAC.
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

/// The readiness that follows from all inputs, and its reason. If the runner reports a readiness
/// other than ready, the health check is ignored. If the runner reports ready, only a failing
/// health check overrides the report. If the operator has made the backend a lame duck, this takes
/// precedence over ready and unknown, but not over down. `health` is `None` without a health check.
fn readiness_from(
    lame_duck: bool,
    runner: Option<Readiness>,
    health: Option<&Health>,
) -> (Readiness, String) {
    use Readiness::{Down, LameDuck, Ready, Unknown};
    let by_runner = "reported by the program that runs it";
    let (readiness, why) = match (runner, health) {
        // These reports of the runner take precedence over the health check, which may fail only
        // because the program is starting or stopping.
        (Some(reported @ (LameDuck | Down | Unknown)), _) => (reported, by_runner),
        (Some(Ready) | None, Some(Health::Down(why))) => (Down, why.as_str()),
        (Some(Ready), None | Some(Health::Unknown(_) | Health::Up)) => (Ready, by_runner),
        (None, Some(Health::Up)) => (Ready, "its health check passes"),
        (None, Some(Health::Unknown(why))) => (Unknown, why.as_str()),
        (None, None) => (Unknown, "it has no health check, and no program that runs it is registered"),
    };
    let (readiness, why) =
        if lame_duck && readiness != Down { (LameDuck, "set by the operator") } else { (readiness, why) };
    (readiness, why.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_readiness_follows_the_precedence_of_its_inputs() {
        use Readiness::{Down, LameDuck, Ready, Unknown};
        let no = || "no".to_owned();
        let healths = [None, Some(Health::Unknown(no())), Some(Health::Up), Some(Health::Down(no()))];
        // Each row has a report of the runner, then the readiness for each health, and last the
        // readiness for each health if the operator has made the backend a lame duck.
        let table = [
            (None, [Unknown, Unknown, Ready, Down], [LameDuck, LameDuck, LameDuck, Down]),
            (Some(Ready), [Ready, Ready, Ready, Down], [LameDuck, LameDuck, LameDuck, Down]),
            (Some(LameDuck), [LameDuck; 4], [LameDuck; 4]),
            (Some(Down), [Down; 4], [Down; 4]),
            (Some(Unknown), [Unknown; 4], [LameDuck; 4]),
        ];
        for (runner, without, with) in table {
            for (health, (without, with)) in healths.iter().zip(without.into_iter().zip(with)) {
                for (lame_duck, expected) in [(false, without), (true, with)] {
                    let (readiness, why) = readiness_from(lame_duck, runner, health.as_ref());
                    assert_eq!(readiness, expected, "{lame_duck} {runner:?} {health:?}: {why}");
                }
            }
        }
    }
}
