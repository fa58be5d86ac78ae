//! Tests for bugs of other balancers that concern flows. Each test has the name of the effect, and
//! the number of the bug in docs/design/bugs-of-others.md.

use lb_view::flows::FlowsDocument;
use stage::backend::with_a_full_queue;
use stage::{Backend, Daemon, Manner, Probe, SocketId, address, eventually, look};

use stage::fixture::{Fixture, SERVICE, config};

const OTHER: &str = "10.96.0.11:80";

/// The sum of a count over a service's backends.
fn sum(fixture: &Fixture, service: &str, count: impl Fn(&lb_view::backend::BackendStatus) -> u64) -> u64 {
    let backends = fixture.setup.backends("web", service);
    backends.iter().map(count).sum()
}

fn active(fixture: &Fixture, service: &str) -> u64 {
    sum(fixture, service, |backend| backend.active)
}

fn ended(fixture: &Fixture, service: &str, ending: &str) -> u64 {
    sum(fixture, service, |backend| backend.endings[ending])
}

/// Two services, each with one of the fixture's three backends.
fn two_services() -> (Fixture, Daemon) {
    let fixture = Fixture::without_daemon();
    let text = config(&fixture.cgroup, r#"{ static = ["127.0.0.1:8001"] }"#, "")
        + &format!(
            "[[service]]\nname = \"others\"\naddress = \"{OTHER}\"\nbackends = {{ static = [\"127.0.0.1:8002\"] }}\n"
        );
    let daemon = Daemon::start(&fixture.setup, &text);
    (fixture, daemon)
}

/// The bug: if a socket had dialled a service and then dialled the backend's own address, the
/// second connection was treated as a connection of the service.
#[test]
fn r3_a_direct_connection_of_a_reused_socket_is_no_flow() {
    let (fixture, _daemon) = two_services();
    let mut probe = fixture.probe();
    let socket = probe.dial(SERVICE).socket;
    probe.disconnect(socket);
    fixture.setup.active_becomes(0);
    look(|| ended(&fixture, "users", "aborted")).becomes(1);
    let direct = probe.try_redial(socket, "127.0.0.1:8001").expect("the backend listens");
    assert_eq!(direct.peer, address("127.0.0.1:8001"), "the socket is connected to the backend's address");
    assert_eq!(active(&fixture, "users"), 0);
    let FlowsDocument { flows, .. } = fixture.setup.document(&["flows"]);
    assert_eq!(flows, [], "no flow is open");
    probe.close(socket);
    look(|| fixture.setup.backends("web", "users").remove(0))
        .has(|users| (users.started, users.diverted, users.reclaimed), (1, 0, 0));
}

/// The bug: a v4-mapped socket saw its backend's address, and was not treated like an IPv4 socket
/// when its backend died.
#[test]
fn r4_v4_mapped_sockets_of_a_dead_backend_behave_like_ipv4_sockets() {
    const MAPPED: &str = "[::ffff:10.96.0.10]:80";
    let mut fixture = Fixture::without_daemon();
    fixture.backends.remove(0);
    let dying = Backend::with_manner("dying", "127.0.0.1:8001", Manner::Resets);
    fixture.write_endpoints(&[("127.0.0.1:8001", "")]);
    fixture.start();
    let mut probe = fixture.probe();
    for service in [SERVICE, MAPPED] {
        let socket = probe.dial(service).socket;
        assert_eq!(probe.peer(socket), address(service));
        assert_eq!(probe.provoke(socket), Err(libc::ECONNRESET));
    }
    drop(dying);
    for service in [SERVICE, MAPPED] {
        assert_eq!(probe.try_dial(service).map(|dialled| dialled.name), Err(libc::ECONNREFUSED));
    }
    look(|| ["reset", "refused"].map(|ending| ended(&fixture, "users", ending))).becomes([2, 2]);
    fixture.setup.active_becomes(0);
    fixture.write_endpoints(&[("127.0.0.1:8002", "")]);
    for service in [SERVICE, MAPPED] {
        let reached = || probe.try_dial(service).map(|dialled| (dialled.name, dialled.peer));
        let other = Ok(("b2".to_owned(), address(service)));
        let _ = eventually("a connect reaches the other backend", reached, |reached| *reached == other);
    }
}

/// The bug: a socket that was disconnected and then dialled another service stayed in the count of
/// the first service.
#[test]
fn r5_a_socket_that_redials_another_service_counts_only_there() {
    let (fixture, _daemon) = two_services();
    let mut probe = fixture.probe();
    let socket = probe.dial(SERVICE).socket;
    assert_eq!((active(&fixture, "users"), active(&fixture, "others")), (1, 0));
    probe.disconnect(socket);
    let second = probe.try_redial(socket, OTHER).expect("the other service's backend listens");
    assert_eq!((second.name.as_str(), second.peer), ("b2", address(OTHER)));
    look(|| ["users", "others"].map(|service| active(&fixture, service))).becomes([0, 1]);
    probe.close(socket);
    look(|| (ended(&fixture, "others", "closed"), active(&fixture, "others"))).becomes((1, 0));
}

/// The bug: counts of active connections stayed above zero, or fell below zero, after processes
/// were killed, network namespaces removed, or connections reset or timed out. Least-connections
/// then starved backends.
#[test]
fn r14_active_counts_return_to_zero_however_connections_end() {
    let mut fixture = Fixture::without_daemon();
    fixture.backends.clear();
    fixture.backends = vec![
        Backend::start("quiet", "127.0.0.1:8001"),
        Backend::with_manner("closes", "127.0.0.1:8002", Manner::ClosesFirst),
        Backend::with_manner("resets", "127.0.0.1:8003", Manner::Resets),
    ];
    let _full = with_a_full_queue("127.0.0.1:8004");
    fixture.write_endpoints(&[
        ("127.0.0.1:8001", ""),
        ("127.0.0.1:8002", ""),
        ("127.0.0.1:8003", ""),
        ("127.0.0.1:8004", ""),
        ("127.0.0.1:8009", ""),
    ]);
    fixture.start();
    let mut elsewhere = Probe::start_with(&fixture.cgroup, stage::namespace::in_a_network_of_its_own);
    for _ in 0..10 {
        // Nothing is reachable in that namespace.
        assert!(elsewhere.try_dial(SERVICE).is_err());
    }
    let mut killed = fixture.probe();
    let mut closing = fixture.probe();
    for _ in 0..20 {
        killed.start_connect(SERVICE);
    }
    let sockets: Vec<SocketId> = (0..20).map(|_| closing.start_connect(SERVICE)).collect();
    look(|| fixture.setup.active()).matches("some flows are open", |active| *active > 0);
    drop(elsewhere);
    killed.kill();
    for socket in sockets {
        closing.close(socket);
    }
    look(|| fixture.setup.backends("web", "users")).matches("every connection has ended once", |backends| {
        let has_ended = |backend: &lb_view::backend::BackendStatus| {
            (backend.active, backend.endings.values().sum()) == (0, backend.started)
        };
        backends.iter().all(has_ended)
    });
}

/// The bug: a refused connect, a connect into a black hole, and a reset connection were recorded
/// with the same cause, or without a cause.
#[test]
fn r19_refused_unanswered_and_reset_are_three_causes() {
    let mut fixture = Fixture::without_daemon();
    fixture.backends.clear();
    fixture.backends = vec![Backend::with_manner("resets", "127.0.0.1:8001", Manner::Resets)];
    let _full = with_a_full_queue("127.0.0.1:8004");
    let service = |name: &str, address: &str, backend: &str, more: &str| {
        format!(
            "[[service]]\nname = \"{name}\"\naddress = \"{address}\"\nbackends = {{ static = [\"{backend}\"] }}\n{more}\n"
        )
    };
    let text = format!("[[client]]\njob = \"web\"\ncgroup = \"{}\"\n", fixture.cgroup.relative().display())
        + &service("refuses", "10.96.0.11:80", "127.0.0.1:8009", "")
        + &service("silent", "10.96.0.12:80", "127.0.0.1:8004", "connect_timeout = \"3s\"")
        + &service("resets", "10.96.0.13:80", "127.0.0.1:8001", "");
    fixture.setup.write("socklb.toml", &text);
    fixture.start();
    let mut probe = fixture.probe();
    assert_eq!(probe.try_dial("10.96.0.11:80").map(|dialled| dialled.name), Err(libc::ECONNREFUSED));
    assert_eq!(probe.try_dial("10.96.0.12:80").map(|dialled| dialled.name), Err(libc::ETIMEDOUT));
    let reset = probe.dial("10.96.0.13:80").socket;
    assert_eq!(probe.provoke(reset), Err(libc::ECONNRESET));
    for (name, ending) in [("refuses", "refused"), ("silent", "timed-out"), ("resets", "reset")] {
        let endings = || {
            let mut endings = fixture.setup.backends("web", name).remove(0).endings;
            endings.retain(|_, count| *count != 0);
            endings.into_iter().collect::<Vec<_>>()
        };
        look(endings).becomes([(ending.to_owned(), 1)]);
    }
}
