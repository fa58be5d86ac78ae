//! Datagrams that reach an agent from several addresses. Some senders have a key, and others have
//! none. The text determines the order of the datagrams, and the changes of backends between the
//! datagrams. The kernel program that answers in place of the agent is compiled for this host, and
//! processes every datagram that the agent's socket processes.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use lb_common::abi::host::SenderName;
use lb_common::abi::responder::{PreparedAnswer, Station, Subscriber, SubscriberName};
use lb_common::net::{Address, Be16, Be32};
use lb_report::agent::entry::{CheckRules, Rules};
use lb_report::agent::load::Load;
use lb_report::agent::name::Name;
use lb_report::agent::streak::Outcome;
use lb_report::agent::{Reports, Requester, Via};
use lb_report::fixtures::{Frame, Shape};
use lb_report::keys::{BackendKey, Keys, Numbered};
use lb_report::respond::{Found, Maps, Response, Workspace, respond};
use lb_report::wire::{BYTES, Cookies, Datagram, Key, Kind, Readiness};

use crate::operations::Operations;
use crate::shapes::{holds_udp, shape};

/// The number of addresses that send requests.
const ASKERS: u8 = 8;

/// The number of datagrams that are stored and may be sent again.
const RETAINED: usize = 64;

/// The maximum number of pushes of one change to one address.
const TIMES: u32 = 5;

/// The agent's port. The constants below are its addresses and the secret of its cookies.
const PORT: u16 = 9465;
const HERE: [&str; 2] = ["192.0.2.9", "2001:db8::9"];
const SECRET: [u8; 16] = [9; 16];

struct World {
    reports: Reports,
    start: Instant,
    now: Instant,
    datagrams: Vec<Datagram>,
    /// The cookies that an address has received for a backend.
    cookies: HashMap<(SocketAddr, Name), Vec<u64>>,
    /// The addresses that have returned a cookie for a backend since the backend was last added.
    returned: HashSet<(SocketAddr, Name)>,
    /// The last change of a backend that was pushed to each address, and the number of pushes.
    pushed: HashMap<(SocketAddr, Name), (u16, u32)>,
    /// The incarnation and the counter of the last report of each backend.
    numbers: HashMap<Name, (u32, u32)>,
}

/// Reads a text as the datagrams that reach an agent.
pub fn agent(text: &[u8]) {
    let mut operations = Operations::new(text);
    let mut world = World::new();
    // The loop is bounded, because each iteration consumes a byte of the text.
    while let Some(operation) = operations.next() {
        match operation % 9 {
            0 => world.pass(&mut operations),
            1 => {
                let from = requester(operations.byte());
                let bytes = operations.bytes(100);
                world.answer(bytes, from);
            }
            2 | 3 => world.authentic(&mut operations),
            4 => {
                let from = requester(operations.byte());
                if let Some(datagram) = operations.choice(&world.datagrams).copied() {
                    world.answer(datagram.bytes(), from);
                }
            }
            5 => world.changed(&mut operations),
            6 => world.set(&mut operations),
            8 => world.odd(&mut operations),
            _ => world.change_readiness(&mut operations),
        }
        world.check();
    }
}

fn names() -> [Name; 3] {
    ["10.0.0.1:1", "10.0.0.1:1/udp", "[2001:db8::1]:2"]
        .map(|name| lb_agent::name::parse(name).expect("the name is valid"))
}

fn key(name: Name, id: u16) -> Numbered<BackendKey> {
    let byte = name.address().port().wrapping_mul(16).wrapping_add(id + u16::from(name.protocol().number()));
    let text = format!("{id} {}", format!("{:02x}", byte & 0xff).repeat(16));
    Keys::parse(&text).expect("the key is valid").current()
}

fn requester(number: u8) -> Requester {
    let number = number % ASKERS;
    let address = match number % 2 {
        0 => SocketAddr::from(([192, 0, 2, 1], 9_000 + u16::from(number))),
        _ => {
            SocketAddr::new("2001:db8::7".parse().expect("the text is an address"), 9_000 + u16::from(number))
        }
    };
    Requester { address, via: Via { socket: 0, local: None } }
}

/// The longest payload that fits into a frame of this file, in bytes.
const LONGEST: usize = 2 * BYTES - 8;

/// The content of the program's maps at this moment.
struct Kernel<'r> {
    reports: &'r Reports,
    now: Instant,
    age: u64,
    subscribed: Cell<bool>,
}

impl Maps for Kernel<'_> {
    fn is_served_at(&self, address: Address) -> bool {
        HERE.iter().any(|here| {
            Address::from(here.parse::<std::net::IpAddr>().expect("the text is an address")) == address
        })
    }

    fn is_own(&self, station: Station) -> bool {
        station == Station::from(lb_report::fixtures::HERE)
    }

    fn prepared(&self, name: &SenderName, into: &mut PreparedAnswer) -> Found {
        let Some(entry) = Name::of_sender(name).and_then(|name| self.reports.get(name)) else {
            return Found::UnknownName;
        };
        let prepared = entry.prepared(self.now, 0).checked();
        let words: &[u64] = bytemuck::cast_slice(std::slice::from_ref(&prepared));
        assert!(PreparedAnswer::copy(into, |at| words[at]));
        Found::Prepared
    }

    fn subscribe(&self, _: &SubscriberName, _: &Subscriber) {
        self.subscribed.set(true);
    }

    fn cookies(&self, _: u64) -> Cookies {
        Cookies::new(Key::from_bytes(SECRET), self.age)
    }
}

impl World {
    fn new() -> Self {
        let now = Instant::now();
        let mut world = Self {
            reports: Reports::new(7, SECRET, now),
            start: now,
            now,
            datagrams: Vec::new(),
            cookies: HashMap::new(),
            returned: HashSet::new(),
            pushed: HashMap::new(),
            numbers: HashMap::new(),
        };
        for name in &names()[..2] {
            world.have(*name, true);
        }
        world
    }

    fn have(&mut self, name: Name, has_two_keys: bool) {
        let keys = Keys::new(key(name, 1), has_two_keys.then(|| key(name, 2)));
        let check = CheckRules { rise: 1, fall: 2, stale_after: Duration::from_secs(9) };
        let (valid_for, hold) = (Duration::from_secs(45), Duration::from_mins(10));
        self.reports.set(name, keys, Rules { valid_for, hold, check: Some(check) }, self.now);
    }

    /// Advances the time by at most some months, and sends all pushes that are due.
    fn pass(&mut self, operations: &mut Operations<'_>) {
        let milliseconds = u64::from(operations.short()) << (operations.byte() % 20);
        self.now += Duration::from_millis(milliseconds);
        self.reports.expire(self.now);
        let mut pushes = Vec::new();
        self.reports.push(self.now, |to, push| pushes.push((to, *push)));
        for (to, push) in pushes {
            self.pushed(to, &push);
        }
        let next = self.reports.next_at(self.now);
        assert!(next.is_none_or(|next| next > self.now), "a completed step is not due again");
    }

    fn pushed(&mut self, to: Requester, push: &Datagram) {
        let name = Name::of(push).expect("a push has a name");
        assert_eq!(push.kind(), Some(Kind::Push));
        assert!(self.returned.contains(&(to.address, name)), "the address has returned a cookie");
        let change = self.reports.get(name).expect("the agent has the report").change();
        let times = self.pushed.entry((to.address, name)).or_default();
        *times = if times.0 == change { (change, times.1 + 1) } else { (change, 1) };
        assert!(times.1 <= TIMES, "each push is repeated a limited number of times");
        self.sent(push, name, to);
    }

    /// Checks a report that an address receives, and records it.
    fn sent(&mut self, report: &Datagram, name: Name, to: Requester) {
        let entry = self.reports.get(name).expect("the agent has the report");
        let key = entry.key(report.key_id.to_host()).expect("the backend has the key");
        assert!(report.is_authentic(key));
        assert_eq!(report.readiness(), Some(entry.readiness()));
        let number = (report.incarnation.to_host(), report.counter.to_host());
        let before = self.numbers.insert(name, number);
        assert!(
            before.is_none_or(|before| before <= number),
            "the numbers of reports grow: {before:?}, then {number:?}"
        );
        self.cookies.entry((to.address, name)).or_default().push(report.cookie);
        self.retain(*report);
    }

    fn retain(&mut self, datagram: Datagram) {
        self.datagrams.push(datagram);
        if self.datagrams.len() > RETAINED {
            self.datagrams.remove(0);
        }
    }

    /// A datagram from a client that has the key. Its cookie belongs to this client, belongs to
    /// another client, or is absent.
    fn authentic(&mut self, operations: &mut Operations<'_>) {
        let from = requester(operations.byte());
        let names = names();
        let Some(name) = operations.choice(&names).copied() else { return };
        let [kind, key_id, cookie, other] = [(); 4].map(|()| operations.byte());
        let kind = [Kind::Request, Kind::Request, Kind::Answer, Kind::Push][usize::from(kind % 4)];
        let mut datagram = Datagram::about(kind, name.protocol().number(), name.address());
        let of = |requester: Requester| self.cookies.get(&(requester.address, name));
        let cookies = if other.is_multiple_of(4) { of(requester(other / 4)) } else { of(from) };
        datagram.cookie = match cookie {
            0 => 0,
            255 => operations.long(),
            back => {
                let cookies = cookies.map_or(&[][..], Vec::as_slice);
                let back = usize::from(back) % cookies.len().max(1);
                cookies.iter().rev().nth(back).copied().unwrap_or_default()
            }
        };
        datagram.nonce = operations.long();
        datagram.readiness = operations.byte() % 4;
        datagram.hold = Be32::from_host(operations.word());
        let key = key(name, 1 + u16::from(key_id % 3));
        datagram.key_id = Be16::from_host(key.id);
        let datagram = datagram.sealed(key.key.wire());
        self.retain(datagram);
        self.answer(datagram.bytes(), from);
    }

    /// A previously sent datagram, with one changed byte.
    fn changed(&mut self, operations: &mut Operations<'_>) {
        let from = requester(operations.byte());
        let Some(datagram) = operations.choice(&self.datagrams) else { return };
        let mut bytes = datagram.bytes().to_vec();
        let at = usize::from(operations.byte()) % (bytes.len() + 1);
        match bytes.get_mut(at) {
            Some(byte) => *byte ^= operations.byte(),
            None => bytes.resize(usize::from(operations.byte()), 0),
        }
        self.answer(&bytes, from);
    }

    /// Delivers a datagram and checks the answer.
    fn answer(&mut self, bytes: &[u8], from: Requester) {
        let total = |reports: &Reports| {
            let counts = reports.counts();
            counts.answered + counts.refused.iter().sum::<u64>()
        };
        let by_kernel = self.by_kernel(Shape::PLAIN, bytes, from);
        let refused = self.reports.counts().refused;
        let before = total(&self.reports);
        let answer = self.reports.answer(bytes, from, self.now);
        match by_kernel {
            Some((Response::Answered, frame)) => {
                let theirs = answer.expect("if the program answers, the socket answers");
                assert!(frame.ends_with(theirs.bytes()), "program and socket send the same answer");
            }
            Some((Response::Refused(why), _)) => {
                assert_eq!(self.reports.counts().refused[why.number()], refused[why.number()] + 1, "{why:?}");
            }
            None => assert!(bytes.len() > LONGEST, "the program leaves only long datagrams to the agent"),
        }
        assert_eq!(total(&self.reports), before + 1, "each datagram is counted");
        let request = Datagram::parse(bytes).ok().filter(|request| request.kind() == Some(Kind::Request));
        let name = request.as_ref().and_then(Name::of);
        let entry = name.and_then(|name| self.reports.get(name));
        let key = request.zip(entry).and_then(|(request, entry)| entry.key(request.key_id.to_host()));
        let is_authentic = request.zip(key).is_some_and(|(request, key)| request.is_authentic(key));
        assert_eq!(answer.is_some(), is_authentic, "only an authentic request is answered");
        let (Some(answer), Some(request), Some(name)) = (answer, request, name) else { return };
        assert!(answer.bytes().len() <= bytes.len(), "no answer is longer than its request");
        assert_eq!(answer.kind(), Some(Kind::Answer));
        assert_eq!((answer.nonce, answer.key_id), (request.nonce, request.key_id));
        assert_eq!(Name::of(&answer), Some(name));
        if self.cookies.get(&(from.address, name)).is_some_and(|sent| sent.contains(&request.cookie)) {
            self.returned.insert((from.address, name));
        }
        self.sent(&answer, name, from);
    }

    /// The program's result for a datagram in a frame; `None` if the datagram is longer than
    /// `LONGEST`. The program may answer only a datagram that the socket would also answer. It must
    /// not change a frame that it does not answer.
    fn by_kernel(&self, shape: Shape, bytes: &[u8], from: Requester) -> Option<(Response, Vec<u8>)> {
        if bytes.len() > LONGEST {
            return None;
        }
        let here = HERE[usize::from(from.address.is_ipv6())].parse().expect("the text is an address");
        let mut frame = Frame::new(shape, from.address, SocketAddr::new(here, PORT), bytes);
        let before = frame;
        let age = u64::try_from((self.now - self.start).as_nanos()).expect("the age fits into 64 bits");
        let kernel = Kernel { reports: &self.reports, now: self.now, age, subscribed: Cell::new(false) };
        let mut workspace = bytemuck::Zeroable::zeroed();
        let workspace: &mut Workspace = &mut workspace;
        let response = respond(frame.bytes_mut(), &kernel, Be16::from_host(PORT), || Some(workspace), || 0);
        if response != Some(Response::Answered) {
            assert_eq!(frame.bytes(), before.bytes());
            assert!(!kernel.subscribed.get());
        }
        Some((response?, frame.bytes().to_vec()))
    }

    /// A previously sent datagram, in a frame of another shape. The program may answer it only if
    /// the socket would answer it.
    fn odd(&mut self, operations: &mut Operations<'_>) {
        let from = requester(operations.byte());
        let [tags, options, fragment, protocol, off] = [(); 5].map(|()| operations.byte());
        let length_off = if off % 8 == 7 { i16::from(off) - 88 } else { 0 };
        let shape = shape([tags, options, fragment, protocol], length_off);
        let Some(datagram) = operations.choice(&self.datagrams).copied() else { return };
        let answered = self.by_kernel(shape, datagram.bytes(), from);
        let is_v6 = from.address.is_ipv6();
        let is_plain = holds_udp(shape, is_v6) && shape.length_off == 0 && (is_v6 || shape.options == 0);
        assert_eq!(answered.is_some(), is_plain, "{shape:?}");
    }

    /// Adds a backend, removes it, or changes its keys.
    fn set(&mut self, operations: &mut Operations<'_>) {
        let names = names();
        let Some(name) = operations.choice(&names).copied() else { return };
        match operations.byte() % 4 {
            0 => {
                self.reports.remove(name);
                self.returned.retain(|(_, other)| *other != name);
                self.pushed.retain(|(_, other), _| *other != name);
            }
            what => self.have(name, what != 1),
        }
    }

    /// Changes the reported state of a backend.
    fn change_readiness(&mut self, operations: &mut Operations<'_>) {
        let names = names();
        let Some(name) = operations.choice(&names).copied() else { return };
        let now = self.now;
        let Some(entry) = self.reports.get_mut(name) else { return };
        match operations.byte() % 10 {
            0 => entry.operator(true, now),
            1 => entry.operator(false, now),
            2 => entry.checked(Outcome::Passed, now),
            3 => entry.checked(Outcome::Failed("it fails".to_owned()), now),
            4 => entry.checked(Outcome::Impossible("it cannot be run".to_owned()), now),
            5 => entry.restart_check(now),
            6 => entry.runner(Some(Readiness::Ready), now),
            7 => entry.runner(Some(Readiness::LameDuck), now),
            8 => entry.runner(None, now),
            _ => {
                let number = operations.word();
                let window = Duration::from_millis(operations.long() >> 16);
                let load =
                    Load { qps: Some(number), eps: None, utilization: Some(number), window, measured: now };
                entry.loaded(load, now + Duration::from_secs(u64::from(operations.short())), now);
            }
        }
    }

    fn check(&self) {
        for (_, entry) in self.reports.iter() {
            assert!(entry.subscribers() <= usize::from(ASKERS), "each address has at most one subscription");
            assert!(entry.unacknowledged(self.now) <= entry.subscribers());
        }
    }
}
