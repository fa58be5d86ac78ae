//! Requests that the kernel answers in an agent's place, on a network interface.

use std::net::{SocketAddr, UdpSocket};
use std::os::unix::process::CommandExt as _;
use std::time::Duration;

use lb_common::net::{Be16, IPPROTO_TCP};
use lb_report::wire::{BYTES, Datagram, Key, Kind, Readiness};
use rustix::process::Signal;
use rustix::thread::CapabilitySet;
use stage::agent::{Agent, derive_key, key_in, make_key};
use stage::fixture::Fixture;
use stage::probe::without;
use stage::router::Router;
use stage::sys::XdpMode;
use stage::{Setup, eventually, look, window};

use crate::agents::reports::{ALL, reported, text};

/// The address of the agent that [`behind_a_link`] starts.
const BEHIND: &str = "10.77.0.2:9465";

/// Writes the key of the first backend, and an agent's configuration with which the kernel answers
/// on an interface. Returns the key.
pub fn configure(setup: &Setup, listen: &str, interface: &str, check: &str) -> [u8; 16] {
    let service = make_key(setup, "service.key", 1);
    let file = derive_key(setup, &service, ALL[0]);
    let text = format!(
        "listen = \"{listen}\"\n[xdp]\ninterfaces = [\"{interface}\"]\n[[backend]]\naddress = \"{}\"\nkey = \"{}\"\ncheck = {check}\n\
         interval = \"200ms\"\ntimeout = \"{}\"\nvalid_for = \"{}\"\n",
        ALL[0],
        file.display(),
        window("3s"),
        window("5s")
    );
    setup.write("agent.toml", &text);
    key_in(&file).1.try_into().expect("a key has sixteen bytes")
}

/// A request for the report of the first backend.
pub fn request(key_id: u16, key: Key, cookie: u64) -> Datagram {
    let mut request = Datagram::about(Kind::Request, IPPROTO_TCP, stage::address(ALL[0]));
    request.key_id = Be16::from_host(key_id);
    (request.nonce, request.cookie) = (0x1234, cookie);
    request.sealed(key)
}

/// A client that sends its own requests.
struct UdpRequester {
    socket: UdpSocket,
    key_id: u16,
    key: Key,
}

impl UdpRequester {
    fn new(from: &str, agent: &str, key: Key) -> Self {
        let socket = UdpSocket::bind(SocketAddr::new(from.parse().expect("the text is an address"), 0))
            .expect("open a socket");
        socket.connect(agent).expect("connect");
        socket.set_read_timeout(Some(Duration::from_secs(10))).expect("set a limit");
        Self { socket, key_id: 1, key }
    }

    /// The next report that arrives.
    #[track_caller]
    fn receive(&self) -> Datagram {
        let mut bytes = [0; 2 * BYTES];
        let length = self.socket.recv(&mut bytes).expect("receive a datagram");
        let report = Datagram::parse(&bytes[..length]).expect("the datagram is a report");
        assert!(report.is_authentic(self.key));
        report
    }

    /// The answer to a request. Skips pushes that arrive before it.
    #[track_caller]
    fn exchange(&self, cookie: u64) -> Datagram {
        self.socket.send(request(self.key_id, self.key, cookie).bytes()).expect("send");
        let mut received = std::iter::repeat_with(|| self.receive()).take(100);
        received.find(|report| report.kind() == Some(Kind::Answer)).expect("receive an answer")
    }

    /// The backend's reported readiness.
    #[track_caller]
    fn readiness(&self) -> Option<Readiness> {
        self.exchange(0).readiness()
    }
}

/// The mode of the only interface in the configuration: how its requests are answered.
fn mode(agent: &Agent) -> String {
    agent.status()["interfaces"][0]["mode"].as_str().unwrap_or_default().to_owned()
}

fn datagrams(agent: &Agent, what: &str) -> u64 {
    let status = agent.status();
    let datagrams = &status["datagrams"];
    let count = datagrams.get(what).unwrap_or(&datagrams["refused"][what]);
    count.as_u64().expect("the status has the count")
}

/// The number of answered requests, and of those that the agent's socket answered.
fn answered(agent: &Agent) -> (u64, u64) {
    let status = agent.status();
    let count = |what: &str| status["datagrams"][what].as_u64().expect("the status has the count");
    (count("answered"), count("answered") - count("answered_by_kernel"))
}

/// An agent behind a virtual link, and a client that sends requests over the link.
fn behind_a_link(setup: &Setup, router: &Router) -> (Agent, UdpRequester) {
    let key = Key::from_bytes(configure(setup, BEHIND, "far", &format!("{{ tcp = \"{BEHIND}\" }}")));
    let agent = Agent::start_with(setup, |command| router.place(command));
    eventually("the kernel answers", || mode(&agent), |mode| mode == "native");
    (agent, UdpRequester::new("10.77.0.1", BEHIND, key))
}

#[test]
fn the_kernel_answers_for_a_stopped_agent_until_its_readiness_expires() {
    let mut fixture = Fixture::without_daemon();
    let router = Router::new();
    // Kernel fact: a virtual Ethernet device receives frames that its peer's program sends back
    // only if the device has a program, too.
    let _peer = stage::sys::attach_xdp("near", XdpMode::Native);
    let (agent, requester) = behind_a_link(&fixture.setup, &router);
    fixture.write_endpoints(&[(ALL[0], "agent = \"10.77.0.2:9465\"")]);
    fixture
        .setup
        .write("socklb.toml", &text(&fixture, "round-robin", "").replace("127.0.0.1:0", "10.77.0.1:0"));
    fixture.start();
    eventually("the daemon shows the report", || reported(&fixture, ALL[0]), |state| state == "ready");
    eventually(
        "the backend is ready",
        || requester.readiness(),
        |readiness| *readiness == Some(Readiness::Ready),
    );
    // A client that returns a cookie becomes a subscriber, even if the kernel answered all its
    // requests.
    let before = requester.exchange(0);
    let cookie = requester.exchange(before.cookie).cookie;
    let subscribers = || agent.status()["backends"][0]["subscribers"].as_u64();
    eventually("the daemon and this client are subscribers", subscribers, |count| *count == Some(2));
    let (all, by_socket) = answered(&agent);
    assert!(all >= 4 && by_socket == 0, "the agent's socket has answered {by_socket} of {all}");

    agent.signal(Signal::STOP);
    assert_eq!(requester.readiness(), Some(Readiness::Ready), "a prepared answer is valid for a while");
    eventually(
        "the state is unknown",
        || requester.readiness(),
        |readiness| *readiness == Some(Readiness::Unknown),
    );
    let answer = requester.exchange(cookie);
    assert_eq!((answer.readiness(), answer.cookie), (Some(Readiness::Unknown), cookie));
    eventually("the report reaches the daemon", || reported(&fixture, ALL[0]), |state| state == "unknown");
    agent.signal(Signal::CONT);
    eventually(
        "the backend is ready again",
        || requester.readiness(),
        |readiness| *readiness == Some(Readiness::Ready),
    );

    let answer = requester.exchange(0);
    requester.exchange(answer.cookie);
    eventually(
        "all subscribers have acknowledged the change",
        || agent.status()["backends"][0]["unheard"].as_u64(),
        |unheard| *unheard == Some(0),
    );
    agent.run_checked(&["lame-duck"]);
    // A push with the previous state may arrive first.
    let mut received = std::iter::repeat_with(|| requester.receive()).take(100);
    let push =
        received.find(|push| push.readiness() == Some(Readiness::LameDuck)).expect("the change is pushed");
    assert_eq!(push.kind(), Some(Kind::Push));
    let unheard = || agent.status()["backends"][0]["unheard"].as_u64();
    eventually("only the daemon has acknowledged the change", unheard, |unheard| *unheard == Some(1));
    let answer = requester.exchange(push.cookie);
    assert_eq!((answer.readiness(), answer.cookie), (Some(Readiness::LameDuck), push.cookie));
    eventually("the test has acknowledged the change", unheard, |unheard| *unheard == Some(0));
    assert_eq!(look(|| answered(&agent).1).now("requests are counted before they are answered"), 0);
}

#[test]
fn requests_of_both_families_are_answered_on_loopback_and_invalid_ones_are_counted() {
    let fixture = Fixture::without_daemon();
    let key = Key::from_bytes(configure(&fixture.setup, "[::]:9465", "lo", "\"off\""));
    let agent = Agent::start_again(&fixture.setup);
    eventually("the kernel answers", || mode(&agent), |mode| mode == "generic");
    for (from, to) in [("127.0.0.1", "127.0.0.1:9465"), ("::1", "[::1]:9465")] {
        let requester = UdpRequester::new(from, to, key);
        let before = datagrams(&agent, "answered_by_kernel");
        let answer = requester.exchange(0);
        assert_eq!((answer.nonce, answer.readiness()), (0x1234, Some(Readiness::Unknown)));
        requester.exchange(answer.cookie);
        look(|| datagrams(&agent, "answered_by_kernel")).becomes(before + 2);
    }
    let stranger = UdpSocket::bind("127.0.0.1:0").expect("open a socket");
    let fine = request(1, key, 0);
    let changed = |change: fn(&mut Datagram)| {
        let mut changed = fine;
        change(&mut changed);
        changed.sealed(key).bytes().to_vec()
    };
    let mut forged = fine.bytes().to_vec();
    forged[BYTES - 1] ^= 1;
    for (kind, datagram) in [
        ("forged", forged),
        ("malformed-length", fine.bytes()[1..].to_vec()),
        ("malformed-version", changed(|datagram| datagram.version = 9)),
        ("unknown-name", changed(|datagram| datagram.port = Be16::from_host(1))),
        ("unknown-key", changed(|datagram| datagram.key_id = Be16::from_host(9))),
        ("not-a-request", changed(|datagram| datagram.kind = Kind::Push as u8)),
    ] {
        for _ in 0..100 {
            stranger.send_to(&datagram, "127.0.0.1:9465").expect("send");
        }
        look(|| datagrams(&agent, kind)).becomes(100);
    }
    // The program has processed all these datagrams, and has left none of them to the socket.
    assert_eq!(look(|| answered(&agent).1).now("requests are counted before they are answered"), 0);
    let page = agent.metrics();
    assert!(page.contains("socklb_agent_xdp_interface{interface=\"lo\",mode=\"generic\"} 1.0"), "{page}");
    assert!(page.contains("socklb_agent_datagrams_total{result=\"forged\"} 100"), "{page}");
    assert!(page.contains("socklb_agent_xdp_answered_total 4"), "{page}");
}

#[test]
fn the_kernel_answers_for_reloaded_backends_and_while_a_key_is_replaced() {
    let fixture = Fixture::without_daemon();
    let old = Key::from_bytes(configure(&fixture.setup, "127.0.0.1:9465", "lo", "\"off\""));
    let agent = Agent::start_again(&fixture.setup);
    eventually("the kernel answers", || mode(&agent), |mode| mode == "generic");
    let requester = UdpRequester::new("127.0.0.1", "127.0.0.1:9465", old);
    requester.exchange(0);
    let path = fixture.setup.folder.join("agent.toml");
    let configured = std::fs::read_to_string(&path).expect("read it");
    let (head, _) = configured.split_once("[[backend]]").expect("the configuration has a backend");
    stage::replace(&path, head);
    agent.signal(Signal::HUP);
    let of_unknown = || {
        requester.socket.send(request(1, old, 0).bytes()).expect("send");
        datagrams(&agent, "unknown-name") > 0
    };
    eventually("the name is unknown", of_unknown, |unknown| *unknown);
    stage::replace(&path, &configured);
    agent.signal(Signal::HUP);
    let backends = || agent.status()["backends"].as_array().map(Vec::len);
    eventually("the backend is known again", backends, |count| *count == Some(1));
    let requester = UdpRequester::new("127.0.0.1", "127.0.0.1:9465", old);
    requester.exchange(0);
    let (before, by_socket) = answered(&agent);
    assert_eq!(by_socket, 0);
    // The agent loads a new key, clients send requests under the new key, and the agent drops the
    // old key.
    let service = fixture.setup.folder.join("service.key");
    let [old_line, new_line] = [service.clone(), make_key(&fixture.setup, "new.key", 2)]
        .map(|file| std::fs::read_to_string(file).expect("read the key"));
    let reread = |lines: &str, ids: &str| {
        std::fs::write(&service, lines).expect("write the keys");
        let file = derive_key(&fixture.setup, &service, ALL[0]);
        agent.signal(Signal::HUP);
        let has = || agent.status()["backends"][0]["keys"].to_string();
        eventually("the agent has these keys", has, |has| has == ids);
        std::fs::read_to_string(file).expect("read the backend's keys")
    };
    let of_both = reread(&(old_line + &new_line), "[1,2]");
    let line =
        of_both.lines().find(|line| line.starts_with("2 ")).expect("the file has a line for the new key");
    let file = fixture.setup.write("2.key", line);
    let new = Key::from_bytes(key_in(&file).1.try_into().expect("a key has sixteen bytes"));
    let first = UdpRequester::new("127.0.0.1", "127.0.0.1:9465", old);
    let second = UdpRequester { key_id: 2, ..UdpRequester::new("127.0.0.1", "127.0.0.1:9465", new) };
    for requester in [&first, &second] {
        let answer = requester.exchange(0);
        assert_eq!(
            answer.key_id,
            Be16::from_host(requester.key_id),
            "the answer is under the key of its request"
        );
        requester.exchange(answer.cookie);
    }
    let subscribers = || agent.status()["backends"][0]["subscribers"].as_u64();
    eventually("both subscribers are known", subscribers, |count| *count == Some(2));
    reread(&new_line, "[2]");
    second.exchange(0);
    assert_eq!(
        look(|| datagrams(&agent, "unknown-key")).now("requests are counted before they are answered"),
        0
    );
    first.socket.send(request(1, old, 0).bytes()).expect("send");
    // The agent has dropped the old key.
    look(|| datagrams(&agent, "unknown-key")).becomes(1);
    agent.run_checked(&["lame-duck"]);
    assert_eq!(
        second.receive().readiness(),
        Some(Readiness::LameDuck),
        "a subscriber under this key receives the push"
    );
    look(|| answered(&agent)).becomes((before + 5, 0));
    stage::replace(&path, &configured.replace("[\"lo\"]", "[]"));
    agent.signal(Signal::HUP);
    let takes_a_restart = || agent.status()["faults"].to_string();
    eventually("the fault is reported", takes_a_restart, |faults| faults.contains("need a restart: xdp"));
}

#[test]
fn the_socket_answers_if_the_kernel_cannot_and_the_reason_is_reported() {
    let fixture = Fixture::without_daemon();
    let key = Key::from_bytes(configure(&fixture.setup, "127.0.0.1:9465", "lo", "\"off\""));
    let other = stage::sys::attach_xdp("lo", XdpMode::Generic);
    let agent = Agent::start_again(&fixture.setup);
    let faults = |agent: &Agent| agent.status()["faults"].to_string();
    eventually(
        "the reason is reported",
        || faults(&agent),
        |faults| faults.contains("lo: the kernel does") && faults.contains("another program is attached, "),
    );
    let requester = UdpRequester::new("127.0.0.1", "127.0.0.1:9465", key);
    requester.exchange(0);
    look(|| (mode(&agent), datagrams(&agent, "answered_by_kernel"))).becomes(("socket".to_owned(), 0));
    assert!(agent.log().contains("only the agent's socket answers requests"), "{}", agent.log());
    drop(other);
    eventually("the program replaces the detached program", || mode(&agent), |mode| mode == "generic");
    drop(agent);
    let agent = Agent::start_with(&fixture.setup, |command| {
        without(command, CapabilitySet::BPF | CapabilitySet::PERFMON | CapabilitySet::SYS_ADMIN);
    });
    eventually("the fault names the capability", || faults(&agent), |faults| faults.contains("CAP_PERFMON"));
    let requester = UdpRequester::new("127.0.0.1", "127.0.0.1:9465", key);
    requester.exchange(0);
    look(|| (mode(&agent), datagrams(&agent, "answered_by_kernel"))).becomes(("socket".to_owned(), 0));
}

/// The command of a health check must not inherit the capabilities for the responder.
#[test]
fn children_do_not_inherit_the_capabilities_for_the_responder() {
    let fixture = Fixture::without_daemon();
    configure(&fixture.setup, "127.0.0.1:9465", "lo", "\"off\"");
    let agent = Agent::start_with(&fixture.setup, |command| {
        // SAFETY: the closure makes system calls and allocates nothing.
        unsafe { command.pre_exec(with_ambient_capabilities) };
    });
    eventually("the kernel answers", || mode(&agent), |mode| mode == "generic");
    let threads = std::fs::read_dir(format!("/proc/{}/task", agent.id())).expect("list the agent's threads");
    for thread in threads {
        let status = std::fs::read_to_string(thread.expect("read a directory entry").path().join("status"))
            .expect("read it");
        let ambient =
            status.lines().find_map(|line| line.strip_prefix("CapAmb:")).expect("the status has CapAmb");
        let ambient = u64::from_str_radix(ambient.trim(), 16).expect("hexadecimal");
        assert_eq!(ambient, CapabilitySet::CHOWN.bits(), "{status}");
    }
}

/// Makes the next executed program inherit the capabilities that the responder needs, and
/// CAP_CHOWN.
fn with_ambient_capabilities() -> std::io::Result<()> {
    let all = CapabilitySet::BPF | CapabilitySet::NET_ADMIN | CapabilitySet::PERFMON | CapabilitySet::CHOWN;
    let mut sets = rustix::thread::capabilities(None)?;
    sets.inheritable |= all;
    rustix::thread::set_capabilities(None, sets)?;
    for capability in all {
        rustix::thread::configure_capability_in_ambient_set(capability, true)?;
    }
    Ok(())
}

#[test]
fn changes_of_interfaces_and_addresses_are_applied() {
    let fixture = Fixture::without_daemon();
    let router = Router::new();
    let _peer = stage::sys::attach_xdp("near", XdpMode::Native);
    let key = Key::from_bytes(configure(&fixture.setup, "0.0.0.0:9465", "far", "\"off\""));
    let agent = Agent::start_with(&fixture.setup, |command| router.place(command));
    eventually("the kernel answers", || mode(&agent), |mode| mode == "native");
    UdpRequester::new("10.77.0.1", BEHIND, key).exchange(0);
    look(|| datagrams(&agent, "answered_by_kernel")).becomes(1);
    router.run("ip address add 10.77.0.7/24 dev far");
    let at_other = UdpRequester::new("10.77.0.1", "10.77.0.7:9465", key);
    let by_kernel = || {
        at_other.exchange(0);
        datagrams(&agent, "answered_by_kernel")
    };
    eventually("the kernel answers", by_kernel, |count| *count > 1);
    // The interface gets another hardware address. Until the responder's maps contain it, the
    // socket answers.
    router.run("ip link set far address 02:00:00:00:00:03");
    router.run("ip neigh replace 10.77.0.1 lladdr 02:00:00:00:00:01 dev far nud permanent");
    let replaced = std::process::Command::new("ip")
        .args("neigh replace 10.77.0.2 lladdr 02:00:00:00:00:03 dev near nud permanent".split(' '))
        .status();
    assert!(replaced.expect("ip runs").success());
    let at_first = UdpRequester::new("10.77.0.1", BEHIND, key);
    let before = datagrams(&agent, "answered_by_kernel");
    let by_kernel = || {
        at_first.exchange(0);
        datagrams(&agent, "answered_by_kernel")
    };
    eventually("the kernel answers", by_kernel, |count| *count > before);
    router.run("ip link set far down");
    router.run("ip link set far name elsewhere");
    eventually("the program is detached", || mode(&agent), |mode| mode == "socket");
    router.run("ip link set elsewhere up");
    let count = datagrams(&agent, "answered_by_kernel");
    router.run("ip neigh replace 10.77.0.1 lladdr 02:00:00:00:00:01 dev elsewhere nud permanent");
    UdpRequester::new("10.77.0.1", BEHIND, key).exchange(0);
    // The agent's socket answers.
    assert_eq!(
        look(|| datagrams(&agent, "answered_by_kernel")).now("requests are counted before they are answered"),
        count
    );
    // Before Linux 6.2 an interface can be renamed only while it is down.
    router.run("ip link set elsewhere down");
    router.run("ip link set elsewhere name far");
    router.run("ip link set far up");
    eventually("the program is attached", || mode(&agent), |mode| mode == "native");
}
