//! Services over UDP: sockets that are connected, and sockets that name the service with each datagram. Whatever becomes of
//! the backends, a socket hears the service's address.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use lb_common::abi::{Rules, Service, map};
use lb_common::ticks::TICK_LOG2;
use stage::maps::array;
use stage::protocol::Received;
use stage::udp::{MAPPED, SERVICE, Scene, address_of, backend_of};
use stage::{Cgroup, Daemon, DatagramBackend, Family, Probe, Setup, SocketId, Stage, address, eventually};

#[test]
fn a_connected_socket_stays_with_its_backend_until_it_connects_again() {
    let scene = Scene::new(1, 3);
    let mut probe = scene.probe();
    let socket = probe.open_datagram(Family::V4);
    let mut names = BTreeSet::new();
    for _ in 0..3 {
        probe.connect_datagram(socket, SERVICE);
        let name = probe.query_connected(socket, SERVICE);
        assert_eq!(probe.query_connected(socket, SERVICE), name);
        // The same address said with the datagram is the same flow: nobody else is heard on this socket.
        assert_eq!(probe.query(socket, SERVICE), name);
        assert_eq!(scene.setup.active(), 1, "one socket");
        names.insert(name);
    }
    assert_eq!(names.len(), 3, "each connect is a choice of its own");
    assert_eq!((scene.outcome(0, "forwarded"), scene.outcome(0, "reused")), (3, 3));
    // What is no service ends the flow.
    probe.connect_datagram(socket, &backend_of(0, 2));
    assert_eq!(probe.query_connected(socket, &backend_of(0, 2)), "s0b2");
    scene.all_gone();
    probe.close(socket);
    scene.all_gone();
}

#[test]
fn datagrams_of_a_socket_go_to_one_backend() {
    let scene = Scene::new(1, 3);
    let mut probe = scene.probe();
    let sockets: Vec<SocketId> = (0..6).map(|_| probe.open_datagram(Family::V4)).collect();
    let first: Vec<String> = sockets.iter().map(|socket| probe.query(*socket, SERVICE)).collect();
    assert_eq!(first.iter().collect::<BTreeSet<_>>().len(), 3, "sockets are spread: {first:?}");
    for _ in 0..3 {
        let again: Vec<String> = sockets.iter().map(|socket| probe.query(*socket, SERVICE)).collect();
        assert_eq!(again, first);
    }
    assert_eq!((scene.outcome(0, "forwarded"), scene.outcome(0, "reused")), (6, 18), "one outcome each");
    assert_eq!((scene.setup.active(), scene.entries()), (6, 6));
    for socket in sockets {
        probe.close(socket);
    }
    scene.all_gone();
    assert_eq!(scene.sum(|backend| backend["endings"]["closed"].as_u64().expect("a count")), 6);
}

#[test]
fn one_socket_talks_to_several_services() {
    let scene = Scene::new(8, 1);
    let mut probe = scene.probe();
    let socket = probe.open_datagram(Family::V4);
    for round in 0..2 {
        for service in 0..8 {
            let name = probe.query(socket, &address_of(service));
            assert_eq!(name, format!("s{service}b1"), "round {round}");
        }
    }
    assert_eq!((scene.setup.active(), scene.entries()), (8, 1));
    // All asked first, all heard after: each answer names its own service.
    for service in 0..8 {
        assert_eq!(probe.send_datagram(socket, &address_of(service)), Ok(()));
    }
    let mut heard: Vec<Received> = (0..8).map(|_| probe.receive_datagram(socket)).collect();
    heard.sort_by(|one, other| one.name.cmp(&other.name));
    let expected = (0..8)
        .map(|service| Received { name: format!("s{service}b1"), source: address(&address_of(service)) });
    assert_eq!(heard, expected.collect::<Vec<_>>());
    probe.close(socket);
    scene.all_gone();
}

/// Goes out by the hook of one family and comes back by that of the other.
#[test]
fn a_v4_mapped_socket_asks_an_ipv4_service() {
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
    assert_eq!(scene.setup.active(), 3);
    for address in ["[::ffff:127.0.0.1]:8101", "[::ffff:127.0.0.1]:8102"] {
        let direct = probe.open_datagram(Family::V6);
        probe.query(direct, address);
    }
    assert_eq!(scene.setup.active(), 3);
    probe.kill();
    scene.all_gone();
}

#[test]
fn ipv6_is_balanced_like_ipv4() {
    const SERVICE6: &str = "[fd00:96::10]:53";
    let stage = Stage::new();
    let cgroup = Cgroup::new();
    let setup = Setup::new(&stage, "a");
    let _backends =
        [DatagramBackend::start("six1", "[::1]:8101"), DatagramBackend::start("six2", "[::1]:8102")];
    let text =
        stage::fixture::config(&cgroup, r#"{ static = ["[::1]:8101", "[::1]:8102"] }"#, "protocol = \"udp\"");
    let _daemon = Daemon::start(&setup, &text.replace(stage::fixture::SERVICE, SERVICE6));
    let mut probe = Probe::start(&cgroup);
    probe.pin(0);
    let mut names = BTreeSet::new();
    for _ in 0..2 {
        let socket = probe.open_datagram(Family::V6);
        let name = probe.query(socket, SERVICE6);
        assert_eq!(probe.query(socket, SERVICE6), name);
        names.insert(name);
    }
    for _ in 0..2 {
        let socket = probe.open_datagram(Family::V6);
        probe.connect_datagram(socket, SERVICE6);
        probe.query_connected(socket, SERVICE6);
    }
    assert_eq!(names.len(), 2, "{names:?}");
    assert_eq!(setup.active(), 4);
    probe.kill();
    eventually("active counts return to 0", || setup.active(), |active| *active == 0);
}

/// Another backend instead of one that takes nothing new, or is gone: by the same port, and nothing else changes.
#[test]
fn r2_a_flow_is_chosen_anew_when_its_backend_may_not_be_chosen() {
    let scene = Scene::new(2, 3);
    let mut probe = scene.probe();
    let [socket, bystander] = [probe.open_datagram(Family::V4), probe.open_datagram(Family::V4)];
    let other = probe.query(socket, &address_of(1));
    let port = probe.local_address(socket);
    // It is sent to all three in turn, as one after the other asks for nothing new and then leaves.
    let first = probe.query(socket, SERVICE);
    let beside = probe.query(bystander, SERVICE);
    assert_ne!(first, beside);
    // One more flow of the first, so that its slot, of which the counts are read, is not free as soon as this one leaves it.
    let [third, keeper] = [probe.open_datagram(Family::V4), probe.open_datagram(Family::V4)];
    probe.query(third, SERVICE);
    probe.close(third);
    assert_eq!(probe.query(keeper, SERVICE), first);
    let number =
        |name: &str| name.strip_prefix("s0b").and_then(|n| n.parse::<u16>().ok()).expect("a backend");
    let all = [backend_of(0, 1), backend_of(0, 2), backend_of(0, 3)];
    let list = |more: &[(u16, &str)]| {
        let list: Vec<_> = more.iter().map(|(n, more)| (all[usize::from(*n) - 1].as_str(), *more)).collect();
        scene.list(&list);
    };
    let (one, two) = (number(&first), number(&beside));
    let three = 6 - one - two;
    let backend = |n: u16| &scene.backends[usize::from(n) - 1];
    // While an answer of the first is on its way.
    backend(one).hold();
    assert_eq!(probe.send_datagram(socket, SERVICE), Ok(()));
    list(&[(one, "state = \"lame-duck\""), (two, "weight = 0"), (three, "")]);
    let states = || [one, two].map(|n| scene.backend(0, n)["state"].clone());
    eventually("the list is in force", states, |states| *states == ["lame-duck", "unweighted"]);
    assert_eq!(probe.query(socket, SERVICE), format!("s0b{three}"));
    let first = scene.backend(0, one);
    assert_eq!((&first["endings"]["closed"], &first["active"]), (&1.into(), &1.into()));
    backend(one).give();
    let late = Received { name: format!("s0b{one}"), source: address(SERVICE) };
    assert_eq!(probe.receive_datagram(socket), late);
    probe.close(keeper);
    // The one that has it now leaves, and then its slot is free; and still its late answer is the service's.
    backend(three).hold();
    assert_eq!(probe.send_datagram(socket, SERVICE), Ok(()));
    list(&[(one, "weight = 0"), (two, "")]);
    let state = || scene.backend(0, two)["state"].clone();
    eventually("the list is in force", state, |state| state == "healthy");
    assert_eq!(probe.query(socket, SERVICE), format!("s0b{two}"));
    let has_left = || {
        let gone = |backend: &serde_json::Value| backend["address"] != all[usize::from(three) - 1].as_str();
        scene.setup.backends("web", "s0").iter().all(gone)
    };
    eventually("its slot is free", has_left, |has_left| *has_left);
    backend(three).give();
    let late = Received { name: format!("s0b{three}"), source: address(SERVICE) };
    assert_eq!(probe.receive_datagram(socket), late);
    // What was not concerned is as it was.
    assert_eq!(probe.local_address(socket), port);
    assert_eq!(probe.query(socket, &address_of(1)), other);
    assert_eq!(probe.query(bystander, SERVICE), beside);
    assert_eq!(scene.setup.active(), 3);
    probe.kill();
    scene.all_gone();
}

/// Nobody else may be chosen: the fallback keeps the flow, and no datagram begins another.
#[test]
fn a_flow_stays_where_nobody_is_better() {
    let scene = Scene::new(1, 2);
    let mut probe = scene.probe();
    let socket = probe.open_datagram(Family::V4);
    probe.query(socket, SERVICE);
    let all = [backend_of(0, 1), backend_of(0, 2)];
    scene.list(&[(&all[0], "state = \"lame-duck\""), (&all[1], "state = \"lame-duck\"")]);
    let state = |n| scene.backend(0, n)["state"].clone();
    eventually(
        "both are lame ducks",
        || [state(1), state(2)],
        |states| states.iter().all(|s| s == "lame-duck"),
    );
    let name = probe.query(socket, SERVICE);
    let chosen = || scene.sum(|backend| backend["chosen"].as_u64().expect("a count"));
    let before = (chosen(), scene.outcome(0, "reused"));
    for _ in 0..5 {
        assert_eq!(probe.query(socket, SERVICE), name);
    }
    assert_eq!((chosen(), scene.outcome(0, "reused")), (before.0, before.1 + 5));
    assert_eq!(scene.setup.active(), 1);
    let connected = probe.open_datagram(Family::V4);
    probe.connect_datagram(connected, SERVICE);
    let peer = probe.query_connected(connected, SERVICE);
    // Without any backend a datagram is refused, and the flow stays: it is the last that the socket was directed to.
    scene.list(&[(&all[0], "weight = 0"), (&all[1], "weight = 0")]);
    let refused = stage::kernel::refusal(libc::EHOSTUNREACH);
    let errno = || probe.send_datagram(socket, SERVICE).err();
    eventually("it is refused", errno, |errno| *errno == Some(refused));
    assert_eq!(scene.setup.active(), 2);
    // So does a connection that cannot be replaced.
    assert_eq!(probe.try_connect_datagram(connected, SERVICE), Err(refused));
    assert_eq!(probe.query_connected(connected, SERVICE), peer);
    assert_eq!(scene.setup.active(), 2);
    scene.list(&[(&all[0], ""), (&all[1], "")]);
    let is_sent = || probe.send_datagram(socket, SERVICE).is_ok();
    eventually("it is sent again", is_sent, |is_sent| *is_sent);
    probe.close(socket);
    probe.close(connected);
    scene.all_gone();
}

/// Shorter than a configuration may ask for.
fn rebind_each_tenth_of_a_second(scene: &Scene) {
    let mut services = array::<Service>(&scene.setup.map("web", map::SERVICES));
    let mut service = services.get(&0, 0).expect("the service");
    service.0.rules = Rules { rebind: 100_000_000 >> TICK_LOG2, ..service.0.rules };
    services.set(0, service, 0).expect("set its rules");
}

/// It is itself what keeps its backend at the limit.
#[test]
fn a_flow_that_cannot_be_chosen_anew_goes_on() {
    let scene = Scene::with(1, 1, "active_limit = 1\noverflow = \"refuse\"\n");
    rebind_each_tenth_of_a_second(&scene);
    let mut probe = scene.probe();
    let socket = probe.open_datagram(Family::V4);
    let begin = Instant::now();
    let age = || {
        assert_eq!(probe.query(socket, SERVICE), "s0b1");
        begin.elapsed()
    };
    eventually("three times the age", age, |age| *age > Duration::from_millis(300));
    // Another socket is refused all the while.
    let other = probe.open_datagram(Family::V4);
    let refused = stage::kernel::refusal(libc::EHOSTUNREACH);
    assert_eq!(probe.send_datagram(other, SERVICE), Err(refused));
    assert_eq!(scene.setup.active(), 1);
    probe.close(socket);
    probe.close(other);
    scene.all_gone();
}

#[test]
fn a_flow_is_chosen_anew_after_a_while_if_that_is_asked_for() {
    let scene = Scene::new(1, 3);
    let mut probe = scene.probe();
    let socket = probe.open_datagram(Family::V4);
    let first = probe.query(socket, SERVICE);
    assert_eq!(probe.query(socket, SERVICE), first);
    rebind_each_tenth_of_a_second(&scene);
    let mut names = BTreeSet::new();
    eventually(
        "all have their turn",
        || {
            names.insert(probe.query(socket, SERVICE));
            names.len()
        },
        |names| *names == 3,
    );
    let reused = scene.outcome(0, "reused");
    assert!(reused > 1, "most datagrams go where the one before went: {reused}");
    assert_eq!(scene.setup.active(), 1);
    probe.close(socket);
    scene.all_gone();
}

#[test]
fn what_is_no_service_is_untouched() {
    let scene = Scene::new(1, 2);
    let other = DatagramBackend::start("other", "127.0.0.1:9000");
    let _six = DatagramBackend::start("six", "[::1]:9000");
    let mut probe = scene.probe();
    let (four, six) = (probe.open_datagram(Family::V4), probe.open_datagram(Family::V6));
    assert_eq!(probe.query(four, "127.0.0.1:9000"), "other");
    assert_eq!(probe.query(six, "[::1]:9000"), "six");
    assert_eq!(probe.query(six, "[::ffff:127.0.0.1]:9000"), "other");
    // A backend that is asked directly answers as itself: this socket is no flow of it.
    assert_eq!(probe.query(four, &backend_of(0, 1)), "s0b1");
    assert_eq!(scene.setup.active(), 0);
    // The service's address with another port is not the service.
    assert_eq!(probe.send_datagram(four, "10.96.0.10:54"), Err(libc::ENETUNREACH));
    assert_eq!(scene.setup.status()["clients"][0]["not_a_service"], 5);
    assert_eq!(scene.entries(), 0);
    drop(other);
}
