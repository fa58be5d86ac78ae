//! Active counts are exact: they equal the number of open sockets, however each socket ends.

use std::collections::BTreeSet;

use lb_common::abi::{Flow, FlowBucket, map};
use lb_view::flows::FlowsDocument;
use stage::backend::with_a_full_queue;
use stage::kernel;
use stage::maps::{hash, values};
use stage::protocol::Counts;
use stage::{Backend, Family, Manner, Probe, SocketId, address, eventually, look};

use stage::fixture::{Fixture, SERVICE, config};

/// Asserts that every active count is zero and no flow has a record.
#[track_caller]
fn all_gone(fixture: &Fixture) {
    eventually("active counts return to 0", || fixture.setup.active(), |active| *active == 0);
    assert_eq!(records(fixture), (0, 0), "records in the table and in the overflow");
}

/// Number of records in the flow table and in the overflow table.
fn records(fixture: &Fixture) -> (usize, usize) {
    let buckets = values::<FlowBucket>(&fixture.setup.map("web", map::FLOWS));
    assert!(buckets.len() >= 64, "the table has at least 64 buckets");
    let overflow = hash::<u64, Flow>(&fixture.setup.map("web", map::FLOW_OVERFLOW));
    let taken = buckets.iter().filter(|bucket| bucket.cookie != 0).count();
    let promised: u64 = buckets.iter().map(|bucket| bucket.elsewhere).sum();
    let recorded = overflow.keys().filter(Result::is_ok).count();
    assert_eq!(promised, recorded as u64, "each bucket counts its own overflow records");
    (taken, recorded)
}

#[test]
fn a_socket_counts_from_connect_to_close() {
    let fixture = Fixture::new();
    let mut probe = fixture.probe();
    let open: Vec<_> = (0..9).map(|_| probe.dial(SERVICE)).collect();
    let active = |backend: &lb_view::backend::BackendStatus| backend.active;
    let counts = || fixture.setup.backends("web", "users").iter().map(active).collect::<Vec<u64>>();
    look(counts).becomes([3, 3, 3]);
    for dialled in &open {
        probe.close(dialled.socket);
    }
    all_gone(&fixture);
    // A disconnected socket can dial again.
    let mut names = BTreeSet::new();
    let first = probe.dial(SERVICE);
    names.insert(first.name);
    for _ in 0..2 {
        probe.disconnect(first.socket);
        names.insert(probe.try_redial(first.socket, SERVICE).expect("the socket can dial again").name);
        // There is one socket, so one flow is active.
        fixture.setup.active_becomes(1);
    }
    assert_eq!(names.len(), 3, "each dial chooses separately");
    probe.close(first.socket);
    all_gone(&fixture);
    // The flows of a killed process end.
    for _ in 0..50 {
        probe.dial(SERVICE);
    }
    fixture.setup.active_becomes(50);
    probe.kill();
    all_gone(&fixture);
}

/// The bug: counts of active connections stayed above zero, or fell below zero, after processes
/// were killed, network namespaces removed, or connections reset or timed out. Least-connections
/// then starved backends.
#[test]
fn r14_active_counts_return_to_zero_however_connections_end() {
    let mut fixture = Fixture::without_daemon();
    fixture.backends.clear();
    fixture.backends = vec![
        Backend::with_manner("closes", "127.0.0.1:8001", Manner::ClosesFirst),
        Backend::with_manner("resets", "127.0.0.1:8002", Manner::Resets),
        Backend::with_manner("waits", "127.0.0.1:8003", Manner::Quiet),
    ];
    fixture.start();
    every_way_to_close_a_connection_ends_its_flow(&fixture);
    // Two more backends: a listener with a full queue, and an address without a listener.
    let _full = with_a_full_queue("127.0.0.1:8004");
    let list = [8001, 8002, 8003, 8004, 8009].map(|port| format!("127.0.0.1:{port}"));
    fixture.write_endpoints(&list.each_ref().map(|address| (address.as_str(), "")));
    let backends = || fixture.setup.backends("web", "users");
    eventually("the list is in force", backends, |all| {
        all.len() == 5 && all.iter().all(|backend| backend.share_wanted > 0.0)
    });
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
    look(backends).matches("every connection has ended once", |backends| {
        let has_ended = |backend: &lb_view::backend::BackendStatus| {
            (backend.active, backend.endings.values().sum()) == (0, backend.started)
        };
        backends.iter().all(has_ended)
    });
    all_gone(&fixture);
}

#[track_caller]
fn every_way_to_close_a_connection_ends_its_flow(fixture: &Fixture) {
    let mut probe = fixture.probe();
    let mut open: Vec<_> = (0..12).map(|_| probe.dial(SERVICE)).collect();
    for dialled in open.iter().filter(|dialled| dialled.name == "resets") {
        assert_eq!(probe.provoke(dialled.socket), Err(libc::ECONNRESET));
    }
    // A reset by the peer ends the connection, even if processes still hold the socket.
    fixture.setup.active_becomes(8);
    open.retain(|dialled| dialled.name != "resets");
    // A copy of a socket is the same socket: its flow is active until the last copy is closed.
    let copied = open.pop().expect("eight sockets are open");
    let copy = probe.duplicate(copied.socket);
    probe.close(copied.socket);
    fixture.setup.active_becomes(8);
    probe.close(copy);
    fixture.setup.active_becomes(7);
    for (i, dialled) in open.iter().enumerate() {
        match i % 3 {
            0 => probe.reset(dialled.socket),
            1 => {
                // shutdown(2) does not close the socket, and fails if the peer has already ended
                // the connection.
                let _ = probe.shut_down(dialled.socket);
                probe.close(dialled.socket);
            }
            _ => probe.close(dialled.socket),
        }
    }
    all_gone(fixture);
}

#[test]
fn every_refused_connect_is_counted_once_and_a_direct_connection_after_it_is_not() {
    let mut fixture = Fixture::without_daemon();
    // Nothing listens on the only backend.
    fixture.write_endpoints(&[("127.0.0.1:8009", "")]);
    fixture.start();
    let mut probe = fixture.probe();
    let sockets: Vec<SocketId> = (0..20).map(|_| probe.open_stream(Family::V4)).collect();
    for socket in sockets.clone() {
        for _ in 0..4 {
            assert_eq!(probe.try_redial(socket, SERVICE).map(|d| d.name), Err(libc::ECONNREFUSED));
        }
    }
    // A refused connection ends the flow.
    fixture.setup.active_becomes(0);
    let backend = look(|| fixture.setup.backends("web", "users")[0].clone())
        .has(|backend| (backend.started, backend.endings["refused"]), (80, 80));
    for socket in sockets {
        probe.close(socket);
    }
    all_gone(&fixture);
    let after = look(|| fixture.setup.backends("web", "users")[0].clone()).now("every socket is closed");
    let counts = |backend: &lb_view::backend::BackendStatus| (backend.started, backend.endings.clone());
    assert_eq!(counts(&after), counts(&backend), "closing the sockets counts no end again");
    let socket = probe.open_stream(Family::V4);
    assert!(probe.try_redial(socket, SERVICE).is_err());
    let direct = probe.try_redial(socket, "127.0.0.1:8001").expect("b1 listens");
    assert_eq!((direct.name.as_str(), direct.peer), ("b1", address("127.0.0.1:8001")));
    fixture.setup.active_becomes(0);
    let endings = look(|| fixture.setup.backends("web", "users")[0].endings.clone())
        .matches("the refusal is counted", |endings| endings["refused"] == 81);
    probe.close(socket);
    all_gone(&fixture);
    let after =
        look(|| fixture.setup.backends("web", "users")[0].endings.clone()).now("the socket is closed");
    assert_eq!(after, endings, "the direct connection is not counted");
}

/// For an MPTCP socket the kernel dials with a separate socket, and no program sees the end of that
/// socket.
#[test]
fn mptcp_connections_are_balanced_but_not_tracked() {
    // Debian's kernels without this helper have no MPTCP at all.
    if kernel::SKC_TO_MPTCP_SOCK.skips() {
        return;
    }
    let enabled = std::fs::read_to_string("/proc/sys/net/mptcp/enabled");
    assert_eq!(enabled.expect("this kernel has MPTCP (CONFIG_MPTCP)").trim(), "1");
    let fixture = Fixture::new();
    assert!(fixture.setup.daemon().features["knows_mptcp"], "root has CAP_PERFMON, and Linux 6.0 the helper");
    let mut probe = fixture.probe();
    for _ in 0..6 {
        let dialled = probe.dial_mptcp(SERVICE);
        assert!(dialled.name.starts_with('b'), "{dialled:?}");
        probe.close(dialled.socket);
    }
    look(|| fixture.setup.service().outcomes)
        .has(|outcomes| (outcomes["untracked"], outcomes["forwarded"]), (6, 0));
    all_gone(&fixture);
}

/// Sets the smallest flow table: 64 buckets. The overflow table then has room for 64 records, too.
fn with_small_table() -> Fixture {
    let mut fixture = Fixture::without_daemon();
    let text = config(&fixture.cgroup, r#"{ file = "users.toml" }"#, "") + "[limits]\nflow_records = 64\n";
    fixture.setup.write("socklb.toml", &text);
    fixture.start();
    fixture
}

#[test]
fn a_small_flow_table_counts_colliding_sockets_in_the_overflow_table_and_refuses_no_connect() {
    let fixture = with_small_table();
    let mut probes: Vec<Probe> = (0..2).map(|_| fixture.probe()).collect();
    let mut open = Vec::new();
    // Without fetching atomics every flow is in the overflow table, which has room for 64 records.
    let first = if kernel::FETCHING_ATOMICS.is_here() { 90 } else { 40 };
    for i in 0..first {
        let probe = &mut probes[i % 2];
        let dialled = probe.dial(SERVICE);
        assert_eq!(dialled.peer, address(SERVICE));
        open.push((i % 2, dialled.socket));
    }
    let (table, overflow) = records(&fixture);
    assert!(overflow > 0, "{first} sockets in 64 buckets left no overflow record");
    assert!(table > 0 || !kernel::FETCHING_ATOMICS.is_here());
    assert_eq!(table + overflow, first);
    fixture.setup.active_becomes(first as u64);
    let FlowsDocument { flows, .. } = fixture.setup.document(&["flows"]);
    let cookies: BTreeSet<u64> = flows.iter().map(|flow| flow.cookie).collect();
    assert_eq!((flows.len(), cookies.len()), (first, first), "each flow is shown once");
    // Closes every second socket and opens others: only new sockets may claim the freed buckets.
    for (probe, socket) in open.iter().step_by(2) {
        probes[*probe].close(*socket);
    }
    let again: Vec<_> = (0..40).map(|_| probes[0].dial(SERVICE)).collect();
    fixture.setup.active_becomes(first as u64 / 2 + 40);
    for (probe, socket) in open.iter().skip(1).step_by(2) {
        assert_eq!(
            probes[*probe].peer(*socket),
            address(SERVICE),
            "the flow is in the flow table or in the overflow table"
        );
        probes[*probe].close(*socket);
    }
    for dialled in again {
        probes[0].close(dialled.socket);
    }
    all_gone(&fixture);
    // Neither table has room for all of these flows.
    let mut probe = fixture.probe();
    for _ in 0..300 {
        probe.dial(SERVICE);
    }
    let chosen = 300 + first as u64 + 40;
    let seen = look(|| fixture.setup.service().outcomes)
        .matches("an outcome of each connect", |seen| seen["forwarded"] + seen["untracked"] == chosen);
    let untracked = seen["untracked"];
    assert!(untracked >= 300 - 128, "{seen:?}");
    // A chosen flow is active or untracked.
    fixture.setup.active_becomes(300 - untracked);
    probe.kill();
    all_gone(&fixture);
}

/// Each call is counted as exactly one outcome, even if two CPUs connect at the same time.
#[test]
fn outcomes_add_up_to_the_calls() {
    let fixture = Fixture::new();
    let mut probes: Vec<Probe> = (0..4).map(|_| fixture.probe()).collect();
    for (i, probe) in probes.iter_mut().enumerate() {
        probe.pin(i % 2);
    }
    let counts: Vec<Counts> = std::thread::scope(|scope| {
        let dial = |probe| scope.spawn(|| Probe::dial_many(probe, SERVICE, 500));
        let threads: Vec<_> = probes.iter_mut().map(dial).collect();
        threads.into_iter().map(|thread| thread.join().expect("the probe answers")).collect()
    });
    for counts in counts {
        assert_eq!(counts.values().sum::<u32>(), 500, "{counts:?}");
        assert_eq!(counts.len(), 3, "{counts:?}");
    }
    let client = look(|| fixture.setup.client()).has(|client| client.services[0].outcomes["forwarded"], 2000);
    assert_eq!(client.not_a_service, 0);
    all_gone(&fixture);
}
