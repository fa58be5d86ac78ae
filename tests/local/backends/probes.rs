//! TCP probes: a backend that fails its probes gets no connects, even if no connect has
//! failed.

use lb_view::diagnosis::{Diagnosis, Severity};
use stage::fixture::{Fixture, SERVICE, config};
use stage::namespace::{another_network, in_a_network_of_its_own};
use stage::{Backend, Probe, eventually, window};

/// The files of a daemon with these keys of `health`, and more lines for the service.
fn prepare(health: &str, lines: &str) -> Fixture {
    let fixture = Fixture::without_daemon();
    let fast = format!("interval = \"100ms\", timeout = \"{}\", rise = 2, fall = 2", window("1s"));
    let lines = format!("policy = \"round-robin\"\nhealth = {{ {health}, {fast} }}\n{lines}");
    let text = config(&fixture.cgroup, "{ file = \"users.toml\" }", &lines);
    fixture.setup.write("socklb.toml", &text);
    fixture
}

fn state(fixture: &Fixture, address: &str) -> String {
    fixture.setup.backend(address).expect("the backend has a slot").state
}

/// Whether the doctor notes, with a configuration, that probes use another network than the client.
fn is_noted(fixture: &Fixture, file: &str) -> bool {
    let path = fixture.setup.folder.join(file).display().to_string();
    let Diagnosis { findings, .. } = fixture.setup.document(&["doctor", "--config", &path]);
    let text = "tcp and http probes of users may fail although the client's connects succeed";
    findings.iter().any(|finding| {
        finding.check == "probes"
            && finding.state == Severity::Note
            && finding.text.ends_with(text)
            && finding.help.is_some()
    })
}

#[test]
fn connects_refute_a_failed_probe_for_a_client_in_another_network_namespace() {
    let mut fixture = prepare("probe = \"tcp\"", "ejection = { base = \"100ms\" }");
    let address = fixture.backends[0].address().to_string();
    drop(fixture.backends.remove(0));
    fixture.start();
    eventually("the backend is refusing", || state(&fixture, &address), |state| state == "refusing");
    // The doctor notes that such a client exists.
    let elsewhere = Probe::start_with(&fixture.cgroup, in_a_network_of_its_own);
    let unprobed = config(&fixture.cgroup, "{ file = \"users.toml\" }", "");
    fixture.setup.write("unprobed.toml", &unprobed);
    assert_eq!(["socklb.toml", "unprobed.toml"].map(|file| is_noted(&fixture, file)), [true, false]);
    drop(elsewhere);
    another_network(|| {
        let there = ["127.0.0.1:8001", "127.0.0.1:8002", "127.0.0.1:8003"];
        let _there = there.map(|address| Backend::start(address, address));
        let mut client = Probe::start(&fixture.cgroup);
        client.pin(0);
        eventually(
            "the failed probe only ejects the backend",
            || state(&fixture, &address),
            |state| state == "ejected",
        );
        // Some of these connects are trials at the backend that the daemon cannot reach. The first
        // ones may count as foreign, while the daemon has not yet noticed that the client is no
        // longer in the namespace of the process above.
        let dial = || {
            let is_tried = client.dial_many(SERVICE, 30).contains_key(&address);
            (is_tried, state(&fixture, &address))
        };
        eventually("a trial makes the backend healthy", dial, |(is_tried, state)| {
            *is_tried && state == "healthy"
        });
        assert_eq!(client.dial_many(SERVICE, 60).len(), 3);
        let probe =
            fixture.setup.backend(&address).and_then(|backend| backend.probe).expect("the backend is probed");
        assert_eq!(probe.state, "failing");
    });
    // Results from the daemon's own namespace count for a client in the same namespace.
    let _client = fixture.probe();
    eventually("the backend is refusing", || state(&fixture, &address), |state| state == "refusing");
}

/// A connect without a route fails at once, with an error that depends on the kind of the route.
#[test]
fn a_backend_without_a_route_is_refusing() {
    // From here on, this thread is in the fixture's network namespace.
    let mut fixture = prepare("probe = \"tcp\"", "ejection = \"off\"");
    fixture.start();
    let kinds = ["blackhole", "prohibit", "unreachable"];
    let network = |at: usize| format!("10.99.{at}.0/24");
    for (at, kind) in kinds.iter().enumerate() {
        let mut ip = std::process::Command::new("ip");
        let status = ip.args(["route", "add", kind, &network(at)]).status().expect("ip");
        assert!(status.success(), "{kind}: {status}");
    }
    let lost = [0, 1, 2].map(|at| format!("10.99.{at}.1:80"));
    let list: Vec<(&str, &str)> =
        ["127.0.0.1:8001"].into_iter().chain(lost.iter().map(|one| &**one)).map(|one| (one, "")).collect();
    fixture.write_endpoints(&list);
    for address in &lost {
        let state = || fixture.setup.backend(address).map(|backend| backend.state);
        eventually("the backend is refusing", state, |state| state.as_deref() == Some("refusing"));
    }
    assert!(fixture.probe().dial_many(SERVICE, 60).keys().eq(["b1"]));
}
