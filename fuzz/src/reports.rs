//! Datagrams that reach a client's host: reports from backends' agents, and datagrams from other
//! senders. The text determines their order and their times.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::LazyLock;
use std::time::Duration;

use lb_common::net::{Be16, Be32};
use lb_core::health::Health;
use lb_core::reports::Name;
use lb_core::service::Protocol;
use lb_report::client::reported::{Base, Disbelieved, ReportState};
use lb_report::client::senders::{Refusal, Request, Senders, Target, name_in};
use lb_report::keys::{BackendKey, Keys, Numbered, ServiceKey};
use lb_report::wire::{Datagram, Kind};
use lb_report::wire::{MAX_HOLD, MAX_VALID_FOR};

use crate::operations::Operations;

/// The maximum number of requests per system call.
const BATCH: usize = 64;

/// The number of datagrams that are stored and may be sent again.
const RETAINED: usize = 64;

/// The part of a backend's state that a datagram may change.
#[derive(Debug, PartialEq, Eq)]
struct Shown {
    base: Option<Base>,
    lame_until: Option<Duration>,
    round_trip: Option<Duration>,
    state: ReportState,
    unanswered: u32,
}

struct World {
    senders: Senders<Duration>,
    targets: Vec<Target>,
    now: Duration,
    nonces: u64,
    /// For each backend, the nonce of the last request, until an answer to it is accepted.
    outstanding: HashMap<Name, u64>,
    /// Datagrams that were received or sent, and may be sent again.
    datagrams: Vec<Datagram>,
}

/// Reads a text as the datagrams that reach a client's host.
pub fn senders(text: &[u8]) {
    let mut operations = Operations::new(text);
    let mut world = World::new();
    // The loop is bounded, because each iteration consumes a byte of the text.
    while let Some(operation) = operations.next() {
        match operation % 8 {
            0 => world.pass(&mut operations),
            1 => {
                let bytes = operations.bytes(100);
                world.take(bytes);
            }
            2 | 3 => world.authentic(&mut operations),
            4 => {
                if let Some(datagram) = operations.choice(&world.datagrams).copied() {
                    world.take(datagram.bytes());
                }
            }
            5 => world.changed(&mut operations),
            6 => world.retarget(&mut operations),
            _ => {
                world.now += Duration::from_millis(operations.byte().into());
                world.poll();
            }
        }
    }
    world.now += MAX_HOLD + MAX_VALID_FOR;
    world.settle();
    assert!(world.senders.sick().is_empty(), "every report expires");
}

/// All possible targets of requests. They are computed only once, because deriving their keys takes
/// longer than the rest of the work for a text.
static ALL: LazyLock<Vec<Target>> = LazyLock::new(|| {
    let names = [
        (Protocol::Tcp, "10.0.0.1:1"),
        (Protocol::Tcp, "10.0.0.1:2"),
        (Protocol::Udp, "10.0.0.1:1"),
        (Protocol::Tcp, "[2001:db8::1]:1"),
    ];
    let target = |(protocol, address): (Protocol, &str)| {
        let address: SocketAddr = address.parse().expect("the text is an address");
        let key = |id, byte| Numbered { id, key: ServiceKey::from_bytes([byte; 32]) };
        Target {
            name: Name { protocol, address },
            agent: SocketAddr::new(address.ip(), 9465),
            keys: Keys::new(
                key(1, 7).of_backend(protocol, address),
                Some(key(2, 8).of_backend(protocol, address)),
            ),
            interval: Duration::from_secs(2),
            id: 0,
        }
    };
    names.into_iter().map(target).collect()
});

impl World {
    fn new() -> Self {
        let mut world = Self {
            senders: Senders::new(1),
            targets: ALL.clone(),
            now: Duration::from_secs(1_000),
            nonces: 0,
            outstanding: HashMap::new(),
            datagrams: Vec::new(),
        };
        world.targets.pop();
        let changes = world.senders.set_targets(world.targets.clone(), |_| (None, None), world.now);
        assert_eq!(changes, [], "a new target has no report");
        world
    }

    fn shown(&self) -> BTreeMap<Name, Shown> {
        let show = |name| {
            let (_, reported) = self.senders.get(name)?;
            let shown = Shown {
                base: reported.base(),
                lame_until: reported.lame_until(),
                round_trip: reported.round_trip(),
                state: reported.state(self.now),
                unanswered: reported.unanswered(),
            };
            Some((name, shown))
        };
        ALL.iter().filter_map(|target| show(target.name)).collect()
    }

    /// Advances the time by at most some months.
    fn pass(&mut self, operations: &mut Operations<'_>) {
        let milliseconds = u64::from(operations.short()) << (operations.byte() % 20);
        self.now += Duration::from_millis(milliseconds);
        self.settle();
    }

    /// Reports all changes that are due, and sends all requests that are due. Afterwards nothing
    /// may be due.
    fn settle(&mut self) {
        for change in self.senders.pass(self.now) {
            assert!(self.senders.get(change.name).is_some(), "a change belongs to a target of requests");
        }
        while self.poll() == BATCH {}
        let is_later = self.senders.next_due().is_none_or(|due| due > self.now);
        assert!(is_later || self.targets.is_empty(), "a completed step is not due again");
        let health_of = |target: &Target| {
            let (_, reported) = self.senders.get(target.name).expect("the sender has the target");
            Some((target.name, reported.verdict(self.now)?.health))
        };
        let expected: BTreeMap<Name, Health> = self.targets.iter().filter_map(health_of).collect();
        assert_eq!(*self.senders.sick(), expected);
    }

    fn poll(&mut self) -> usize {
        let nonces = &mut self.nonces;
        let nonce = || {
            *nonces += 1;
            *nonces
        };
        let requests = self.senders.requests(BATCH, nonce, self.now);
        for Request { to, datagram: request, .. } in &requests {
            let name = name_in(request).expect("the request has a name");
            let target = self.target(name).expect("the name belongs to a target");
            assert_eq!(*to, target.agent, "each request goes to the backend's agent");
            assert_eq!(request.kind(), Some(Kind::Request));
            assert!(request.is_authentic(target.keys.current().key.wire()));
            self.outstanding.insert(name, request.nonce);
        }
        self.datagrams.extend(requests.iter().map(|request| request.datagram));
        self.trim();
        requests.len()
    }

    fn trim(&mut self) {
        let excess = self.datagrams.len().saturating_sub(RETAINED);
        self.datagrams.drain(..excess);
    }

    fn target(&self, name: Name) -> Option<&Target> {
        self.targets.iter().find(|target| target.name == name)
    }

    /// A datagram from a sender with a backend's key: the backend's agent or a client's host.
    fn authentic(&mut self, operations: &mut Operations<'_>) {
        let Some(target) = operations.choice(&ALL) else { return };
        let [kind, readiness, key, nonce] = [(); 4].map(|()| operations.byte());
        let kind = [Kind::Answer, Kind::Push, Kind::Answer, Kind::Request][usize::from(kind % 4)];
        let mut datagram = Datagram::about(kind, target.name.protocol.number(), target.name.address);
        datagram.readiness = readiness % 4;
        datagram.nonce = match nonce % 4 {
            0 => operations.long(),
            1 => self.nonces,
            _ => self.outstanding.get(&target.name).copied().unwrap_or_default(),
        };
        datagram.incarnation = Be32::from_host(u32::from(operations.byte()));
        datagram.counter = Be32::from_host(u32::from(operations.byte()));
        datagram.cookie = operations.long();
        for number in [
            &mut datagram.valid_for,
            &mut datagram.hold,
            &mut datagram.qps,
            &mut datagram.eps,
            &mut datagram.utilization,
        ] {
            *number = Be32::from_host(operations.word());
        }
        let keys: &[Numbered<BackendKey>] = target.keys.all();
        let key = keys[usize::from(key) % keys.len()];
        datagram.key_id = Be16::from_host(key.id);
        let datagram = datagram.sealed(key.key.wire());
        self.datagrams.push(datagram);
        self.trim();
        self.take(datagram.bytes());
    }

    /// A previously sent or received datagram, with one changed byte.
    fn changed(&mut self, operations: &mut Operations<'_>) {
        let Some(datagram) = operations.choice(&self.datagrams) else { return };
        let mut bytes = datagram.bytes().to_vec();
        let at = usize::from(operations.byte()) % (bytes.len() + 1);
        match bytes.get_mut(at) {
            Some(byte) => *byte ^= operations.byte(),
            None => bytes.resize(usize::from(operations.byte()), 0),
        }
        self.take(&bytes);
    }

    /// Changes the targets of requests.
    fn retarget(&mut self, operations: &mut Operations<'_>) {
        let [which, interval, adopted] = [(); 3].map(|()| operations.byte());
        let interval = Duration::from_millis(100 + 100 * u64::from(interval));
        let targets = ALL.iter().enumerate().filter(|(at, _)| which >> at & 1 != 0);
        self.targets = targets.map(|(_, target)| Target { interval, ..target.clone() }).collect();
        let before = self.shown();
        let base = (adopted & 1 != 0).then(|| Base { incarnation: adopted.into(), counter: 0 });
        let until = (adopted & 2 != 0).then(|| self.now + Duration::from_secs(operations.long() >> 32));
        self.senders.set_targets(self.targets.clone(), |_| (base, until), self.now);
        self.outstanding.retain(|name, _| self.targets.iter().any(|target| target.name == *name));
        let after = self.shown();
        assert_eq!(after.len(), self.targets.len());
        for (name, after) in after {
            match before.get(&name) {
                Some(before) => assert_eq!(after, *before, "the backend's state is unchanged"),
                None => {
                    assert_eq!(after.base, base);
                    let latest = self.now + MAX_HOLD;
                    assert!(after.lame_until.is_none_or(|until| until <= latest), "bounded");
                }
            }
        }
    }

    /// Processes a datagram, and checks the changes.
    fn take(&mut self, bytes: &[u8]) {
        let (before, sick, due) = (self.shown(), self.senders.sick().clone(), self.senders.next_due());
        let result = self.senders.take(bytes, self.now);
        let after = self.shown();
        let datagram = Datagram::parse(bytes).ok();
        let name = datagram.as_ref().and_then(name_in);
        let is_authentic = name.zip(datagram).is_some_and(|(name, datagram)| {
            let key = self.target(name).and_then(|target| target.keys.get(datagram.key_id.to_host()));
            key.is_some_and(|key| datagram.is_authentic(key.wire()))
        });
        let (name, change) = match result {
            Ok(taken) => taken,
            Err(refusal) => {
                assert_eq!(after, before, "a rejected datagram changes no state");
                assert_eq!(*self.senders.sick(), sick);
                let is_again = refusal == Refusal::Disbelieved(Disbelieved::Replayed) && is_authentic;
                assert!(is_again || self.senders.next_due() == due, "a rejected datagram causes no request");
                return;
            }
        };
        assert!(is_authentic, "an accepted datagram is authentic");
        let datagram = datagram.expect("an accepted datagram can be parsed");
        for (other, shown) in &after {
            assert!(
                *other == name || Some(shown) == before.get(other),
                "a datagram changes only its own backend"
            );
        }
        let (before, after) = (&before[&name], &after[&name]);
        let base = Base { incarnation: datagram.incarnation.to_host(), counter: datagram.counter.to_host() };
        assert_eq!(after.base, Some(base));
        let nonce = self.outstanding.remove(&name);
        match datagram.kind() {
            Some(Kind::Answer) => {
                assert_eq!(nonce, Some(datagram.nonce), "an accepted answer is for the outstanding request");
            }
            Some(Kind::Push) => assert!(
                before.base.is_some_and(|before| before < base),
                "an accepted push is later than the last one"
            ),
            Some(Kind::Request) | None => panic!("a request was accepted as a report"),
        }
        let (_, reported) = self.senders.get(name).expect("the sender has the target");
        let report = reported.report().expect("there is a report");
        assert!(report.valid_for <= MAX_VALID_FOR, "bounded");
        assert!(after.lame_until.is_none_or(|until| until <= self.now + MAX_HOLD), "bounded");
        assert!(change.is_none_or(|change| change.name == name));
    }
}
