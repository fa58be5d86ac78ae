//! Frames that reach a network interface where the kernel processes reports. The kernel's program,
//! compiled for this host, processes each frame, and the daemon's socket processes the datagram in
//! the frame. Both must accept the same reports, and store the same results.

use std::net::SocketAddr;
use std::sync::LazyLock;
use std::time::Duration;

use lb_common::abi::host::LastReport;
use lb_common::net::{Be16, Be32};
use lb_core::reports::Name;
use lb_core::service::Protocol;
use lb_report::client::reported::Base;
use lb_report::client::senders::{Refusal, Senders, Target};
use lb_report::fixtures::{Frame, OneBackend, Shape};
use lb_report::keys::{BackendKey, Keys, Numbered, ServiceKey};
use lb_report::receive::{Received, Reception, receive};
use lb_report::wire::MAX_HOLD;
use lb_report::wire::{BYTES, Datagram, Kind, Readiness};

use crate::operations::Operations;
use crate::shapes::{holds_udp, shape};

const DAEMON: [&str; 2] = ["192.0.2.2:9467", "[2001:db8::2]:9467"];
const AGENT: [&str; 2] = ["192.0.2.1:9465", "[2001:db8::1]:9465"];
const BACKEND: &str = "192.0.2.1:80";

static KEYS: LazyLock<Keys<BackendKey>> = LazyLock::new(|| {
    let key = Numbered { id: 1, key: ServiceKey::from_bytes([7; 32]) };
    Keys::new(key.of_backend(Protocol::Tcp, address(BACKEND)), None)
});

fn address(text: &str) -> SocketAddr {
    text.parse().expect("the text is an address")
}

struct World {
    kernel: OneBackend,
    socket: Senders<Duration>,
    name: Name,
    is_v6: bool,
    now: Duration,
    nonces: u64,
    outstanding: u64,
    /// The last datagram, which may be sent again.
    datagram: Datagram,
}

/// Reads a text as the frames that reach an interface.
pub fn frames(text: &[u8]) {
    let mut operations = Operations::new(text);
    let mut world = World::new(operations.byte() % 2 == 1);
    // The loop is bounded, because each iteration consumes a byte of the text.
    while let Some(operation) = operations.next() {
        match operation % 6 {
            0 => world.now += Duration::from_millis(operations.short().into()),
            1 => world.poll(),
            2 => world.raw(&mut operations),
            3 | 4 => {
                let datagram = world.authentic(&mut operations);
                world.datagram = datagram;
                world.take(Shape::PLAIN, datagram.bytes());
            }
            _ => world.odd(&mut operations),
        }
    }
}

impl World {
    fn new(is_v6: bool) -> Self {
        let name = Name { protocol: Protocol::Tcp, address: address(BACKEND) };
        let daemon = address(DAEMON[usize::from(is_v6)]);
        let target = Target {
            name,
            agent: address(AGENT[usize::from(is_v6)]),
            keys: KEYS.clone(),
            interval: Duration::from_secs(2),
            id: 1,
        };
        let now = Duration::from_secs(1_000);
        let mut socket = Senders::new(1);
        socket.set_targets([target], |_| (None, None), now);
        let kernel = OneBackend::new(daemon.ip(), name.address, KEYS.current().key.bytes());
        let datagram = Datagram::about(Kind::Push, 6, name.address);
        Self { kernel, socket, name, is_v6, now, nonces: 0, outstanding: 0, datagram }
    }

    fn poll(&mut self) {
        self.now += Duration::from_secs(3);
        let nonces = &mut self.nonces;
        let nonce = || {
            *nonces += 1;
            *nonces
        };
        for request in self.socket.requests(1, nonce, self.now) {
            self.outstanding = request.datagram.nonce;
            self.kernel.last.set(LastReport { nonce: self.outstanding, ..self.kernel.last.get() });
        }
    }

    fn authentic(&self, operations: &mut Operations<'_>) -> Datagram {
        let [kind, readiness, nonce] = [(); 3].map(|()| operations.byte());
        let kind = [Kind::Answer, Kind::Push, Kind::Answer, Kind::Request][usize::from(kind % 4)];
        let mut datagram = Datagram::about(kind, 6, self.name.address);
        datagram.readiness = readiness % 4;
        datagram.key_id = Be16::from_host(1);
        datagram.nonce = if nonce % 4 == 0 { operations.long() } else { self.outstanding };
        datagram.incarnation = Be32::from_host(u32::from(operations.byte()));
        datagram.counter = Be32::from_host(u32::from(operations.byte()));
        datagram.valid_for = Be32::from_host(operations.word());
        datagram.hold = Be32::from_host(operations.word());
        datagram.sealed(KEYS.current().key.wire())
    }

    /// The last datagram, in a frame of another shape or with one changed byte.
    fn odd(&mut self, operations: &mut Operations<'_>) {
        let [tags, options, fragment, protocol, at, byte] = [(); 6].map(|()| operations.byte());
        let length_off = if protocol % 8 == 7 { i16::from(byte) - 88 } else { 0 };
        let shape = shape([tags, options, fragment, protocol], length_off);
        let mut payload = self.datagram.bytes().to_vec();
        match payload.get_mut(usize::from(at)) {
            Some(changed) => *changed ^= byte,
            None => payload.resize(usize::from(byte) % 160, 0),
        }
        self.take(shape, &payload);
    }

    /// Random bytes, which are a valid frame only by chance. Their sender has no key, so the
    /// program must not accept them.
    fn raw(&mut self, operations: &mut Operations<'_>) {
        let before = self.state();
        let bytes = operations.bytes(255);
        let taken = receive(bytes, &self.kernel, Be16::from_host(9467), || self.now_ns());
        assert!(!matches!(taken, Some(Received { reception: Reception::Believed, .. })));
        assert_eq!(self.state(), before);
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.now.as_nanos()).expect("the time fits into 64 bits")
    }

    fn state(&self) -> (LastReport, u64) {
        (self.kernel.last.get(), self.kernel.lame_until_ns.get())
    }

    fn take(&mut self, shape: Shape, payload: &[u8]) {
        let [agent, daemon] = [AGENT, DAEMON].map(|of| address(of[usize::from(self.is_v6)]));
        let frame = Frame::new(shape, agent, daemon, payload);
        let before = self.state();
        let taken = receive(frame.bytes(), &self.kernel, Be16::from_host(daemon.port()), || self.now_ns());
        let is_for_us = holds_udp(shape, self.is_v6);
        let Some(Received { reception, goes_on }) = taken else {
            assert!(!is_for_us, "{shape:?} is for the daemon");
            return assert_eq!(self.state(), before, "a passed frame changes no state");
        };
        assert!(is_for_us, "{shape:?} is not for the daemon");
        if reception != Reception::Believed {
            let (mut last, until) = self.state();
            last.repeated_ns = before.0.repeated_ns;
            assert_eq!((last, until), before, "a rejected datagram changes no state");
        }
        // The network stack delivers as many bytes to the socket as the UDP header states. If the
        // frame has fewer bytes, the socket receives nothing.
        let udp_length = u16::try_from(8 + payload.len())
            .expect("the payload is short")
            .wrapping_add_signed(shape.length_off);
        let body = usize::from(udp_length).checked_sub(8).and_then(|length| payload.get(..length));
        let Some(payload) = body else {
            return assert_eq!((reception, goes_on), (Reception::Malformed, false));
        };
        let result = self.socket.take(payload, self.now);
        let expected = match result {
            Ok(_) => Reception::Believed,
            Err(Refusal::Malformed(_)) => Reception::Malformed,
            Err(Refusal::Disbelieved(why)) => Reception::Disbelieved(why),
        };
        assert_eq!(reception, expected, "program and socket have the same result");
        if result.is_ok() {
            assert!(goes_on && payload.len() == BYTES);
            self.compare(payload);
        }
    }

    /// Compares the results of program and socket for a report that both accept.
    fn compare(&mut self, payload: &[u8]) {
        let datagram = Datagram::parse(payload).expect("an accepted datagram can be parsed");
        assert!(datagram.is_authentic(KEYS.current().key.wire()));
        let (_, reported) = self.socket.get(self.name).expect("the socket has the target");
        let (last, until) = self.state();
        assert_eq!(Base::of(last.base), reported.base());
        assert_eq!((last.nonce, reported.nonce()), (0, 0), "the nonce is cleared");
        self.outstanding = 0;
        let by_socket = reported.lame_until();
        let by_socket =
            by_socket.map_or(0, |until| u64::try_from(until.as_nanos()).expect("the time fits into 64 bits"));
        let is_serving = matches!(datagram.readiness(), Some(Readiness::Ready | Readiness::LameDuck));
        // The kernel's program stores one end time for the states lame duck and down, so its end
        // time may be later than the socket's. The daemon corrects the time afterwards.
        assert!(
            if is_serving { until == by_socket } else { until >= by_socket },
            "end time of the program: {until}, of the socket: {by_socket}: {datagram:?}"
        );
        assert!(
            until <= self.now_ns() + u64::try_from(MAX_HOLD.as_nanos()).expect("the hold fits into 64 bits"),
            "the end time is within the maximum hold"
        );
        self.kernel.lame_until_ns.set(by_socket);
    }
}
