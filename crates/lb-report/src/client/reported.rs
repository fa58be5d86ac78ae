//! The reported state of one backend: the rules by which its datagrams are accepted, and the state
//! that results from the accepted reports.

use std::ops::{Add, Sub};
use std::time::Duration;

use lb_common::abi::host::{LastReport, ReportBase};
use lb_common::net::Be16;
use lb_core::health::{Health, ReportedVerdict, Why};
use lb_core::reports::{Name, ReportedLoad};

use crate::keys::{BackendKey, Keys};
pub use crate::receive::Disbelieved;
use crate::receive::judge;
use crate::wire::{Datagram, Kind, Readiness, UNKNOWN};

/// The number of a report. A later report has a larger number; the incarnation is compared first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Base {
    /// A number that rises with each start of the agent.
    pub incarnation: u32,
    /// A number that rises with each change of the report.
    pub counter: u32,
}

/// A report that was accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report<T> {
    /// The readiness that the backend reports.
    pub readiness: Readiness,
    /// The report's number.
    pub base: Base,
    /// When the report arrived.
    pub received: T,
    /// How long the report is valid.
    pub valid_for: Duration,
    /// The load that the backend reports.
    pub load: ReportedLoad,
}

impl Base {
    /// Converts from the form in kernel maps and datagrams; `None` if both numbers are zero, which
    /// no report has.
    pub fn of(number: ReportBase) -> Option<Self> {
        let ReportBase { incarnation, counter } = number;
        (number != ReportBase::default()).then_some(Self { incarnation, counter })
    }

    /// Converts to the form in kernel maps; `None` becomes two zeros.
    pub fn number(base: Option<Self>) -> ReportBase {
        base.map_or_else(ReportBase::default, |Self { incarnation, counter }| ReportBase {
            counter,
            incarnation,
        })
    }
}

/// The reported state of one backend. `T` is a time of any clock.
#[derive(Clone, Debug)]
pub struct Reported<T> {
    /// The number of the last report, and the nonce of the unanswered request.
    last: LastReport,
    /// When the last request was made; `None` if it was answered.
    requested_at: Option<T>,
    /// The cookie that the next request returns to the agent, to prove that this client receives
    /// the agent's answers at its address.
    cookie: u64,
    report: Option<Report<T>>,
    lame_until: Option<T>,
    down_until: Option<T>,
    round_trip: Option<Duration>,
    unanswered: u32,
    /// The last two times at which the number of an accepted answer was below the number of the
    /// previous report, the latest first.
    went_back: [Option<T>; 2],
}

/// The numbers of an agent go back once if its disk was lost and its clock was set back. If numbers
/// go back twice within this time, two agents report the backend.
const CONTESTED_WITHIN: Duration = Duration::from_mins(10);

/// The state of a backend according to its reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReportState {
    /// The backend accepts requests.
    Ready,
    /// The backend serves but requests that clients open no new connections, or it has been silent
    /// since such a report.
    LameDuck,
    /// The backend accepts no requests.
    Down,
    /// No report of the backend has been accepted yet.
    NeverReported,
    /// Reports of the backend have been accepted, but the last one is no longer valid.
    Silent,
    /// Its agent does not know the readiness.
    Unknown,
}

impl ReportState {
    /// The state's name in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::LameDuck => "lame-duck",
            Self::Down => "down",
            Self::NeverReported => "unheard",
            Self::Silent => "silent",
            Self::Unknown => "unknown",
        }
    }
}

impl<T: Copy> Default for Reported<T> {
    fn default() -> Self {
        Self {
            last: LastReport::default(),
            requested_at: None,
            cookie: 0,
            report: None,
            lame_until: None,
            down_until: None,
            round_trip: None,
            unanswered: 0,
            went_back: [None; 2],
        }
    }
}

impl<T: Copy + Ord + Add<Duration, Output = T> + Sub<T, Output = Duration>> Reported<T> {
    /// A backend in the state that an earlier daemon has stored: the number of the last report, and
    /// the time until which the backend is a lame duck.
    pub fn adopted(base: Option<Base>, lame_until: Option<T>) -> Self {
        let number = Base::number(base);
        let last = LastReport { base: number, highest: number, ..LastReport::default() };
        Self { last, lame_until, ..Self::default() }
    }

    /// Makes a request. Answers to earlier requests are no longer accepted.
    pub fn new_request(&mut self, name: Name, keys: &Keys<BackendKey>, nonce: u64, now: T) -> Datagram {
        if self.requested_at.replace(now).is_some() {
            self.unanswered = self.unanswered.saturating_add(1);
        }
        self.last.nonce = nonce;
        self.request(name, keys, nonce)
    }

    /// Repeats the unanswered request if it is less than `within` old. Replayed pushes cause such
    /// repetitions. An answer to the first request is still accepted, because the nonce remains the
    /// same.
    pub fn repeat_request(
        &self,
        name: Name,
        keys: &Keys<BackendKey>,
        within: Duration,
        now: T,
    ) -> Option<Datagram> {
        self.requested_at.filter(|requested_at| *requested_at + within > now)?;
        Some(self.request(name, keys, self.last.nonce))
    }

    fn request(&self, name: Name, keys: &Keys<BackendKey>, nonce: u64) -> Datagram {
        let key = keys.current();
        let mut datagram = Datagram::about(Kind::Request, name.protocol.number(), name.address);
        datagram.key_id = Be16::from_host(key.id);
        (datagram.nonce, datagram.cookie) = (nonce, self.cookie);
        datagram.sealed(key.key.wire())
    }

    /// Processes a datagram about this backend. The datagram is accepted if [`judge`] accepts it
    /// and its MAC is valid.
    ///
    /// # Errors
    /// The reason why the datagram is not accepted. The state is then unchanged.
    pub fn take(&mut self, datagram: &Datagram, keys: &Keys<BackendKey>, now: T) -> Result<(), Disbelieved> {
        let readiness = datagram.readiness().ok_or(Disbelieved::NotAReport)?;
        let after = judge(self.last, datagram)?;
        let base = Base::of(after.base).ok_or(Disbelieved::NotAReport)?;
        let key = keys.get(datagram.key_id.to_host()).ok_or(Disbelieved::UnknownKey)?;
        if !datagram.is_authentic(key.wire()) {
            return Err(Disbelieved::Forged);
        }
        if datagram.kind() == Some(Kind::Answer) {
            self.round_trip = self.requested_at.map(|requested_at| now - requested_at);
            if self.base().is_some_and(|before| base < before) {
                self.went_back = [Some(now), self.went_back[0]];
            }
        }
        self.last = after;
        self.cookie = datagram.cookie;
        let valid_for = milliseconds(datagram.valid_for_ms());
        self.requested_at = None;
        self.unanswered = 0;
        match readiness {
            Readiness::Ready => (self.lame_until, self.down_until) = (None, None),
            Readiness::LameDuck => {
                (self.lame_until, self.down_until) = (Some(now + milliseconds(datagram.hold_ms())), None);
            }
            // If the backend was a lame duck before, `lame_until` remains, because the backend is
            // restarting.
            Readiness::Down => self.down_until = Some(now + valid_for),
            Readiness::Unknown => self.down_until = None,
        }
        self.report = Some(Report { readiness, base, received: now, valid_for, load: load(datagram) });
        Ok(())
    }

    /// The state at this time.
    pub fn state(&self, now: T) -> ReportState {
        let lasts = |until: Option<T>| until.is_some_and(|until| until > now);
        if lasts(self.down_until) {
            return ReportState::Down;
        }
        if lasts(self.lame_until) {
            return ReportState::LameDuck;
        }
        match &self.report {
            None => ReportState::NeverReported,
            Some(report) if report.received + report.valid_for <= now => ReportState::Silent,
            Some(report) if report.readiness == Readiness::Ready => ReportState::Ready,
            Some(_) => ReportState::Unknown,
        }
    }

    /// The verdict that follows from the state; `None` if the backend is ready or its state is
    /// unknown.
    pub fn verdict(&self, now: T) -> Option<ReportedVerdict<T>> {
        let (health, until) = match self.state(now) {
            ReportState::Down => (Health::Refusing, self.down_until),
            ReportState::LameDuck => (Health::LameDuck, self.lame_until),
            ReportState::Ready | ReportState::NeverReported | ReportState::Silent | ReportState::Unknown => {
                return None;
            }
        };
        Some(ReportedVerdict { health, why: Why::Report, until })
    }

    /// When the verdict changes next without another report.
    pub fn next_change(&self, now: T) -> Option<T> {
        [self.lame_until, self.down_until].into_iter().flatten().filter(|until| *until > now).min()
    }

    /// The time until which connects treat the backend as a lame duck, which the kernel programs
    /// read from the verdict array; `None` if there is no such time. A backend that is down also
    /// counts as a lame duck here, so that connects avoid it at once, before the daemon has
    /// published that it is refusing.
    pub fn lame_until(&self) -> Option<T> {
        self.lame_until.max(self.down_until)
    }

    /// The nonce of the last request; 0 after an accepted report.
    pub fn nonce(&self) -> u64 {
        self.last.nonce
    }

    /// The number of the last report that was accepted.
    pub fn base(&self) -> Option<Base> {
        Base::of(self.last.base)
    }

    /// The last report that was accepted.
    pub fn report(&self) -> Option<&Report<T>> {
        self.report.as_ref()
    }

    /// Whether two agents answer alternately for the backend, each with its own numbers. The
    /// answers of both are accepted.
    pub fn is_contested(&self, now: T) -> bool {
        let [Some(last), Some(before)] = self.went_back else { return false };
        now < last + CONTESTED_WITHIN && last < before + CONTESTED_WITHIN
    }

    /// The time from the last answered request to its answer.
    pub fn round_trip(&self) -> Option<Duration> {
        self.round_trip
    }

    /// The number of unanswered requests in a row, not counting the latest request.
    pub fn unanswered(&self) -> u32 {
        self.unanswered
    }
}

fn milliseconds(number: u32) -> Duration {
    Duration::from_millis(number.into())
}

fn load(datagram: &Datagram) -> ReportedLoad {
    let known = |number: u32| (number != UNKNOWN).then_some(number);
    let short = |number: Be16| Duration::from_millis(number.to_host().into());
    ReportedLoad {
        qps: known(datagram.qps.to_host()),
        eps: known(datagram.eps.to_host()),
        utilization: known(datagram.utilization.to_host()),
        window: short(datagram.window),
        age: short(datagram.age),
    }
}

#[cfg(test)]
mod tests {
    use lb_common::net::Be32;
    use lb_core::service::Protocol;
    use proptest::prelude::*;

    use super::*;
    use crate::keys::{Numbered, ServiceKey};
    use crate::wire::{MAX_HOLD, MAX_VALID_FOR};

    fn name() -> Name {
        Name { protocol: Protocol::Tcp, address: "10.1.2.3:8080".parse().unwrap() }
    }

    fn keys_of(id: u16, byte: u8) -> Keys<BackendKey> {
        let key = Numbered { id, key: ServiceKey::from_bytes([byte; 32]) };
        Keys::new(key.of_backend(name().protocol, name().address), None)
    }

    fn keys() -> Keys<BackendKey> {
        keys_of(1, 7)
    }

    fn at(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    /// An agent that answers requests.
    #[derive(Clone, Copy)]
    struct Agent {
        incarnation: u32,
        counter: u32,
        readiness: Readiness,
    }

    impl Agent {
        fn of(readiness: Readiness) -> Self {
            Self { incarnation: 100, counter: 1, readiness }
        }

        fn report(self, kind: Kind, nonce: u64) -> Datagram {
            let mut datagram = Datagram::about(kind, 6, name().address);
            datagram.readiness = self.readiness as u8;
            datagram.key_id = Be16::from_host(1);
            datagram.incarnation = Be32::from_host(self.incarnation);
            datagram.counter = Be32::from_host(self.counter);
            (datagram.nonce, datagram.cookie) = (nonce, 5);
            datagram.utilization = Be32::from_host(600);
            datagram.qps = Be32::from_host(UNKNOWN);
            datagram.valid_for = Be32::from_host(6_000);
            datagram.hold = Be32::from_host(60_000);
            datagram.sealed(keys().current().key.wire())
        }

        fn answer(self, request: &Datagram) -> Datagram {
            self.report(Kind::Answer, request.nonce)
        }

        fn push(self) -> Datagram {
            self.report(Kind::Push, 0)
        }
    }

    /// The reported state after an answer of `agent` at `now`.
    fn with_report(agent: Agent, now: Duration) -> Reported<Duration> {
        let mut reported = Reported::default();
        let request = reported.new_request(name(), &keys(), 1, now);
        reported.take(&agent.answer(&request), &keys(), now).unwrap();
        reported
    }

    #[test]
    fn an_answer_is_believed_once_and_shows_the_round_trip() {
        let mut reported = Reported::default();
        assert_eq!(reported.state(at(0)), ReportState::NeverReported);
        let request = reported.new_request(name(), &keys(), 77, at(0));
        assert!((request.kind(), request.cookie) == (Some(Kind::Request), 0));
        assert!(request.is_authentic(keys().current().key.wire()));
        let answer = Agent::of(Readiness::Ready).answer(&request);
        reported.take(&answer, &keys(), at(3)).unwrap();
        assert_eq!((reported.state(at(3)), reported.round_trip()), (ReportState::Ready, Some(at(3))));
        assert_eq!(reported.report().unwrap().load.utilization, Some(600));
        assert_eq!(reported.report().unwrap().load.qps, None);
        assert_eq!(reported.take(&answer, &keys(), at(4)), Err(Disbelieved::Unrequested));
        // The next request returns the cookie.
        assert_eq!(reported.new_request(name(), &keys(), 78, at(5)).cookie, 5);
        assert_eq!(
            reported.take(&answer, &keys(), at(6)),
            Err(Disbelieved::Unrequested),
            "the nonce was already used"
        );
    }

    #[test]
    fn after_numbers_went_back_older_pushes_are_replays() {
        let now = at(10);
        let mut reported = with_report(Agent { incarnation: 9, ..Agent::of(Readiness::Ready) }, at(0));
        let before = Agent { incarnation: 9, counter: 5, ..Agent::of(Readiness::LameDuck) }.push();
        reported.take(&before, &keys(), now).unwrap();
        let again = Agent { incarnation: 3, ..Agent::of(Readiness::Ready) };
        let request = reported.new_request(name(), &keys(), 2, now);
        reported.take(&again.answer(&request), &keys(), now).unwrap();
        assert_eq!(reported.take(&before, &keys(), now), Err(Disbelieved::Replayed));
        // Pushes are accepted from the current agent, and from an agent with numbers above all
        // earlier numbers.
        for (incarnation, counter) in [(3, 20), (10, 0)] {
            let push = Agent { incarnation, counter, ..Agent::of(Readiness::LameDuck) }.push();
            assert_eq!(reported.take(&push, &keys(), now), Ok(()));
        }
    }

    #[test]
    fn a_reporting_lame_duck_remains_one_with_any_hold() {
        let mut reported = Reported::default();
        let request = reported.new_request(name(), &keys(), 1, at(0));
        let mut answer = Agent::of(Readiness::LameDuck).answer(&request);
        answer.hold = Be32::from_host(0);
        reported.take(&answer.sealed(keys().current().key.wire()), &keys(), at(0)).unwrap();
        assert_eq!(
            reported.lame_until(),
            Some(at(6_000)),
            "the backend is a lame duck while its report is valid"
        );
    }

    #[test]
    fn a_silent_backend_has_no_verdict() {
        let mut reported = with_report(Agent::of(Readiness::Ready), at(0));
        assert_eq!(reported.state(at(5_999)), ReportState::Ready);
        assert_eq!((reported.state(at(6_000)), reported.verdict(at(6_000))), (ReportState::Silent, None));
        for nonce in 0..4 {
            reported.new_request(name(), &keys(), nonce, at(7_000));
        }
        assert_eq!(reported.unanswered(), 3);
    }

    #[test]
    fn a_silent_lame_duck_remains_one_until_its_hold_ends() {
        let lame = with_report(Agent::of(Readiness::LameDuck), at(0));
        let verdict = lame.verdict(at(59_999)).unwrap();
        assert_eq!((verdict.health, verdict.until), (Health::LameDuck, Some(at(60_000))));
        assert_eq!(lame.next_change(at(1)), Some(at(60_000)));
        assert_eq!((lame.state(at(60_000)), lame.verdict(at(60_000))), (ReportState::Silent, None));
        for (readiness, state) in [
            (Readiness::Ready, ReportState::Ready),
            (Readiness::Unknown, ReportState::LameDuck),
            (Readiness::Down, ReportState::Down),
        ] {
            let mut then = lame.clone();
            let push = Agent { counter: 2, ..Agent::of(readiness) }.push();
            then.take(&push, &keys(), at(10)).unwrap();
            assert_eq!(then.state(at(20)), state);
        }
        // The backend is down while the report that it is down is valid. After that the backend is
        // a lame duck again, because it is restarting.
        let mut down = lame;
        let push = Agent { counter: 2, ..Agent::of(Readiness::Down) }.push();
        down.take(&push, &keys(), at(10)).unwrap();
        assert_eq!(down.verdict(at(6_009)).map(|verdict| verdict.health), Some(Health::Refusing));
        assert_eq!(down.next_change(at(20)), Some(at(6_010)));
        assert_eq!(down.state(at(6_010)), ReportState::LameDuck);
        assert_eq!(down.lame_until(), Some(at(60_000)));
    }

    #[test]
    fn times_of_a_report_are_bounded() {
        let mut reported = Reported::default();
        let request = reported.new_request(name(), &keys(), 1, at(0));
        let mut answer = Agent::of(Readiness::LameDuck).answer(&request);
        (answer.hold, answer.valid_for) = (Be32::from_host(u32::MAX), Be32::from_host(u32::MAX));
        reported.take(&answer.sealed(keys().current().key.wire()), &keys(), at(0)).unwrap();
        assert_eq!(reported.lame_until(), Some(MAX_HOLD));
        assert_eq!(reported.report().unwrap().valid_for, MAX_VALID_FOR);
    }

    #[test]
    fn a_push_must_be_later_than_the_last_report() {
        let lame = Agent::of(Readiness::LameDuck);
        let mut reported = Reported::default();
        assert_eq!(reported.take(&lame.push(), &keys(), at(0)), Err(Disbelieved::Premature));
        let mut reported = with_report(Agent { counter: 5, ..Agent::of(Readiness::Ready) }, at(0));
        for (incarnation, counter, expected) in [
            (100, 5, Err(Disbelieved::Replayed)),
            (100, 4, Err(Disbelieved::Replayed)),
            (99, 9, Err(Disbelieved::Replayed)),
            (100, 6, Ok(())),
            (101, 0, Ok(())),
        ] {
            let push = Agent { incarnation, counter, ..lame }.push();
            assert_eq!(
                reported.take(&push, &keys(), at(1)),
                expected,
                "incarnation {incarnation}, counter {counter}"
            );
        }
        // The agent's disk was lost, and its clock is behind.
        let request = reported.new_request(name(), &keys(), 9, at(2));
        let answer = Agent { incarnation: 3, counter: 0, readiness: Readiness::Ready }.answer(&request);
        reported.take(&answer, &keys(), at(3)).unwrap();
        assert_eq!(reported.base(), Some(Base { incarnation: 3, counter: 0 }));
        assert_eq!(reported.state(at(3)), ReportState::Ready);
    }

    /// Whether two agents are detected for the backend, after answers with these incarnations that
    /// arrive `step` apart.
    fn contested(incarnations: &[u32], step: Duration) -> bool {
        let mut reported = Reported::default();
        let mut now = at(0);
        for (nonce, incarnation) in (1..).zip(incarnations) {
            now += step;
            let request = reported.new_request(name(), &keys(), nonce, now);
            let agent = Agent { incarnation: *incarnation, ..Agent::of(Readiness::Ready) };
            reported.take(&agent.answer(&request), &keys(), now).unwrap();
        }
        assert!(!reported.is_contested(now + CONTESTED_WITHIN), "the detection must expire");
        reported.is_contested(now)
    }

    #[test]
    fn two_agents_that_answer_in_turns_are_detected() {
        let second = at(1_000);
        assert!(contested(&[5, 9, 5, 9, 5], second));
        assert!(
            !contested(&[5, 9, 5, 9, 5], CONTESTED_WITHIN),
            "answers of two agents that are this rare look like restarts"
        );
        // These are single agents: one restarts repeatedly, one has begun with lower numbers, and
        // one continues to run.
        assert!(!contested(&[5, 6, 7, 8, 9], second));
        assert!(!contested(&[9, 5, 6, 7, 8], second));
        assert!(!contested(&[5; 5], second));
    }

    #[test]
    fn a_push_invalidates_the_nonce() {
        let mut reported = with_report(Agent::of(Readiness::Ready), at(0));
        let request = reported.new_request(name(), &keys(), 2, at(1));
        let push = Agent { counter: 2, ..Agent::of(Readiness::LameDuck) }.push();
        reported.take(&push, &keys(), at(2)).unwrap();
        let late = Agent::of(Readiness::Ready).answer(&request);
        assert_eq!(reported.take(&late, &keys(), at(3)), Err(Disbelieved::Unrequested));
        assert_eq!(reported.state(at(3)), ReportState::LameDuck);
    }

    #[test]
    fn datagrams_that_are_not_authentic_change_nothing() {
        let mut reported = with_report(Agent::of(Readiness::Ready), at(0));
        let request = reported.new_request(name(), &keys(), 2, at(1));
        // The client receives its own request, which was reflected.
        assert_eq!(reported.take(&request, &keys(), at(2)), Err(Disbelieved::NotAReport));
        let mut reflected = request;
        reflected.kind = Kind::Answer as u8;
        assert_eq!(
            reported.take(&reflected, &keys(), at(2)),
            Err(Disbelieved::NotAReport),
            "the datagram contains no number"
        );
        reflected.counter = Be32::from_host(1);
        assert_eq!(reported.take(&reflected, &keys(), at(2)), Err(Disbelieved::Forged));
        let answer = Agent::of(Readiness::LameDuck).answer(&request);
        assert_eq!(reported.take(&answer, &keys_of(2, 7), at(2)), Err(Disbelieved::UnknownKey));
        assert_eq!(reported.take(&answer, &keys_of(1, 8), at(2)), Err(Disbelieved::Forged));
        assert_eq!((reported.state(at(2)), reported.verdict(at(2))), (ReportState::Ready, None));
        // Two keys are valid while one replaces the other.
        let both = Keys::new(keys_of(2, 8).current(), Some(keys().current()));
        assert!(
            reported.new_request(name(), &both, 3, at(3)).is_authentic(keys_of(2, 8).current().key.wire())
        );
        let request = reported.new_request(name(), &both, 4, at(3));
        reported.take(&Agent::of(Readiness::LameDuck).answer(&request), &both, at(4)).unwrap();
    }

    proptest! {
        /// Datagrams arrive in any order, repeated and changed. Changed datagrams are never
        /// accepted, and an accepted push is always later than the last report.
        #[test]
        fn changed_datagrams_are_rejected_and_pushes_never_go_back(
            steps in proptest::collection::vec((0_u8..4, 0_usize..20, 0_usize..640), 1..60)
        ) {
            let mut reported = Reported::default();
            let mut sent: Vec<Datagram> = vec![];
            let (mut counter, mut now) = (0, 0);
            for (what, which, bit) in steps {
                now += 1;
                let before = reported.base();
                match what {
                    0 => {
                        let request = reported.new_request(name(), &keys(), now + 1_000, at(now));
                        counter += 1;
                        let readiness =
                            if which % 2 == 0 { Readiness::LameDuck } else { Readiness::Ready };
                        sent.push(Agent { counter, ..Agent::of(readiness) }.answer(&request));
                    }
                    1 => {
                        counter += 1;
                        sent.push(Agent { counter, ..Agent::of(Readiness::LameDuck) }.push());
                    }
                    _ if sent.is_empty() => {}
                    2 => {
                        let datagram = sent[which % sent.len()];
                        if reported.take(&datagram, &keys(), at(now)).is_ok()
                            && datagram.kind() == Some(Kind::Push)
                        {
                            prop_assert!(reported.base() > before);
                        }
                    }
                    _ => {
                        let mut bytes = sent[which % sent.len()].bytes().to_vec();
                        bytes[bit / 8] ^= 1 << (bit % 8);
                        if let Ok(changed) = Datagram::parse(&bytes) {
                            prop_assert!(reported.take(&changed, &keys(), at(now)).is_err());
                            prop_assert_eq!(reported.base(), before);
                        }
                    }
                }
            }
        }
    }
}
