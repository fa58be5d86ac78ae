//! Both address families, v4-mapped sockets, getpeername, and addresses without a service.

use std::collections::BTreeSet;

use stage::{Backend, Cgroup, Daemon, DatagramBackend, Family, Probe, Setup, Stage, address, look};

use stage::fixture::{Fixture, SERVICE, config};

const SERVICE6: &str = "[fd00:96::10]:80";

#[test]
fn a_process_sees_the_address_it_dialled_and_other_destinations_are_not_rewritten() {
    let fixture = Fixture::new();
    let mut probe = fixture.probe();
    // A v4-mapped socket is treated like an IPv4 socket.
    for service in [SERVICE, "[::ffff:10.96.0.10]:80"] {
        let dialled = probe.dial(service);
        assert!(["b1", "b2", "b3"].contains(&dialled.name.as_str()), "{dialled:?}");
        assert_eq!(dialled.peer, address(service));
        fixture.setup.active_becomes(1);
        probe.close(dialled.socket);
        fixture.setup.active_becomes(0);
    }
    // An accepted socket in the cgroup retains its peer.
    let mut server = fixture.probe();
    let listener = server.listen("127.0.0.1:9010");
    let client = std::net::TcpStream::connect("127.0.0.1:9010").expect("connect from outside the cgroup");
    let here = client.local_addr().expect("the socket has an address");
    assert_eq!(server.accept(listener), here);
    drop(server);
    let other = Backend::start("other", "127.0.0.1:9000");
    let six = Backend::start("six", "[::1]:9000");
    for (direct, backend) in
        [("127.0.0.1:9000", &other), ("[::1]:9000", &six), ("[::ffff:127.0.0.1]:9000", &other)]
    {
        let dialled = probe.dial(direct);
        assert_eq!((dialled.name.as_str(), dialled.peer), (backend.name(), address(direct)));
    }
    // A direct connection to a backend is no flow of the service, and getpeername returns the
    // backend's address.
    let direct = probe.dial("127.0.0.1:8001");
    assert_eq!((direct.name.as_str(), direct.peer), ("b1", address("127.0.0.1:8001")));
    // The service's address with another port or protocol is not the service, so the connect fails.
    assert_eq!(probe.try_dial("10.96.0.10:81").map(|dialled| dialled.name), Err(libc::ENETUNREACH));
    let datagrams = [probe.open_datagram(Family::V4), probe.open_datagram(Family::V4)];
    assert_eq!(probe.try_connect_datagram(datagrams[0], "10.96.0.10:80"), Err(libc::ENETUNREACH));
    probe.connect_datagram(datagrams[1], "127.0.0.1:9000");
    // Four dials, one failed dial and two datagram sockets. No more connects were balanced.
    let client = look(|| fixture.setup.client()).has(|client| client.not_a_service, 7);
    assert_eq!(client.services[0].outcomes["forwarded"], 2);
    assert_eq!(look(|| fixture.setup.active()).now("a connect is counted before it returns"), 0);
}

#[test]
fn ipv6_is_balanced_like_ipv4_over_tcp_and_udp() {
    const DATAGRAMS6: &str = "[fd00:96::10]:53";
    let stage = Stage::new();
    let cgroup = Cgroup::new();
    let setup = Setup::new(&stage, "a");
    let _backends = [Backend::start("six1", "[::1]:8001"), Backend::start("six2", "[::1]:8002")];
    let _datagram_backends =
        [DatagramBackend::start("six1", "[::1]:8101"), DatagramBackend::start("six2", "[::1]:8102")];
    let text = config(&cgroup, r#"{ static = ["[::1]:8001", "[::1]:8002"] }"#, "").replace(SERVICE, SERVICE6);
    let datagrams = format!(
        "[[service]]\nname = \"datagrams\"\naddress = \"{DATAGRAMS6}\"\nprotocol = \"udp\"\n\
         backends = {{ static = [\"[::1]:8101\", \"[::1]:8102\"] }}\n"
    );
    let _daemon = Daemon::start(&setup, &(text + &datagrams));
    let mut probe = Probe::start(&cgroup);
    probe.pin(0);
    let dialled = probe.dial(SERVICE6);
    assert_eq!(dialled.peer, address(SERVICE6));
    probe.close(dialled.socket);
    let counts = probe.dial_many(SERVICE6, 1024);
    assert_eq!(counts, [("six1".to_owned(), 512), ("six2".to_owned(), 512)].into());
    setup.active_becomes(0);
    let mut names = BTreeSet::new();
    for _ in 0..2 {
        let socket = probe.open_datagram(Family::V6);
        let name = probe.query(socket, DATAGRAMS6);
        assert_eq!(probe.query(socket, DATAGRAMS6), name);
        names.insert(name);
    }
    for _ in 0..2 {
        let socket = probe.open_datagram(Family::V6);
        probe.connect_datagram(socket, DATAGRAMS6);
        probe.query_connected(socket, DATAGRAMS6);
    }
    assert_eq!(names.len(), 2, "{names:?}");
    setup.active_becomes(4);
    probe.kill();
    setup.active_becomes(0);
}
