//! Operators' overrides on this kernel: `socklb drain`, `undrain`, `weight` and `overrides`.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use lb_view::overrides::OverridesDocument;
use rustix::mount::MountFlags;
use rustix::thread::CapabilitySet;
use stage::daemon::{Beside, refuse_to_destroy_sockets};
use stage::fixture::{Fixture, SERVICE};
use stage::probe::without;
use stage::terminal::Terminal;
use stage::{Daemon, Probe, eventually, look};

const FIRST: &str = "127.0.0.1:8001";
const ALL: [&str; 3] = [FIRST, "127.0.0.1:8002", "127.0.0.1:8003"];

/// Runs a command; returns its exit code and all that it prints.
fn run(fixture: &Fixture, arguments: &[&str]) -> (Option<i32>, String) {
    let output = fixture.setup.run(arguments);
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.code(), text)
}

/// Runs a command that must succeed.
#[track_caller]
fn good(fixture: &Fixture, arguments: &[&str]) -> String {
    let (code, text) = run(fixture, arguments);
    assert_eq!(code, Some(0), "{arguments:?}: {text}");
    text
}

fn overrides(fixture: &Fixture) -> OverridesDocument {
    fixture.setup.document(&["overrides"])
}

/// The names of the backends that answer 60 connects.
fn names(probe: &mut Probe) -> BTreeSet<String> {
    probe.dial_many(SERVICE, 60).into_keys().collect()
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn a_drain_closes_the_flows_that_do_not_end_by_themselves() {
    let fixture = Fixture::new();
    let mut probe = fixture.probe();
    let _open: Vec<_> = (0..6).map(|_| probe.dial(SERVICE)).collect();
    let active = || ALL.map(|address| fixture.setup.backend(address).map_or(0, |backend| backend.active));
    assert_eq!(active(), [2; 3]);
    let (code, text) = run(&fixture, &["drain", "users", FIRST, "--close", "idle", "--after", "1s"]);
    assert_eq!(code, Some(0), "connections that are not idle may stay: {text}");
    assert_eq!(active(), [2; 3]);
    let text = good(&fixture, &["drain", "users", FIRST, "--close", "all", "--wait", "--timeout", "60s"]);
    assert_eq!(active(), [0, 2, 2], "{text}");
}

#[test]
fn the_progress_on_a_terminal_is_one_line_and_control_c_ends_only_the_waiting() {
    let fixture = Fixture::new();
    let mut probe = fixture.probe();
    let open: Vec<_> = (0..9).map(|_| probe.dial(SERVICE)).collect();
    good(&fixture, &["drain", "users", FIRST]);
    let wait = || fixture.setup.socklb(&["drain", "users", FIRST, "--wait"]);
    // The program clears the line before it writes each new text.
    let mut terminal = Terminal::start(wait(), 100, 10);
    let shows = |terminal: &Terminal, what: &str| {
        let line = format!("\r\x1b[K{what}");
        eventually(what, || terminal.written(), |written| written.contains(&line))
    };
    shows(&terminal, "127.0.0.1:8001: 3 open flows");
    let of_first =
        open.iter().filter(|dialled| dialled.name == "b1").nth(1).expect("b1 has three connections");
    probe.close(of_first.socket);
    let written = shows(&terminal, "127.0.0.1:8001: 2 open flows");
    let progress = &written[written.find("\r\x1b[K").expect("the terminal shows the progress")..];
    assert!(!progress.contains('\n'), "the progress is one line: {written:?}");
    terminal.types("\x03");
    assert_eq!(terminal.ended().code(), Some(130));
    shows(&terminal, "stopped waiting; the backends stay drained until `socklb undrain`\r\n");
    assert_eq!(names(&mut probe), set(&["b2", "b3"]));
    assert_eq!(overrides(&fixture).overrides.len(), 1);
    // The terminal would wrap a text longer than its row, and the next text would replace only the
    // last row.
    let mut terminal = Terminal::start(wait(), 20, 10);
    shows(&terminal, "127.0.0.1:8001: 2 o");
    good(&fixture, &["undrain", "users", FIRST]);
    assert_eq!(terminal.ended().code(), Some(1));
    let written = shows(&terminal, "127.0.0.1:8001 is no longer drained");
    assert!(!written.contains("127.0.0.1:8001: 2 op"), "{written:?}");
}

/// A command waits for the end of the backend's connections meanwhile.
#[test]
fn a_drain_survives_the_death_of_the_daemon() {
    let mut fixture = Fixture::new();
    let mut probe = fixture.probe();
    let dialled: Vec<_> = (0..3).map(|_| probe.dial(SERVICE)).collect();
    let drain = ["drain", "users", "0", "--for", "1h", "--reason", "new kernel", "--wait"];
    let mut waits = Beside::start(&fixture.setup, &drain);
    waits.prints("127.0.0.1:8001: 1 open flow");
    fixture.daemon.take().expect("a daemon runs").kill();
    waits.prints("the daemon does not answer; the backends stay drained");
    assert_eq!(names(&mut probe), set(&["b2", "b3"]), "the drain needs no daemon");
    let drained = fixture.setup.backend(FIRST).expect("the backend has a slot");
    assert_eq!((drained.state.as_str(), drained.witness.as_deref()), ("drained", Some("operator")));
    let (code, text) = run(&fixture, &["overrides"]);
    assert_eq!(code, Some(3), "{text}");
    for part in [
        "the daemon is not running",
        "showing the stored overrides: drained backends stay drained, and no override ends before the daemon runs again",
        "127.0.0.1:8001",
        "drain",
        "reason: new kernel",
        "client web: 1 open flow",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // The maps also show which backends are drained.
    let file = fixture.setup.folder.join("state/overrides/overrides.json");
    let lost = file.with_file_name("lost.json");
    fs::rename(&file, &lost).expect("rename the file");
    let (code, text) = run(&fixture, &["overrides"]);
    let is_shown = text.contains(FIRST) && text.contains("which the next daemon ends");
    assert!(code == Some(3) && is_shown, "exit code {code:?}: {text}");
    fs::rename(&lost, &file).expect("rename the file");
    for arguments in [&["undrain", "users", FIRST][..], &["drain", "users", FIRST, "--close", "all"]] {
        let (code, text) = run(&fixture, arguments);
        assert!(
            code == Some(1) && text.contains("the daemon is not running: nothing was changed"),
            "{arguments:?}: exit code {code:?}: {text}"
        );
    }
    fixture.start();
    assert_eq!(names(&mut probe), set(&["b2", "b3"]), "no connect chooses b1, not even the first");
    assert_eq!(waits.ending(), None, "a flow is open: {}", waits.text());
    let document = look(|| overrides(&fixture)).has(|document| document.overrides.len(), 1);
    let of = &document.overrides[0].of;
    assert_eq!(of.reason.as_deref(), Some("new kernel"));
    assert!(of.until.is_some_and(|until| until == of.since + 3_600), "{of:?}");
    let (_, text) = run(&fixture, &["status"]);
    assert!(text.contains("drained (operator)"), "{text}");
    let last = dialled.iter().find(|dialled| dialled.name == "b1").expect("one connection goes to b1");
    probe.close(last.socket);
    waits.ends(0);
    assert!(waits.text().contains("127.0.0.1:8001: 0 open flows after"), "{}", waits.text());
    good(&fixture, &["undrain", "users", FIRST]);
    eventually("b1 serves again", || names(&mut probe), |names| names.contains("b1"));
    assert_eq!(overrides(&fixture).overrides, []);
}

/// The state directory is a small separate file system.
#[test]
fn overrides_are_stored_as_soon_as_the_disk_permits_and_not_read_from_a_file_of_another_user() {
    let mut fixture = Fixture::without_daemon();
    let state = fixture.setup.folder.join("state");
    fs::create_dir(&state).expect("make the folder");
    rustix::mount::mount("none", &state, "tmpfs", MountFlags::empty(), c"size=64k,mode=700")
        .expect("mount a file system");
    fixture.start();
    let mut probe = fixture.probe();
    let not_kept = |fixture: &Fixture| overrides(fixture).not_kept;
    let filler = state.join("filler");
    let full = fs::write(&filler, [7; 64 << 10]).expect_err("64 KiB and the daemon's files have no room");
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    let (code, text) = run(&fixture, &["drain", "users", FIRST]);
    for part in ["No space left on device", "lost when the daemon restarts"] {
        assert!(code == Some(3) && text.contains(part), "exit code {code:?}: {text}");
    }
    assert_eq!(names(&mut probe), set(&["b2", "b3"]), "the override is in force");
    let (code, text) = run(&fixture, &["overrides"]);
    assert!(
        code == Some(3) && text.contains("degraded: cannot store the overrides"),
        "exit code {code:?}: {text}"
    );
    fs::remove_file(filler).expect("remove the file");
    eventually("a retry stores the override", || not_kept(&fixture), Option::is_none);
    let remount =
        |flags| rustix::mount::mount_remount(&state, flags, "").expect("mount the file system again");
    remount(MountFlags::RDONLY);
    let (code, text) = run(&fixture, &["weight", "users", ALL[1], "50%"]);
    assert!(code == Some(3) && text.contains("Read-only file system"), "exit code {code:?}: {text}");
    remount(MountFlags::empty());
    eventually("a retry stores the override", || not_kept(&fixture), Option::is_none);
    fixture.daemon.take().expect("a daemon runs").kill();
    fixture.start();
    look(|| overrides(&fixture).overrides.len()).becomes(2);
    assert_eq!(names(&mut probe), set(&["b2", "b3"]));
    overrides_in_a_file_of_another_user_are_not_applied(&mut fixture, &mut probe);
    fixture.stop();
    rustix::mount::unmount(&state, rustix::mount::UnmountFlags::DETACH).expect("unmount the file system");
}

/// The daemon neither applies nor overwrites a file that another user could have written.
#[track_caller]
fn overrides_in_a_file_of_another_user_are_not_applied(fixture: &mut Fixture, probe: &mut Probe) {
    fixture.stop();
    let file = fixture.setup.folder.join("state/overrides/overrides.json");
    let forged = fs::read_to_string(&file).expect("the override is stored").replace(FIRST, ALL[1]);
    fs::write(&file, &forged).expect("write the forged file");
    std::os::unix::fs::chown(&file, Some(65_534), None).expect("change the owner");
    fixture.start();
    assert_eq!(names(probe), set(&["b2", "b3"]), "only b1 is drained");
    let document =
        look(|| overrides(fixture)).matches("the reason is shown", |document| document.not_kept.is_some());
    let why = document.not_kept.expect("the document has the reason");
    assert!(why.contains("65534"), "{why}");
    let (code, text) = run(fixture, &["overrides"]);
    assert!(code == Some(3) && text.contains(&why), "exit code {code:?}: {text}");
    let (code, text) = run(fixture, &["undrain", "users", FIRST]);
    assert!(code == Some(1) && text.contains("cannot be read yet"), "exit code {code:?}: {text}");
    assert_eq!(fs::read_to_string(&file).expect("the file exists"), forged);
    // The administrator removes the file.
    fs::remove_file(&file).expect("remove it");
    look(|| overrides(fixture).not_kept).becomes(None);
    eventually("nothing is drained", || names(probe), |names| names.len() == 3);
}

/// The daemon cannot close connections, because its kernel or its capabilities do not permit it.
#[test]
fn a_drain_that_is_to_close_flows_changes_nothing_if_the_daemon_cannot_close_any() {
    type Prepare = fn(&mut Command);
    let fixture = Fixture::without_daemon();
    let mut probe = Probe::start(&fixture.cgroup);
    let daemons: [(Prepare, i32, &str); 2] = [
        (refuse_to_destroy_sockets, 1, "CONFIG_INET_DIAG_DESTROY"),
        (|command| without(command, CapabilitySet::NET_ADMIN), 4, "that needs CAP_NET_ADMIN"),
    ];
    for (prepare, code, expected) in daemons {
        let daemon = Daemon::spawn_with(&fixture.setup, prepare);
        eventually("the daemon answers", || fixture.setup.status().daemon.is_some(), |answers| *answers);
        let open: Vec<_> = (0..3).map(|_| probe.dial(SERVICE).socket).collect();
        for arguments in [
            &["drain", "users", FIRST, "--close", "all"][..],
            &["drain", "users", FIRST, "--close", "idle", "--after", "1h", "--wait"],
            &["close", "users", FIRST],
            &["close", "users", FIRST, "--dry-run"],
        ] {
            let (seen, text) = run(&fixture, arguments);
            assert!(
                seen == Some(code) && text.contains(expected),
                "{arguments:?}: exit code {seen:?}: {text}"
            );
        }
        assert_eq!(overrides(&fixture).overrides, [], "nothing is drained");
        assert_eq!(names(&mut probe), set(&["b1", "b2", "b3"]));
        fixture.setup.active_becomes(3);
        for socket in open {
            assert_eq!(probe.take_error(socket), None, "nothing is closed");
            probe.close(socket);
        }
        // Without --close the daemon drains.
        good(&fixture, &["drain", "users", FIRST]);
        assert_eq!(names(&mut probe), set(&["b2", "b3"]));
        good(&fixture, &["undrain", "users", FIRST]);
        assert_eq!(daemon.stop(), Some(0));
    }
}

/// Waits until no running connect still uses a table from before the overrides.
#[track_caller]
fn settled(fixture: &Fixture) {
    let clients = |document: &OverridesDocument| {
        let all = document.overrides.iter().flat_map(|one| &one.clients);
        all.map(|effect| effect.is_settled).collect::<Vec<bool>>()
    };
    eventually(
        "the overrides are settled",
        || overrides(fixture),
        |document| {
            let clients = clients(document);
            !clients.is_empty() && clients.iter().all(|is_settled| *is_settled)
        },
    );
}

#[test]
fn a_drained_backend_gets_no_connection_and_no_connect_fails() {
    let fixture = Fixture::new();
    let mut probes: Vec<Probe> = (0..2).map(|_| Probe::start(&fixture.cgroup)).collect();
    for probe in &mut probes {
        probe.start_dialling(SERVICE);
    }
    let started = |address: &str| fixture.setup.backend(address).map_or(0, |backend| backend.started);
    eventually("connects reach b1", || started(FIRST), |started| *started > 100);
    let text = good(&fixture, &["drain", "users", FIRST, "--reason", "new kernel"]);
    assert!(
        text.contains("127.0.0.1:8001 of service users is drained on this host only, until it is removed"),
        "{text}"
    );
    settled(&fixture);
    let before = started(FIRST);
    let others = started(ALL[1]);
    eventually("connects to other backends continue", || started(ALL[1]), |now| *now > others + 1_000);
    let after = look(|| started(FIRST)).now("other connects have begun and ended since");
    assert_eq!(after, before, "no connect has chosen b1 since the daemon confirmed the drain");
    good(&fixture, &["undrain", "users", FIRST]);
    eventually("connects reach b1 again", || started(FIRST), |now| *now > before + 100);
    for probe in &mut probes {
        // A failed connect would be counted under the name of its errno.
        let names: BTreeSet<String> = probe.stop_dialling().into_keys().collect();
        assert_eq!(names, set(&["b1", "b2", "b3"]));
    }
    // The backend itself has accepted exactly the connections that socklb has counted.
    look(|| fixture.backends[0].accepted()).becomes(started(FIRST));
}
