//! Verdicts by report. For each report id, an array that all clients of the host share contains the
//! time until which a backend is a lame duck. If another backend is usable, no connect goes to a
//! lame duck. Here each test itself stores these times, and the report ids of the backends.

use std::collections::BTreeMap;

use aya::maps::IterableMap as _;
use lb_common::abi::host::{Sender, SenderName, Verdict};
use lb_common::abi::{self, Policy, Reason, Service, map};
use lb_common::net::{Address, Be16, IPPROTO_TCP};
use rustix::process::Signal;
use rustix::time::{ClockId, clock_gettime};
use stage::daemon::finish;
use stage::fixture::{Fixture, SERVICE, config};
use stage::maps::{Raw, array, hash};
use stage::udp::{self, Scene, backend_of};
use stage::{Cgroup, Family, Setup, eventually, look, replace};

use crate::backends::ejection::{THREE, dial, start};

/// Report ids above those that a daemon assigns to a few backends.
const IDS: [u32; 3] = [1_000, 65_535, 7];

/// A time after the end of any test.
pub fn for_an_hour() -> u64 {
    monotonic_ns() + 3_600_000_000_000
}

/// A time in the past of the programs' clock, which lags behind by a few kernel ticks of at most 10
/// ms.
fn just_over() -> u64 {
    monotonic_ns() - 100_000_000
}

fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    u64::try_from(now.tv_sec * 1_000_000_000 + now.tv_nsec).expect("the clock is positive")
}

/// Stores the report id of the backend at an address, in all services of a client. No flow may
/// begin or end meanwhile, because this stores whole rows, with the numbers of their flows.
pub fn identify(setup: &Setup, client: &str, address: &str, id: u32) {
    let mut backends = array::<abi::Backend>(&setup.map(client, map::BACKENDS));
    let address = stage::address(address);
    let (ip, port) = (Address::from(address.ip()), Be16::from_host(address.port()));
    let mut found = 0;
    for slot in 0..64 {
        let Raw(mut row) = backends.get(&slot, 0).expect("read the row of the slot");
        if (row.endpoint.address, row.endpoint.port) == (ip, port) {
            row.endpoint.report = u16::try_from(id).expect("report ids have 16 bits");
            backends.set(slot, Raw(row), 0).expect("store the row");
            found += 1;
        }
    }
    assert!(found > 0, "{address} has a slot");
}

/// Stores the time until which the backend with a report id is a lame duck.
pub fn judge(setup: &Setup, id: u32, lame_until_ns: u64) {
    let mut verdicts = array::<Verdict>(&setup.host_map(abi::host::map::VERDICTS));
    verdicts.set(id, Raw(Verdict { lame_until_ns }), 0).expect("store the verdict");
}

/// Three backends with report ids behind a policy that scans, so that programs for all policies are
/// loaded.
fn three(lines: &str) -> Fixture {
    let fixture = start(&THREE, &format!("policy = \"least-loaded\"\n{lines}"));
    for (address, id) in THREE.iter().zip(IDS) {
        identify(&fixture.setup, "web", address, id);
    }
    fixture
}

/// Makes a policy choose for the next connects, as the daemon does when the configuration changes.
fn set_policy(fixture: &Fixture, policy: Policy) {
    let mut services = array::<Service>(&fixture.setup.map("web", map::SERVICES));
    let Raw(mut row) = services.get(&0, 0).expect("read the service's row");
    row.rules.policy = policy as u8;
    services.set(0, Raw(row), 0).expect("store the service");
}

/// The names of the backends that got connects.
fn names(counts: &BTreeMap<String, u32>) -> Vec<&str> {
    counts.keys().map(String::as_str).collect()
}

/// `lb-user` has the same as a script, for every lame duck and with the whole path of a report.
#[test]
fn every_policy_skips_a_lame_duck_from_the_next_connect_on() {
    let mut fixture = three("");
    let mut probe = fixture.probe();
    for id in &IDS[..2] {
        judge(&fixture.setup, *id, for_an_hour());
    }
    let flows: Vec<_> = (0..12).map(|_| probe.dial(SERVICE)).collect();
    assert!(flows.iter().all(|dialled| dialled.name == "b3"));
    let text = fixture.setup.run(&["flows", "--json"]).stdout;
    let text = String::from_utf8(text).expect("the output is UTF-8");
    let diverted = text.matches(&format!("\"reason\": \"{}\"", Reason::Diverted.name())).count();
    // A connect is diverted if the policy has chosen a lame duck. Least-loaded chooses the lame
    // duck whenever it has fewer flows than the other backends.
    assert!((6..=12).contains(&diverted), "{diverted} connects were diverted: {text}");
    for dialled in flows {
        probe.close(dialled.socket);
    }
    for id in &IDS[..2] {
        judge(&fixture.setup, *id, 0);
    }
    fixture.daemon.take().expect("the daemon runs").kill();
    for policy in Policy::ALL {
        set_policy(&fixture, policy);
        judge(&fixture.setup, IDS[1], for_an_hour());
        let counts = dial(&mut probe, 60);
        assert_eq!(names(&counts), ["b1", "b3"], "{policy:?}: {counts:?}");
        // For a v4-mapped IPv6 socket, the lame duck is not chosen either.
        for _ in 0..6 {
            let dialled = probe.dial("[::ffff:10.96.0.10]:80");
            assert!(dialled.name != "b2", "{policy:?}");
            probe.close(dialled.socket);
        }
        // The verdict expires.
        judge(&fixture.setup, IDS[1], just_over());
        assert_eq!(names(&dial(&mut probe, 60)), ["b1", "b2", "b3"], "{policy:?}");
    }
    let outcomes = fixture.setup.service().outcomes;
    let total = 12 + 5 * (60 + 6 + 60);
    assert_eq!((outcomes["forwarded"], outcomes.values().sum::<u64>()), (total, total), "{outcomes:?}");
}

#[test]
fn host_maps_outlive_the_daemon_until_the_last_client_and_services_without_reports_ignore_verdicts() {
    let mut fixture = three("");
    let id_of_map = |setup: &Setup| {
        let map = array::<Verdict>(&setup.host_map(abi::host::map::VERDICTS));
        map.map().info().expect("read the map's description").id()
    };
    let name = SenderName {
        address: Address::from(stage::address(THREE[0]).ip()),
        port: Be16::from_host(8001),
        protocol: IPPROTO_TCP,
        _reserved: 0,
    };
    let sender = Sender { id: IDS[0], ..bytemuck::Zeroable::zeroed() };
    let senders = |setup: &Setup| hash::<SenderName, Sender>(&setup.host_map(abi::host::map::SENDERS));
    senders(&fixture.setup).insert(Raw(name), Raw(sender), 0).expect("register the name");
    judge(&fixture.setup, IDS[0], for_an_hour());
    let before = id_of_map(&fixture.setup);
    fixture.daemon.take().expect("the daemon runs").kill();
    fixture.start();
    assert_eq!(id_of_map(&fixture.setup), before);
    assert_eq!(senders(&fixture.setup).get(&Raw(name), 0).expect("the backend is registered").0, sender);
    // The verdict on b1 is in force, but the service does not request reports: an operator may have
    // removed this setting while no daemon ran. The module `reports` tests a service that requests
    // reports.
    let mut probe = fixture.probe();
    eventually(
        "the verdict has no effect any more",
        || dial(&mut probe, 30),
        |counts| names(counts) == ["b1", "b2", "b3"],
    );
    let text = config(
        &fixture.cgroup,
        r#"{ file = "users.toml" }"#,
        "subset = { size = 20 }\non_no_backend = \"ECONNREFUSED\"",
    );
    replace(&fixture.setup.folder.join("socklb.toml"), &text);
    fixture.daemon().signal(Signal::HUP);
    let errno = || {
        let services = array::<Service>(&fixture.setup.map("web", map::SERVICES));
        services.get(&0, 0).expect("read the service's row").0.errno
    };
    eventually("the reload is in the kernel", errno, |errno| *errno == 111);
    assert_eq!(senders(&fixture.setup).get(&Raw(name), 0).expect("the backend is registered").0, sender);
    drop(probe);
    host_maps_are_removed_with_the_last_client(&mut fixture, &text);
}

/// Adds a second client to this configuration, and then detaches both.
#[track_caller]
fn host_maps_are_removed_with_the_last_client(fixture: &mut Fixture, text: &str) {
    let other = Cgroup::new();
    let mail = format!("[[client]]\njob = \"mail\"\ncgroup = \"{}\"\n", other.relative().display());
    replace(&fixture.setup.folder.join("socklb.toml"), &(mail + text));
    fixture.daemon().signal(Signal::HUP);
    eventually("both clients are attached", || fixture.setup.status().clients.len(), |count| *count == 2);
    look(|| fixture.setup.faults()).becomes(Vec::<String>::new());
    fixture.stop();
    let setup = &fixture.setup;
    let host = setup.host_map(abi::host::map::VERDICTS).parent().expect("the pin has a directory").to_owned();
    assert!(finish(&mut setup.socklb(&["detach", "web"])).status.success());
    assert!(host.is_dir(), "the other client needs the host's maps");
    assert!(finish(&mut setup.socklb(&["detach", "--all"])).status.success());
    assert!(!host.exists() && !setup.pins.exists());
    // This also works if no client was ever attached, or if a start was interrupted.
    std::fs::create_dir_all(&host).expect("make the directory");
    assert!(finish(&mut setup.socklb(&["detach", "--all"])).status.success());
    assert!(!setup.pins.exists());
}

#[test]
fn unconnected_sockets_are_diverted_from_a_lame_duck() {
    let scene = Scene::new(1, 3);
    for n in 1..=3 {
        identify(&scene.setup, "web", &backend_of(0, n), IDS[usize::from(n) - 1]);
    }
    judge(&scene.setup, IDS[0], for_an_hour());
    judge(&scene.setup, IDS[1], for_an_hour());
    let mut probe = scene.probe();
    for family in [Family::V4, Family::V6] {
        let service = if family == Family::V4 { udp::SERVICE } else { udp::MAPPED };
        for _ in 0..4 {
            let addressed = probe.open_datagram(family);
            assert_eq!(probe.query(addressed, service), "s0b3");
            let connected = probe.open_datagram(family);
            probe.connect_datagram(connected, service);
            assert_eq!(probe.query_connected(connected, service), "s0b3");
            // A connected socket continues with its backend. Datagrams of an unconnected socket go
            // to another backend, as for an endpoint that the list marks as a lame duck.
            judge(&scene.setup, IDS[2], for_an_hour());
            judge(&scene.setup, IDS[1], 0);
            assert_eq!(probe.query(addressed, service), "s0b2");
            assert_eq!(probe.query_connected(connected, service), "s0b3");
            judge(&scene.setup, IDS[1], for_an_hour());
            judge(&scene.setup, IDS[2], 0);
            probe.close(addressed);
            probe.close(connected);
        }
    }
    scene.all_gone();
}
