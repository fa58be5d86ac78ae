//! If no program saw the end of a flow, a comparison with the kernel's lists of sockets reclaims
//! its record. All other records remain.

use lb_common::abi::{Flow, map};
use stage::maps::hash;
use stage::protocol::failure;
use stage::{Backend, Dialled, Family, Manner, Probe, address, eventually, kernel, look};

use stage::fixture::{Fixture, SERVICE, config, with_active_accounting, with_passes};

/// The reason for a single read of a count after an unseen end of a flow.
const UNSEEN: &str = "no daemon runs, and the programs that see ends are gone";

/// The results of the passes over the records: the number of flows reclaimed since the start, then
/// the numbers of suspected, open and elsewhere flows in the last pass.
fn passes_found(fixture: &Fixture) -> [u64; 4] {
    let found = fixture.setup.reclaim();
    [found.reclaimed, found.suspected, found.kept_open, found.kept_elsewhere]
}

fn reclaimed(fixture: &Fixture) -> u64 {
    let backends = fixture.setup.backends("web", "users");
    backends.iter().map(|backend| backend.reclaimed).sum()
}

/// A set-up in which passes over the records are a second apart.
fn scene(change: impl FnOnce(String) -> String) -> Fixture {
    let fixture = Fixture::without_daemon();
    let text = config(&fixture.cgroup, r#"{ file = "users.toml" }"#, "");
    fixture.setup.write("socklb.toml", &with_passes(&change(text)));
    fixture
}

/// Removes the links of the programs that detect the ends of flows.
fn without_ends(fixture: &Fixture) {
    without_hooks(fixture, &["sock_release", "tcp_events"]);
}

fn without_hooks(fixture: &Fixture, hooks: &[&str]) {
    for link in std::fs::read_dir(fixture.setup.pins_of("web").join("links")).expect("list the links") {
        let link = link.expect("read a directory entry").path();
        let name = link.to_string_lossy().into_owned();
        if hooks.iter().any(|hook| name.contains(hook)) {
            stage::sys::remove_link(&link);
        }
    }
}

/// While the daemon is stopped, no program sees the first four of six sockets end. The next daemon
/// ends their flows. The flows of the remaining two sockets end as usual.
#[track_caller]
fn four_of_six_end_unseen(fixture: &mut Fixture) {
    let mut probe = fixture.probe();
    let open: Vec<Dialled> = (0..6).map(|_| probe.dial(SERVICE)).collect();
    fixture.stop();
    without_ends(fixture);
    for dialled in &open[..4] {
        probe.close(dialled.socket);
    }
    assert_eq!(look(|| fixture.setup.active()).now(UNSEEN), 6);
    fixture.start();
    eventually("four flows are ended", || fixture.setup.active(), |active| *active == 2);
    eventually(
        "the passes have reclaimed four records",
        || passes_found(fixture),
        |found| *found == [4, 0, 0, 0],
    );
    for dialled in &open[4..] {
        assert_eq!(probe.peer(dialled.socket), address(SERVICE));
        probe.close(dialled.socket);
    }
    fixture.setup.active_becomes(0);
    look(|| reclaimed(fixture)).becomes(4);
}

#[test]
fn flows_with_an_unseen_end_are_reclaimed_and_many_of_them_are_a_fault() {
    if kernel::NAMESPACE_COOKIES.skips() {
        return;
    }
    let mut fixture = scene(|text| with_active_accounting(&text));
    fixture.start();
    four_of_six_end_unseen(&mut fixture);
    assert!(fixture.daemon().log().contains("reclaimed flow records of sockets that are gone"));
    flows_between_two_passes_are_reclaimed_and_a_fault(&mut fixture);
    drop(fixture);
    let mut tracked = scene(|text| text);
    tracked.start();
    four_of_six_end_unseen(&mut tracked);
    // Each chosen flow is counted as ended, active or reclaimed.
    let closed = |backend: &lb_view::backend::BackendStatus| backend.endings["closed"];
    look(|| tracked.setup.backends("web", "users").iter().map(closed).sum::<u64>()).becomes(2);
}

/// Connections that begin and end between two passes are in no list that the daemon reads. If no
/// program saw their ends either, they would be counted as active forever.
#[track_caller]
fn flows_between_two_passes_are_reclaimed_and_a_fault(fixture: &mut Fixture) {
    let before = reclaimed(fixture);
    let mut probe = fixture.probe();
    fixture.stop();
    without_ends(fixture);
    assert_eq!(probe.dial_many(SERVICE, 30).values().sum::<u32>(), 30);
    assert_eq!(look(|| fixture.setup.active()).now(UNSEEN), 30);
    fixture.start();
    look(|| (fixture.setup.active(), reclaimed(fixture))).becomes((0, before + 30));
    let degraded = || stage::faults_of(&fixture.setup.status()).join("\n");
    let is_degraded = |text: &String| text.contains("client web: no program saw the end of 30 of 30 flows");
    eventually("the unseen ends are a fault", degraded, is_degraded);
    assert_eq!(fixture.setup.run(&["status"]).status.code(), Some(3));
}

/// No program saw the end of the connection, and its socket is still open. The release of the
/// socket ends the flow.
#[test]
fn a_flow_with_a_missed_end_ends_with_its_socket() {
    let mut fixture = Fixture::without_daemon();
    fixture.backends.clear();
    fixture.backends = vec![Backend::with_manner("resets", "127.0.0.1:8003", Manner::Resets)];
    fixture.write_endpoints(&[("127.0.0.1:8003", "")]);
    fixture.start();
    let mut probe = fixture.probe();
    let socket = probe.dial(SERVICE).socket;
    fixture.stop();
    without_hooks(&fixture, &["tcp_events"]);
    assert_eq!(probe.provoke(socket), Err(libc::ECONNRESET));
    assert_eq!(look(|| fixture.setup.active()).now(UNSEEN), 1);
    probe.close(socket);
    fixture.setup.active_becomes(0);
    look(|| fixture.setup.status()).has(|status| status.clients[0].anomalies.release_out_of_turn, 1);
    look(|| fixture.setup.backends("web", "users").remove(0)).has(
        |backend| {
            let ended = backend.endings.values().sum();
            [backend.started, backend.established, backend.reclaimed, ended]
        },
        [1, 1, 0, 1],
    );
}

/// A small flow table: every record is in the overflow table or competes for its bucket.
#[test]
fn flows_in_the_overflow_table_are_reclaimed() {
    if kernel::NAMESPACE_COOKIES.skips() {
        return;
    }
    let mut fixture = scene(|text| with_active_accounting(&text) + "[limits]\nflow_records = 64\n");
    fixture.start();
    let mut probes: Vec<Probe> = (0..2).map(|_| fixture.probe()).collect();
    let open: Vec<_> = (0..90).map(|i| (i % 2, probes[i % 2].dial(SERVICE).socket)).collect();
    let overflow = hash::<u64, Flow>(&fixture.setup.map("web", map::FLOW_OVERFLOW));
    assert!(overflow.keys().count() >= 26, "90 sockets in 64 buckets have at least 26 overflow records");
    // The records of the first sockets found room in the table, unless two of them had the same
    // bucket. Most records of the sockets that stay open are in the overflow table.
    for (probe, socket) in &open[..30] {
        probes[*probe].close(*socket);
    }
    assert!(overflow.keys().count() > 0, "some records of open sockets are in the overflow table");
    fixture.stop();
    without_ends(&fixture);
    for (probe, socket) in &open[30..70] {
        probes[*probe].close(*socket);
    }
    fixture.start();
    eventually("forty flows are ended", || fixture.setup.active(), |active| *active == 20);
    for (probe, socket) in &open[70..] {
        probes[*probe].close(*socket);
    }
    fixture.setup.active_becomes(0);
}

/// After a failed connect, an open socket is in none of the kernel's lists. The daemon must not
/// treat it as closed while a process holds it.
#[test]
fn the_flow_of_an_unconnected_socket_is_reclaimed_only_once_no_process_holds_it() {
    let mut fixture = scene(|text| with_active_accounting(&text));
    fixture.write_endpoints(&[("127.0.0.1:8009", "")]);
    fixture.start();
    let mut probe = fixture.probe();
    let socket = probe.open_stream(Family::V4);
    assert_eq!(probe.try_redial(socket, SERVICE), Err(libc::ECONNREFUSED));
    // If namespaces do not have cookies, the daemon cannot determine which list would have to
    // contain the socket, but only that a process holds it.
    let expected = if kernel::NAMESPACE_COOKIES.is_here() { [0, 0, 1, 0] } else { [0; 4] };
    let passes = |fixture: &Fixture| fixture.setup.client().reclaim.map(|reclaim| reclaim.passes);
    eventually("passes have examined the flow", || passes(&fixture), |passes| *passes >= Some(4));
    let seen = || (passes_found(&fixture), fixture.setup.active());
    assert_eq!(look(seen).now("four passes have examined the flow"), (expected, 1));
    let doctor = fixture.setup.run(&["doctor", "--config", "socklb.toml"]);
    let text = String::from_utf8_lossy(&doctor.stdout).into_owned();
    assert!(text.contains(&format!("retained: {} with an open socket", expected[2])), "{text}");
    if kernel::NAMESPACE_COOKIES.is_here() {
        // The process ends, and no program sees the end of the flow, as after the loss of a link.
        fixture.stop();
        without_ends(&fixture);
        probe.kill();
        assert_eq!(look(|| fixture.setup.active()).now(UNSEEN), 1);
        fixture.start();
        eventually("the flow is no longer active", || fixture.setup.active(), |active| *active == 0);
    } else {
        probe.close(socket);
        fixture.setup.active_becomes(0);
    }
}

/// Sockets of other network namespaces are searched in the lists of those namespaces, however many
/// namespaces there are: a process of the cgroup may create thousands of them, and the daemon has
/// few descriptors. Flows of a namespace that is gone are reclaimed.
#[test]
fn sockets_are_searched_in_each_of_many_namespaces_and_reclaimed_with_a_removed_one() {
    const NAMESPACES: usize = 30;
    let mut fixture = scene(|text| text);
    fixture.start();
    let mut elsewhere: Vec<Probe> = (0..NAMESPACES)
        .map(|_| Probe::start_with(&fixture.cgroup, stage::namespace::in_a_network_of_its_own))
        .collect();
    // Nothing is reachable there, so each socket is open, but not connected. The kernel's lists
    // contain such a socket only if it listens.
    assert!(elsewhere.iter_mut().all(|probe| probe.try_dial(SERVICE).is_err()));
    look(|| fixture.setup.active()).becomes(NAMESPACES as u64);
    // A pass needs some descriptors for the client's maps and for the iteration over open files.
    fixture.daemon().leave_descriptors(Some(30));
    let expected = if kernel::NAMESPACE_COOKIES.is_here() { [0, 0, NAMESPACES as u64, 0] } else { [0; 4] };
    eventually("all namespaces were searched", || passes_found(&fixture), |found| *found == expected);
    drop(elsewhere);
    fixture.setup.active_becomes(0);
    flows_of_a_removed_namespace_are_reclaimed(&mut fixture);
}

/// The daemon cannot enter a removed namespace, and no process of the host holds its sockets. After
/// ten passes, the daemon ends the flows of such a namespace.
#[track_caller]
fn flows_of_a_removed_namespace_are_reclaimed(fixture: &mut Fixture) {
    let mut elsewhere = Probe::start_with(&fixture.cgroup, stage::namespace::in_a_network_of_its_own);
    assert!(elsewhere.try_dial(SERVICE).is_err());
    fixture.stop();
    without_ends(fixture);
    elsewhere.kill();
    assert_eq!(look(|| fixture.setup.active()).now(UNSEEN), 1);
    fixture.start();
    eventually("the flow is counted as elsewhere", || passes_found(fixture), |found| *found == [0, 0, 0, 1]);
    // The daemon makes ten passes, one per second.
    let given_back = || fixture.setup.active();
    stage::within(4 * stage::patience(), given_back, |active| *active == 0)
        .expect("the flow is no longer active");
}

/// During a pass, sockets dial backends that refuse, again and again. These sockets are open, but
/// never in the kernel's lists.
#[test]
fn sockets_that_redial_during_a_pass_are_counted_exactly() {
    if kernel::NAMESPACE_COOKIES.skips() {
        return;
    }
    let mut fixture = scene(|text| with_active_accounting(&text));
    fixture.start();
    let mut probes: Vec<Probe> = (0..3).map(|_| fixture.probe()).collect();
    for probe in &mut probes {
        for _ in 0..7 {
            probe.dial(SERVICE);
        }
    }
    // From here on all backends refuse.
    fixture.write_endpoints(&[("127.0.0.1:8009", ""), ("127.0.0.1:8010", "")]);
    let mut other = fixture.probe();
    let refused = failure(libc::ECONNREFUSED);
    eventually(
        "all connects are refused",
        || other.dial_many(SERVICE, 6),
        |counts| counts.get(&refused) == Some(&6),
    );
    for probe in &mut probes {
        probe.start_redialling(SERVICE);
    }
    let passes = || fixture.setup.reclaim().passes;
    let before = passes();
    eventually("four passes have examined the flows", passes, |passes| *passes >= before + 4);
    for probe in &mut probes {
        probe.stop_redialling();
    }
    let counts = || -> Vec<u64> {
        let backends = fixture.setup.backends("web", "users");
        backends.iter().map(|backend| backend.active).collect()
    };
    look(|| counts().iter().sum::<u64>()).becomes(21);
    let reclaimed = look(|| passes_found(&fixture)[0]).now("a count of reclaimed flows never falls");
    assert_eq!(reclaimed, 0);
    drop(probes);
    eventually("every count returns to zero", counts, |counts| counts.iter().all(|count| *count == 0));
}
