//! Tests for bugs of other balancers. Each test has the name of the effect, and the number of the
//! bug in docs/design/bugs-of-others.md.
//!
//! R10 (cgroup namespaces), R25 (the verifier) and R29 (services that restart) have longer tests
//! elsewhere; the tests in this file show the bugs themselves. R9 (a cgroup that is created again)
//! and R24 (daemons that stop and start) are in the module `lifecycle`.

use std::path::PathBuf;

use lb_common::abi::{Service, map};
use lb_view::diagnosis::{Diagnosis, Severity};
use stage::maps::array;
use stage::{Backend, Cgroup, Daemon, Probe, Setup, Stage, eventually, look};

use stage::fixture::{Fixture, SERVICE, config};

/// The bug: if a map was full, the connect failed with ENOMEM.
#[test]
fn r6_full_maps_refuse_no_connect_and_are_reported() {
    let mut fixture = Fixture::without_daemon();
    let limits = "[limits]\nflow_records = 64\nslots = 64\nschedule_entries = 2048\n";
    let text = config(&fixture.cgroup, r#"{ file = "users.toml" }"#, "") + limits;
    fixture.setup.write("socklb.toml", &text);
    // The list fills every slot: three backends that answer, and others with weight 0.
    let mut list: Vec<String> = (1..=3).map(|n| format!("127.0.0.1:800{n}")).collect();
    list.extend((0..61).map(|n| format!("127.0.1.{n}:9")));
    let entries: Vec<(&str, &str)> =
        list.iter().enumerate().map(|(n, a)| (a.as_str(), if n < 3 { "" } else { "weight = 0" })).collect();
    fixture.write_endpoints(&entries);
    fixture.start();
    let mut probe = fixture.probe();
    // The doctor reports nearly full maps before they are full. The overflow table has room for the
    // same number of flows. Without fetching atomics all flows are in the overflow table.
    let looks = if stage::kernel::FETCHING_ATOMICS.is_here() {
        [
            (60, Severity::Ok, "128 flow_records (64, and the same number in the overflow table)"),
            (118, Severity::Warning, "128 flow_records"),
        ]
    } else {
        [(50, Severity::Ok, "64 flow_records"), (60, Severity::Warning, "64 flow_records")]
    };
    let config = fixture.setup.folder.join("socklb.toml").display().to_string();
    for (flows, expected, room) in looks {
        // A flow for which both tables have no room is not counted.
        let open = || {
            probe.dial(SERVICE);
            fixture.setup.active()
        };
        eventually("so many flows are open", open, |active| *active == flows);
        let Diagnosis { findings, .. } = fixture.setup.document(&["doctor", "--config", &config]);
        let limits: Vec<_> = findings.iter().filter(|finding| finding.check == "limits").collect();
        let text = format!("{flows} of {room}");
        let named = limits.iter().any(|finding| finding.state == expected && finding.text.contains(&text));
        assert!(named, "{limits:?}");
    }
    for _ in 0..200 {
        probe.dial(SERVICE);
    }
    let outcomes = fixture.setup.service().outcomes;
    assert!(
        outcomes["untracked"] > 0,
        "connects are untracked when flow table and overflow table are full: {outcomes:?}"
    );
    // A list that needs more slots than the client has is refused and counted, and the previous
    // list stays in force.
    let more: Vec<String> = (0..70).map(|n| format!("127.0.2.{n}:9")).collect();
    let more: Vec<(&str, &str)> = more.iter().map(|address| (address.as_str(), "")).collect();
    fixture.write_endpoints(&more);
    let source = || fixture.setup.source();
    eventually("the refused list is counted", source, |source| {
        source.failures == 1 && source.error.is_some()
    });
    assert_eq!(fixture.setup.run(&["status"]).status.code(), Some(3));
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3);
}

/// The bug: of two programs at the same hook, the later one's rewrite went unnoticed.
#[test]
fn r11_neighbouring_programs_are_listed_and_later_rewrites_are_detected() {
    let stage = Stage::new();
    let parent = Cgroup::new();
    let cgroup = parent.child("service");
    let _backends = [Backend::start("ours", "127.0.0.1:8001"), Backend::start("theirs", "127.0.0.1:8002")];
    let other = |name: &str, cgroup: &Cgroup, service: &str| {
        let setup = Setup::new(&stage, name);
        let text = config(cgroup, r#"{ static = ["127.0.0.1:8002"] }"#, "").replace(SERVICE, service);
        Daemon::start(&setup, &text)
    };
    let _before = other("before", &cgroup, "10.96.0.11:80");
    let setup = Setup::new(&stage, "a");
    let daemon = Daemon::start(&setup, &config(&cgroup, r#"{ static = ["127.0.0.1:8001"] }"#, ""));
    let _after = other("after", &cgroup, "10.96.0.12:80");
    let _above = other("above", &parent, "10.96.0.13:80");
    let mut probe = Probe::start(&cgroup);
    // The kernel runs the programs of both balancers.
    assert_eq!(probe.dial(SERVICE).name, "ours");
    for service in ["10.96.0.11:80", "10.96.0.12:80", "10.96.0.13:80"] {
        assert_eq!(probe.dial(service).name, "theirs");
    }
    let listed = || -> Vec<(PathBuf, bool)> {
        let neighbours = setup.client().neighbours.expect("the daemon answers").into_iter();
        let at_connect4 = neighbours.filter(|neighbour| neighbour.hook == "connect4");
        at_connect4.map(|neighbour| (neighbour.cgroup, neighbour.runs_after_ours)).collect()
    };
    let (here, there) = (cgroup.path().to_owned(), parent.path().to_owned());
    look(listed).becomes([(here.clone(), false), (here, true), (there, true)]);
    drop((daemon, _after, _above));
    // A second client dials a service with our backend, and another balancer has this backend as
    // its service. The other balancer's program runs after ours, and determines the destination.
    let setup = Setup::new(&stage, "b");
    let victim = Cgroup::new();
    let _daemon = Daemon::start(&setup, &config(&victim, r#"{ static = ["127.0.0.1:8001"] }"#, ""));
    let _thief = other("thief", &victim, "127.0.0.1:8001");
    let mut probe = Probe::start(&victim);
    let dialled = probe.dial(SERVICE);
    assert_eq!(dialled.name, "theirs");
    probe.close(dialled.socket);
    look(|| setup.backends("web", "users")[0].clone()).has(|backend| backend.diverted, 1);
    look(|| setup.faults().join("\n")).matches("the fault is reported", |faults| {
        faults.contains("another program rewrites destinations after socklb")
    });
    // A flow that goes to its chosen backend is not counted as diverted.
    drop(_thief);
    assert!(
        stage::daemon::finish(&mut Setup::new(&stage, "thief").socklb(&["detach", "--all"])).status.success()
    );
    let dialled = probe.dial(SERVICE);
    assert_eq!(dialled.name, "ours");
    probe.close(dialled.socket);
    look(|| setup.backends("web", "users")[0].diverted).becomes(1);
}

/// The bug: a program that had grown past the verifier's limits loaded with small tables and failed
/// with large ones.
#[test]
fn r25_programs_load_with_the_largest_configuration() {
    let fixture = Fixture::without_daemon();
    let limits = "[limits]\nflow_records = 4194304\nslots = 65535\nschedule_entries = 4194304\n";
    let text = config(&fixture.cgroup, r#"{ file = "users.toml" }"#, "") + limits;
    let _daemon = Daemon::start(&fixture.setup, &text);
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3);
    let services = array::<Service>(&fixture.setup.map("web", map::SERVICES));
    assert_eq!(services.len(), 256);
}
