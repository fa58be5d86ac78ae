//! The daemon stops and starts, without effect on connects.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use rustix::thread::CapabilitySet;
use stage::probe::without;
use stage::{Daemon, Probe, address, eventually, look};

use stage::fixture::{Fixture, SERVICE, config, with_active_accounting};

/// Waits until the busy probes have made 200 more connects.
fn some_connects(fixture: &Fixture) {
    let connects = || -> u64 {
        let backends = fixture.setup.backends("web", "users");
        backends.iter().map(|backend| backend.started).sum()
    };
    let before = connects();
    eventually("the client makes more connects", connects, |now| *now > before + 200);
}

fn links(fixture: &Fixture) -> PathBuf {
    fixture.setup.pins_of("web").join("links")
}

/// The kernel's id of each attached program, keyed by the name of its link.
fn programs(fixture: &Fixture) -> BTreeMap<String, u32> {
    let links = std::fs::read_dir(links(fixture)).expect("list the links");
    let program = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.expect("read a directory entry");
        (entry.file_name().to_string_lossy().into_owned(), stage::sys::link(&entry.path()).program)
    };
    links.map(program).collect()
}

/// The bug: when a daemon was killed and replaced, connects failed, or went to the service
/// address itself.
#[test]
fn r24_restarts_and_kills_fail_no_connect_lose_no_count_and_retain_the_programs() {
    let mut fixture = Fixture::new();
    let before = programs(&fixture);
    assert_eq!(before.len(), 10);
    let mut held = fixture.probe();
    let open: Vec<_> = (0..6).map(|_| held.dial(SERVICE)).collect();
    let mut probes: Vec<Probe> = (0..2).map(|_| fixture.probe()).collect();
    for probe in &mut probes {
        probe.start_dialling(SERVICE);
    }
    for is_killed in [false, true, false, true] {
        some_connects(&fixture);
        if is_killed {
            fixture.daemon.take().expect("a daemon runs").kill();
        } else {
            fixture.stop();
        }
        // `status` reports that the daemon is not running.
        assert_eq!(fixture.setup.run(&["status"]).status.code(), Some(3));
        some_connects(&fixture);
        fixture.start();
        assert_eq!(programs(&fixture), before);
    }
    some_connects(&fixture);
    for probe in &mut probes {
        let counts = probe.stop_dialling();
        assert!(counts.keys().all(|name| name.starts_with('b')), "{counts:?}");
        assert!(counts.values().sum::<u32>() > 0, "{counts:?}");
    }
    assert_eq!(
        look(|| fixture.setup.client().not_a_service).now("a connect is counted before it returns"),
        0
    );
    fixture.setup.active_becomes(6);
    for dialled in &open {
        assert_eq!(held.peer(dialled.socket), address(SERVICE));
        held.close(dialled.socket);
    }
    fixture.setup.active_becomes(0);
}

#[test]
fn a_start_replaces_all_programs_if_an_attachment_differs_or_cannot_be_inspected() {
    type Change = fn(&Fixture);
    fn connect4(fixture: &Fixture) -> PathBuf {
        links(fixture).join(format!("connect4@{}", fixture.cgroup.id()))
    }
    let changes: [(&str, Change, usize); 3] = [
        ("a program of another owner", |fixture| stage::sys::disable_connect4(&connect4(fixture)), 10),
        (
            "a hook without a link",
            |fixture| std::fs::remove_file(connect4(fixture)).expect("remove the pin"),
            10,
        ),
        (
            "other accounting",
            |fixture| {
                let text = config(&fixture.cgroup, r#"{ file = "users.toml" }"#, "");
                fixture.setup.write("socklb.toml", &with_active_accounting(&text));
            },
            9,
        ),
    ];
    let mut fixture = Fixture::new();
    for (what, change, hooks) in changes {
        let before: BTreeSet<u32> = programs(&fixture).into_values().collect();
        fixture.daemon.take().expect("a daemon runs").kill();
        change(&fixture);
        fixture.start();
        let after = programs(&fixture);
        assert_eq!(after.len(), hooks, "{what}");
        assert!(
            after.values().all(|id| !before.contains(id)),
            "{what}: programs before: {before:?}, after: {after:?}"
        );
        assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3, "{what}");
    }
    // Without CAP_SYS_ADMIN, the daemon cannot inspect the attached programs.
    let before: BTreeSet<u32> = programs(&fixture).into_values().collect();
    fixture.stop();
    let daemon = Daemon::spawn_with(&fixture.setup, |command| without(command, CapabilitySet::SYS_ADMIN));
    fixture.daemon = Some(daemon);
    let replaced = || programs(&fixture).values().all(|id| !before.contains(id));
    eventually("all programs are replaced", replaced, |replaced| *replaced);
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3);
}

/// The lock of a client's pins permits one daemon, and `detach` only without this daemon.
#[test]
fn a_second_daemon_on_the_same_pins_is_refused_and_detach_leaves_nothing_behind() {
    let mut fixture = Fixture::new();
    let mut probe = fixture.probe();
    let open = probe.dial(SERVICE);
    let before = fixture.setup.status();
    let mut second = fixture.setup.clone();
    second.folder = second.folder.join("second");
    std::fs::create_dir(&second.folder).expect("make a folder");
    second.write("socklb.toml", &config(&fixture.cgroup, "{ static = [] }", ""));
    assert_eq!(Daemon::spawn(&second).wait(), Some(1));
    let log = stage::daemon::read(&second.folder.join("log"));
    assert!(log.contains("another socklb process has locked"), "{log}");
    let refused = fixture.setup.run(&["detach", "web"]);
    assert_eq!(refused.status.code(), Some(1), "`detach` fails while a daemon runs");
    // The first daemon continues as before.
    let after = fixture.setup.status();
    assert_eq!(before.daemon, after.daemon);
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3);
    // `detach` removes a client that the running daemon does not use. The status names this command
    // if a client is attached, but not configured.
    fixture.stop();
    let elsewhere = stage::Cgroup::new();
    let text = config(&elsewhere, r#"{ file = "users.toml" }"#, "").replace("\"web\"", "\"other\"");
    fixture.setup.write("socklb.toml", &text);
    fixture.start();
    assert_eq!(fixture.setup.run(&["status"]).status.code(), Some(3));
    let done = fixture.setup.run(&["detach", "web"]);
    assert!(done.status.success(), "{done:?}");
    assert_eq!(fixture.setup.run(&["status"]).status.code(), Some(0));
    // Connects of the cgroup go to the dialled address.
    assert_eq!(probe.try_dial(SERVICE).map(|d| d.name), Err(libc::ENETUNREACH));
    assert_eq!(probe.peer(open.socket), fixture.backends[backend(&open.name)].address());
    fixture.stop();
    let again = fixture.setup.run(&["detach", "web"]);
    assert_eq!(again.status.code(), Some(1), "`detach` fails when no pins exist");
    assert!(fixture.setup.run(&["detach", "other"]).status.success());
    assert!(!fixture.setup.pins.exists(), "`detach` also removes the directories of the pins");
    assert!(fixture.setup.run(&["detach", "--all"]).status.success());
}

fn backend(name: &str) -> usize {
    name.strip_prefix('b').and_then(|n| n.parse::<usize>().ok()).expect("the name has the form bN") - 1
}

#[test]
fn a_start_succeeds_after_a_kill_at_any_step_of_the_previous_start() {
    // Each round kills the daemon a little later between the first maps and the attached programs.
    // In a guest the test kills at fewer steps, because a start takes seconds there.
    let whole = {
        let fixture = Fixture::new();
        progress(&fixture)
    };
    assert!(whole > 20, "{whole}");
    for wanted in (0..=whole).step_by(if stage::in_a_guest() { 4 } else { 1 }) {
        let fixture = Fixture::without_daemon();
        let daemon = Daemon::spawn(&fixture.setup);
        eventually(
            "the start reaches the wanted step",
            || progress(&fixture),
            |progress| *progress >= wanted,
        );
        daemon.kill();
        let daemon = Daemon::start_again(&fixture.setup);
        assert_eq!(
            fixture.probe().dial_many(SERVICE, 30).len(),
            3,
            "the start was killed at step {wanted} of {whole}"
        );
        assert_eq!(daemon.stop(), Some(0));
    }
}

/// The progress of the client's start: the number of pinned maps, and twice the number of links,
/// because a link takes longer.
fn progress(fixture: &Fixture) -> usize {
    let pins = fixture.setup.pins_of("web");
    let count = |folder: &str| std::fs::read_dir(pins.join(folder)).map_or(0, Iterator::count);
    count("maps") + 2 * count("links")
}

/// The verifier aborts when a signal is pending, and a service manager may request a reload at any
/// time.
#[test]
fn a_start_succeeds_under_constant_signals() {
    let fixture = Fixture::without_daemon();
    let daemon = Daemon::spawn(&fixture.setup);
    let status = || {
        std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).expect("read the daemon's status")
    };
    let catches_hangup = |status: &String| {
        let caught = status
            .lines()
            .find_map(|line| line.strip_prefix("SigCgt:\t"))
            .expect("the status has a signal mask");
        u64::from_str_radix(caught, 16).expect("the mask is hexadecimal") & 1 != 0
    };
    eventually("SIGHUP does not end the daemon any more", status, catches_hangup);
    let running = || {
        for _ in 0..1000 {
            daemon.signal(rustix::process::Signal::HUP);
        }
        daemon.log()
    };
    eventually("the daemon runs", running, |log| log.contains("running"));
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3);
    assert_eq!(daemon.stop(), Some(0));
}

/// Some kernels and filters refuse membarrier(2). Then the daemon must wait in another way until
/// old tables are unused, because the arena would fill up if their regions were not reused.
#[test]
fn tables_are_replaced_without_membarrier() {
    let fixture = Fixture::without_daemon();
    // The arena has room for two tables, so each publication reuses the region of the table before
    // the current table.
    let text =
        config(&fixture.cgroup, r#"{ file = "users.toml" }"#, "") + "[limits]\nschedule_entries = 1024\n";
    fixture.setup.write("socklb.toml", &text);
    let mut command = fixture.setup.socklb(&["run", "--config"]);
    command.arg(fixture.setup.folder.join("socklb.toml"));
    let log = std::fs::File::create(fixture.setup.folder.join("log")).expect("open the log");
    stage::probe::die_with_us(&mut command);
    stage::daemon::refuse_membarrier(&mut command);
    let mut daemon = command.stderr(log).spawn().expect("start socklb");
    eventually("the daemon answers", || fixture.setup.status().daemon.is_some(), |answers| *answers);
    for round in 0..6 {
        let backend = ["127.0.0.1:8001", "127.0.0.1:8002"][round % 2];
        fixture.write_endpoints(&[(backend, "")]);
        let name = ["b1", "b2"][round % 2];
        let mut probe = fixture.probe();
        eventually(
            "the expected backends answer",
            || probe.dial_many(SERVICE, 5).into_keys().collect::<Vec<_>>(),
            |n| *n == [name],
        );
    }
    stage::daemon::signal(&daemon, rustix::process::Signal::TERM);
    assert!(daemon.wait().expect("reap the daemon").success());
}

/// The bug: links stayed on the removed cgroup, updates succeeded, the status showed "enabled", and
/// nothing was translated.
#[test]
fn r9_a_recreated_cgroup_is_covered_before_status_shows_it_and_flows_of_former_cgroups_end() {
    let mut fixture = Fixture::new();
    let mut old = fixture.probe();
    // The socket holds a reference to the cgroup, so the cgroup still exists after its removal.
    let held = old.dial(SERVICE);
    let ids = |fixture: &Fixture| fixture.setup.client().cgroup_id;
    let before = ids(&fixture);
    assert_eq!(before, Some(fixture.cgroup.id()));
    // The test moves the process to another cgroup, which no service manager would do. Its socket
    // stays in the old one.
    let refuge = stage::Cgroup::new();
    std::fs::write(refuge.path().join("cgroup.procs"), old.pid().to_string()).expect("move the process");
    std::fs::remove_dir(fixture.cgroup.path()).expect("remove the empty cgroup");
    assert_eq!(fixture.setup.run(&["status"]).status.code(), Some(3));
    assert_eq!(ids(&fixture), None, "a client without its cgroup has no effective cgroup ID");
    fixture.cgroup.create();
    eventually("the recreated cgroup is covered", || ids(&fixture), |id| *id == Some(fixture.cgroup.id()));
    assert_ne!(ids(&fixture), before);
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3);
    // The flow of the old cgroup's socket is still counted, and still ends.
    fixture.setup.active_becomes(1);
    assert_eq!(old.peer(held.socket), address(SERVICE));
    old.close(held.socket);
    fixture.setup.active_becomes(0);
    drop(old);
    flows_of_the_former_cgroup_of_a_client_still_end(&mut fixture);
}

/// A client gets another cgroup while no daemon runs.
#[track_caller]
fn flows_of_the_former_cgroup_of_a_client_still_end(fixture: &mut Fixture) {
    let mut before = fixture.probe();
    let open: Vec<_> = (0..5).map(|_| before.dial(SERVICE)).collect();
    fixture.stop();
    let elsewhere = stage::Cgroup::new();
    fixture.setup.write("socklb.toml", &config(&elsewhere, r#"{ file = "users.toml" }"#, ""));
    fixture.start();
    // The old cgroup is not balanced any more, but the new one is.
    assert_eq!(before.try_dial(SERVICE).map(|d| d.name), Err(libc::ENETUNREACH));
    assert_eq!(Probe::start(&elsewhere).dial_many(SERVICE, 30).values().sum::<u32>(), 30);
    fixture.setup.active_becomes(5);
    assert_eq!(before.peer(open[0].socket), address(SERVICE));
    for dialled in open {
        before.close(dialled.socket);
    }
    fixture.setup.active_becomes(0);
    let cgroups = || -> BTreeSet<String> {
        let links = std::fs::read_dir(fixture.setup.pins_of("web").join("links")).expect("list the links");
        let cgroup =
            |name: String| name.split_once('@').expect("a link's name contains a cgroup").1.to_owned();
        links
            .map(|link| {
                cgroup(
                    link.expect("read a directory entry")
                        .file_name()
                        .into_string()
                        .expect("the link's name is UTF-8"),
                )
            })
            .collect()
    };
    eventually("the old links are removed", cgroups, |cgroups| cgroups.len() == 1);
}
