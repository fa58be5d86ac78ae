//! Decides which backends the daemon polls for reports, and when, and stores the reported states of
//! all backends.
//!
//! Requests are spread over their interval and jittered, so that neither the requests of one host
//! nor those of many hosts are sent at the same time. Each backend is polled once, regardless of
//! how many client tasks of the network namespace need its reports.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::ops::{Add, Sub};
use std::time::Duration;

use lb_core::health::{Health, ReportedVerdict};
use lb_core::reports::Name;
use lb_core::service::Protocol;
use xxhash_rust::xxh64::xxh64;

use super::reported::{Base, Disbelieved, ReportState, Reported};
use crate::keys::{BackendKey, Keys};
use crate::wire::MAX_HOLD;
use crate::wire::{ACKNOWLEDGED_FOR_MS, Datagram, Malformed};

/// A backend to poll.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The backend's name.
    pub name: Name,
    /// The address of its agent.
    pub agent: SocketAddr,
    /// The keys of the backend.
    pub keys: Keys<BackendKey>,
    /// The interval between requests.
    pub interval: Duration,
    /// The backend's report id; 0 if it has none.
    pub id: u32,
}

/// A request to send.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// The address of the agent.
    pub to: SocketAddr,
    /// The report id of the backend; 0 if it has none.
    pub id: u32,
    /// The datagram to send. Its nonce identifies the answer.
    pub datagram: Datagram,
    /// Whether the datagram repeats an earlier request, with the same nonce.
    pub is_again: bool,
}

/// Why a datagram that arrived is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// The bytes are not a valid datagram.
    Malformed(Malformed),
    /// The datagram is valid, but not accepted.
    Disbelieved(Disbelieved),
}

impl Refusal {
    /// The names of all refusals, in the order of the documentation.
    pub const NAMES: [&str; 8] = {
        let mut names = ["malformed"; 8];
        let mut at = 0;
        while at < Disbelieved::ALL.len() {
            names[at + 1] = Disbelieved::ALL[at].name();
            at += 1;
        }
        names
    };

    /// The refusal's name in metrics and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Malformed(_) => Self::NAMES[0],
            Self::Disbelieved(why) => why.name(),
        }
    }
}

/// A change of a backend's verdict, caused by a report or by silence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change<T> {
    /// The backend.
    pub name: Name,
    /// The new verdict; `None` if the backend no longer has a verdict.
    pub verdict: Option<ReportedVerdict<T>>,
}

/// A backend that is polled.
#[derive(Clone, Debug)]
struct Sender<T> {
    target: Target,
    /// Whether its agent has restarted and has not reported "ready" since.
    has_restarted: bool,
    reported: Reported<T>,
    due: T,
    /// When the verdict changes next without another report.
    expiry: Option<T>,
    /// The health in the last verdict that was returned to the caller; `None` if there was none.
    returned: Option<Health>,
    /// The seed of its jitter, different for each host and backend.
    seed: u64,
    /// The number of polls so far; input to the jitter.
    turns: u64,
    requested_at: Option<T>,
    /// Whether the next request is due because a push was repeated.
    is_again: bool,
    /// The incarnation of the last agent to which an immediate second request was sent, and the
    /// time of that request. The second request returns the agent's cookie, so that the agent can
    /// push to this host.
    introduced: Option<(u32, T)>,
    /// The state that was stored last.
    stored: Option<Stored<T>>,
}

/// The stored state of a backend: the number of its last report, and the time until which it is a
/// lame duck.
#[derive(Clone, Copy, Debug)]
struct Stored<T> {
    base: Base,
    lame_until: Option<T>,
    /// The number of reports since this store that left the state unchanged.
    repeated: u8,
}

impl<T> Stored<T> {
    /// Makes the next report store the state again, even if it is unchanged.
    const fn make_due(&mut self) {
        self.repeated = REPEATED;
    }
}

/// The state to store for a backend.
#[derive(Debug)]
pub struct ToStore<'s, T> {
    /// The backend.
    pub target: &'s Target,
    /// The number of its last report.
    pub base: Base,
    /// The number of the report that this or an earlier daemon stored before.
    pub before: Option<Base>,
    /// The time until which it is a lame duck; `None` if it is not a lame duck.
    pub lame_until: Option<T>,
}

/// An index into the list of senders.
type Place = u32;

/// An unchanged state is stored again only after this many reports, because each store requires a
/// system call. The repetition is needed because the register's entry may have been recreated
/// without the state.
const REPEATED: u8 = 15;

/// All backends that are polled. `T` is a time of any clock.
#[derive(Clone, Debug)]
pub struct Senders<T> {
    /// The seed of this host. It differs between hosts, so that two hosts do not poll at the same
    /// time.
    seed: u64,
    senders: Vec<Sender<T>>,
    places: HashMap<Name, Place>,
    due: BTreeSet<(T, Place)>,
    expiries: BTreeSet<(T, Place)>,
    /// The backends with a verdict.
    sick: BTreeMap<Name, Health>,
    /// Backends with an agent that has restarted and reported ready since the last
    /// [`Senders::take_restarted`].
    restarted: BTreeSet<Name>,
}

/// Minimum time between two acknowledgements of the same push.
const ACKNOWLEDGED_FOR: Duration = Duration::from_millis(ACKNOWLEDGED_FOR_MS as u64);

impl<T: Copy + Ord + Add<Duration, Output = T> + Sub<T, Output = Duration>> Senders<T> {
    /// Creates a set without backends.
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            senders: Vec::new(),
            places: HashMap::new(),
            due: BTreeSet::new(),
            expiries: BTreeSet::new(),
            sick: BTreeMap::new(),
            restarted: BTreeSet::new(),
        }
    }

    /// Replaces the set of backends to poll. A backend that was polled before, and that still has
    /// one of its keys, retains its reported state. For a new backend, `adopted` returns the state
    /// that an earlier daemon stored. Returns the backends with a changed verdict.
    pub fn set_targets(
        &mut self,
        targets: impl IntoIterator<Item = Target>,
        adopted: impl Fn(Name) -> (Option<Base>, Option<T>),
        now: T,
    ) -> Vec<Change<T>> {
        let places = std::mem::take(&mut self.places);
        let mut before: Vec<Option<Sender<T>>> =
            std::mem::take(&mut self.senders).into_iter().map(Some).collect();
        let mut changes = Vec::new();
        self.due.clear();
        self.expiries.clear();
        let mut sick = std::mem::take(&mut self.sick);
        for target in targets {
            let name = target.name.on_wire();
            if self.places.contains_key(&name) {
                continue;
            }
            let known = places.get(&name).and_then(|place| before.get_mut(*place as usize)?.take());
            let known = known.filter(|known| known.target.keys.common(&target.keys).is_some());
            let mut sender = match known {
                Some(known) => {
                    // The next request must not be later than before, or than the new interval
                    // allows.
                    let due = known.due.min(now + target.interval);
                    let mut stored = known.stored;
                    // If the keys or the id have changed, the register's entry may be recreated
                    // without the stored state.
                    stored.iter_mut().filter(|_| known.target != target).for_each(Stored::make_due);
                    Sender { target, due, stored, ..known }
                }
                None => {
                    let (base, lame_until) = adopted(name);
                    let text = format!("{}/{}", name.protocol.name(), name.address);
                    let seed = xxh64(text.as_bytes(), self.seed);
                    let first = target.interval.mul_f64(fraction(seed, 0));
                    // A later time cannot come from a report, because no hold is that long.
                    let lame_until = lame_until.filter(|until| *until > now && *until <= now + MAX_HOLD);
                    let reported = Reported::adopted(base, lame_until);
                    let due = now + first;
                    Sender {
                        target,
                        reported,
                        due,
                        expiry: None,
                        returned: None,
                        seed,
                        turns: 0,
                        requested_at: None,
                        is_again: false,
                        introduced: None,
                        has_restarted: false,
                        stored: base.map(|base| Stored { base, lame_until, repeated: REPEATED }),
                    }
                }
            };
            if let Some(change) = sender.take_change(name, now) {
                changes.push(change);
            }
            self.sick.extend(sender.returned.map(|health| (name, health)));
            self.insert(name, sender);
            sick.remove(&name);
        }
        self.restarted.retain(|name| self.places.contains_key(name));
        // A backend that is no longer polled has no verdict.
        changes.extend(sick.into_keys().map(|name| Change { name, verdict: None }));
        changes
    }

    /// Makes the first requests to these backends due earlier: the first request after the time
    /// `after`, and the others in this order, `spacing` apart. Requests that are already due
    /// earlier do not change. Backends that have reported are skipped.
    pub fn poll_first(
        &mut self,
        names: impl IntoIterator<Item = Name>,
        after: Duration,
        spacing: Duration,
        now: T,
    ) {
        let mut due = now + after;
        for name in names {
            let Some(&place) = self.places.get(&name.on_wire()) else { continue };
            let Some(sender) = self.senders.get_mut(place as usize) else { continue };
            if sender.reported.report().is_some() {
                continue;
            }
            self.due.remove(&(sender.due, place));
            sender.due = sender.due.min(due);
            self.due.insert((sender.due, place));
            due = due + spacing;
        }
    }

    fn insert(&mut self, name: Name, sender: Sender<T>) {
        let place = Place::try_from(self.senders.len()).expect("the number of backends fits in 32 bits");
        self.due.insert((sender.due, place));
        self.expiries.extend(sender.expiry.map(|expiry| (expiry, place)));
        self.places.insert(name, place);
        self.senders.push(sender);
    }

    /// When the next request is due or the next verdict ends; `None` if neither will happen.
    pub fn next_due(&self) -> Option<T> {
        let first = |of: &BTreeSet<(T, Place)>| of.first().map(|(at, _)| *at);
        first(&self.due).into_iter().chain(first(&self.expiries)).min()
    }

    /// The requests that are due, at most `most`. `nonce` must return unpredictable numbers, never
    /// 0.
    pub fn requests(&mut self, most: usize, mut nonce: impl FnMut() -> u64, now: T) -> Vec<Request> {
        let mut requests = Vec::new();
        while requests.len() < most {
            let Some((_, place)) = self.due.first().copied().filter(|(at, _)| *at <= now) else { break };
            self.due.pop_first();
            let Some(sender) = self.senders.get_mut(place as usize) else { continue };
            sender.turns += 1;
            // The next request follows after 0.9 to 1.1 times the interval.
            let jitter = 0.9 + 0.2 * fraction(sender.seed, sender.turns);
            let Target { name: target, ref keys, interval, .. } = sender.target;
            let again = std::mem::take(&mut sender.is_again)
                .then(|| sender.reported.repeat_request(target, keys, interval, now));
            let again = again.flatten();
            let is_again = again.is_some();
            let datagram = match again {
                Some(request) => request,
                None => sender.reported.new_request(target, keys, nonce(), now),
            };
            requests.push(Request { to: sender.target.agent, id: sender.target.id, datagram, is_again });
            sender.requested_at = Some(now);
            sender.due = now + sender.target.interval.mul_f64(jitter);
            self.due.insert((sender.due, place));
        }
        requests
    }

    /// Processes a received datagram. Returns its backend, and the change of the verdict, if any.
    /// After each push, even a repeated one, a request is due at once, which acknowledges the push.
    /// A request is also due at once after the first report of an agent since its start, because an
    /// agent does not push to a client that has not returned its cookie.
    ///
    /// # Errors
    /// The reason why the datagram is not accepted. All reported states are then unchanged.
    pub fn take(&mut self, bytes: &[u8], now: T) -> Result<(Name, Option<Change<T>>), Refusal> {
        let datagram = Datagram::parse(bytes).map_err(Refusal::Malformed)?;
        let name = name_in(&datagram).ok_or(Refusal::Malformed(Malformed::Name))?;
        let unknown = Refusal::Disbelieved(Disbelieved::UnknownName);
        let place = self.places.get(&name).copied().ok_or(unknown)?;
        let sender = self.senders.get_mut(place as usize).ok_or(unknown)?;
        let is_push = datagram.kind() == Some(crate::wire::Kind::Push);
        let known = sender.reported.base();
        let taken = sender.reported.take(&datagram, &sender.target.keys, now);
        let is_again = taken == Err(Disbelieved::Replayed)
            && sender.reported.base() == Base::of(datagram.base())
            && sender.requested_at.is_none_or(|at| at + ACKNOWLEDGED_FOR <= now)
            && sender.target.keys.authenticate(&datagram);
        let incarnation = datagram.incarnation.to_host();
        // An immediate second request is sent at most once per interval, even if every report has
        // another incarnation.
        let is_stranger = taken.is_ok()
            && sender
                .introduced
                .is_none_or(|(known, at)| known != incarnation && at + sender.target.interval <= now);
        if is_stranger {
            sender.introduced = Some((incarnation, now));
        }
        if is_stranger || is_push && (taken.is_ok() || is_again) {
            self.due.remove(&(sender.due, place));
            sender.due = now;
            sender.is_again = is_again;
            self.due.insert((now, place));
        }
        taken.map_err(Refusal::Disbelieved)?;
        // An agent that has just started may not know the readiness of its backend yet, so the
        // restart counts only after the agent reports "ready".
        sender.has_restarted |= known.is_some_and(|known| known.incarnation < incarnation);
        if sender.has_restarted && sender.reported.state(now) == ReportState::Ready {
            sender.has_restarted = false;
            self.restarted.insert(name);
        }
        let before = sender.expiry;
        let change = sender.take_change(name, now);
        note(&mut self.sick, change.as_ref());
        if before != sender.expiry {
            before.map(|at| self.expiries.remove(&(at, place)));
            self.expiries.extend(sender.expiry.map(|expiry| (expiry, place)));
        }
        Ok((name, change))
    }

    /// Applies the effects of elapsed time. Returns the backends with a changed verdict.
    pub fn pass(&mut self, now: T) -> Vec<Change<T>> {
        let mut changes = Vec::new();
        while let Some((_, place)) = self.expiries.first().copied().filter(|(at, _)| *at <= now) {
            self.expiries.pop_first();
            let Some(sender) = self.senders.get_mut(place as usize) else { continue };
            sender.expiry = None;
            let change = sender.take_change(sender.target.name.on_wire(), now);
            note(&mut self.sick, change.as_ref());
            changes.extend(change);
            self.expiries.extend(sender.expiry.map(|expiry| (expiry, place)));
        }
        changes
    }

    /// The backends with a verdict, and their health.
    pub fn sick(&self) -> &BTreeMap<Name, Health> {
        &self.sick
    }

    /// Whether [`Senders::take_restarted`] returns any backend.
    pub fn has_restarted(&self) -> bool {
        !self.restarted.is_empty()
    }

    /// Removes and returns the backends with an agent that has restarted and reported ready since
    /// the last call: after a restart, the cause of a backend's failures may be gone.
    pub fn take_restarted(&mut self) -> BTreeSet<Name> {
        std::mem::take(&mut self.restarted)
    }

    /// A polled backend and its reported state.
    pub fn get(&self, name: Name) -> Option<(&Target, &Reported<T>)> {
        let place = self.places.get(&name.on_wire())?;
        self.senders.get(*place as usize).map(|sender| (&sender.target, &sender.reported))
    }

    /// The state to store for a backend after a report; `None` if it equals the stored state. After
    /// 15 reports with an equal state, the state is returned again.
    pub fn to_store(&mut self, name: Name) -> Option<ToStore<'_, T>> {
        let place = self.places.get(&name.on_wire())?;
        let sender = self.senders.get_mut(*place as usize)?;
        let (base, lame_until) = (sender.reported.base()?, sender.reported.lame_until());
        if let Some(stored) = &mut sender.stored
            && (stored.base, stored.lame_until) == (base, lame_until)
            && stored.repeated < REPEATED
        {
            stored.repeated += 1;
            return None;
        }
        let before = sender.stored.replace(Stored { base, lame_until, repeated: 0 });
        Some(ToStore { target: &sender.target, base, before: before.map(|before| before.base), lame_until })
    }

    /// Backends for which two agents answer alternately.
    pub fn contested(&self, now: T) -> BTreeSet<Name> {
        let contested = self.senders.iter().filter(|sender| sender.reported.is_contested(now));
        contested.map(|sender| sender.target.name.on_wire()).collect()
    }

    /// The number of polled backends.
    pub fn len(&self) -> usize {
        self.senders.len()
    }

    /// Whether no backend is polled.
    pub fn is_empty(&self) -> bool {
        self.senders.is_empty()
    }
}

/// The backend of a parsed datagram; `None` if services cannot have its protocol.
pub fn name_in(datagram: &Datagram) -> Option<Name> {
    Some(Name { protocol: Protocol::of_number(datagram.protocol)?, address: datagram.backend() })
}

/// A number from 0 to 1 that depends on the seed and the turn.
fn fraction(seed: u64, turn: u64) -> f64 {
    let hash = xxh64(&turn.to_le_bytes(), seed);
    #[expect(clippy::cast_precision_loss, reason = "53 random bits are enough")]
    let fraction = (hash >> 11) as f64 / (1u64 << 53) as f64;
    fraction
}

fn note<T>(sick: &mut BTreeMap<Name, Health>, change: Option<&Change<T>>) {
    match change {
        Some(Change { name, verdict: Some(verdict) }) => drop(sick.insert(*name, verdict.health)),
        Some(Change { name, verdict: None }) => drop(sick.remove(name)),
        None => {}
    }
}

impl<T: Copy + Ord + Add<Duration, Output = T> + Sub<T, Output = Duration>> Sender<T> {
    /// The new verdict, if its health has changed. The verdict has no end time, because its end is
    /// returned as a separate change.
    fn take_change(&mut self, name: Name, now: T) -> Option<Change<T>> {
        let verdict = self.reported.verdict(now);
        self.expiry = self.reported.next_change(now);
        let health = verdict.as_ref().map(|verdict| verdict.health);
        let is_news = std::mem::replace(&mut self.returned, health) != health;
        is_news.then(|| Change {
            name,
            verdict: verdict.map(|verdict| ReportedVerdict { until: None, ..verdict }),
        })
    }
}

#[cfg(test)]
mod tests {
    use lb_common::net::{Be16, Be32};

    use super::*;
    use crate::keys::{Numbered, ServiceKey};
    use crate::wire::{Kind, Readiness};

    const INTERVAL: Duration = Duration::from_secs(2);

    fn at(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    fn target(number: u16) -> Target {
        let address = SocketAddr::from(([10, 0, 0, 1], number));
        let key = Numbered { id: 1, key: ServiceKey::from_bytes([7; 32]) };
        Target {
            name: Name { protocol: Protocol::Tcp, address },
            agent: SocketAddr::from(([10, 0, 0, 1], 9465)),
            keys: Keys::new(key.of_backend(Protocol::Tcp, address), None),
            interval: INTERVAL,
            id: 0,
        }
    }

    fn of(numbers: impl IntoIterator<Item = u16>) -> Senders<Duration> {
        let mut senders = Senders::new(1);
        let changes = senders.set_targets(numbers.into_iter().map(target), |_| (None, None), at(0));
        assert_eq!(changes, []);
        senders
    }

    fn report(number: u16, kind: Kind, readiness: Readiness, counter: u32, nonce: u64) -> Datagram {
        let target = target(number);
        let mut datagram = Datagram::about(kind, 6, target.name.address);
        datagram.readiness = readiness as u8;
        datagram.key_id = Be16::from_host(1);
        (datagram.incarnation, datagram.counter) = (Be32::from_host(1), Be32::from_host(counter));
        datagram.nonce = nonce;
        datagram.valid_for = Be32::from_host(6_000);
        datagram.hold = Be32::from_host(60_000);
        datagram.sealed(target.keys.current().key.wire())
    }

    fn answer(senders: &mut Senders<Duration>, number: u16, readiness: Readiness, counter: u32) {
        let request = senders.requests(1, || 9, at(2_000)).remove(0).datagram;
        let answer = report(number, Kind::Answer, readiness, counter, request.nonce);
        senders.take(answer.bytes(), at(2_000)).unwrap();
        assert_eq!(senders.requests(9, || 10, at(2_000)).len(), 1, "the second request returns the cookie");
    }

    #[test]
    fn a_new_agent_is_polled_twice_at_once_at_most_once_per_interval() {
        let mut senders = of([1]);
        let mut poll = |now, incarnation| {
            let requests = senders.requests(9, || 9, at(now));
            let Some(Request { datagram: request, .. }) = requests.first() else { return 0 };
            let mut answer = report(1, Kind::Answer, Readiness::Ready, 1, request.nonce);
            answer.incarnation = Be32::from_host(incarnation);
            let answer = answer.sealed(target(1).keys.current().key.wire());
            senders.take(answer.bytes(), at(now)).unwrap();
            requests.len()
        };
        let sent: Vec<usize> = [2_000, 2_000, 2_000].map(|now| poll(now, 1)).to_vec();
        assert_eq!(sent, [1, 1, 0], "the second request returns the cookie");
        let sent: Vec<usize> = [4_500, 4_500, 4_500].map(|now| poll(now, 2)).to_vec();
        assert_eq!(sent, [1, 1, 0], "a second request also follows a restart");
        let sent: usize = (4_600..6_400).map(|now| poll(now, u32::try_from(now).unwrap())).sum();
        assert_eq!(sent, 0, "less than an interval has passed since the second request at 4,500");
        let sent: usize = (6_700..16_700).map(|now| poll(now, u32::try_from(now).unwrap())).sum();
        assert!((8..=12).contains(&sent), "at most two requests per interval: {sent}");
    }

    #[test]
    fn each_backend_is_polled_once_per_interval_at_spread_times() {
        let mut senders = of(1..=1_000);
        let mut sent: HashMap<u16, Vec<u64>> = HashMap::new();
        let mut nonce = 0;
        for now in (0..20_000).step_by(100) {
            let mut draw = || {
                nonce += 1;
                nonce
            };
            let requests = senders.requests(usize::MAX, &mut draw, at(now));
            assert!(requests.len() <= 100, "{} requests at {now} ms, expected at most 100", requests.len());
            for Request { datagram: request, .. } in requests {
                sent.entry(request.port.to_host()).or_default().push(now);
            }
        }
        assert_eq!(sent.len(), 1_000);
        for times in sent.values() {
            assert!((9..=11).contains(&times.len()), "{times:?}");
            assert!(times.windows(2).all(|pair| (1_700..=2_300).contains(&(pair[1] - pair[0]))), "{times:?}");
        }
        // Another host polls at other times.
        let mut other = Senders::new(2);
        other.set_targets((1..=1_000).map(target), |_| (None, None), at(0));
        assert_ne!(other.next_due(), of(1..=1_000).next_due());
    }

    #[test]
    fn the_number_of_requests_at_a_time_is_limited() {
        let mut senders = of(1..=10);
        assert_eq!(senders.requests(3, || 1, at(2_000)).len(), 3);
        assert_eq!(senders.requests(64, || 1, at(2_000)).len(), 7);
        assert_eq!(senders.requests(64, || 1, at(2_000)).len(), 0);
    }

    #[test]
    fn a_change_is_returned_once() {
        let mut senders = of([1]);
        let request = senders.requests(1, || 9, at(2_000)).remove(0).datagram;
        let lame = report(1, Kind::Answer, Readiness::LameDuck, 1, request.nonce);
        let (name, change) = senders.take(lame.bytes(), at(2_000)).unwrap();
        assert_eq!(name, target(1).name);
        let verdict = change.expect("the verdict has changed").verdict.expect("the backend has a verdict");
        assert_eq!((verdict.health, verdict.until), (Health::LameDuck, None));
        let again = report(1, Kind::Push, Readiness::LameDuck, 2, 0);
        assert_eq!(senders.take(again.bytes(), at(3_000)), Ok((name, None)));
        assert_eq!(senders.pass(at(62_999)), []);
        assert_eq!(senders.pass(at(63_000)), [Change { name, verdict: None }], "the hold has ended");
        assert_eq!(senders.pass(at(70_000)), []);
    }

    #[test]
    fn every_push_is_acknowledged_even_a_repeated_one() {
        let mut senders = of([1]);
        answer(&mut senders, 1, Readiness::Ready, 1);
        assert_eq!(senders.requests(1, || 1, at(2_001)).len(), 0);
        let push = report(1, Kind::Push, Readiness::LameDuck, 2, 0);
        senders.take(push.bytes(), at(2_001)).unwrap();
        assert_eq!(senders.requests(9, || 1, at(2_001)).len(), 1);
        for (now, expected) in [(2_005, 0), (2_006, 1), (2_007, 0), (2_015, 1)] {
            let replayed = Err(Refusal::Disbelieved(Disbelieved::Replayed));
            assert_eq!(senders.take(push.bytes(), at(now)), replayed);
            assert_eq!(senders.requests(9, || 1, at(now)).len(), expected, "at {now} ms");
        }
        let older = report(1, Kind::Push, Readiness::Ready, 1, 0);
        assert!(senders.take(older.bytes(), at(2_100)).is_err());
        assert_eq!(senders.requests(9, || 1, at(2_100)).len(), 0, "an old push causes no request");
    }

    /// An attacker that has seen a push can replay it indefinitely.
    #[test]
    fn replayed_pushes_cannot_suppress_an_answer() {
        let mut senders = of([1]);
        answer(&mut senders, 1, Readiness::Ready, 1);
        let push = report(1, Kind::Push, Readiness::LameDuck, 2, 0);
        senders.take(push.bytes(), at(2_001)).unwrap();
        let mut nonces = 100;
        let mut poll = |senders: &mut Senders<Duration>, now| {
            let mut nonce = || {
                nonces += 1;
                nonces
            };
            senders.requests(9, &mut nonce, at(now))
        };
        let first = poll(&mut senders, 2_001).remove(0).datagram;
        for now in (2_007..2_050).step_by(6) {
            assert!(senders.take(push.bytes(), at(now)).is_err());
            let again: Vec<Datagram> =
                poll(&mut senders, now).iter().map(|request| request.datagram).collect();
            assert_eq!(again, [first], "at {now} ms");
        }
        let ready = report(1, Kind::Answer, Readiness::Ready, 3, first.nonce);
        senders.take(ready.bytes(), at(2_051)).unwrap();
        assert_eq!(senders.get(target(1).name).unwrap().1.unanswered(), 0);
        // A request that was not answered within an interval is lost, and is not repeated.
        senders.take(report(1, Kind::Push, Readiness::LameDuck, 4, 0).bytes(), at(2_060)).unwrap();
        let lost = poll(&mut senders, 2_060).remove(0).datagram;
        let again = report(1, Kind::Push, Readiness::LameDuck, 4, 0);
        assert!(senders.take(again.bytes(), at(4_060)).is_err());
        assert_ne!(poll(&mut senders, 4_060).remove(0).datagram.nonce, lost.nonce);
    }

    #[test]
    fn backends_with_two_agents_are_contested() {
        let mut senders = of([1, 2]);
        let mut now = 0;
        for counter in [5, 1, 5, 1] {
            assert!(senders.contested(at(now)).is_empty());
            now += 4_000;
            let requests = senders.requests(9, || 9, at(now));
            assert_eq!(requests.len(), 2);
            let answer = report(1, Kind::Answer, Readiness::Ready, counter, 9);
            senders.take(answer.bytes(), at(now)).unwrap();
        }
        assert_eq!(senders.contested(at(now)), BTreeSet::from([target(1).name]));
    }

    #[test]
    fn a_restarted_agent_is_returned_once_it_is_ready() {
        let mut senders = of([1, 2]);
        let incarnated = |incarnation: u32, readiness, now: u64, senders: &mut Senders<Duration>| {
            senders.requests(9, || 9, at(now));
            let mut answer = report(1, Kind::Answer, readiness, 1, 9);
            answer.incarnation = Be32::from_host(incarnation);
            senders.take(answer.sealed(target(1).keys.current().key.wire()).bytes(), at(now)).unwrap();
            (senders.has_restarted(), senders.take_restarted().len())
        };
        let seen: Vec<(bool, usize)> = [
            (5, Readiness::Ready),
            (5, Readiness::Ready),
            (6, Readiness::Down),
            (7, Readiness::Ready),
            (7, Readiness::Ready),
            (8, Readiness::Unknown),
            (8, Readiness::Ready),
            (8, Readiness::Ready),
        ]
        .into_iter()
        .zip(1..)
        .map(|((incarnation, readiness), turn)| {
            incarnated(incarnation, readiness, turn * 4_000, &mut senders)
        })
        .collect();
        assert_eq!(seen, [0, 0, 0, 1, 0, 0, 1, 0].map(|count| (count == 1, count)));
    }

    #[test]
    fn first_polls_are_early_and_spaced() {
        let mut senders = of([1, 2, 3]);
        let names = [3, 1, 9, 2].map(|port| target(port).name);
        senders.poll_first(names, Duration::from_millis(40), Duration::from_millis(2), at(0));
        let mut polled = Vec::new();
        for now in 0..=46 {
            let ports = senders.requests(9, || 9, at(now)).into_iter().map(|one| one.datagram.port.to_host());
            polled.extend(ports.map(|port| (port, now)));
        }
        assert_eq!(polled, [(3, 40), (1, 42), (2, 44)]);
        senders.take(report(1, Kind::Answer, Readiness::Ready, 1, 9).bytes(), at(50)).unwrap();
        assert_eq!(
            senders.requests(9, || 9, at(50)).len(),
            1,
            "the backend gets one more request, with its cookie"
        );
        senders.poll_first(names, Duration::ZERO, Duration::from_millis(2), at(60));
        let again = senders.requests(9, || 9, at(70)).into_iter().map(|one| one.datagram.port.to_host());
        assert_eq!(again.collect::<Vec<_>>(), [3, 2], "backend 1 has reported");
    }

    #[test]
    fn removed_targets_are_forgotten_and_others_retain_their_state() {
        let mut senders = of([1, 2]);
        for _ in 0..2 {
            let request = senders.requests(1, || 9, at(2_000)).remove(0).datagram;
            let number = request.port.to_host();
            let lame = report(number, Kind::Answer, Readiness::LameDuck, 1, request.nonce);
            senders.take(lame.bytes(), at(2_000)).unwrap();
        }
        let fast = Target { interval: at(100), ..target(2) };
        let forgotten = Change { name: target(1).name, verdict: None };
        assert_eq!(senders.sick().len(), 2);
        assert_eq!(senders.set_targets([fast, target(3)], |_| (None, None), at(2_000)), [forgotten]);
        assert_eq!(senders.sick().keys().collect::<Vec<_>>(), [&target(2).name]);
        assert_eq!(senders.len(), 2);
        assert!(senders.get(target(1).name).is_none());
        assert_eq!(senders.get(target(2).name).unwrap().1.state(at(2_000)), ReportState::LameDuck);
        assert!(senders.next_due() <= Some(at(2_100)), "a shorter interval is applied at once");
        let of_unknown = report(1, Kind::Push, Readiness::Ready, 9, 0);
        let unknown = Err(Refusal::Disbelieved(Disbelieved::UnknownName));
        assert_eq!(senders.take(of_unknown.bytes(), at(2_001)), unknown);
    }

    #[test]
    fn the_stored_state_of_an_earlier_daemon_is_adopted() {
        let mut senders = Senders::new(1);
        let base = Base { incarnation: 1, counter: 5 };
        let changes = senders.set_targets([target(1)], |_| (Some(base), Some(at(500))), at(0));
        assert_eq!(changes.len(), 1, "the backend is a lame duck");
        let old = report(1, Kind::Push, Readiness::Ready, 5, 0);
        assert!(senders.take(old.bytes(), at(1)).is_err());
        assert_eq!(senders.pass(at(500)), [Change { name: target(1).name, verdict: None }]);
        // No report can have such a long hold, so the stored time is ignored.
        let mut senders = Senders::new(1);
        let late = at(1) + MAX_HOLD;
        assert_eq!(senders.set_targets([target(1)], |_| (None, Some(late)), at(0)), []);
    }

    #[test]
    fn an_address_in_v4_mapped_form_is_the_same_name() {
        let mapped: SocketAddr = "[::ffff:10.0.0.1]:1".parse().unwrap();
        let name = Name { protocol: Protocol::Tcp, address: mapped };
        assert_eq!(name.on_wire(), target(1).name);
        let mut senders = Senders::new(1);
        senders.set_targets([target(1), Target { name, ..target(1) }], |_| (None, None), at(0));
        assert_eq!(
            (senders.len(), senders.requests(9, || 9, at(2_000)).len()),
            (1, 1),
            "the backend is polled once"
        );
    }

    #[test]
    fn unchanged_state_is_stored_again_after_15_reports() {
        let mut senders = of([1]);
        let name = target(1).name;
        let mut now = 0;
        let before = std::cell::Cell::new(None);
        let mut store = |senders: &mut Senders<Duration>, readiness, counter| {
            now += 3_000;
            let request = senders.requests(1, || 9, at(now)).remove(0).datagram;
            let mut answer = report(1, Kind::Answer, readiness, counter, request.nonce);
            // The report's hold ends at the same time as before.
            answer.hold = Be32::from_host(600_000 - u32::try_from(now).unwrap());
            let answer = answer.sealed(target(1).keys.current().key.wire());
            senders.take(answer.bytes(), at(now)).unwrap();
            let stored = senders.to_store(name);
            before.set(stored.as_ref().and_then(|stored| stored.before).map(|base| base.counter));
            stored.is_some()
        };
        let stored = [(); 33].map(|()| store(&mut senders, Readiness::Ready, 1));
        let turns: Vec<usize> = (0..33).filter(|turn| stored[*turn]).collect();
        assert_eq!(turns, [0, 16, 32]);
        assert!(store(&mut senders, Readiness::LameDuck, 2));
        assert!(!store(&mut senders, Readiness::LameDuck, 2), "the hold ends at the same time");
        assert!(store(&mut senders, Readiness::Ready, 3));
        senders.set_targets([target(1)], |_| (None, None), at(0));
        assert!(!store(&mut senders, Readiness::Ready, 3));
        senders.set_targets([Target { id: 5, ..target(1) }], |_| (None, None), at(0));
        assert!(store(&mut senders, Readiness::Ready, 3), "the new id may have another entry");
        assert!(store(&mut senders, Readiness::Ready, 2), "an agent's numbers may go back");
        assert_eq!(before.get(), Some(3), "the number that was stored before is returned");
        assert!(senders.to_store(Name { address: "10.0.0.9:1".parse().unwrap(), ..name }).is_none());
        // State that an earlier daemon has stored counts as stored.
        let base = Base { incarnation: 100, counter: 9 };
        let mut senders = Senders::new(1);
        senders.set_targets([target(1)], |_| (Some(base), None), at(0));
        assert!(store(&mut senders, Readiness::Ready, 8));
        assert_eq!(before.get(), Some(9));
    }

    #[test]
    fn a_malformed_datagram_is_refused() {
        let mut senders = of([1]);
        assert_eq!(senders.take(&[0; 79], at(0)), Err(Refusal::Malformed(Malformed::Length)));
    }
}
