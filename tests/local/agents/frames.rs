//! Runs the kernel program that processes reports, on frames of every shape. It must have the same
//! effects as the same code compiled for this host.

use std::net::{IpAddr, SocketAddr};

use lb_common::abi::host::{LastReport, Listener, ReportBase, Sender, SenderKey, Verdict, map};
use lb_common::net::{Address, Be16, Be32, IPPROTO_TCP};
use lb_report::fixtures::{Frame, OneBackend, Shape};
use lb_report::receive::{Received, Reception, receive};
use lb_report::wire::{Datagram, Kind, Readiness};
use stage::fixture::Fixture;
use stage::maps::{Raw, array, hash};

use crate::agents::reports::ALL;
use crate::agents::xdp::{LISTEN, links, start};

/// `XDP_DROP` and `XDP_PASS`.
const DROP: u32 = 1;
const PASS: u32 = 2;

struct Twins {
    fixture: Fixture,
    program: std::os::fd::OwnedFd,
    daemon: [SocketAddr; 2],
    sender: Sender,
    backend: SocketAddr,
    listener: Listener,
    /// The counter in the last push. Each push increments it.
    counter: u32,
}

impl Twins {
    /// A program that a daemon has attached. The daemon then ends, so that no other process writes
    /// to the maps.
    fn new() -> Self {
        let (mut fixture, _agent) = start("round-robin");
        let [link] = &links(&fixture)[..] else { panic!("expected one link") };
        let program = stage::sys::program(stage::sys::link(link).program);
        fixture.stop();
        let port = stage::address(LISTEN).port();
        let daemon = [
            stage::address(LISTEN),
            SocketAddr::new("2001:db8::2".parse().expect("the text is an address"), port),
        ];
        let mut listeners = hash::<Address, Listener>(&fixture.setup.host_map(map::LISTENERS));
        listeners.insert(Raw(daemon[1].ip().into()), Raw(Listener::default()), 0).expect("listen at IPv6");
        let backend = stage::address(ALL[0]);
        let name = Datagram::about(Kind::Push, IPPROTO_TCP, backend).name();
        let senders = hash::<_, Sender>(&fixture.setup.host_map(map::SENDERS));
        let sender = senders.get(&Raw(name), 0).expect("the backend is registered").0;
        Self { fixture, program, daemon, sender, backend, listener: Listener::default(), counter: 0 }
    }

    fn set(&self, last: LastReport, lame_until_ns: u64) {
        let maps = &self.fixture.setup;
        array(&maps.host_map(map::LAST_REPORTS)).set(self.sender.id, Raw(last), 0).expect("write");
        array(&maps.host_map(map::VERDICTS))
            .set(self.sender.id, Raw(Verdict { lame_until_ns }), 0)
            .expect("write");
    }

    fn state(&self) -> (LastReport, u64) {
        let maps = &self.fixture.setup;
        let last = array::<LastReport>(&maps.host_map(map::LAST_REPORTS)).get(&self.sender.id, 0);
        let verdict = array::<Verdict>(&maps.host_map(map::VERDICTS)).get(&self.sender.id, 0);
        (last.expect("read").0, verdict.expect("read").0.lame_until_ns)
    }

    fn counts(&self) -> Vec<u64> {
        let values = stage::maps::per_cpu::<lb_common::abi::host::Receptions>(
            &self.fixture.setup.host_map(map::RECEPTIONS),
        );
        let values = values.get(&0, 0).expect("read");
        (0..Reception::NAMES.len()).map(|at| values.iter().map(|of| of.0.counts[at]).sum()).collect()
    }

    /// Makes the program pass rejected datagrams to the daemon.
    fn pass_unbelieved(&mut self) {
        self.listener = Listener { passes_unbelieved: 1 };
        let mut listeners = hash::<Address, Listener>(&self.fixture.setup.host_map(map::LISTENERS));
        for daemon in self.daemon {
            listeners.insert(Raw(daemon.ip().into()), Raw(self.listener), 0).expect("write");
        }
    }

    /// Adds a second key of the backend.
    fn add_key(&mut self, id: u16, key: [u8; 16]) {
        self.sender.keys[1] = SenderKey { id, key, ..SenderKey::default() };
        let name = Datagram::about(Kind::Push, IPPROTO_TCP, self.backend).name();
        let mut senders = hash::<_, Sender>(&self.fixture.setup.host_map(map::SENDERS));
        senders.insert(Raw(name), Raw(self.sender), 0).expect("write");
    }

    /// A push that reports a lame duck, with a higher number than all earlier pushes.
    fn push(&mut self) -> Datagram {
        self.counter += 1;
        let mut push = Datagram::about(Kind::Push, IPPROTO_TCP, self.backend);
        push.readiness = Readiness::LameDuck as u8;
        push.key_id = Be16::from_host(self.sender.keys[0].id);
        push.incarnation = Be32::from_host(9);
        push.counter = Be32::from_host(self.counter);
        push.hold = Be32::from_host(10_000);
        push
    }

    fn sealed(&self, datagram: Datagram) -> Vec<u8> {
        datagram.sealed(lb_report::wire::Key::from_bytes(self.sender.keys[0].key)).bytes().to_vec()
    }

    /// Runs the kernel's program, and the same code compiled for this host, on a frame, and
    /// compares the effects. Returns the result of the code on this host.
    #[track_caller]
    fn run(&self, shape: Shape, is_v6: bool, payload: &[u8], cut: usize) -> Option<Received> {
        let daemon = self.daemon[usize::from(is_v6)];
        let from: IpAddr =
            if is_v6 { "2001:db8::1" } else { "192.0.2.1" }.parse().expect("the text is an address");
        let frame = Frame::new(shape, SocketAddr::new(from, 9465), daemon, payload);
        let bytes = &frame.bytes()[..cut.min(frame.bytes().len())];
        let before = LastReport {
            base: ReportBase { incarnation: 9, counter: 0 },
            highest: ReportBase { incarnation: 9, counter: 0 },
            nonce: 77,
            repeated_ns: 0,
        };
        self.set(before, 0);
        let mut twin = OneBackend::new(daemon.ip(), self.backend, self.sender.keys[0].key);
        twin.keys = self.sender.keys;
        twin.listener = self.listener;
        twin.last.set(before);
        let now_ns = 1_000_000_000;
        let expected = receive(bytes, &twin, Be16::from_host(daemon.port()), || now_ns);
        let counts = self.counts();
        let (action, after) = stage::sys::run_xdp(&self.program, bytes);
        let what = format!("{shape:?} {is_v6} {} bytes, cut at {cut}: {expected:?}", payload.len());
        assert_eq!(after, bytes, "no frame is changed: {what}");
        let goes_on = expected.is_none_or(|received| received.goes_on);
        let mut counted = counts;
        if let Some(received) = expected {
            counted[received.reception.number() as usize] += 1;
        }
        let of = |last: LastReport| (last.base, last.highest, last.nonce);
        let (last, until) = self.state();
        // Compares all effects in one assertion, because equal parts help to interpret a
        // difference.
        assert_eq!(
            (action, self.counts(), of(last), until == 0),
            (if goes_on { PASS } else { DROP }, counted, of(twin.last.get()), twin.lame_until_ns.get() == 0),
            "{what}"
        );
        expected
    }
}

#[test]
fn the_program_in_the_kernel_matches_its_code_on_this_host() {
    let mut twins = Twins::new();
    let plain = Shape::PLAIN;
    let mut believed = 0;
    for is_v6 in [false, true] {
        for tags in [[0, 0], [0x8100, 0], [0x88a8, 0], [0x88a8, 0x8100]] {
            for options in if is_v6 { &[0][..] } else { &[0, 1, 5, 10] } {
                for fragment in if is_v6 { &[0][..] } else { &[0, 0x4000, 0x2000, 1] } {
                    for protocol in [17, 6, 44] {
                        let shape = Shape { tags, options: *options, fragment: *fragment, protocol, ..plain };
                        let push = twins.push();
                        let payload = twins.sealed(push);
                        let received = twins.run(shape, is_v6, &payload, usize::MAX);
                        believed += u32::from(
                            received.is_some_and(|received| received.reception == Reception::Believed),
                        );
                    }
                }
            }
        }
    }
    assert_eq!(believed, 3 * 4 * 2 + 3, "whole frames with at most one tag are accepted");
    let push = twins.push();
    let fine = twins.sealed(push);
    // A test run accepts no frame that is shorter than an Ethernet header.
    for cut in 14..42 + 80 {
        twins.run(plain, false, &fine, cut);
    }
    let longest = Shape { tags: [0x8100, 0], options: 10, ..plain };
    for cut in [14, 17, 18, 37, 38, 77, 78, 85, 86, 165, 166] {
        twins.run(longest, false, &fine, cut);
    }
    let mut long = fine.clone();
    long.resize(150, 0);
    for length in [0, 1, 79, 80, 81, 150] {
        twins.run(plain, true, &long[..length], usize::MAX);
    }
    for length_off in [-88, -81, -1, 1, 1000] {
        twins.run(Shape { length_off, ..plain }, false, &fine, usize::MAX);
    }
    // A datagram with any changed byte is refused.
    for at in 0..fine.len() {
        let mut changed = fine.clone();
        changed[at] ^= 0x11;
        let received =
            twins.run(plain, at % 2 == 0, &changed, usize::MAX).expect("the daemon receives a datagram");
        assert_ne!(
            received.reception,
            Reception::Believed,
            "a datagram with a changed byte {at} is not accepted"
        );
    }
    let change = |twins: &mut Twins, change: &dyn Fn(&mut Datagram)| {
        let mut datagram = twins.push();
        change(&mut datagram);
        let payload = twins.sealed(datagram);
        twins.run(plain, false, &payload, usize::MAX).expect("the daemon receives a datagram").reception
    };
    let answer = Kind::Answer as u8;
    let answered = change(&mut twins, &|datagram| (datagram.kind, datagram.nonce) = (answer, 77));
    assert_eq!(answered, Reception::Believed);
    let down = Readiness::Down as u8;
    change(&mut twins, &|datagram| (datagram.readiness, datagram.valid_for) = (down, Be32::from_host(5_000)));
    for readiness in [Readiness::Ready, Readiness::Unknown] {
        change(&mut twins, &|datagram| datagram.readiness = readiness as u8);
    }
    change(&mut twins, &|datagram| (datagram.kind, datagram.nonce) = (answer, 76));
    change(&mut twins, &|datagram| datagram.kind = Kind::Request as u8);
    change(&mut twins, &|datagram| datagram.port = Be16::from_host(1));
    change(&mut twins, &|datagram| datagram.key_id = Be16::from_host(9));
    change(&mut twins, &|datagram| datagram.counter = Be32::from_host(0));
    change(&mut twins, &|datagram| datagram.incarnation = Be32::from_host(u32::MAX));
    // A push under the second key is accepted, but not if it contains the id of the first key.
    let second = *b"of another party";
    twins.add_key(7, second);
    let mut push = twins.push();
    for (id, is_believed) in [(7, true), (twins.sender.keys[0].id, false)] {
        push.key_id = Be16::from_host(id);
        let payload = push.sealed(lb_report::wire::Key::from_bytes(second)).bytes().to_vec();
        let received = twins.run(plain, false, &payload, usize::MAX).expect("the daemon receives a datagram");
        assert_eq!(
            received.reception == Reception::Believed,
            is_believed,
            "reception of a datagram under key {id}"
        );
    }
    // If the daemon requests rejected datagrams, the program passes them on. The counts are the
    // same as without this request.
    twins.pass_unbelieved();
    change(&mut twins, &|datagram| datagram.port = Be16::from_host(1));
    change(&mut twins, &|datagram| datagram.key_id = Be16::from_host(9));
    twins.run(plain, true, &long[..79], usize::MAX);
}
