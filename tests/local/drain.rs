//! Operators' overrides on this kernel: `socklb drain`, `undrain`, `weight` and `overrides`.

use std::collections::BTreeSet;
use std::fs;
use std::process::{Command, Stdio};

use lb_view::fault::FaultCode;
use lb_view::overrides::{Overridden, OverridesDocument};
use rustix::process::Signal;
use stage::daemon::{ChildGuard, signal};
use stage::fixture::{Fixture, SERVICE, config};
use stage::probe::die_with_us;
use stage::{Probe, eventually, look, replace};

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

/// Waits until no connect that began before the overrides can still use the earlier tables.
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

/// The names of the backends that answer, for 60 connects.
fn names(probe: &mut Probe) -> BTreeSet<String> {
    probe.dial_many(SERVICE, 60).into_keys().collect()
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// A command that runs beside the test. Its output goes to a file.
struct Beside {
    child: ChildGuard,
    output: std::path::PathBuf,
}

impl Beside {
    fn start(fixture: &Fixture, arguments: &[&str]) -> Self {
        let output = fixture.setup.folder.join("beside");
        let file = fs::File::create(&output).expect("create a file");
        let mut command: Command = fixture.setup.socklb(arguments);
        command.stdin(Stdio::null()).stderr(file.try_clone().expect("a second handle")).stdout(file);
        die_with_us(&mut command);
        Self { child: ChildGuard::of(command.spawn().expect("start the command")), output }
    }

    fn text(&self) -> String {
        fs::read_to_string(&self.output).expect("read the output")
    }

    #[track_caller]
    fn prints(&self, what: &str) {
        eventually(what, || self.text(), |text| text.contains(what));
    }

    /// The exit code, if the command has ended.
    fn ending(&mut self) -> Option<i32> {
        self.child.try_wait().expect("read its status").and_then(|status| status.code())
    }

    #[track_caller]
    fn ends(&mut self, code: i32) {
        let ending = eventually("the command ends", || self.ending(), Option::is_some);
        assert_eq!(ending, Some(code), "{}", self.text());
    }
}

#[test]
fn a_drained_backend_gets_no_connection_and_no_connect_fails() {
    let fixture = Fixture::new();
    let mut probes: Vec<Probe> = (0..2).map(|_| Probe::start(&fixture.cgroup)).collect();
    for probe in &mut probes {
        probe.start_dialling(SERVICE);
    }
    let started = |address: &str| fixture.setup.backend(address).map_or(0, |backend| backend.started);
    eventually("connects reach it", || started(FIRST), |started| *started > 100);
    let text = good(&fixture, &["drain", "users", FIRST, "--reason", "new kernel"]);
    assert!(
        text.contains("127.0.0.1:8001 of service users is drained on this host only, until it is removed"),
        "{text}"
    );
    settled(&fixture);
    let before = started(FIRST);
    let others = started(ALL[1]);
    eventually("others go on", || started(ALL[1]), |now| *now > others + 1_000);
    let after = look(|| started(FIRST)).now("other connects have begun and ended since");
    assert_eq!(after, before, "no connect has chosen it since the answer");
    good(&fixture, &["undrain", "users", FIRST]);
    eventually("connects reach it again", || started(FIRST), |now| *now > before + 100);
    for probe in &mut probes {
        // A failed connect would be an error of this request.
        let names: BTreeSet<String> = probe.stop_dialling().into_keys().collect();
        assert_eq!(names, set(&["b1", "b2", "b3"]));
    }
    // The backend, which does not know socklb, has seen exactly the connections that were counted.
    look(|| fixture.backends[0].accepted()).becomes(started(FIRST));
}

#[test]
fn waiting_ends_with_the_last_connection_even_if_the_daemon_was_killed() {
    let mut fixture = Fixture::new();
    let mut probe = fixture.probe();
    let dialled: Vec<_> = (0..3).map(|_| probe.dial(SERVICE)).collect();
    let mut waits = Beside::start(&fixture, &["drain", "users", FIRST, "--wait"]);
    waits.prints("127.0.0.1:8001: 1 open flow");
    fixture.daemon.take().expect("a daemon runs").kill();
    waits.prints("the daemon does not answer; the backends stay drained");
    assert_eq!(names(&mut probe), set(&["b2", "b3"]), "the drain needs no daemon");
    fixture.start();
    assert_eq!(waits.ending(), None, "a flow is open: {}", waits.text());
    let last = dialled.iter().find(|dialled| dialled.name == "b1").expect("one reached it");
    probe.close(last.socket);
    waits.ends(0);
    assert!(waits.text().contains("127.0.0.1:8001: 0 open flows after"), "{}", waits.text());
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
fn the_end_of_waiting_leaves_the_drain_in_force() {
    let fixture = Fixture::new();
    let mut probe = fixture.probe();
    for _ in 0..3 {
        probe.dial(SERVICE);
    }
    let drain = ["drain", "users", FIRST, "--wait"];
    let (code, text) = run(&fixture, &[&drain[..], &["--timeout", "1s"]].concat());
    assert_eq!(code, Some(3), "{text}");
    assert!(text.contains("1 open flow after") && text.contains("the backends stay drained"), "{text}");
    let mut waits = Beside::start(&fixture, &drain);
    waits.prints("127.0.0.1:8001: 1 open flow");
    signal(&waits.child, Signal::INT);
    waits.ends(130);
    waits.prints("the backends stay drained");
    assert_eq!(names(&mut probe), set(&["b2", "b3"]));
    let mut waits = Beside::start(&fixture, &drain);
    waits.prints("127.0.0.1:8001: 1 open flow");
    good(&fixture, &["undrain", "users", FIRST]);
    waits.ends(1);
    assert!(waits.text().contains("127.0.0.1:8001 is no longer drained"), "{}", waits.text());
}

#[test]
fn a_drain_survives_the_death_of_the_daemon() {
    let mut fixture = Fixture::new();
    let mut probe = fixture.probe();
    good(&fixture, &["drain", "users", "0", "--for", "1h", "--reason", "new kernel"]);
    fixture.daemon.take().expect("a daemon runs").kill();
    assert_eq!(names(&mut probe), set(&["b2", "b3"]));
    let drained = fixture.setup.backend(FIRST).expect("the backend");
    assert_eq!((drained.state.as_str(), drained.witness.as_deref()), ("drained", Some("operator")));
    let (code, text) = run(&fixture, &["overrides"]);
    assert_eq!(code, Some(3), "{text}");
    for part in [
        "the daemon is not running",
        "127.0.0.1:8001",
        "drain",
        "reason: new kernel",
        "client web: 0 open flows",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let (code, text) = run(&fixture, &["undrain", "users", FIRST]);
    assert!(
        code == Some(1) && text.contains("the daemon is not running: nothing is changed"),
        "{code:?} {text}"
    );
    fixture.start();
    assert_eq!(names(&mut probe), set(&["b2", "b3"]), "from the first connect on");
    let document = look(|| overrides(&fixture)).has(|document| document.overrides.len(), 1);
    let of = &document.overrides[0].of;
    assert_eq!(of.reason.as_deref(), Some("new kernel"));
    assert!(of.until.is_some_and(|until| until == of.since + 3_600), "{of:?}");
    let (_, text) = run(&fixture, &["status"]);
    assert!(text.contains("drained (operator)"), "{text}");
    good(&fixture, &["undrain", "users", FIRST]);
    eventually("it serves again", || names(&mut probe), |names| names.contains("b1"));
    assert_eq!(overrides(&fixture).overrides, []);
}

#[test]
fn the_last_available_backend_is_drained_only_by_force() {
    let fixture = Fixture::new();
    let mut probe = fixture.probe();
    good(&fixture, &["drain", "users", ALL[1], ALL[2]]);
    let (code, text) = run(&fixture, &["drain", "users", FIRST]);
    assert!(code == Some(1) && text.contains("web") && text.contains("--force"), "{code:?} {text}");
    assert_eq!(names(&mut probe), set(&["b1"]), "a refused drain changes nothing");
    good(&fixture, &["drain", "users", FIRST, "--force"]);
    settled(&fixture);
    assert_eq!(probe.try_dial(SERVICE).map(|dialled| dialled.name), Err(libc::EHOSTUNREACH));
    let is_there = |code: FaultCode| fixture.setup.status().faults.iter().any(|fault| fault.code == code);
    eventually("the fault is shown", || is_there(FaultCode::OnlyDrained), |is_there| *is_there);
    assert!(!is_there(FaultCode::NoUsableBackend), "one fault for one cause");
    let (code, text) = run(&fixture, &["status"]);
    assert!(code == Some(3) && text.contains("3 drained by an operator"), "{code:?} {text}");
    let metrics = fixture.setup.metrics();
    assert!(metrics.contains("socklb_overrides{service=\"users\",kind=\"drain\"} 3"), "{metrics}");
    good(&fixture, &["undrain", "users", FIRST]);
    eventually("it serves", || probe.try_dial(SERVICE).is_ok(), |serves| *serves);
    eventually("the fault ends", || is_there(FaultCode::OnlyDrained), |is_there| !is_there);
}

#[test]
fn with_drain_fallback_drained_backends_serve_if_there_are_no_others() {
    let mut fixture = Fixture::without_daemon();
    let text = config(&fixture.cgroup, r#"{ file = "users.toml" }"#, "health = { drain_fallback = true }");
    replace(&fixture.setup.folder.join("socklb.toml"), &text);
    fixture.start();
    good(&fixture, &[&["drain", "users", "--force"], &ALL[..]].concat());
    settled(&fixture);
    assert_eq!(names(&mut fixture.probe()), set(&["b1", "b2", "b3"]));
    let (code, text) = run(&fixture, &["status"]);
    assert!(code == Some(3) && text.contains("because `drain_fallback` is on"), "{code:?} {text}");
}

#[test]
fn half_a_weight_gives_half_a_share() {
    let fixture = Fixture::new();
    let mut probe = fixture.probe();
    let answer: Overridden = fixture.setup.document(&["weight", "users", FIRST, "50%"]);
    let share = answer.overrides[0].clients[0].share;
    assert!((share - 0.2).abs() < 0.002, "half a weight of 2.5: {answer:?}");
    settled(&fixture);
    let counts = probe.dial_many(SERVICE, 1_000);
    assert!((190..=210).contains(&counts["b1"]), "{counts:?}");
    let (_, text) = run(&fixture, &["status"]);
    assert!(text.contains("1 (50 %)"), "{text}");
    let text = good(&fixture, &["weight", "users", FIRST, "100%"]);
    assert!(text.contains("has its whole weight again"), "{text}");
    eventually(
        "the shares are equal again",
        || probe.dial_many(SERVICE, 300)["b1"],
        |count| (90..=110).contains(count),
    );
}

/// A file in the place of the directory prevents the daemon from storing overrides.
#[test]
fn an_override_that_cannot_be_stored_is_in_force_and_reported() {
    let fixture = Fixture::new();
    fs::write(fixture.setup.folder.join("state/overrides"), "").expect("write a file");
    let (code, text) = run(&fixture, &["drain", "users", FIRST]);
    assert!(code == Some(3) && text.contains("lost at a restart of the daemon"), "{code:?} {text}");
    assert_eq!(names(&mut fixture.probe()), set(&["b2", "b3"]));
    let (code, text) = run(&fixture, &["overrides"]);
    assert!(code == Some(3) && text.contains("degraded: the overrides are not stored"), "{code:?} {text}");
    fs::remove_file(fixture.setup.folder.join("state/overrides")).expect("remove the file");
    let not_kept = || overrides(&fixture).not_kept;
    eventually("a retry stores it", not_kept, Option::is_none);
}

#[test]
fn impossible_requests_name_what_exists_and_change_nothing() {
    let mut fixture = Fixture::new();
    for (arguments, expected) in [
        (&["drain", "users", "127.0.0.1:1"][..], "127.0.0.1:8001"),
        (&["drain", "users", "9"], "127.0.0.1:8001"),
        (&["drain", "users", "127.0.0.1"], "ambiguous"),
        (&["drain", "orders", FIRST], "orders"),
        (&["drain", "users", FIRST, "--client", "batch"], "batch"),
        (&["weight", "users", "127.0.0.1:1", "50%"], "127.0.0.1:8001"),
    ] {
        let (code, text) = run(&fixture, arguments);
        assert!(code == Some(1) && text.contains(expected), "{arguments:?}: {code:?} {text}");
    }
    let refused: Overridden = fixture.setup.document(&["drain", "users", "9"]);
    assert!(refused.refused.is_some() && refused.changed.is_empty(), "{refused:?}");
    let text = good(&fixture, &["drain", "users", FIRST, "--dry-run"]);
    assert_eq!(text, "dry run: drain would change 127.0.0.1:8001 of service users on this host only\n");
    assert!(good(&fixture, &["undrain", "users", FIRST]).starts_with("no change"));
    assert_eq!(overrides(&fixture).overrides, []);
    good(&fixture, &["drain", "users", FIRST]);
    assert!(good(&fixture, &["drain", "users", FIRST]).contains(", as before"));
    fixture.daemon().signal(Signal::STOP);
    let (code, text) = run(&fixture, &["undrain", "users", FIRST]);
    let expected = "does not answer: it may still make the change when it continues";
    assert!(code == Some(1) && text.contains(expected), "{code:?} {text}");
    fixture.daemon().signal(Signal::CONT);
    fixture.stop();
    let (code, text) = run(&fixture, &["drain", "users", FIRST]);
    assert!(
        code == Some(1) && text.contains("the daemon is not running: nothing is changed"),
        "{code:?} {text}"
    );
}
