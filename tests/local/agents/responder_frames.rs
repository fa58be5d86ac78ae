//! Runs the kernel program that answers in an agent's place, on frames of every shape. It must have
//! the same effects as the same code compiled for this host.

use std::net::{IpAddr, SocketAddr};

use bytemuck::Zeroable as _;
use lb_common::net::Be16;
use lb_report::fixtures::{Frame, OneAnswer, Shape, checksum};
use lb_report::respond::{Response, Workspace, respond};
use lb_report::wire::{BYTES, Datagram, Key, Kind};
use stage::agent::Agent;
use stage::fixture::Fixture;
use stage::{eventually, look};

use crate::agents::reports::ALL;
use crate::agents::responder::{configure, request};

/// `XDP_DROP`, `XDP_PASS`, `XDP_TX`.
const DROP: u32 = 1;
const PASS: u32 = 2;
const TRANSMIT: u32 = 3;

/// The offset of the payload in frames without tags and options: for IPv4, then for IPv6.
const PAYLOAD: [usize; 2] = [14 + 20 + 8, 14 + 40 + 8];

struct Twins {
    agent: Agent,
    program: std::os::fd::OwnedFd,
    key: Key,
    key_bytes: [u8; 16],
    _fixture: Fixture,
}

impl Twins {
    fn new() -> Self {
        let fixture = Fixture::without_daemon();
        let key_bytes = configure(&fixture.setup, "[::]:9465", "lo", "\"off\"");
        let agent = Agent::start_again(&fixture.setup);
        let mode = || agent.status()["interfaces"][0]["mode"] == "generic";
        eventually("the kernel answers", mode, |is_attached| *is_attached);
        let [id] = stage::sys::xdp_programs("lo")[..] else { panic!("expected one XDP program on lo") };
        Self {
            agent,
            program: stage::sys::program(id),
            key: Key::from_bytes(key_bytes),
            key_bytes,
            _fixture: fixture,
        }
    }

    fn counts(&self) -> (u64, u64) {
        let status = self.agent.status();
        let datagrams = &status["datagrams"];
        let refused = datagrams["refused"].as_object().expect("the status has counts").values();
        let refused = refused.map(|count| count.as_u64().expect("the status has the count")).sum();
        (datagrams["answered_by_kernel"].as_u64().expect("the status has the count"), refused)
    }

    /// Processes a frame twice: with the program in the kernel, and with the same code in this
    /// process. Compares the effects, and returns the result and the answer.
    #[track_caller]
    fn run(&self, shape: Shape, is_v6: bool, payload: &[u8], cut: usize) -> Option<(Response, Vec<u8>)> {
        self.run_to([0; 6], shape, is_v6, payload, cut)
    }

    /// As `run`, for a frame to the hardware address `station`.
    #[track_caller]
    fn run_to(
        &self,
        station: [u8; 6],
        shape: Shape,
        is_v6: bool,
        payload: &[u8],
        cut: usize,
    ) -> Option<(Response, Vec<u8>)> {
        let [requester, here]: [IpAddr; 2] =
            if is_v6 { ["2001:db8::7", "::1"] } else { ["192.0.2.7", "127.0.0.1"] }
                .map(|text| text.parse().expect("the text is an address"));
        let mut frame =
            Frame::new(shape, SocketAddr::new(requester, 9467), SocketAddr::new(here, 9465), payload);
        frame.bytes_mut()[..6].copy_from_slice(&station);
        let before = &frame.bytes()[..cut.min(frame.bytes().len())];
        let mut expected = before.to_vec();
        let twin = OneAnswer::new(here, stage::address(ALL[0]), self.key_bytes, u64::MAX);
        let mut workspace = Workspace::zeroed();
        let response =
            respond(&mut expected[..], &twin, Be16::from_host(9465), || Some(&mut workspace), || 0);
        let what = format!("{shape:?} {is_v6} {} bytes, cut at {cut}: {response:?}", payload.len());
        let (action, after) = stage::sys::run_xdp(&self.program, before);
        match response {
            None => assert_eq!((action, &after[..]), (PASS, before), "{what}"),
            Some(Response::Refused(_)) => assert_eq!((action, &after[..]), (DROP, before), "{what}"),
            Some(Response::Answered) => {
                assert_eq!((action, after.len()), (TRANSMIT, before.len()), "{what}");
                let payload = PAYLOAD[usize::from(is_v6)] + 4 * usize::from(shape.tags[0] != 0);
                // The headers are equal except for the UDP checksum: the twin belongs to another
                // agent, so its answer differs.
                assert_eq!(after[..payload - 2], expected[..payload - 2], "{what}");
                let addresses = if is_v6 { payload - 40..payload - 8 } else { payload - 16..payload - 8 };
                let pseudo = [&after[addresses], &[0, 17, 0, 88], &after[payload - 8..]].concat();
                assert_eq!(checksum(&pseudo), 0, "the UDP checksum is right: {what}");
                let answer = Datagram::parse(&after[payload..]).expect("the answer is a datagram");
                assert!(answer.is_authentic(self.key), "{what}");
                assert_eq!((answer.kind(), answer.nonce), (Some(Kind::Answer), 0x1234), "{what}");
            }
        }
        response.map(|response| (response, after))
    }
}

#[test]
fn the_program_in_the_kernel_matches_its_code_on_this_host() {
    let twins = Twins::new();
    let plain = Shape::PLAIN;
    let fine = request(1, twins.key, 0);
    let mut answered = 0;
    let mut refused = 0;
    let mut count = |response: Option<(Response, Vec<u8>)>| match response {
        Some((Response::Answered, _)) => answered += 1,
        Some((Response::Refused(_), _)) => refused += 1,
        None => {}
    };
    let before = twins.counts();
    for is_v6 in [false, true] {
        for tags in [[0, 0], [0x8100, 0], [0x88a8, 0], [0x88a8, 0x8100]] {
            for options in if is_v6 { &[0][..] } else { &[0, 1, 5, 10] } {
                for fragment in if is_v6 { &[0][..] } else { &[0, 0x4000, 0x2000, 1] } {
                    for protocol in [17, 6, 44] {
                        let shape = Shape { tags, options: *options, fragment: *fragment, protocol, ..plain };
                        count(twins.run(shape, is_v6, fine.bytes(), usize::MAX));
                    }
                }
            }
        }
        for cut in 14..PAYLOAD[usize::from(is_v6)] + BYTES {
            count(twins.run(plain, is_v6, fine.bytes(), cut));
        }
        for length_off in [-88, -81, -1, 1, 1000] {
            count(twins.run(Shape { length_off, ..plain }, is_v6, fine.bytes(), usize::MAX));
        }
        let mut long = fine.bytes().to_vec();
        long.resize(150, 0);
        for length in [0, 1, 79, 81, 150] {
            count(twins.run(plain, is_v6, &long[..length], usize::MAX));
        }
        // A request with any changed byte is refused.
        for at in 0..BYTES {
            let mut changed = fine.bytes().to_vec();
            changed[at] ^= 0x11;
            let response = twins.run(plain, is_v6, &changed, usize::MAX);
            assert!(
                matches!(response, Some((Response::Refused(_), _))),
                "a request with a changed byte {at} is refused"
            );
            count(response);
        }
    }
    let change = |change: fn(&mut Datagram)| {
        let mut datagram = fine;
        change(&mut datagram);
        twins.run(plain, false, datagram.sealed(twins.key).bytes(), usize::MAX)
    };
    count(change(|datagram| datagram.kind = Kind::Push as u8));
    count(change(|datagram| datagram.port = Be16::from_host(1)));
    count(change(|datagram| datagram.key_id = Be16::from_host(0)));
    count(change(|datagram| datagram.key_id = Be16::from_host(2)));
    // A link that receives all frames also delivers frames that are addressed to other hosts. The
    // program must not answer these in place of the other hosts.
    assert!(twins.run_to([2, 0, 0, 0, 0, 9], plain, false, fine.bytes(), usize::MAX).is_none());
    // A client that returns the cookie becomes a subscriber.
    let (_, after) = twins.run(plain, false, fine.bytes(), usize::MAX).expect("the kernel answers");
    let answer = Datagram::parse(&after[PAYLOAD[0]..]).expect("the answer is a datagram");
    count(Some((Response::Answered, after)));
    let subscribers = || twins.agent.status()["backends"][0]["subscribers"].as_u64();
    assert_eq!(subscribers(), Some(0));
    count(twins.run(plain, false, request(1, twins.key, answer.cookie ^ 1).bytes(), usize::MAX));
    assert_eq!(subscribers(), Some(0), "a request with an unknown cookie creates no subscriber");
    count(twins.run(plain, false, request(1, twins.key, answer.cookie).bytes(), usize::MAX));
    eventually("the client is a subscriber", subscribers, |count| *count == Some(1));
    look(|| twins.counts()).has(|after| (after.0 - before.0, after.1 - before.1), (answered, refused));
    assert!(answered >= 2 * 3 + 3, "{answered}");
}
