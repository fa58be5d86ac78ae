//! Tests for bugs of other balancers that concern flows. Each test has the name of the effect, and
//! the number of the bug in docs/design/bugs-of-others.md.

use lb_view::flows::FlowsDocument;
use lb_view::status::AnomalyCounts;
use stage::backend::with_a_full_queue;
use stage::{Backend, Daemon, Manner, address, eventually, look};

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

/// The bugs: if a socket had dialled a service and then dialled the backend's own address, the
/// second connection was treated as a connection of the service (R3). A socket that was
/// disconnected and then dialled another service stayed in the count of the first service (R5).
///
/// The programs' callbacks on a socket must not outlive its flow either: the socket may then dial
/// another address, or listen, and the sockets that it accepts inherit the callbacks.
#[test]
fn r3_r5_a_reused_socket_counts_only_for_the_service_that_it_dialled_last() {
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
    let socket = probe.dial(SERVICE).socket;
    assert_eq!((active(&fixture, "users"), active(&fixture, "others")), (1, 0));
    probe.disconnect(socket);
    let second = probe.try_redial(socket, OTHER).expect("the other service's backend listens");
    assert_eq!((second.name.as_str(), second.peer), ("b2", address(OTHER)));
    look(|| ["users", "others"].map(|service| active(&fixture, service))).becomes([0, 1]);
    probe.close(socket);
    look(|| (ended(&fixture, "others", "closed"), active(&fixture, "others"))).becomes((1, 0));
    // The third socket dials an address that is neither a service nor a backend. The fourth socket
    // listens and accepts.
    let _elsewhere = Backend::start("elsewhere", "127.0.0.1:8005");
    let socket = probe.dial(SERVICE).socket;
    probe.disconnect(socket);
    probe.try_redial(socket, "127.0.0.1:8005").expect("connect to the listener");
    probe.close(socket);
    let socket = probe.dial(SERVICE).socket;
    probe.disconnect(socket);
    probe.listen_again(socket, "127.0.0.1:8006");
    let caller = std::net::TcpStream::connect("127.0.0.1:8006").expect("connect to the listener");
    probe.accept(socket);
    drop(caller);
    probe.kill();
    fixture.setup.active_becomes(0);
    assert_eq!(
        look(|| fixture.setup.client().anomalies)
            .now("an anomaly is counted when it happens, and the flows have ended"),
        AnomalyCounts::default()
    );
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
