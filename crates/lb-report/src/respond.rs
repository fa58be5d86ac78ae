//! Answers a request in a frame before the host's network stack processes the frame, with the
//! answers that the agent has prepared. The kernel program calls this code with its maps, and tests
//! call it with their own maps.

use bytemuck::Zeroable;
use lb_common::abi::host::SenderName;
use lb_common::abi::responder::{PreparedAnswer, Station, Subscriber, SubscriberName};
use lb_common::net::{Address, Be16};
use network_types::eth::EthHdr;

use crate::answer::{Refused, answer};
use crate::frame::{FrameMut, Udp, can_turn, turn, udp_to};
use crate::wire::{Cookies, Datagram, Malformed, Readiness, RequestSource};

/// The maps that the agent and the program share, as the program uses them.
pub trait Maps {
    /// Whether requests to this address of the host are answered.
    fn is_served_at(&self, address: Address) -> bool;
    /// Whether an interface of this host has this hardware address.
    fn is_own(&self, station: Station) -> bool;
    /// Looks up the prepared answer of a backend and copies it to `into` if it is found.
    fn prepared(&self, name: &SenderName, into: &mut PreparedAnswer) -> Found;
    /// Records a subscriber, to which the agent will push changes.
    fn subscribe(&self, name: &SubscriberName, subscriber: &Subscriber);
    /// The cookies that are valid at this time.
    fn cookies(&self, now_ns: u64) -> Cookies;
}

/// The result of looking up a prepared answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The answer was found.
    Prepared,
    /// This host has no backend with this name.
    UnknownName,
    /// The agent is writing the answer now.
    BeingWritten,
}

/// The memory in which an answer is made. A kernel program's stack (512 bytes) has no room for it.
#[derive(Clone, Copy, Debug, Zeroable)]
pub struct Workspace {
    /// The request.
    pub request: Datagram,
    /// The prepared answer, which becomes the answer.
    pub prepared: PreparedAnswer,
}

/// The result for a frame with a datagram for the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Response {
    /// The frame now contains the answer and is sent back.
    Answered,
    /// The request is not answered, and the frame is dropped.
    Refused(Refused),
}

/// Answers the request in a frame. `None` if the frame is not for the agent, or if the agent's
/// socket must answer the request; the frame is then unchanged.
#[inline(always)]
pub fn respond<'w, F: FrameMut + ?Sized, M: Maps>(
    frame: &mut F,
    maps: &M,
    port: Be16,
    workspace: impl FnOnce() -> Option<&'w mut Workspace>,
    now_ns: impl FnOnce() -> u64,
) -> Option<Response> {
    let udp = request_in(frame, port)?;
    if !maps.is_served_at(udp.to) || !is_to_this_host(frame, maps) {
        return None;
    }
    let workspace = workspace()?;
    if udp.read(frame, &mut workspace.request).is_none() {
        return refused(Refused::Malformed(Malformed::Length));
    }
    let response = decide(maps, &udp, workspace, now_ns())?;
    if response == Response::Answered {
        turn(frame, &udp, &workspace.prepared.report)?;
    }
    Some(response)
}

/// The UDP datagram to the agent's port in a frame, if the frame can be turned around.
///
/// This and the following functions are not inlined into the kernel program, because a program's
/// stack has only 512 bytes.
#[cfg_attr(target_arch = "bpf", inline(never))]
fn request_in<F: FrameMut + ?Sized>(frame: &F, port: Be16) -> Option<Udp> {
    udp_to(frame, port).filter(|udp| can_turn(frame, *udp))
}

/// Whether a frame is addressed to an interface of this host. An interface in promiscuous mode also
/// receives frames for other hosts; an answer to such a frame would have the hardware address of
/// another host as its source.
#[cfg_attr(target_arch = "bpf", inline(never))]
fn is_to_this_host<F: FrameMut + ?Sized, M: Maps>(frame: &F, maps: &M) -> bool {
    frame.header::<EthHdr>(0).is_some_and(|ethernet| maps.is_own(Station::from(ethernet.dst_addr)))
}

/// Decides whether the request in the workspace is answered. If the request is answered, the answer
/// replaces the prepared answer in the workspace.
#[cfg_attr(target_arch = "bpf", inline(never))]
fn decide<M: Maps>(maps: &M, udp: &Udp, workspace: &mut Workspace, now_ns: u64) -> Option<Response> {
    let Workspace { request, prepared } = workspace;
    if let Err(malformed) = request.check() {
        return refused(Refused::Malformed(malformed));
    }
    let backend = request.name();
    match maps.prepared(&backend, prepared) {
        Found::Prepared => {}
        Found::UnknownName => return refused(Refused::UnknownName),
        Found::BeingWritten => return None,
    }
    // The map value's memory may have been reused for another backend.
    let report = Datagram::in_words(&prepared.report);
    if report.name() != backend {
        return None;
    }
    // After its deadline, a prepared answer reports the backend as unknown. If the backend was
    // down, clients choose it sooner after such an answer than without an answer. So the agent's
    // socket must answer.
    if now_ns > prepared.deadline_ns && report.readiness == Readiness::Down as u8 {
        return None;
    }
    let requester = RequestSource { address: udp.from, port: udp.from_port };
    match answer(request, &requester, prepared, &maps.cookies(now_ns), now_ns) {
        Ok(None) => {}
        Ok(Some(acknowledged)) => write_down(maps, request, udp, acknowledged, now_ns),
        Err(why) => return refused(why),
    }
    Some(Response::Answered)
}

/// Records the sender of a request as a subscriber.
#[cfg_attr(target_arch = "bpf", inline(never))]
fn write_down<M: Maps>(maps: &M, request: &Datagram, udp: &Udp, acknowledged: u16, now_ns: u64) {
    let backend = request.name();
    let name = SubscriberName { backend, address: udp.from, port: udp.from_port, _reserved: 0 };
    let key_id = request.key_id.to_host();
    maps.subscribe(
        &name,
        &Subscriber { asked_ns: now_ns, local: udp.to, key_id, heard: acknowledged, _reserved: 0 },
    );
}

#[inline(always)]
const fn refused(why: Refused) -> Option<Response> {
    Some(Response::Refused(why))
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::net::{IpAddr, SocketAddr};
    use std::vec::Vec;

    use super::*;
    use crate::fixtures::{Frame, OneAnswer, Shape, checksum};
    use crate::wire::{BYTES, Key, Kind};

    const KEY: [u8; 16] = *b"of sixteen bytes";
    const SECOND: u64 = 1_000_000_000;

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("the address is valid")
    }

    /// The addresses of the client and of the agent.
    fn ends(is_v6: bool) -> [SocketAddr; 2] {
        if is_v6 {
            [address("[2001:db8::2]:9467"), address("[2001:db8::1]:9465")]
        } else {
            [address("192.0.2.2:9467"), address("192.0.2.1:9465")]
        }
    }

    fn maps(is_v6: bool) -> OneAnswer {
        OneAnswer::new(ends(is_v6)[1].ip(), address("192.0.2.1:80"), KEY, 9 * SECOND)
    }

    fn request(cookie: u64) -> Datagram {
        let mut request = Datagram::about(Kind::Request, 6, address("192.0.2.1:80"));
        request.key_id = Be16::from_host(1);
        (request.nonce, request.cookie) = (99, cookie);
        request.sealed(Key::from_bytes(KEY))
    }

    fn run(maps: &OneAnswer, frame: &mut [u8], now_ns: u64) -> Option<Response> {
        let mut workspace = Workspace::zeroed();
        respond(frame, maps, Be16::from_host(9465), || Some(&mut workspace), || now_ns)
    }

    fn respond_to(
        maps: &OneAnswer,
        shape: Shape,
        is_v6: bool,
        payload: &[u8],
    ) -> (Option<Response>, Vec<u8>) {
        let [requester, agent] = ends(is_v6);
        let mut frame = Frame::new(shape, requester, agent, payload);
        let response = run(maps, frame.bytes_mut(), SECOND);
        (response, frame.bytes().to_vec())
    }

    /// The datagram in an answer. Checks the headers of the answer.
    fn answer_in(frame: &[u8], is_v6: bool, tags: usize) -> Datagram {
        let [requester, agent] = ends(is_v6);
        let bytes = |ip: IpAddr| match ip {
            IpAddr::V4(v4) => v4.octets().to_vec(),
            IpAddr::V6(v6) => v6.octets().to_vec(),
        };
        let (from, to) = (bytes(agent.ip()), bytes(requester.ip()));
        assert_eq!(frame[..12], [2, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0]);
        let ip = 14 + 4 * tags;
        let udp = if is_v6 {
            assert_eq!((frame[ip + 7], &frame[ip + 8..ip + 24]), (64, &from[..]));
            assert_eq!(&frame[ip + 24..ip + 40], &to[..]);
            ip + 40
        } else {
            assert_eq!(
                (frame[ip + 8], checksum(&frame[ip..ip + 20])),
                (64, 0),
                "the header, including its checksum, sums to 0"
            );
            assert_eq!((&frame[ip + 12..ip + 16], &frame[ip + 16..ip + 20]), (&from[..], &to[..]));
            ip + 20
        };
        let ports = [agent.port().to_be_bytes(), requester.port().to_be_bytes()].concat();
        assert_eq!(frame[udp..udp + 4], ports);
        let pseudo = [&from[..], &to, &[0, 17, 0, 88], &frame[udp..]].concat();
        assert_eq!(checksum(&pseudo), 0);
        assert_ne!(frame[udp + 6..udp + 8], [0, 0], "zero would mean that there is no checksum");
        Datagram::parse(&frame[udp + 8..]).expect("the bytes are a datagram")
    }

    #[test]
    fn a_request_is_turned_into_its_answer() {
        for is_v6 in [false, true] {
            for tag in [0, 0x8100, 0x88a8] {
                let shape = Shape { tags: [tag, 0], ..Shape::PLAIN };
                let maps = maps(is_v6);
                let (response, frame) = respond_to(&maps, shape, is_v6, request(0).bytes());
                assert_eq!((response, maps.subscriber.get()), (Some(Response::Answered), None));
                let answer = answer_in(&frame, is_v6, usize::from(tag != 0));
                assert!(answer.is_authentic(Key::from_bytes(KEY)));
                assert_eq!((answer.kind(), answer.nonce), (Some(Kind::Answer), 99));
                assert_eq!(answer.readiness(), Some(Readiness::Ready));
                let [requester, agent] = ends(is_v6);
                respond_to(&maps, shape, is_v6, request(answer.cookie).bytes());
                let (name, subscriber) = maps.subscriber.get().expect("the client is a subscriber");
                assert_eq!((name.backend, name.address), (maps.name, requester.ip().into()));
                assert_eq!((name.port.to_host(), subscriber.local), (requester.port(), agent.ip().into()));
                assert_eq!((subscriber.asked_ns, subscriber.key_id, subscriber.heard), (SECOND, 1, 3));
            }
        }
    }

    #[test]
    fn after_the_deadline_an_answer_reports_unknown() {
        let maps = maps(false);
        let [requester, agent] = ends(false);
        for (now_ns, readiness) in [(9 * SECOND, Readiness::Ready), (9 * SECOND + 1, Readiness::Unknown)] {
            let mut frame = Frame::new(Shape::PLAIN, requester, agent, request(0).bytes());
            assert_eq!(run(&maps, frame.bytes_mut(), now_ns), Some(Response::Answered));
            let answer = answer_in(frame.bytes(), false, 0);
            assert_eq!(
                (answer.readiness(), answer.is_authentic(Key::from_bytes(KEY))),
                (Some(readiness), true)
            );
        }
    }

    #[test]
    fn after_the_deadline_the_socket_answers_for_a_down_backend() {
        let mut maps = maps(false);
        Datagram::in_words_mut(&mut maps.prepared.report).readiness = Readiness::Down as u8;
        let [requester, agent] = ends(false);
        for (now_ns, expected) in [(9 * SECOND, Some(Response::Answered)), (9 * SECOND + 1, None)] {
            let mut frame = Frame::new(Shape::PLAIN, requester, agent, request(0).bytes());
            assert_eq!(run(&maps, frame.bytes_mut(), now_ns), expected);
        }
        Datagram::in_words_mut(&mut maps.prepared.report).port = Be16::from_host(81);
        let frame = Frame::new(Shape::PLAIN, requester, agent, request(0).bytes());
        untouched(&maps, frame, None);
    }

    /// Checks the response to a frame, and that the frame is not changed.
    #[track_caller]
    fn untouched(maps: &OneAnswer, mut frame: Frame, expected: Option<Response>) {
        let before = frame.bytes().to_vec();
        assert_eq!(run(maps, frame.bytes_mut(), SECOND), expected);
        assert_eq!(frame.bytes(), before);
    }

    #[test]
    fn frames_that_the_socket_must_answer_pass_unchanged() {
        let fine = request(0);
        let plain = Shape::PLAIN;
        let [requester, agent] = ends(false);
        for shape in [
            Shape { tags: [0x88a8, 0x8100], ..plain },
            Shape { options: 1, ..plain },
            Shape { fragment: 0x2000, ..plain },
            Shape { protocol: 6, ..plain },
            Shape { length_off: 1, ..plain },
            Shape { length_off: -1, ..plain },
        ] {
            untouched(&maps(false), Frame::new(shape, requester, agent, fine.bytes()), None);
        }
        for (from, to) in [
            ("192.0.2.2:9467", "192.0.2.3:9465"),
            ("192.0.2.2:9467", "192.0.2.1:9464"),
            ("169.254.0.1:9467", "192.0.2.1:9465"),
            ("255.255.255.255:9467", "192.0.2.1:9465"),
            ("192.0.2.2:0", "192.0.2.1:9465"),
        ] {
            untouched(&maps(false), Frame::new(plain, address(from), address(to), fine.bytes()), None);
        }
        let agent = ends(true)[1];
        for from in ["[fe80::1]:9467", "[ff02::1]:9467", "[::ffff:192.0.2.2]:9467", "[::]:9467"] {
            untouched(&maps(true), Frame::new(plain, address(from), agent, fine.bytes()), None);
        }
        // The frames are addressed to a group or to another host, or come from a group.
        for (at, bit) in [(0, 1), (5, 1), (6, 1)] {
            let [requester, agent] = ends(false);
            let mut frame = Frame::new(plain, requester, agent, fine.bytes());
            frame.bytes_mut()[at] |= bit;
            untouched(&maps(false), frame, None);
        }
        let [requester, agent] = ends(false);
        for length in 0..42 + BYTES {
            let mut frame = Frame::new(plain, requester, agent, fine.bytes());
            let response = run(&maps(false), &mut frame.bytes_mut()[..length], SECOND);
            let expected = (length >= 42).then_some(Response::Refused(Refused::Malformed(Malformed::Length)));
            assert_eq!(response, expected, "{length} bytes");
        }
    }

    #[test]
    fn refused_requests_are_dropped_with_the_reason() {
        let refused = |why| Some(Response::Refused(why));
        let [requester, agent] = ends(false);
        let check = |payload: &[u8], why| {
            untouched(&maps(false), Frame::new(Shape::PLAIN, requester, agent, payload), refused(why));
        };
        let fine = request(0);
        let long = [fine.bytes(), &[0]].concat();
        for length in [0, 79, 81] {
            check(&long[..length], Refused::Malformed(Malformed::Length));
        }
        for at in 0..BYTES {
            let mut bytes = fine.bytes().to_vec();
            bytes[at] ^= 0x40;
            let original = Frame::new(Shape::PLAIN, requester, agent, &bytes);
            let mut frame = original;
            let response = run(&maps(false), frame.bytes_mut(), SECOND);
            assert!(matches!(response, Some(Response::Refused(_))), "byte {at}: {response:?}");
            assert_eq!(frame.bytes(), original.bytes());
        }
        let mut push = request(0);
        push.kind = Kind::Push as u8;
        check(push.sealed(Key::from_bytes(KEY)).bytes(), Refused::NotARequest);
    }

    #[test]
    fn the_socket_answers_while_an_answer_is_being_written() {
        struct Writing(OneAnswer);
        impl Maps for Writing {
            fn is_served_at(&self, address: Address) -> bool {
                self.0.is_served_at(address)
            }
            fn is_own(&self, station: Station) -> bool {
                self.0.is_own(station)
            }
            fn prepared(&self, _: &SenderName, _: &mut PreparedAnswer) -> Found {
                Found::BeingWritten
            }
            fn subscribe(&self, _: &SubscriberName, _: &Subscriber) {
                panic!("a subscriber was recorded, but no request may be answered");
            }
            fn cookies(&self, now_ns: u64) -> Cookies {
                self.0.cookies(now_ns)
            }
        }
        let [requester, agent] = ends(false);
        let mut frame = Frame::new(Shape::PLAIN, requester, agent, request(0).bytes());
        let mut workspace = Workspace::zeroed();
        let maps = Writing(maps(false));
        let port = Be16::from_host(9465);
        assert_eq!(respond(frame.bytes_mut(), &maps, port, || Some(&mut workspace), || SECOND), None);
    }
}
