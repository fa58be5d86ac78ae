//! Flows of datagram sockets: however many flows a socket has, and however it ends, every count is
//! exact.

use stage::fixture::with_passes;
use stage::protocol::Received;
use stage::udp::{MAPPED, SERVICE, Scene, address_of, backend_of};
use stage::{Daemon, Family, Probe, SocketId, address, eventually, look};

/// A connected socket that addresses datagrams to another service is a flow of both services.
/// connect(AF_UNSPEC) calls no program: the flow ends with the next connect, or with the socket.
#[test]
fn r30_a_connected_socket_that_disconnects_or_addresses_another_service_is_counted_exactly() {
    let scene = Scene::new(2, 2);
    let mut probe = scene.probe();
    for (family, first, other) in [
        (Family::V4, SERVICE.to_owned(), address_of(1)),
        (Family::V6, MAPPED.to_owned(), "[::ffff:10.96.0.11]:53".to_owned()),
    ] {
        let socket = probe.open_datagram(family);
        probe.connect_datagram(socket, &first);
        assert_eq!(probe.send_datagram(socket, &other), Ok(()));
        scene.setup.active_becomes(2);
        // A connected socket receives only from its peer.
        assert!(probe.query_connected(socket, &first).starts_with("s0"));
        probe.disconnect(socket);
        assert!(probe.query(socket, &other).starts_with("s1"));
        scene.setup.active_becomes(2);
        probe.close(socket);
        scene.setup.active_becomes(0);
    }
    scene.all_gone();
    let sockets =
        [probe.open_datagram(Family::V4), probe.open_datagram(Family::V4), probe.open_datagram(Family::V4)];
    for socket in sockets {
        probe.connect_datagram(socket, SERVICE);
        probe.disconnect(socket);
    }
    scene.setup.active_becomes(3);
    probe.connect_datagram(sockets[0], &backend_of(0, 1));
    scene.setup.active_becomes(2);
    probe.connect_datagram(sockets[1], &address_of(1));
    // The flow to the first service has ended, and a flow to the second has started.
    scene.setup.active_becomes(2);
    // The third socket now addresses the service with a datagram, for which a backend is chosen.
    probe.query(sockets[2], SERVICE);
    // This socket now has two flows: that of its connection, and that of its datagrams.
    scene.setup.active_becomes(3);
    for socket in sockets {
        probe.close(socket);
    }
    scene.all_gone();
}

#[test]
fn a_socket_has_flows_of_eight_services_and_a_ninth_replaces_the_oldest() {
    let scene = Scene::new(9, 1);
    let mut probe = scene.probe();
    let socket = probe.open_datagram(Family::V4);
    for round in 0..2 {
        for service in 0..8 {
            let name = probe.query(socket, &address_of(service));
            assert_eq!(name, format!("s{service}b1"), "round {round}");
        }
    }
    scene.setup.active_becomes(8);
    look(|| scene.entries()).becomes(1);
    // The socket sends all requests first and then receives all answers. Each answer comes from its
    // own service.
    for service in 0..8 {
        assert_eq!(probe.send_datagram(socket, &address_of(service)), Ok(()));
    }
    let mut received: Vec<Received> = (0..8).map(|_| probe.receive_datagram(socket)).collect();
    received.sort_by(|one, other| one.name.cmp(&other.name));
    let expected = (0..8)
        .map(|service| Received { name: format!("s{service}b1"), source: address(&address_of(service)) });
    assert_eq!(received, expected.collect::<Vec<_>>());
    probe.query(socket, &address_of(8));
    let active = |service| scene.backend(service, 1).active;
    look(|| (active(0), active(1), active(8))).becomes((0, 1, 1));
    look(|| scene.backend(0, 1).endings["closed"]).becomes(1);
    // Using the first service again starts a new flow. The oldest flow is then that of the second
    // service.
    probe.query(socket, SERVICE);
    look(|| (active(0), active(1), active(2))).becomes((1, 0, 1));
    probe.query(socket, &address_of(1));
    look(|| (active(1), active(2), scene.setup.active())).becomes((1, 0, 8));
    probe.close(socket);
    scene.all_gone();
}

/// Two threads send the first datagrams of a socket at the same moment: one of them begins the
/// flow.
#[test]
fn threads_that_send_at_once_start_one_flow() {
    const ROUNDS: u32 = 2000;
    let scene = Scene::new(2, 3);
    let mut probe = Probe::start(&scene.cgroup);
    probe.race_datagrams(ROUNDS, &[SERVICE, &address_of(1)]);
    for service in 0..2 {
        let counted = || (scene.outcome(service, "forwarded"), scene.outcome(service, "reused"));
        look(counted).becomes((u64::from(ROUNDS), u64::from(ROUNDS)));
    }
    scene.all_gone();
}

#[test]
fn flows_end_when_the_last_copy_of_the_socket_is_closed_or_the_process_is_killed() {
    let scene = Scene::new(2, 2);
    let mut probe = scene.probe();
    let socket = probe.open_datagram(Family::V4);
    probe.query(socket, SERVICE);
    probe.connect_datagram(socket, &address_of(1));
    scene.setup.active_becomes(2);
    let copy = probe.duplicate(socket);
    // A child inherits the sockets.
    probe.hold_in_child();
    probe.close(socket);
    // The copy still holds the flows.
    scene.setup.active_becomes(2);
    probe.query_connected(copy, &address_of(1));
    probe.close(copy);
    // The child still holds the flows.
    scene.setup.active_becomes(2);
    probe.kill_children();
    scene.all_gone();
    for _ in 0..20 {
        let socket = probe.open_datagram(Family::V4);
        probe.query(socket, SERVICE);
        let socket = probe.open_datagram(Family::V4);
        probe.connect_datagram(socket, SERVICE);
    }
    scene.setup.active_becomes(40);
    probe.kill();
    scene.all_gone();
}

#[test]
fn a_full_datagram_table_refuses_no_datagram() {
    let scene = Scene::with(1, 3, "[limits]\nflow_records = 64\n");
    let mut probe = scene.probe();
    let sockets: Vec<SocketId> = (0..80).map(|_| probe.open_datagram(Family::V4)).collect();
    for socket in &sockets {
        assert_eq!(probe.send_datagram(*socket, SERVICE), Ok(()));
    }
    let counted = || (scene.outcome(0, "forwarded"), scene.outcome(0, "untracked"), scene.entries());
    look(counted).becomes((64, 16, 64));
    scene.setup.active_becomes(64);
    // A socket without a record still receives answers: from the chosen backend, under the
    // backend's own address.
    let answer = probe.receive_datagram(sockets[79]);
    let number =
        answer.name.strip_prefix("s0b").and_then(|n| n.parse().ok()).expect("the name has the form s0bN");
    assert_eq!(answer.source, address(&backend_of(0, number)));
    for socket in sockets {
        probe.close(socket);
    }
    scene.all_gone();
}

/// No program has seen the ends of these sockets, connected and unconnected. The daemon detects the
/// ends with the kernel's lists of sockets.
#[test]
fn flows_with_an_unseen_end_are_reclaimed() {
    if stage::kernel::NAMESPACE_COOKIES.skips() {
        return;
    }
    let mut scene = Scene::with(2, 2, &with_passes(""));
    let mut probe = scene.probe();
    let mut sockets = Vec::new();
    for i in 0..6 {
        let socket = probe.open_datagram(if i % 2 == 0 { Family::V4 } else { Family::V6 });
        let [first, second] = match i % 2 {
            0 => [SERVICE.to_owned(), address_of(1)],
            _ => [MAPPED.to_owned(), "[::ffff:10.96.0.11]:53".to_owned()],
        };
        probe.query(socket, &first);
        probe.query(socket, &second);
        if i < 4 {
            probe.connect_datagram(socket, &first);
        }
        sockets.push(socket);
    }
    look(|| scene.setup.active()).becomes(16);
    assert_eq!(scene.daemon.take().expect("a daemon runs").stop(), Some(0));
    for link in std::fs::read_dir(scene.setup.pins_of("web").join("links")).expect("list the links") {
        let link = link.expect("read a directory entry").path();
        if link.to_string_lossy().contains("sock_release") {
            stage::sys::remove_link(&link);
        }
    }
    for socket in &sockets[2..5] {
        probe.close(*socket);
    }
    scene.daemon = Some(Daemon::start_again(&scene.setup));
    // Two of the closed sockets were also connected, and one was not.
    eventually("the flows of closed sockets are ended", || scene.setup.active(), |active| *active == 8);
    look(|| (scene.sum(|backend| backend.reclaimed), scene.entries())).becomes((8, 3));
    for socket in [sockets[0], sockets[1], sockets[5]] {
        probe.close(socket);
    }
    scene.all_gone();
}
