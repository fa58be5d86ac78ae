//! Which evidence counts against a backend: connects that this host cannot send, sockets and
//! processes that fail by themselves, and connections that are accepted and never answered.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::process::Command;
use std::time::Duration;

use aya::maps::{Array, MapData};
use lb_common::abi::{Service, map};
use lb_view::backend::BackendStatus;
use lb_view::flows::FlowsDocument;
use stage::backend::Manner;
use stage::fixture::{Fixture, SERVICE, with_active_accounting};
use stage::maps::{Raw, array};
use stage::namespace::in_a_network_of_its_own;
use stage::protocol::{Family, Oddity};
use stage::{Backend, Probe, eventually, kernel, look, replace};

use crate::backends::ejection::{DEAD, THREE, start, text, write};

/// An ejection that outlasts a test, so that no trial is due.
const FOR_LONG: &str = "ejection = { base = \"1h\", max = \"1h\" }";
/// An address without a route.
const LOST: &str = "10.99.0.1:80";

/// Replaces the route to [`LOST`] in the test's own network with a route of this kind, such as
/// `blackhole`.
fn lose(kind: &str) {
    route(kind, "10.99.0.0/24");
}

fn route(kind: &str, network: &str) {
    let status = Command::new("ip").args(["route", "replace", kind, network]).status().expect("ip");
    assert!(status.success(), "{kind} {network}: {status}");
}

fn at(fixture: &Fixture, address: &str) -> BackendStatus {
    fixture.setup.backend(address).expect("the backend has a slot")
}

/// The number of failed connects.
fn failed(counts: &BTreeMap<String, u32>) -> u32 {
    counts.iter().filter(|(name, _)| !name.starts_with('b')).map(|(_, count)| count).sum()
}

/// Dials `count` times, holds connected sockets, and closes failed sockets, as applications do.
fn connect(probe: &mut Probe, count: u32) -> BTreeMap<String, u32> {
    let mut counts = BTreeMap::new();
    for _ in 0..count {
        let socket = probe.open_stream(Family::V4);
        let name = match probe.try_redial(socket, SERVICE) {
            Ok(dialled) => dialled.name,
            Err(errno) => {
                probe.close(socket);
                errno.to_string()
            }
        };
        *counts.entry(name).or_insert(0) += 1;
    }
    counts
}

fn service(fixture: &Fixture) -> Service {
    let services: Array<MapData, Raw<Service>> = array(&fixture.setup.map("web", map::SERVICES));
    services.get(&0, 0).expect("read the service's row").0
}

#[test]
fn a_backend_without_a_route_costs_few_connects() {
    let list = [LOST, THREE[0], THREE[1], THREE[2], "127.0.0.1:8004"];
    for (kind, policy) in
        [("blackhole", "weighted-round-robin"), ("prohibit", "p2c"), ("unreachable", "least-loaded")]
    {
        let fixture = start(&list, &format!("policy = \"{policy}\"\n{FOR_LONG}"));
        lose(kind);
        let _fourth = Backend::start("b4", "127.0.0.1:8004");
        let counts = fixture.probe().dial_many(SERVICE, 300);
        // Five failures eject the backend. After that, a connect fails only if all of the few
        // entries that it examines belong to this backend.
        assert!((1..=12).contains(&failed(&counts)), "{kind}, {policy}: {counts:?}");
        let lost = || at(&fixture, LOST).ejection.map(|ejection| ejection.cause);
        if failed(&counts) >= 5 {
            look(lost).becomes(Some("not-sent".to_owned()));
        }
    }
    an_ipv6_backend_without_a_route_costs_few_connects();
}

fn an_ipv6_backend_without_a_route_costs_few_connects() {
    const SERVICE6: &str = "[fd00:96::10]:80";
    const LOST6: &str = "[fd00:99::1]:80";
    for kind in ["blackhole", "prohibit", "unreachable"] {
        let mut fixture = Fixture::without_daemon();
        let _six = ["[::1]:8001", "[::1]:8002"].map(|address| Backend::start("b6", address));
        write(&fixture, &[LOST6, "[::1]:8001", "[::1]:8002"]);
        let text = text(&fixture, FOR_LONG).replace(SERVICE, SERVICE6);
        replace(&fixture.setup.folder.join("socklb.toml"), &text);
        route(kind, "fd00:99::/64");
        fixture.start();
        let counts = fixture.probe().dial_many(SERVICE6, 300);
        assert!((1..=12).contains(&failed(&counts)), "{kind}: {counts:?}");
        look(|| at(&fixture, LOST6).ejection.map(|ejection| ejection.cause))
            .becomes(Some("not-sent".to_owned()));
    }
}

/// With active accounting, the programs do not learn why connects fail.
#[test]
fn without_known_causes_a_failing_backend_is_not_ejected_and_does_not_look_idle() {
    for (lines, expected) in [("", 20), (FOR_LONG, 20)] {
        let mut fixture = Fixture::without_daemon();
        write(&fixture, &[DEAD[0], THREE[0], THREE[1]]);
        let text = with_active_accounting(&text(&fixture, lines));
        replace(&fixture.setup.folder.join("socklb.toml"), &text);
        fixture.start();
        // A failed blocking connect has cleared its error before its socket is released, so the
        // programs see no failure.
        let counts = fixture.probe().dial_many(SERVICE, 60);
        assert_eq!(failed(&counts), expected, "{lines}: {counts:?}");
    }
    for policy in ["p2c", "least-loaded"] {
        let fixture = start(&[THREE[0], THREE[1], DEAD[0]], "ejection = \"off\"");
        let lines = format!("policy = \"{policy}\"\nerror_decay = \"1h\"\nejection = \"off\"");
        replace(&fixture.setup.folder.join("socklb.toml"), &with_active_accounting(&text(&fixture, &lines)));
        let active = || fixture.setup.backends("web", "users").len();
        look(active).becomes(3);
        eventually("the policy is in force", || service(&fixture).rules.error_half_life, |half| *half > 0);
        let counts = connect(&mut fixture.probe(), 200);
        // The fair share of this backend is a third of the connects.
        assert!(failed(&counts) <= 67 + 1, "{policy}: {counts:?}");
    }
}

#[test]
fn unusual_sockets_eject_no_backend_and_do_not_reset_the_failure_count() {
    let fixture = start(&[DEAD[0], THREE[0]], FOR_LONG);
    let mut probe = fixture.probe();
    // These sockets have routing options of their own.
    for oddity in Oddity::ALL {
        for _ in 0..20 {
            if let Ok(socket) = probe.connect_oddly(SERVICE, oddity) {
                probe.close(socket);
            }
        }
    }
    let dead = look(|| at(&fixture, DEAD[0])).now("many connects have failed");
    assert!(dead.endings["refused"] >= 20 && dead.ejections == 0, "{dead:?}");
    // Five failures of ordinary sockets eject the backend; four do not.
    let counts = probe.dial_many(SERVICE, 8);
    assert_eq!(failed(&counts), 4, "{counts:?}");
    // Connects go to both backends in turn. From the dead backend's own address, a connect to that
    // backend connects the socket to itself. A connect to the other backend is an ordinary
    // connection.
    let before = dead.established;
    let from_its_address = || {
        if let Ok(socket) = probe.connect_from(DEAD[0], SERVICE) {
            probe.reset(socket);
        }
        at(&fixture, DEAD[0]).established
    };
    eventually("a socket has connected to itself", from_its_address, |now| *now == before + 1);
    look(|| at(&fixture, DEAD[0]).ejections).now("four failures do not eject");
    assert_eq!(at(&fixture, DEAD[0]).ejections, 0);
    assert_eq!(failed(&probe.dial_many(SERVICE, 2)), 1);
    look(|| at(&fixture, DEAD[0]).ejections).becomes(1);
    assert_eq!(failed(&probe.dial_many(SERVICE, 100)), 0, "the backend is ejected");
}

#[test]
fn failures_in_another_network_namespace_eject_no_backend() {
    if kernel::NAMESPACE_COOKIES.skips() {
        return;
    }
    let fixture = start(&THREE, FOR_LONG);
    let mut probe = fixture.probe();
    // The network namespace of the client's oldest process is the client's namespace.
    probe.dial_many(SERVICE, 3);
    let namespace = || service(&fixture).namespace;
    eventually("the service's row has the namespace", namespace, |namespace| *namespace != 0);
    let mut elsewhere = Probe::start_with(&fixture.cgroup, in_a_network_of_its_own);
    let counts = elsewhere.dial_many(SERVICE, 100);
    assert_eq!(counts.values().sum::<u32>(), 100, "{counts:?}");
    assert!(
        !counts.keys().any(|name| name.starts_with('b')),
        "no backend is reachable from that namespace: {counts:?}"
    );
    let ejected = fixture.setup.backends("web", "users").iter().map(|backend| backend.ejections).sum::<u64>();
    assert_eq!(ejected, 0);
    let counts = probe.dial_many(SERVICE, 30);
    assert_eq!(counts.values().copied().collect::<Vec<_>>(), [10, 10, 10], "{counts:?}");
}

/// Starts two processes of the client, with flows, and waits until the daemon has detected both.
fn two_known_processes(fixture: &mut Fixture) -> (Probe, Probe) {
    let (mut first, mut second) = (fixture.probe(), fixture.probe());
    connect(&mut first, 1);
    connect(&mut second, 1);
    // A daemon reads the flow records when it starts.
    fixture.stop();
    fixture.start();
    eventually("two processes are known", || service(fixture).several_processes, |several| *several == 1);
    (first, second)
}

/// A backend may reset the requests of one process for a good reason. Resets of a second process
/// count against the backend.
#[test]
fn resets_eject_a_backend_only_if_several_processes_receive_them() {
    // Without fetching atomics, flow records do not identify a process.
    if kernel::FETCHING_ATOMICS.skips() {
        return;
    }
    const RESETTING: &str = "127.0.0.1:8010";
    let mut fixture = start(&THREE, FOR_LONG);
    // Processes that ended before a restart do not count as several.
    drop(two_known_processes(&mut fixture));
    let mut third = fixture.probe();
    connect(&mut third, 1);
    fixture.stop();
    fixture.start();
    look(|| service(&fixture).several_processes).stays(0, Duration::from_secs(1));
    drop(third);
    let resetting = Backend::with_manner("b0", RESETTING, Manner::ResetsAtOnce);
    let (mut first, mut second) = two_known_processes(&mut fixture);
    write(&fixture, &[RESETTING, THREE[0], THREE[1], THREE[2]]);
    eventually("the backend is in the list", || fixture.setup.backend(RESETTING), Option::is_some);
    first.dial_many(SERVICE, 100);
    assert!(resetting.accepted() >= 20, "{}", resetting.accepted());
    look(|| at(&fixture, RESETTING).ejections).now("resets are counted when the sockets are closed");
    assert_eq!(at(&fixture, RESETTING).ejections, 0);
    let before = resetting.accepted();
    second.dial_many(SERVICE, 100);
    assert_eq!(resetting.accepted() - before, 1, "a second process ejects the backend");
    look(|| at(&fixture, RESETTING).ejections).becomes(1);
}

/// The kernel completes the handshakes for this listener, but no process accepts or answers.
#[test]
fn a_silent_backend_is_ejected_while_others_answer() {
    const HUNG: &str = "127.0.0.1:8010";
    let fixture = start(&[HUNG, THREE[0], THREE[1], THREE[2]], FOR_LONG);
    let _hung = TcpListener::bind(HUNG).expect("listen");
    let mut probe = fixture.probe();
    // One connection gets no answer, and three are answered. The kernel of the hung backend needs a
    // moment to acknowledge a close, so each round shows the result of the previous round. A
    // missing answer counts as two failures, because the established connection has counted as a
    // success.
    let round = || {
        let sockets = [(); 4].map(|()| probe.start_connect(SERVICE));
        sockets.iter().for_each(|socket| probe.write(*socket));
        let youngest = || {
            let flows = fixture.setup.document::<FlowsDocument>(&["flows"]).flows;
            flows.iter().map(|flow| flow.age_s).fold(f64::INFINITY, f64::min)
        };
        eventually("each connection has waited for an answer", youngest, |age| *age > 0.6);
        sockets.into_iter().for_each(|socket| probe.close(socket));
        at(&fixture, HUNG).ejection.map(|ejection| ejection.cause)
    };
    eventually("the backend is ejected", round, |cause| cause.as_deref() == Some("no-answer"));
}
