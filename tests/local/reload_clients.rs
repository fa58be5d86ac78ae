//! Client tasks that a new configuration adds, removes, moves or renames while the daemon runs:
//! each client is balanced without interruption, and removed clients leave no pins.

use stage::{Cgroup, Daemon, Probe, Setup, eventually, look, replace};

use stage::fixture::{Fixture, SERVICE, config};

/// The fixture's configuration with more lines for the client and the service, and with more
/// sections.
fn text(fixture: &Fixture, client: &str, service: &str, more: &str) -> String {
    let text = config(&fixture.cgroup, r#"{ file = "users.toml" }"#, service);
    text.replacen("\n\n", &format!("\n{client}\n\n"), 1) + more
}

fn write(setup: &Setup, text: &str) {
    replace(&setup.folder.join("socklb.toml"), text);
}

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
        write(&fixture.setup, &if round % 2 == 0 { back(&fixture) } else { there(&fixture) });
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

/// A reload adds 40 clients (in a guest: 5). The event loop must continue during the reload.
#[test]
fn a_reload_that_adds_many_clients_does_not_block_the_loop() {
    let mut fixture = Fixture::without_daemon();
    let limits = "[limits]\nschedule_entries = 32768\nslots = 1024\nflow_records = 8192\n";
    // A guest needs thirty times longer to load programs.
    let more = if stage::in_a_guest() { 5 } else { 40 };
    let cgroups: Vec<Cgroup> = (0..more).map(|_| Cgroup::new()).collect();
    let all = |count: usize| -> String {
        let one = text(&fixture, "", "", limits);
        let more = cgroups[..count].iter().enumerate();
        let more = more.map(|(number, cgroup)| client(&format!("job-{number}"), cgroup));
        more.collect::<String>() + &one
    };
    let (one, many) = (all(0), all(cgroups.len()));
    fixture.setup.write("socklb.toml", &one);
    let manager = stage::Manager::new(fixture.setup.folder.join("notify"));
    // The loop that adds the clients also feeds the watchdog, every 100 ms.
    let watchdog = std::time::Duration::from_millis(200);
    let daemon = Daemon::spawn_with(&fixture.setup, |command| manager.starts(command, watchdog));
    fixture.daemon = Some(daemon);
    manager.expect("READY=1");
    write(&fixture.setup, &many);
    let reloading = manager.expect("RELOADING=1");
    assert!(reloading.iter().any(|line| line.starts_with("MONOTONIC_USEC=")), "{reloading:?}");
    let fed = manager.count_until("READY=1", "WATCHDOG=1");
    assert!(fed >= 3, "the daemon fed the watchdog {fed} times while {more} clients were started");
    let attached = || fixture.setup.status().clients.len();
    eventually("all clients are attached", attached, |count| *count == more + 1);
    look(|| fixture.setup.faults()).becomes(Vec::<String>::new());
}
