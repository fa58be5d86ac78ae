//! Services over UDP: connected sockets, and sockets that send each datagram to the service's
//! address. A socket receives answers from the service's address, even if backends change.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use lb_common::abi::{Rules, Service, map};
use lb_common::ticks::TICK_LOG2;
use stage::maps::array;
use stage::protocol::Received;
use stage::udp::{MAPPED, SERVICE, Scene, address_of, backend_of};
use stage::{DatagramBackend, Family, Probe, SocketId, address, eventually, look};

#[test]
fn a_socket_stays_with_its_backend_unless_it_connects_again() {
    let scene = Scene::new(1, 3);
    let mut probe = scene.probe();
    let socket = probe.open_datagram(Family::V4);
    let mut names = BTreeSet::new();
    for _ in 0..3 {
        probe.connect_datagram(socket, SERVICE);
        let name = probe.query_connected(socket, SERVICE);
        assert_eq!(probe.query_connected(socket, SERVICE), name);
        // A datagram that names the same address belongs to the same flow, because the socket
        // receives from no other address.
        assert_eq!(probe.query(socket, SERVICE), name);
        // There is one socket, so one flow is active.
        scene.setup.active_becomes(1);
        names.insert(name);
    }
    assert_eq!(names.len(), 3, "each connect chooses separately");
    look(|| (scene.outcome(0, "forwarded"), scene.outcome(0, "reused"))).becomes((3, 3));
    // A connect to an address that is no service ends the flow.
    probe.connect_datagram(socket, &backend_of(0, 2));
    assert_eq!(probe.query_connected(socket, &backend_of(0, 2)), "s0b2");
    scene.all_gone();
    probe.close(socket);
    scene.all_gone();
    // From here on, no socket connects.
    let sockets: Vec<SocketId> = (0..6).map(|_| probe.open_datagram(Family::V4)).collect();
    let first: Vec<String> = sockets.iter().map(|socket| probe.query(*socket, SERVICE)).collect();
    assert_eq!(first.iter().collect::<BTreeSet<_>>().len(), 3, "sockets are spread: {first:?}");
    for _ in 0..3 {
        let again: Vec<String> = sockets.iter().map(|socket| probe.query(*socket, SERVICE)).collect();
        assert_eq!(again, first);
    }
    // Each datagram is counted as one outcome: 6 and 18 more than before.
    look(|| (scene.outcome(0, "forwarded"), scene.outcome(0, "reused"))).becomes((9, 21));
    scene.setup.active_becomes(6);
    look(|| scene.entries()).becomes(6);
    for socket in sockets {
        probe.close(socket);
    }
    scene.all_gone();
    look(|| scene.sum(|backend| backend.endings["closed"])).becomes(9);
}

/// Datagrams of a v4-mapped socket leave through the hook of one address family, and answers arrive
/// through the hook of the other family.
#[test]
fn a_v4_mapped_socket_reaches_an_ipv4_service() {
    let scene = Scene::new(2, 2);
    let mut probe = scene.probe();
    let connected = probe.open_datagram(Family::V6);
    probe.connect_datagram(connected, MAPPED);
    let name = probe.query_connected(connected, MAPPED);
    assert_eq!(probe.query_connected(connected, MAPPED), name);
    let unconnected = probe.open_datagram(Family::V6);
    let name = probe.query(unconnected, MAPPED);
    assert_eq!(probe.query(unconnected, MAPPED), name);
    assert!(probe.query(unconnected, "[::ffff:10.96.0.11]:53").starts_with("s1"));
    scene.setup.active_becomes(3);
    for address in ["[::ffff:127.0.0.1]:8101", "[::ffff:127.0.0.1]:8102"] {
        let direct = probe.open_datagram(Family::V6);
        probe.query(direct, address);
    }
    scene.setup.active_becomes(3);
    probe.kill();
    scene.all_gone();
}

/// A socket that uses two services, and the values that must not change when its backend of the
/// first service becomes unusable.
struct Concerned {
    scene: Scene,
    probe: Probe,
    socket: SocketId,
    /// The socket's own address.
    local: SocketAddr,
    /// The name that answers for the second service.
    other: String,
    /// A socket with another backend of the first service.
    bystander: SocketId,
    /// The numbers of the first service's backends: the socket's, the bystander's, and the third.
    backends: [u16; 3],
}

impl Concerned {
    fn new() -> Self {
        let scene = Scene::new(2, 3);
        let mut probe = scene.probe();
        let [socket, bystander] = [probe.open_datagram(Family::V4), probe.open_datagram(Family::V4)];
        let other = probe.query(socket, &address_of(1));
        let local = probe.local_address(socket);
        let number = |name: String| {
            name.strip_prefix("s0b").and_then(|n| n.parse().ok()).expect("the name has the form s0bN")
        };
        let [own, beside]: [u16; 2] = [socket, bystander].map(|socket| number(probe.query(socket, SERVICE)));
        assert_ne!(own, beside);
        Self { scene, probe, socket, local, other, bystander, backends: [own, beside, 6 - own - beside] }
    }

    /// Makes the socket's backend delay its next answer until [`Concerned::receives_late_answer`].
    fn hold_answer(&mut self) {
        self.scene.backends[usize::from(self.backends[0]) - 1].hold();
        assert_eq!(self.probe.send_datagram(self.socket, SERVICE), Ok(()));
    }

    /// Asserts that the delayed answer comes from the service's address, even if the backend has
    /// left.
    #[track_caller]
    fn receives_late_answer(&mut self) {
        let own = self.backends[0];
        self.scene.backends[usize::from(own) - 1].give();
        let late = Received { name: format!("s0b{own}"), source: address(SERVICE) };
        assert_eq!(self.probe.receive_datagram(self.socket), late);
    }

    /// Replaces the first service's list, and waits until backends have these states.
    #[track_caller]
    fn list(&self, list: &[(u16, &str)], states: &[(u16, &str)]) {
        let list: Vec<_> = list.iter().map(|(n, more)| (backend_of(0, *n), *more)).collect();
        let list: Vec<_> = list.iter().map(|(address, more)| (address.as_str(), *more)).collect();
        self.scene.list(&list);
        let state = |n: u16| self.scene.backend(0, n).state_in_words().to_owned();
        let seen = || states.iter().map(|(n, _)| state(*n)).collect();
        let expected: Vec<&str> = states.iter().map(|(_, state)| *state).collect();
        eventually("the list is in force", seen, |seen: &Vec<String>| *seen == expected);
    }

    #[track_caller]
    fn until_slot_is_free(&self, n: u16) {
        let address = backend_of(0, n);
        let backends = || self.scene.setup.backends("web", "s0");
        eventually("the backend's slot is free", backends, |all| {
            all.iter().all(|backend| backend.address.to_string() != *address)
        });
    }

    /// Asserts that the socket's port, the socket's backend of the second service, and the
    /// bystander's backend are the same as before.
    #[track_caller]
    fn nothing_else_has_changed(&mut self) {
        assert_eq!(self.probe.local_address(self.socket), self.local);
        assert_eq!(self.probe.query(self.socket, &address_of(1)), self.other);
        assert_eq!(self.probe.query(self.bystander, SERVICE), format!("s0b{}", self.backends[1]));
    }
}

#[test]
fn r2_a_flow_moves_when_its_backend_becomes_unusable() {
    let mut concerned = Concerned::new();
    let [own, beside, third] = concerned.backends;
    // Opens one more flow of the socket's backend. Without it, the backend's slot, from which the
    // counts are read, would be freed as soon as the socket's flow moves. Backends are chosen in
    // turn.
    let [passed, holder] =
        [concerned.probe.open_datagram(Family::V4), concerned.probe.open_datagram(Family::V4)];
    concerned.probe.query(passed, SERVICE);
    concerned.probe.close(passed);
    assert_eq!(concerned.probe.query(holder, SERVICE), format!("s0b{own}"));
    concerned.hold_answer();
    let list = [(own, "state = \"lame-duck\""), (beside, "weight = 0"), (third, "")];
    concerned.list(&list, &[(own, "lame-duck"), (beside, "drained")]);
    assert_eq!(concerned.probe.query(concerned.socket, SERVICE), format!("s0b{third}"));
    look(|| concerned.scene.backend(0, own)).has(|left| (left.endings["closed"], left.active), (1, 1));
    concerned.receives_late_answer();
    concerned.probe.close(holder);
    // The bystander has not sent a datagram during these changes.
    concerned.list(&[(own, "weight = 0"), (beside, ""), (third, "")], &[(beside, "healthy")]);
    concerned.nothing_else_has_changed();
    concerned.scene.setup.active_becomes(3);
    concerned.probe.kill();
    concerned.scene.all_gone();
}

#[test]
fn r2_a_flow_moves_when_its_backend_has_left() {
    let mut concerned = Concerned::new();
    let [own, beside, third] = concerned.backends;
    concerned.hold_answer();
    concerned.list(&[(beside, ""), (third, "weight = 0")], &[(own, "leaving")]);
    concerned.until_slot_is_free(third);
    assert_eq!(concerned.probe.query(concerned.socket, SERVICE), format!("s0b{beside}"));
    concerned.until_slot_is_free(own);
    concerned.receives_late_answer();
    concerned.nothing_else_has_changed();
    concerned.scene.setup.active_becomes(3);
    concerned.probe.kill();
    concerned.scene.all_gone();
}

fn make_both_lame_ducks(scene: &Scene) {
    let all = [backend_of(0, 1), backend_of(0, 2)];
    scene.list(&[(&all[0], "state = \"lame-duck\""), (&all[1], "state = \"lame-duck\"")]);
    let states = || [1, 2].map(|n| scene.backend(0, n).state);
    eventually("both backends are lame ducks", states, |states| *states == ["lame-duck", "lame-duck"]);
}

/// If no other backend is usable, the flow remains at its backend, and no datagram starts another
/// flow. If the service has lost all its backends, its flows remain, because their sockets were not
/// directed to another destination.
#[test]
fn flows_stay_if_no_better_backend_exists_and_if_none_exists() {
    let scene = Scene::new(1, 2);
    let mut probe = scene.probe();
    let [socket, connected] = [probe.open_datagram(Family::V4), probe.open_datagram(Family::V4)];
    probe.query(socket, SERVICE);
    make_both_lame_ducks(&scene);
    let name = probe.query(socket, SERVICE);
    let chosen = || scene.sum(|backend| backend.started);
    let before = (chosen(), scene.outcome(0, "reused"));
    for _ in 0..5 {
        assert_eq!(probe.query(socket, SERVICE), name);
    }
    look(|| (chosen(), scene.outcome(0, "reused"))).becomes((before.0, before.1 + 5));
    scene.setup.active_becomes(1);
    // From here on the service has no backend.
    probe.connect_datagram(connected, SERVICE);
    let peer = probe.query_connected(connected, SERVICE);
    let all = [backend_of(0, 1), backend_of(0, 2)];
    scene.list(&[(&all[0], "weight = 0"), (&all[1], "weight = 0")]);
    let refused = stage::kernel::refusal(libc::EHOSTUNREACH);
    let errno = || probe.send_datagram(socket, SERVICE).err();
    eventually("datagrams are refused", errno, |errno| *errno == Some(refused));
    // A failed reconnect leaves the connection unchanged.
    assert_eq!(probe.try_connect_datagram(connected, SERVICE), Err(refused));
    assert_eq!(probe.query_connected(connected, SERVICE), peer);
    scene.setup.active_becomes(2);
    // A backend of weight 0 releases its slot, and so its counts, when its last flow ends.
    scene.list(&[(&all[0], ""), (&all[1], "")]);
    eventually(
        "a datagram can be sent again",
        || probe.send_datagram(socket, SERVICE).is_ok(),
        |is_sent| *is_sent,
    );
    probe.close(socket);
    probe.close(connected);
    scene.all_gone();
}

/// Stores a rebind time that is shorter than the minimum in configurations.
fn rebind_each_tenth_of_a_second(scene: &Scene) {
    let mut services = array::<Service>(&scene.setup.map("web", map::SERVICES));
    let mut service = services.get(&0, 0).expect("read the service's row");
    service.0.rules = Rules { rebind: 100_000_000 >> TICK_LOG2, ..service.0.rules };
    services.set(0, service, 0).expect("store the service's row");
}

/// Opens a socket, and asserts that its flow changes its backend after each rebind time.
#[track_caller]
fn changes_its_backend(scene: &Scene, probe: &mut Probe) -> SocketId {
    let socket = probe.open_datagram(Family::V4);
    let first = probe.query(socket, SERVICE);
    assert_eq!(probe.query(socket, SERVICE), first);
    rebind_each_tenth_of_a_second(scene);
    let mut names = BTreeSet::new();
    eventually(
        "all backends are used in turn",
        || {
            names.insert(probe.query(socket, SERVICE));
            names.len()
        },
        |names| *names == 3,
    );
    let reused = scene.outcome(0, "reused");
    assert!(reused > 1, "datagrams reuse the backend of the previous datagram: {reused}");
    scene.setup.active_becomes(1);
    socket
}

#[test]
fn a_flow_changes_its_backend_after_the_rebind_time_or_continues_if_it_cannot() {
    // Without a limit, the programs of the client contain no scans of backends.
    let scene = Scene::new(1, 3);
    let mut probe = scene.probe();
    let socket = changes_its_backend(&scene, &mut probe);
    probe.close(socket);
    scene.all_gone();
    drop((probe, scene));
    // With this limit, the flow changes its backend although that backend has room.
    let scene = Scene::with(1, 3, "active_limit = 2\noverflow = \"refuse\"\n");
    let mut probe = scene.probe();
    let socket = changes_its_backend(&scene, &mut probe);
    // From here on every backend is at its limit.
    let others = [(); 5].map(|()| probe.open_datagram(Family::V4));
    for other in others {
        probe.query(other, SERVICE);
    }
    scene.setup.active_becomes(6);
    let own = probe.query(socket, SERVICE);
    let begin = Instant::now();
    let age = || {
        assert_eq!(probe.query(socket, SERVICE), own);
        begin.elapsed()
    };
    eventually("queries have continued for three rebind times", age, |age| *age > Duration::from_millis(300));
    // Meanwhile, datagrams of another socket are refused.
    let refused = stage::kernel::refusal(libc::EHOSTUNREACH);
    let late = probe.open_datagram(Family::V4);
    assert_eq!(probe.send_datagram(late, SERVICE), Err(refused));
    scene.setup.active_becomes(6);
    for socket in others.into_iter().chain([socket, late]) {
        probe.close(socket);
    }
    scene.all_gone();
}

#[test]
fn other_destinations_are_not_rewritten() {
    let scene = Scene::new(1, 2);
    let other = DatagramBackend::start("other", "127.0.0.1:9000");
    let _six = DatagramBackend::start("six", "[::1]:9000");
    let mut probe = scene.probe();
    let (four, six) = (probe.open_datagram(Family::V4), probe.open_datagram(Family::V6));
    assert_eq!(probe.query(four, "127.0.0.1:9000"), "other");
    assert_eq!(probe.query(six, "[::1]:9000"), "six");
    assert_eq!(probe.query(six, "[::ffff:127.0.0.1]:9000"), "other");
    // A backend that is addressed directly answers from its own address, and the socket has no
    // flow.
    assert_eq!(probe.query(four, &backend_of(0, 1)), "s0b1");
    assert_eq!(look(|| scene.setup.active()).now("a datagram is counted before it is sent"), 0);
    // The service's address with another port is not the service.
    assert_eq!(probe.send_datagram(four, "10.96.0.10:54"), Err(libc::ENETUNREACH));
    look(|| scene.setup.client().not_a_service).becomes(5);
    assert_eq!(look(|| scene.entries()).now("a datagram is counted before it is sent"), 0);
    drop(other);
}
