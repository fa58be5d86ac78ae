//! `socklb close` on real sockets: only the connections of a backend's flows are closed.

use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use lb_view::close_result::{CloseCounts, Closed};
use rustix::process::Signal;
use rustix::thread::CapabilitySet;
use stage::daemon::{Beside, ChildGuard, failure, finish};
use stage::fixture::{Fixture, SERVICE, config, endpoints};
use stage::namespace::another_network;
use stage::probe::without;
use stage::udp::{SERVICE as DATAGRAM_SERVICE, Scene, backend_of};
use stage::{
    Backend, Cgroup, Daemon, Family, Probe, Setup, SocketId, Stage, eventually, in_a_guest, look, patience,
    within,
};

const BACKENDS: [&str; 2] = ["127.0.0.1:8001", "127.0.0.1:8002"];

/// A listener that accepts nothing: the kernel completes up to 20,000 handshakes.
fn listen(address: &str) -> TcpListener {
    const QUEUE: i32 = 20_000;
    // This limit belongs to the network namespace.
    std::fs::write("/proc/sys/net/core/somaxconn", QUEUE.to_string()).expect("raise the limit");
    let listener = TcpListener::bind(address).expect("listen");
    rustix::net::listen(listener.as_fd(), QUEUE).expect("make the queue long");
    listener
}

/// The local ports of the sockets that `ss` lists with these arguments.
fn shown_by_ss(filter: &[&str]) -> BTreeSet<u16> {
    let output = finish(Command::new("ss").args(["--no-header", "--numeric"]).args(filter));
    assert!(output.status.success(), "{filter:?}: {output:?}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // The first word with a colon is the local address.
    let local = |line: &str| {
        let address = line.split_whitespace().find(|word| word.contains(':'))?;
        address.rsplit_once(':')?.1.parse().ok()
    };
    let port = |line: &str| {
        local(line).unwrap_or_else(|| panic!("ss {filter:?} printed a line without a local port: {line}"))
    };
    text.lines().map(port).collect()
}

/// The local ports of the connections to an address, from `/proc/net/tcp`.
fn connected_to(address: &str) -> BTreeSet<u16> {
    const ESTABLISHED: &str = "01";
    let port = |field: &str| u16::from_str_radix(field.split_once(':')?.1, 16).ok();
    let wanted = stage::address(address).port();
    let table = std::fs::read_to_string("/proc/thread-self/net/tcp").expect("read the table");
    let of_line = |line: &str| {
        let mut fields = line.split_whitespace().skip(1);
        let (local, peer, state) = (fields.next()?, fields.next()?, fields.next()?);
        (state == ESTABLISHED && port(peer)? == wanted).then(|| port(local)).flatten()
    };
    table.lines().filter_map(of_line).collect()
}

/// Runs `close`, which must exit with this code. Returns the counts in its output.
#[track_caller]
fn close(setup: &Setup, code: i32, arguments: &[&str]) -> Closed {
    let output = setup.run(&[&["close"], arguments, &["--json"]].concat());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {text}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {text}"))
}

/// The counts of one client, TCP and UDP.
fn of_client<'c>(closed: &'c Closed, name: &str) -> (&'c CloseCounts, &'c CloseCounts) {
    let client =
        closed.clients.iter().find(|client| client.client == name).expect("the document has the client");
    (&client.tcp, &client.udp)
}

fn only(closed: u64) -> CloseCounts {
    CloseCounts { closed, ..CloseCounts::default() }
}

/// The active flows of a client to each backend.
fn active(setup: &Setup, client: &str) -> [u64; 2] {
    let backends = setup.backends(client, "users");
    BACKENDS.map(|address| {
        let of_address =
            |backend: &&lb_view::backend::BackendStatus| backend.address == stage::address(address);
        backends.iter().find(of_address).map_or(0, |backend| backend.active)
    })
}

/// In a guest, the test opens only a tenth of these connections, because the CPU is emulated.
/// Guests have no `ss`.
#[test]
fn ten_thousand_connections_of_one_backend_are_closed_and_no_others() {
    let least = if in_a_guest() { 1_000 } else { 10_000 };
    let stage = Stage::new();
    let (cgroup, other) = (Cgroup::new(), Cgroup::new());
    let setup = Setup::new(&stage, "a");
    let _listeners = BACKENDS.map(listen);
    setup.write("users.toml", &endpoints(&[(BACKENDS[0], "weight = 9"), (BACKENDS[1], "")]));
    let second = format!("[[client]]\njob = \"mail\"\ncgroup = \"{}\"\n", other.relative().display());
    let daemon = Daemon::start(&setup, &(second + &config(&cgroup, r#"{ file = "users.toml" }"#, "")));
    let (mut web, mut mail) = (Probe::start(&cgroup), Probe::start(&other));
    // Nine of ten connects go to the first backend.
    let all = least * 10 / 9 + 10;
    let sockets: Vec<SocketId> = (0..all).map(|_| web.start_connect(SERVICE)).collect();
    let of_mail: Vec<SocketId> = (0..40).map(|_| mail.start_connect(SERVICE)).collect();
    // These connections have the backend's own address as their destination, and no flow.
    let direct: BTreeSet<u16> = (0..10)
        .map(|_| {
            let socket = web.start_connect(BACKENDS[0]);
            web.local_address(socket).port()
        })
        .collect();
    // This UDP socket is not connected, and has sent a datagram to the backend's address.
    let datagram = web.open_datagram(Family::V4);
    web.send_datagram(datagram, BACKENDS[0]).expect("the datagram is sent");
    let of_datagram = web.local_address(datagram).port();
    let before = look(|| (active(&setup, "web"), active(&setup, "mail")))
        .matches("every connect is recorded as a flow", |(web, mail)| {
            web.iter().sum::<u64>() == all && mail.iter().sum::<u64>() == 40
        });
    let [flows, of_other_backend] = before.0;
    assert!(flows >= least && of_other_backend > 0 && before.1[0] > 0, "{before:?}");
    let shown = established();
    let others = before.1[0] + direct.len() as u64;
    assert_eq!(shown[0].len() as u64, flows + others);

    let arguments = ["users", BACKENDS[0], "--client", "web"];
    let dry = close(&setup, 0, &[&arguments[..], &["--dry-run"]].concat());
    assert_eq!((of_client(&dry, "web"), dry.dry_run), ((&only(flows), &only(0)), true));
    assert_eq!(established(), shown, "a dry run closes nothing");

    let closed = close(&setup, 0, &[&arguments[..], &["--rate", "10000/s"]].concat());
    assert_eq!((of_client(&closed, "web"), closed.clients.len()), ((&only(flows), &only(0)), 1));
    // The kernel's table still contains the connections of the other client and of the other
    // backend, and the connections without a flow.
    let after = established();
    assert_eq!((after[0].len() as u64, &after[1]), (others, &shown[1]));
    assert!(after[0].is_subset(&shown[0]) && direct.is_subset(&after[0]));
    assert!(of_mail.iter().all(|socket| mail.take_error(*socket).is_none()));
    assert!(in_a_guest() || shown_by_ss(&["--udp", "--all"]).contains(&of_datagram));
    assert_eq!((web.local_address(datagram).port(), web.take_error(datagram)), (of_datagram, None));
    look(|| (active(&setup, "web"), active(&setup, "mail"))).becomes(([0, of_other_backend], before.1));
    let errors: Vec<_> = sockets.iter().filter_map(|socket| web.take_error(*socket)).collect();
    assert_eq!(errors.len() as u64, flows);
    assert!(errors.iter().all(|errno| *errno == libc::ECONNABORTED), "{errors:?}");
    assert!(daemon.log().contains("closed connections of a backend"), "{}", daemon.log());
    // The second `close` finds no flow to close.
    assert_eq!(of_client(&close(&setup, 0, &arguments), "web"), (&only(0), &only(0)));
}

/// The local ports of the connections to each backend. The kernel's table and `ss` agree.
fn established() -> [BTreeSet<u16>; 2] {
    BACKENDS.map(|address| {
        let connected = connected_to(address);
        if !in_a_guest() {
            let of_ss = shown_by_ss(&["--tcp", "state", "established", "dst", address]);
            assert_eq!(of_ss, connected, "{address}");
        }
        connected
    })
}

#[test]
fn connected_datagram_sockets_are_closed_and_can_connect_again() {
    let scene = Scene::new(1, 2);
    let mut probe = scene.probe();
    let open: Vec<SocketId> = (0..4).map(|_| probe.open_datagram(Family::V4)).collect();
    let names: Vec<String> = open
        .iter()
        .map(|socket| {
            probe.connect_datagram(*socket, DATAGRAM_SERVICE);
            probe.query_connected(*socket, DATAGRAM_SERVICE)
        })
        .collect();
    // Unconnected sockets that have flows to both backends, and sockets that have no flow.
    let unconnected = [probe.open_datagram(Family::V4), probe.open_datagram(Family::V4)];
    let of_unconnected = unconnected.map(|socket| probe.query(socket, DATAGRAM_SERVICE));
    assert_eq!(of_unconnected.iter().collect::<BTreeSet<_>>().len(), 2, "{of_unconnected:?}");
    let backend = backend_of(0, 1);
    let direct = probe.open_datagram(Family::V4);
    probe.connect_datagram(direct, &backend);
    scene.setup.active_becomes(6);

    let idle = close(&scene.setup, 0, &["s0", &backend, "--idle", "100ms"]);
    let expected = CloseCounts { not_idle: 2, unconnected: 1, ..CloseCounts::default() };
    assert_eq!(of_client(&idle, "web"), (&only(0), &expected));
    let closed = close(&scene.setup, 0, &["s0", &backend]);
    let expected = CloseCounts { closed: 2, unconnected: 1, ..CloseCounts::default() };
    assert_eq!(of_client(&closed, "web"), (&only(0), &expected));

    for (socket, name) in open.into_iter().zip(names) {
        if name == "s0b1" {
            assert_eq!(probe.take_error(socket), Some(libc::ECONNABORTED));
            probe.connect_datagram(socket, DATAGRAM_SERVICE);
            assert!(probe.query_connected(socket, DATAGRAM_SERVICE).starts_with("s0"));
        } else {
            assert_eq!(probe.query_connected(socket, DATAGRAM_SERVICE), name);
        }
        probe.close(socket);
    }
    assert_eq!(probe.query_connected(direct, &backend), "s0b1");
    for (socket, name) in unconnected.into_iter().zip(of_unconnected) {
        assert_eq!(probe.query(socket, DATAGRAM_SERVICE), name);
        probe.close(socket);
    }
    scene.all_gone();
}

/// IPv6 sockets that dial a v4-mapped address, and IPv6 sockets that dial an IPv6 address.
#[test]
fn connections_of_ipv6_sockets_are_closed() {
    let fixture = Fixture::new();
    let mut probe = fixture.probe();
    let sockets: Vec<SocketId> = (0..3)
        .map(|_| probe.dial(&format!("[::ffff:{}]:80", SERVICE.trim_end_matches(":80"))).socket)
        .collect();
    fixture.setup.active_becomes(3);
    for n in 1..=3 {
        let closed = close(&fixture.setup, 0, &["users", &format!("127.0.0.1:800{n}")]);
        assert_eq!(of_client(&closed, "web"), (&only(1), &only(0)));
    }
    fixture.setup.active_becomes(0);
    for socket in sockets {
        assert_eq!(probe.take_error(socket), Some(libc::ECONNABORTED));
    }
}

#[test]
fn flows_of_another_network_namespace_are_closed_only_with_the_privilege_to_enter_it() {
    if stage::kernel::NAMESPACE_COOKIES.skips() {
        return;
    }
    let fixture = Fixture::without_daemon();
    fixture.write_endpoints(&[("127.0.0.1:8001", "")]);
    let start = |capabilities| {
        let daemon = Daemon::spawn_with(&fixture.setup, |command| without(command, capabilities));
        eventually("the daemon answers", || fixture.setup.status().daemon.is_some(), |answers| *answers);
        daemon
    };
    let daemon = start(CapabilitySet::SYS_ADMIN);
    let (has_dialled, dialled) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    let cgroup = &fixture.cgroup;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            another_network(move || {
                let _backend = Backend::start("there", "127.0.0.1:8001");
                let mut probe = Probe::start(cgroup);
                let socket = probe.dial(SERVICE).socket;
                has_dialled.send(()).expect("the test waits");
                // If the test fails, the channel is closed, which also ends this call.
                let _ = ended.recv();
                assert_eq!(probe.take_error(socket), Some(libc::ECONNABORTED));
            })
        });
        dialled.recv().expect("the other thread has dialled");
        let mut here = fixture.probe();
        here.dial(SERVICE);
        fixture.setup.active_becomes(2);
        let arguments = ["users", "127.0.0.1:8001"];
        let closed = close(&fixture.setup, 3, &arguments);
        let expected = CloseCounts { closed: 1, other_namespaces: 1, ..CloseCounts::default() };
        assert_eq!(of_client(&closed, "web").0, &expected);
        let text = String::from_utf8_lossy(&fixture.setup.run(&[&["close"], &arguments[..]].concat()).stdout)
            .into_owned();
        assert!(text.contains("1 other flow: in a network namespace that the daemon cannot enter"), "{text}");
        fixture.setup.active_becomes(1);
        assert_eq!(daemon.stop(), Some(0));
        let _daemon = start(CapabilitySet::empty());
        assert_eq!(of_client(&close(&fixture.setup, 0, &arguments), "web").0, &only(1));
        fixture.setup.active_becomes(0);
        end.send(()).expect("the other thread waits");
    });
}

#[test]
fn one_command_at_a_time_closes_and_a_kill_of_it_or_of_the_daemon_ends_the_closing() {
    let stage = Stage::new();
    let cgroup = Cgroup::new();
    let setup = Setup::new(&stage, "a");
    let _listener = listen(BACKENDS[0]);
    let daemon =
        Daemon::start(&setup, &config(&cgroup, &format!("{{ static = [\"{}\"] }}", BACKENDS[0]), ""));
    let mut probe = Probe::start(&cgroup);
    for _ in 0..50 {
        probe.start_connect(SERVICE);
    }
    setup.active_becomes(50);
    let arguments = ["close", "users", BACKENDS[0]];
    let mut command = setup.socklb(&[&arguments[..], &["--rate", "1/s"]].concat());
    let mut slow = ChildGuard::of(command.spawn().expect("start socklb"));
    let left =
        eventually("the first connection is closed", || connected_to(BACKENDS[0]).len(), |left| *left < 50);
    let (code, text) = failure(&setup.run(&arguments));
    assert!(
        code == Some(1) && text.contains("is closing the connections of service users"),
        "exit code {code:?}: {text}"
    );
    stage::daemon::signal(&slow, Signal::INT);
    slow.wait().expect("reap the command");
    let log = eventually("the job ends", || daemon.log(), |log| log.contains("is_canceled=true"));
    let after = connected_to(BACKENDS[0]).len();
    assert!(after > 0 && after <= left, "open connections: {after}, and {left} before the job ended: {log}");
    let closed = close(&setup, 0, &arguments[1..]);
    assert_eq!(of_client(&closed, "web").0, &only(after as u64));
    assert_eq!(connected_to(BACKENDS[0]).len(), 0);
    // A kill of the daemon reopens nothing and closes nothing more.
    let sockets: Vec<SocketId> = (0..50).map(|_| probe.start_connect(SERVICE)).collect();
    setup.active_becomes(50);
    let mut slow = Beside::start(&setup, &["close", "users", BACKENDS[0], "--rate", "10/s"]);
    eventually("the first connection is closed", || connected_to(BACKENDS[0]).len(), |left| *left < 50);
    daemon.kill();
    slow.ends(1);
    let text = slow.text();
    assert!(
        text.contains("the daemon ended before it answered: some connections may have been closed"),
        "{text}"
    );
    let left = connected_to(BACKENDS[0]);
    let _daemon = Daemon::start_again(&setup);
    assert_eq!(connected_to(BACKENDS[0]), left);
    let closed = sockets.iter().filter(|socket| probe.take_error(**socket).is_some()).count();
    assert_eq!(closed, 50 - left.len());
    look(|| active(&setup, "web")[0]).becomes(left.len() as u64);
    // Nothing of the earlier job blocks another command.
    let rest = close(&setup, 0, &["users", BACKENDS[0], "--rate", "1000/s"]);
    assert_eq!(of_client(&rest, "web").0, &only(left.len() as u64));
    assert_eq!(connected_to(BACKENDS[0]).len(), 0);
}

/// A minute must pass, so this test mostly waits.
#[test]
fn idle_connections_are_closed_by_command_and_after_their_backend_has_left_and_busy_ones_stay() {
    let fixture = Fixture::without_daemon();
    let text = config(&fixture.cgroup, r#"{ file = "users.toml" }"#, "on_backend_loss = \"close-idle\"");
    let daemon = Daemon::start(&fixture.setup, &text);
    let mut probe = fixture.probe();
    let idle: Vec<_> = (0..9).map(|_| probe.dial(SERVICE)).collect();
    // These connections are not idle, because the clients have not read the backend's data.
    let busy: Vec<SocketId> = (0..6).map(|_| probe.start_connect(SERVICE)).collect();
    fixture.setup.active_becomes(15);
    let arguments = ["users", "127.0.0.1:8001", "--idle", "200ms"];
    let found =
        || of_client(&close(&fixture.setup, 0, &[&arguments[..], &["--dry-run"]].concat()), "web").0.clone();
    let expected = CloseCounts { closed: 3, not_idle: 2, ..CloseCounts::default() };
    look(found).becomes(expected.clone());
    let long = close(&fixture.setup, 0, &["users", "127.0.0.1:8001", "--idle", "1h"]);
    assert_eq!(of_client(&long, "web").0.not_idle, 5);
    assert_eq!(of_client(&close(&fixture.setup, 0, &arguments), "web").0, &expected);
    fixture.setup.active_becomes(12);
    // The second backend leaves the list.
    fixture.write_endpoints(&[("127.0.0.1:8001", ""), ("127.0.0.1:8003", "")]);
    let active = || {
        let backends = fixture.setup.backends("web", "users");
        backends.iter().map(|backend| (backend.address.port(), backend.active)).collect::<BTreeMap<_, _>>()
    };
    let expected = BTreeMap::from([(8001, 2), (8002, 2), (8003, 5)]);
    within(Duration::from_secs(75) + patience(), active, |seen| *seen == expected)
        .unwrap_or_else(|seen| panic!("last seen: {seen:?}: {}", daemon.log()));
    for dialled in idle {
        let error = (dialled.name != "b3").then_some(libc::ECONNABORTED);
        assert_eq!(probe.take_error(dialled.socket), error, "{}", dialled.name);
    }
    let mut names: Vec<String> = busy.into_iter().map(|socket| probe.read_name(socket)).collect();
    names.sort();
    assert_eq!(names, ["b1", "b1", "b2", "b2", "b3", "b3"]);
    let log = daemon.log();
    assert!(log.contains("cause=\"backend-loss\"") && log.contains("closed=3"), "{log}");
}
