//! Client tasks that a new configuration moves while the daemon runs: each client is balanced
//! without interruption.

use stage::{Cgroup, Probe, eventually, replace};

use stage::fixture::{Fixture, SERVICE, config};

/// The configuration of two clients, each with its job and its cgroup, and of a daemon that logs
/// JSON.
fn two_clients(fixture: &Fixture, cgroups: [&Cgroup; 2]) -> String {
    let json = "[daemon]\nlog_format = \"json\"\n";
    client("one", cgroups[0]) + &client("two", cgroups[1]) + &service(fixture) + json
}

fn client(job: &str, cgroup: &Cgroup) -> String {
    format!("[[client]]\njob = \"{job}\"\ncgroup = \"{}\"\n", cgroup.relative().display())
}

/// The service of the fixture.
fn service(fixture: &Fixture) -> String {
    let text = config(&fixture.cgroup, r#"{ file = "users.toml" }"#, "");
    text[text.find("[[service]]").expect("a service")..].to_owned()
}

/// Here the kernel attaches both clients' programs to each cgroup, while processes dial. `lb-user`
/// has the steps of the daemon as a script with the same name.
#[test]
fn clients_that_swap_cgroups_are_always_balanced() {
    let mut fixture = Fixture::without_daemon();
    let other = Cgroup::new();
    let there = |fixture: &Fixture| two_clients(fixture, [&fixture.cgroup, &other]);
    let back = |fixture: &Fixture| two_clients(fixture, [&other, &fixture.cgroup]);
    fixture.setup.write("socklb.toml", &there(&fixture));
    fixture.start();
    let mut busy = [fixture.probe(), Probe::start(&other)];
    for probe in &mut busy {
        probe.start_dialling(SERVICE);
    }
    for round in 0..2 {
        replace(
            &fixture.setup.folder.join("socklb.toml"),
            &if round % 2 == 0 { back(&fixture) } else { there(&fixture) },
        );
        let first = if round % 2 == 0 { other.id() } else { fixture.cgroup.id() };
        let attached = || fixture.setup.status().clients.first().and_then(|client| client.cgroup_id);
        eventually("the clients have exchanged their cgroups", attached, |id| *id == Some(first));
    }
    for probe in &mut busy {
        let counts = probe.stop_dialling();
        assert!(counts.keys().all(|name| name.starts_with('b')), "{counts:?}");
    }
    let log = fixture.daemon().log();
    let message = |line: &str| {
        serde_json::from_str::<serde_json::Value>(line).expect("a line of the log is JSON")["message"].clone()
    };
    assert!(log.lines().map(message).all(|message| message.is_string()), "{log}");
}
