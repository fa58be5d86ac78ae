//! One client and one agent exchange datagrams in virtual time, over a wire that loses, repeats,
//! delays and thereby reorders datagrams.
//!
//! The behaviour of the wire is random, and derived from a seed that the test prints. No assertion
//! depends on the seed: each assertion must be true for any behaviour within the limits that the
//! test sets.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use fastrand::Rng;
use lb_core::health::Health;
use lb_core::reports;
use lb_core::service::Protocol;
use lb_report::agent::entry::{Entry, Rules};
use lb_report::agent::name::Name;
use lb_report::agent::{Reports, Requester, Via};
use lb_report::client::reported::{Base, Disbelieved, ReportState, Reported};
use lb_report::client::senders::{Change, Refusal, Senders, Target};
use lb_report::keys::{BackendKey, Keys, Numbered, ServiceKey};
use lb_report::wire::{BYTES, Datagram, Kind, Readiness};

const INTERVAL: Duration = Duration::from_secs(2);
const VALID_FOR: Duration = Duration::from_secs(6);
const HOLD: Duration = Duration::from_mins(1);

/// The longest interval between two polls, in milliseconds, including the jitter of a tenth.
const LONGEST_INTERVAL: u64 = 2_200;

/// The times of the pushes, in milliseconds after the first.
const PUSHES: [u64; 5] = [0, 10, 20, 40, 80];

fn backend() -> SocketAddr {
    ([10, 0, 0, 1], 80).into()
}

fn name() -> Name {
    Name::new(Protocol::Tcp, backend()).expect("the address belongs to one host")
}

fn client_address() -> SocketAddr {
    ([192, 0, 2, 1], 9467).into()
}

/// The keys of the backend with these numbers; the first is the key to send with. Both sides derive
/// them from the service's key.
fn keys(first: u16, second: Option<u16>) -> Keys<BackendKey> {
    let number = |id: u16| Numbered { id, key: ServiceKey::from_bytes([id.to_be_bytes()[1]; 32]) };
    Keys::new(number(first), second.map(number)).of_backend(Protocol::Tcp, backend())
}

/// The destination of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Client,
    Agent,
}

/// The behaviour of the wire: percentages of losses and repetitions, and delays in milliseconds.
#[derive(Clone, Debug)]
struct Weather {
    lost: u8,
    repeated: u8,
    delay: RangeInclusive<u64>,
}

const FINE: Weather = Weather { lost: 0, repeated: 0, delay: 1..=1 };

/// Delays are longer than an interval, so that answers arrive after the next request was sent.
const ROUGH: Weather = Weather { lost: 30, repeated: 40, delay: 0..=3_000 };

struct Wire {
    rng: Rng,
    weather: Weather,
    /// Datagrams in flight, keyed by arrival time and sequence number.
    under_way: BTreeMap<(u64, u64), (End, [u8; BYTES])>,
    sent: u64,
    /// All datagrams ever sent, for replays.
    seen: Vec<(End, [u8; BYTES])>,
}

impl Wire {
    fn send(&mut self, now: u64, to: End, datagram: &Datagram) {
        let bytes = datagram.bytes().try_into().expect("a datagram has BYTES bytes");
        self.seen.push((to, bytes));
        self.carry(now, to, bytes);
    }

    fn carry(&mut self, now: u64, to: End, bytes: [u8; BYTES]) {
        let Weather { lost, repeated, ref delay } = self.weather;
        let copies = 1 + usize::from(self.rng.u8(0..100) < repeated);
        for _ in 0..copies {
            if self.rng.u8(0..100) < lost {
                continue;
            }
            self.sent += 1;
            let at = now + self.rng.u64(delay.clone());
            self.under_way.insert((at, self.sent), (to, bytes));
        }
    }

    /// Sends a random earlier datagram again.
    fn replay(&mut self, now: u64) {
        if let Some(&(to, bytes)) = self.rng.choice(&self.seen) {
            self.carry(now, to, bytes);
        }
    }

    fn arrived(&mut self, now: u64) -> Vec<(End, [u8; BYTES])> {
        let later = self.under_way.split_off(&(now + 1, 0));
        std::mem::replace(&mut self.under_way, later).into_values().collect()
    }
}

/// Both sides, and the wire between them. Time is in milliseconds.
struct Pair {
    begin: Instant,
    now: u64,
    client: Senders<Instant>,
    agent: Reports,
    /// Whether the agent is running.
    runs: bool,
    wire: Wire,
    nonces: u64,
    /// Whether the wire accepts a datagram.
    takes: Box<dyn FnMut(&Datagram) -> bool>,
    /// When each request was sent.
    requests: Vec<u64>,
    /// The accepted reports: when each was accepted, its number and its readiness.
    believed: Vec<(u64, Base, Readiness)>,
    refused: Vec<Refusal>,
    changes: Vec<(u64, Change<Instant>)>,
}

impl Pair {
    /// A client that polls the backend, and its agent, which reports ready. Neither has received a
    /// datagram yet.
    fn new(seed: u64, weather: Weather) -> Self {
        println!("seed {seed}");
        let begin = Instant::now();
        let wire = Wire {
            rng: Rng::with_seed(seed),
            weather,
            under_way: BTreeMap::new(),
            sent: 0,
            seen: Vec::new(),
        };
        let mut pair = Self {
            begin,
            now: 0,
            client: Senders::new(seed),
            agent: Reports::new(7, [7; 16], begin),
            runs: true,
            wire,
            nonces: 0,
            takes: Box::new(|_| true),
            requests: Vec::new(),
            believed: Vec::new(),
            refused: Vec::new(),
            changes: Vec::new(),
        };
        pair.set_client_keys(keys(1, None));
        pair.set_agent_keys(keys(1, None));
        pair.set_readiness(Readiness::Ready);
        pair
    }

    /// A client and its agent over a wire without losses, after a report has arrived and the client
    /// has returned its cookie, so that the client receives pushes.
    fn introduced() -> Self {
        let mut pair = Self::new(1, FINE);
        pair.run(LONGEST_INTERVAL);
        let has_subscribed = pair.agent.get(name()).is_some_and(|entry| entry.subscribers() == 1);
        assert!(has_subscribed && pair.state() == ReportState::Ready);
        pair
    }

    fn at(&self, ms: u64) -> Instant {
        self.begin + Duration::from_millis(ms)
    }

    fn set_client_keys(&mut self, keys: Keys<BackendKey>) {
        let name = reports::Name { protocol: Protocol::Tcp, address: backend() };
        let agent = ([10, 0, 0, 1], 9465).into();
        let target = Target { name, agent, keys, interval: INTERVAL, id: 1 };
        self.client.set_targets([target], |_| (None, None), self.at(self.now));
    }

    fn set_agent_keys(&mut self, keys: Keys<BackendKey>) {
        let rules = Rules { valid_for: VALID_FOR, hold: HOLD, check: None };
        self.agent.set(name(), keys, rules, self.at(self.now));
    }

    /// Changes the readiness that the agent reports.
    fn set_readiness(&mut self, readiness: Readiness) {
        let now = self.at(self.now);
        self.agent.get_mut(name()).expect("the agent has the backend").runner(Some(readiness), now);
    }

    /// Restarts the agent, which loses all its state.
    fn restart(&mut self, incarnation: u32) {
        self.agent = Reports::new(incarnation, [incarnation.to_be_bytes()[3]; 16], self.at(self.now));
        self.set_agent_keys(keys(1, None));
        self.set_readiness(Readiness::Ready);
    }

    fn reported(&self) -> &Reported<Instant> {
        let name = reports::Name { protocol: Protocol::Tcp, address: backend() };
        self.client.get(name).expect("the client polls the backend").1
    }

    fn state(&self) -> ReportState {
        self.reported().state(self.at(self.now))
    }

    /// Advances the time in steps of one millisecond.
    fn run(&mut self, ms: u64) {
        for _ in 0..ms {
            self.now += 1;
            self.step();
        }
    }

    /// Runs until the backend has this state at the client, which must take at most `within`
    /// milliseconds. Returns the time.
    #[track_caller]
    fn run_until(&mut self, state: ReportState, within: u64) -> u64 {
        let begin = self.now;
        while self.state() != state {
            assert!(self.now < begin + within, "the state is {:?} and not {state:?}", self.state());
            self.run(1);
        }
        self.now
    }

    fn step(&mut self) {
        let now = self.at(self.now);
        // A datagram that is sent now may also arrive now.
        loop {
            self.send(now);
            let arrived = self.wire.arrived(self.now);
            if arrived.is_empty() {
                break;
            }
            for (to, bytes) in arrived {
                self.deliver(to, &bytes, now);
            }
        }
        let changes = self.client.pass(now);
        self.changes.extend(changes.into_iter().map(|change| (self.now, change)));
    }

    fn send(&mut self, now: Instant) {
        let nonces = &mut self.nonces;
        let nonce = || {
            *nonces += 1;
            *nonces
        };
        for request in self.client.requests(usize::MAX, nonce, now) {
            self.requests.push(self.now);
            self.carry(End::Agent, &request.datagram);
        }
        if self.runs {
            self.agent.expire(now);
            let mut pushes = Vec::new();
            self.agent.push(now, |to, push| pushes.push((to, *push)));
            for (to, push) in pushes {
                assert_eq!(to.address, client_address());
                self.carry(End::Client, &push);
            }
        }
    }

    fn carry(&mut self, to: End, datagram: &Datagram) {
        if (self.takes)(datagram) {
            self.wire.send(self.now, to, datagram);
        }
    }

    fn deliver(&mut self, to: End, bytes: &[u8; BYTES], now: Instant) {
        match to {
            End::Client => self.receive(bytes, now),
            End::Agent if self.runs => {
                let requester = Requester { address: client_address(), via: Via { socket: 0, local: None } };
                if let Some(answer) = self.agent.answer(bytes, requester, now) {
                    self.carry(End::Client, &answer);
                }
            }
            End::Agent => {}
        }
    }

    fn receive(&mut self, bytes: &[u8; BYTES], now: Instant) {
        match self.client.take(bytes, now) {
            Ok((_, change)) => {
                let report = self.reported().report().expect("a report was just accepted");
                self.believed.push((self.now, report.base, report.readiness));
                self.changes.extend(change.map(|change| (self.now, change)));
            }
            Err(refusal) => self.refused.push(refusal),
        }
    }

    fn answers_are_refused(&self) -> u64 {
        self.agent.counts().refused.iter().sum()
    }
}

fn is_push(datagram: &Datagram) -> bool {
    datagram.kind() == Some(Kind::Push)
}

/// A push takes effect when it arrives, even if the wire loses all other pushes.
#[test]
fn the_first_push_that_arrives_delivers_a_lame_duck() {
    for lost in 0..31_u32 {
        let mut pair = Pair::introduced();
        let announced = pair.now;
        pair.set_readiness(Readiness::LameDuck);
        let mut number = 0;
        pair.takes = Box::new(move |datagram| {
            let is_lost = is_push(datagram) && lost & 1 << number != 0;
            number += u32::from(is_push(datagram));
            !is_lost
        });
        let first = PUSHES[lost.trailing_ones() as usize];
        // The agent sends its pushes one step later, and the wire delays each by a millisecond.
        assert_eq!(
            pair.run_until(ReportState::LameDuck, 100),
            announced + 1 + first + 1,
            "lost pushes {lost:b}"
        );
    }
}

/// The wire loses all pushes, and the request or the answer of several polls. The next poll
/// delivers the change.
#[test]
fn the_first_poll_that_arrives_delivers_a_lame_duck() {
    for lost in 0..5 {
        for loses_answers in [false, true] {
            let mut pair = Pair::introduced();
            let announced = pair.now;
            let requests_before = pair.requests.len();
            pair.set_readiness(Readiness::LameDuck);
            let mut polls = 0;
            pair.takes = Box::new(move |datagram| match datagram.kind() {
                Some(Kind::Push) => false,
                Some(Kind::Request) => {
                    polls += 1;
                    loses_answers || polls > lost
                }
                _ => polls > lost,
            });
            let believed = pair.run_until(ReportState::LameDuck, (lost + 1) * LONGEST_INTERVAL + 3);
            let polls: Vec<u64> = pair.requests[requests_before..].to_vec();
            // The report is accepted two milliseconds after the poll. The agent is already known,
            // so it gets no second request.
            let last = polls[usize::try_from(lost).expect("the number fits in a usize")];
            assert_eq!((polls.len() as u64, believed), (lost + 1, last + 2), "polls at {polls:?}");
            let actual = pair.agent.counts().pushed;
            assert_eq!(actual, PUSHES.iter().filter(|after| announced + 1 + **after < last).count() as u64);
            assert_eq!(u64::from(pair.reported().unanswered()), 0);
        }
    }
}

/// Each push that arrives is acknowledged, even a repeated one: the first acknowledgement that the
/// wire does not lose ends the pushes.
#[test]
fn pushes_end_with_the_first_acknowledgement_that_is_not_lost() {
    for lost in 0..PUSHES.len() {
        let mut pair = Pair::introduced();
        pair.set_readiness(Readiness::LameDuck);
        let mut acknowledgements = 0;
        pair.takes = Box::new(move |datagram| {
            let is_request = datagram.kind() == Some(Kind::Request);
            acknowledgements += usize::from(is_request);
            !is_request || acknowledgements > lost
        });
        pair.run(200);
        let actual = pair.agent.get(name()).map(|entry| entry.unacknowledged(pair.at(pair.now)));
        assert_eq!((pair.agent.counts().pushed, actual), (lost as u64 + 1, Some(0)));
        assert_eq!(pair.state(), ReportState::LameDuck);
    }
}

/// The request has a cookie from before the change, so it does not acknowledge the change.
#[test]
fn a_request_that_crosses_a_change_ends_no_pushes() {
    let mut pair = Pair::introduced();
    let requests_before = pair.requests.len();
    while pair.requests.len() == requests_before {
        pair.run(1);
    }
    let announced = pair.now;
    pair.set_readiness(Readiness::LameDuck);
    let mut pushes = 0;
    pair.takes = Box::new(move |datagram| {
        pushes += usize::from(is_push(datagram));
        datagram.kind() != Some(Kind::Answer) && pushes != 1
    });
    assert_eq!(pair.run_until(ReportState::LameDuck, 100), announced + 1 + PUSHES[1] + 1);
}

/// Datagrams are lost, repeated, delayed, and replayed by an attacker. The agent's numbers never go
/// back, so no older report is accepted after a newer report, and each accepted report has the
/// readiness that the agent had at that number.
#[test]
fn no_older_report_is_believed_after_a_newer_one() {
    for seed in 0..24 {
        let mut pair = Pair::new(seed, ROUGH);
        let mut incarnation = 7;
        // The agent's readiness, keyed by the number of the first report that contains it.
        let mut readiness_of = BTreeMap::new();
        for turn in 0..120_u32 {
            let all = [Readiness::Ready, Readiness::LameDuck, Readiness::Down, Readiness::Unknown];
            if turn % 40 == 39 {
                incarnation += 1;
                pair.restart(incarnation);
            } else {
                let readiness = *pair.wire.rng.choice(&all).expect("the list is not empty");
                pair.set_readiness(readiness);
            }
            let entry = pair.agent.get(name()).expect("the agent has the backend");
            readiness_of.insert(entry.version(), entry.readiness());
            for _ in 0..pair.wire.rng.u32(0..8) {
                let some = pair.wire.rng.u64(1..200);
                pair.run(some);
                pair.wire.replay(pair.now);
            }
        }
        let number = |base: &Base| u64::from(base.incarnation) << 32 | u64::from(base.counter);
        assert!(pair.believed.is_sorted_by_key(|(_, base, _)| *base), "accepted reports {:?}", pair.believed);
        for (_, base, readiness) in &pair.believed {
            let by_agent = readiness_of
                .range(..=number(base))
                .next_back()
                .map_or(Readiness::Ready, |(_, readiness)| *readiness);
            assert_eq!(*readiness, by_agent, "report {base:?}");
        }
        let refused =
            |why| pair.refused.iter().filter(|refusal| **refusal == Refusal::Disbelieved(why)).count();
        let [unrequested, replayed] = [Disbelieved::Unrequested, Disbelieved::Replayed].map(refused);
        println!("{} believed, {unrequested} unasked, {replayed} replayed", pair.believed.len());
        // The wire becomes reliable: when all datagrams in flight have arrived, both sides agree.
        pair.wire.weather = FINE;
        pair.set_readiness(Readiness::LameDuck);
        pair.run(3_000 + LONGEST_INTERVAL + 2);
        assert_eq!(pair.state(), ReportState::LameDuck);
    }
}

/// A push invalidates the nonce of the unanswered request, so a late answer to this request is not
/// accepted.
#[test]
fn a_delayed_answer_is_refused_after_a_push() {
    let mut pair = Pair::introduced();
    let requests_before = pair.requests.len();
    // The wire drops the next answer, which the test delivers later.
    pair.takes = Box::new(|datagram| datagram.kind() != Some(Kind::Answer));
    while pair.requests.len() == requests_before {
        pair.run(1);
    }
    let request = pair.wire.seen.last().expect("a request was sent").1;
    pair.run(5);
    let requester = Requester { address: client_address(), via: Via { socket: 0, local: None } };
    let late =
        pair.agent.answer(&request, requester, pair.at(pair.now)).expect("the agent answers the request");
    assert_eq!(late.readiness(), Some(Readiness::Ready));
    pair.set_readiness(Readiness::LameDuck);
    pair.run_until(ReportState::LameDuck, 2);
    let now = pair.at(pair.now);
    let late: [u8; BYTES] = late.bytes().try_into().expect("a datagram has BYTES bytes");
    pair.receive(&late, now);
    assert_eq!(pair.refused.last(), Some(&Refusal::Disbelieved(Disbelieved::Unrequested)));
    assert_eq!(pair.state(), ReportState::LameDuck);
}

/// The first answer of a restarted agent is accepted, with any number. The agent gets a second
/// request at once, so it can push its next change to the client.
#[test]
fn a_restarted_agent_is_believed_and_pushes_changes() {
    for incarnation in [8, 9, u32::MAX] {
        let mut pair = Pair::introduced();
        // An agent gets at most one immediate second request per interval.
        pair.run(LONGEST_INTERVAL);
        let requests_before = pair.requests.len();
        let restarted = pair.now;
        assert!(!pair.client.has_restarted());
        pair.restart(incarnation);
        while pair.reported().base().is_none_or(|base| base.incarnation != incarnation) {
            assert!(pair.now <= restarted + LONGEST_INTERVAL + 2);
            pair.run(1);
        }
        assert_eq!(pair.client.take_restarted().len(), 1);
        pair.run(1);
        assert_eq!(pair.requests.len(), requests_before + 2, "the second request returns the cookie");
        pair.run(1);
        assert_eq!(pair.agent.get(name()).map(Entry::subscribers), Some(1));
        pair.set_readiness(Readiness::LameDuck);
        let announced = pair.now;
        assert_eq!(pair.run_until(ReportState::LameDuck, 3), announced + 2);
        assert_eq!((pair.refused.as_slice(), pair.answers_are_refused()), (&[][..], 0));
    }
}

/// The agent's disk was lost, and its clock was set back. Its answers are accepted; its old pushes,
/// which have higher numbers, are rejected.
#[test]
fn answers_with_lower_numbers_are_believed_and_earlier_pushes_are_not() {
    let mut pair = Pair::introduced();
    pair.set_readiness(Readiness::LameDuck);
    pair.run_until(ReportState::LameDuck, 3);
    let push = |(to, bytes): &&(End, [u8; BYTES])| {
        *to == End::Client && Datagram::parse(bytes).is_ok_and(|datagram| is_push(&datagram))
    };
    let push = pair.wire.seen.iter().find(push).expect("a push was sent").1;
    pair.run(LONGEST_INTERVAL);
    pair.restart(3);
    pair.run_until(ReportState::Ready, LONGEST_INTERVAL + 2);
    pair.run(2);
    assert_eq!(pair.reported().base().map(|base| base.incarnation), Some(3));
    let now = pair.at(pair.now);
    pair.receive(&push, now);
    assert_eq!(pair.refused, [Refusal::Disbelieved(Disbelieved::Replayed)]);
    assert_eq!(pair.state(), ReportState::Ready);
    assert!(pair.client.next_due() > Some(now), "a replayed push causes no request");
    pair.set_readiness(Readiness::LameDuck);
    let announced = pair.now;
    assert_eq!(
        pair.run_until(ReportState::LameDuck, 3),
        announced + 2,
        "pushes with the current numbers are believed"
    );
}

/// An attacker knows everything except the key, including the nonce of the current request. The
/// attacker's datagrams change nothing and suppress no answer.
#[test]
fn a_report_under_another_key_changes_nothing() {
    let mut pair = Pair::introduced();
    let requests_before = pair.requests.len();
    while pair.requests.len() == requests_before {
        pair.run(1);
    }
    let believed = pair.believed.len();
    let before = (pair.client.next_due(), pair.state(), pair.reported().base(), pair.reported().nonce());
    assert_ne!(before.3, 0, "an answer is in flight");
    let [another, unknown] = [(1, 9), (9, 9)].map(|(id, key)| {
        let key = keys(key, None).current().key;
        move |kind: Kind, nonce: u64| {
            let mut forged = Datagram::about(kind, Protocol::Tcp.number(), backend());
            forged.readiness = Readiness::LameDuck as u8;
            forged.key_id = lb_common::net::Be16::from_host(id);
            forged.incarnation = lb_common::net::Be32::from_host(100);
            forged.counter = lb_common::net::Be32::from_host(1);
            forged.hold = lb_common::net::Be32::from_host(60_000);
            forged.nonce = nonce;
            forged.sealed(key.wire())
        }
    });
    let now = pair.at(pair.now);
    for kind in [Kind::Answer, Kind::Push] {
        for forged in [another(kind, before.3), unknown(kind, before.3)] {
            pair.receive(&forged.bytes().try_into().expect("a datagram has BYTES bytes"), now);
        }
    }
    let why = [Disbelieved::Forged, Disbelieved::UnknownKey].map(Refusal::Disbelieved);
    assert_eq!(pair.refused, [why, why].concat());
    let after = (pair.client.next_due(), pair.state(), pair.reported().base(), pair.reported().nonce());
    assert_eq!(after, before);
    pair.run(2);
    assert_eq!(pair.believed.len(), believed + 1, "the answer is believed");
    // An agent does not answer requests under another key, and does not push to the sender of such
    // a request.
    let mut stranger = Pair::new(1, FINE);
    stranger.set_client_keys(keys(9, None));
    stranger.run(10 * LONGEST_INTERVAL);
    assert_eq!((stranger.state(), stranger.believed.as_slice()), (ReportState::NeverReported, &[][..]));
    assert_eq!(stranger.answers_are_refused(), stranger.requests.len() as u64);
    assert_eq!(stranger.agent.get(name()).map(Entry::subscribers), Some(0));
}

/// The agent stops after its last report was accepted. The test checks the state that remains at
/// the client, and the exact millisecond at which it ends.
#[test]
fn the_state_of_a_silent_backend_ends_at_the_time_in_its_report() {
    let ms = |duration: Duration| u64::try_from(duration.as_millis()).expect("the duration fits in 64 bits");
    let table = [
        (Readiness::Ready, ReportState::Ready, ms(VALID_FOR), None),
        (Readiness::LameDuck, ReportState::LameDuck, ms(HOLD), Some(Health::LameDuck)),
        (Readiness::Down, ReportState::Down, ms(VALID_FOR), Some(Health::Refusing)),
        (Readiness::Unknown, ReportState::Unknown, ms(VALID_FOR), None),
    ];
    for (readiness, state, holds, health) in table {
        let mut pair = Pair::introduced();
        pair.set_readiness(readiness);
        pair.run(3);
        pair.runs = false;
        // Datagrams in flight arrive.
        pair.run(2);
        assert_eq!(pair.state(), state);
        assert_eq!(pair.client.sick().values().copied().next(), health);
        let (received, ..) = *pair.believed.last().expect("a report was accepted");
        pair.run(received + holds - 1 - pair.now);
        assert_eq!(pair.state(), state, "a millisecond before the end");
        pair.run(1);
        assert_eq!(pair.state(), ReportState::Silent);
        // A silent backend has no verdict: it is available.
        assert!(pair.client.sick().is_empty());
        let ends: Vec<u64> =
            pair.changes.iter().filter(|(_, change)| change.verdict.is_none()).map(|(at, _)| *at).collect();
        assert_eq!(ends, health.map(|_| received + holds).into_iter().collect::<Vec<_>>());
        // After the agent has restarted, the first poll gets an answer.
        pair.runs = true;
        pair.restart(8);
        pair.run_until(ReportState::Ready, LONGEST_INTERVAL + 2);
    }
}

/// A lame duck that reports that it is down, and then becomes silent, is a lame duck again until
/// its hold ends, because the backend is restarting.
#[test]
fn a_lame_duck_that_goes_down_silently_remains_one_until_its_hold_ends() {
    let mut pair = Pair::introduced();
    pair.set_readiness(Readiness::LameDuck);
    let lame = pair.run_until(ReportState::LameDuck, 3);
    pair.set_readiness(Readiness::Down);
    let down = pair.run_until(ReportState::Down, 3);
    pair.runs = false;
    let (last, ..) = *pair.believed.last().expect("a report was accepted");
    let since = pair.believed.iter().rev().find(|(.., readiness)| *readiness == Readiness::LameDuck);
    assert!(since.is_some_and(|(at, ..)| (lame..=down).contains(at)));
    let hold_begins = since.map(|(at, ..)| *at).expect("a report of a lame duck was accepted");
    assert_eq!(pair.run_until(ReportState::LameDuck, 7_000), last + 6_000);
    assert_eq!(pair.run_until(ReportState::Silent, 60_000), hold_begins + 60_000);
}

/// A key is replaced in three steps: the agent accepts both keys, the clients send with the new
/// key, and the agent accepts only the new key. The test also runs the steps in another order, in
/// which the clients accept both keys first. In no step is a request refused, a report rejected, or
/// a change delayed.
#[test]
fn a_key_is_replaced_without_a_gap() {
    enum Side {
        Client,
        Agent,
    }
    use Side::{Agent, Client};
    let both = [
        vec![(Agent, 1, Some(2)), (Client, 2, Some(1)), (Client, 2, None), (Agent, 2, None)],
        vec![
            (Client, 1, Some(2)),
            (Agent, 2, Some(1)),
            (Client, 2, Some(1)),
            (Agent, 2, None),
            (Client, 2, None),
        ],
    ];
    for steps in both {
        let mut pair = Pair::introduced();
        pair.wire.weather = Weather { delay: 0..=20, ..FINE };
        let mut is_lame = false;
        for (side, first, second) in steps {
            match side {
                Client => pair.set_client_keys(keys(first, second)),
                Agent => pair.set_agent_keys(keys(first, second)),
            }
            // The change arrives at once, in a push under a key that the client has.
            is_lame = !is_lame;
            let (readiness, state) = if is_lame {
                (Readiness::LameDuck, ReportState::LameDuck)
            } else {
                (Readiness::Ready, ReportState::Ready)
            };
            pair.set_readiness(readiness);
            pair.run_until(state, 22);
            // Polls are also answered.
            let believed = pair.believed.len();
            pair.run(3 * LONGEST_INTERVAL);
            assert!(pair.believed.len() >= believed + 3);
            assert_eq!((pair.state(), pair.reported().unanswered()), (state, 0));
        }
        let is_of_a_key = |refusal: &Refusal| {
            matches!(refusal, Refusal::Disbelieved(Disbelieved::Forged | Disbelieved::UnknownKey))
        };
        assert_eq!((pair.refused.iter().any(is_of_a_key), pair.answers_are_refused()), (false, 0));
        let last = pair.wire.seen.iter().rev().find_map(|(_, bytes)| Datagram::parse(bytes).ok());
        assert_eq!(last.map(|datagram| datagram.key_id.to_host()), Some(2), "the old key is not used");
    }
}

/// If a client has none of its earlier keys any more, it discards the reported state, because the
/// state belongs to an earlier key.
#[test]
fn an_abrupt_change_of_keys_discards_the_reported_state() {
    let mut pair = Pair::introduced();
    pair.set_readiness(Readiness::LameDuck);
    pair.run_until(ReportState::LameDuck, 3);
    pair.set_client_keys(keys(2, None));
    assert_eq!(pair.state(), ReportState::NeverReported);
}
