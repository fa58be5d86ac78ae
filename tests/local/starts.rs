//! Starts where something is wrong: what is wrong with one client is that client's, is said, and heals by itself.

use std::collections::BTreeSet;
use std::fs;

use stage::fixture::{Fixture, SERVICE, config};
use stage::sys::Exclusive;
use stage::{Backend, Cgroup, Daemon, Probe, eventually, look, replace, within};

/// Clients `one` in the fixture's cgroup and `two` in another, before the same service.
fn with_another(fixture: &Fixture, other: &Cgroup) {
    let text = config(&fixture.cgroup, r#"{ file = "users.toml" }"#, "").replace("\"web\"", "\"one\"");
    let two = format!("[[client]]\njob = \"two\"\ncgroup = \"{}\"\n", other.relative().display());
    fixture.setup.write("socklb.toml", &(two + &text));
}

fn reached(probe: &mut Probe) -> bool {
    probe.dial_many(SERVICE, 3).keys().all(|name| name.starts_with('b'))
}

#[test]
fn a_client_beside_an_exclusive_program_keeps_no_other_client_from_being_started() {
    let mut fixture = Fixture::without_daemon();
    let other = Cgroup::new();
    with_another(&fixture, &other);
    let exclusive = Exclusive::attach(other.path());
    fixture.start();
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3, "the other one is balanced");
    let faults = fixture.setup.faults();
    assert!(
        faults.len() == 1 && faults[0].starts_with("client two: ") && faults[0].contains("cannot attach"),
        "{faults:?}"
    );
    let mut probe = Probe::start(&other);
    assert!(!reached(&mut probe));
    // It is tried again without being asked for.
    drop(exclusive);
    eventually("it is attached once it can be", || fixture.setup.faults(), Vec::is_empty);
    assert!(reached(&mut probe));
    // The same with a client that is the only one: its tables are there already.
    drop(probe);
    fixture.stop();
    assert!(fixture.setup.run(&["detach", "--all"]).status.success());
    let exclusive = Exclusive::attach(fixture.cgroup.path());
    fixture.setup.write("socklb.toml", &config(&fixture.cgroup, r#"{ file = "users.toml" }"#, ""));
    fixture.start();
    look(|| fixture.setup.faults().len()).becomes(1);
    drop(exclusive);
    eventually("it is attached once it can be", || fixture.setup.faults(), Vec::is_empty);
}

/// Clients are opened on all CPUs at once: what is wrong with one is told of that one.
#[test]
fn of_64_clients_two_that_are_refused_are_named_and_the_others_are_balanced() {
    let mut fixture = Fixture::without_daemon();
    let others: Vec<Cgroup> = (0..63).map(|_| Cgroup::new()).collect();
    let small = "[limits]\nslots = 64\nflow_records = 64\n";
    let client = |(number, cgroup): (usize, &Cgroup)| {
        format!("[[client]]\njob = \"job-{number}\"\ncgroup = \"{}\"\n", cgroup.relative().display())
    };
    let clients: String = others.iter().enumerate().map(client).collect();
    let text = clients + &config(&fixture.cgroup, r#"{ file = "users.toml" }"#, "") + small;
    fixture.setup.write("socklb.toml", &text);
    fixture.start();
    fixture.stop();
    let (unfit, exclusive) = (20, 40);
    let maps = fixture.setup.pins_of(&format!("job-{unfit}")).join("maps");
    fs::rename(maps.join("counts"), maps.join("theirs")).expect("rename a pin");
    assert!(fixture.setup.run(&["detach", &format!("job-{exclusive}")]).status.success());
    let program = Exclusive::attach(others[exclusive].path());
    fixture.start();
    let faults = fixture.setup.faults();
    let named: BTreeSet<&str> =
        faults.iter().map(|fault| fault.split(':').next().unwrap_or_default()).collect();
    assert!(faults.len() == 2 && named == ["client job-20", "client job-40"].into(), "{faults:?}");
    let is_reached = |cgroup: &Cgroup| reached(&mut Probe::start(cgroup));
    let alone: Vec<usize> = (0..63).filter(|number| !is_reached(&others[*number])).collect();
    // The programs of the daemon before go on where the pins do not fit.
    assert_eq!(alone, [exclusive]);
    drop(program);
    fs::rename(maps.join("theirs"), maps.join("counts")).expect("put it back");
    let healed = within(3 * stage::patience(), || fixture.setup.faults(), Vec::is_empty);
    assert!(healed.is_ok(), "both are tried again by themselves: {healed:?}");
}

#[test]
fn a_client_whose_pins_do_not_fit_keeps_no_other_client_from_being_started() {
    let mut fixture = Fixture::without_daemon();
    let other = Cgroup::new();
    with_another(&fixture, &other);
    fixture.start();
    fixture.stop();
    let maps = fixture.setup.pins_of("two").join("maps");
    fs::rename(maps.join("counts"), maps.join("theirs")).expect("rename a pin");
    fixture.start();
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3);
    let faults = fixture.setup.faults();
    assert!(
        faults.iter().any(|fault| fault.starts_with("client two: ") && fault.contains("maps/theirs")),
        "{faults:?}"
    );
    // Programs of an earlier daemon go on with its tables.
    assert!(reached(&mut Probe::start(&other)));
    fs::rename(maps.join("theirs"), maps.join("counts")).expect("put it back");
    let healed = within(3 * stage::patience(), || fixture.setup.faults(), Vec::is_empty);
    assert!(healed.is_ok(), "it is tried again by itself: {healed:?}");
}

/// The configuration of the fixture's client with a list of its own, 64 slots, and one backend that has all addresses.
fn with_static(fixture: &Fixture, third: u8, last: std::ops::RangeInclusive<u8>) -> String {
    let list: Vec<String> = last.map(|last| format!("\"127.0.{third}.{last}:8001\"")).collect();
    let backends = format!("{{ static = [{}] }}", list.join(", "));
    config(&fixture.cgroup, &backends, "subset = \"all\"") + "[limits]\nslots = 64\n"
}

/// A daemon with such a list of 40, and one backend behind all of them.
fn forty_of_64_slots() -> (Fixture, Probe) {
    let mut fixture = Fixture::without_daemon();
    // The fixture's backends listen at the port of the one that is to have all addresses.
    fixture.backends.clear();
    fixture.backends.push(Backend::start("b", "0.0.0.0:8001"));
    fixture.setup.write("socklb.toml", &with_static(&fixture, 1, 1..=40));
    fixture.start();
    let probe = fixture.probe();
    (fixture, probe)
}

fn addresses(fixture: &Fixture, prefix: &str) -> usize {
    let backends = fixture.setup.backends("web", "users");
    let of = |backend: &&lb_view::backend::BackendStatus| {
        backend.usable && backend.address.to_string().starts_with(prefix)
    };
    backends.iter().filter(of).count()
}

#[test]
fn a_static_list_that_finds_no_slot_keeps_no_daemon_from_starting() {
    let (mut fixture, mut probe) = forty_of_64_slots();
    fixture.stop();
    // As many others at once do not fit beside those that are in force.
    fixture.setup.write("socklb.toml", &with_static(&fixture, 2, 1..=40));
    fixture.start();
    let faults = fixture.setup.faults();
    assert!(faults.len() == 1 && faults[0].contains("all 64 slots"), "{faults:?}");
    assert_eq!(addresses(&fixture, "127.0.1."), 40, "what was in force stays");
    assert!(reached(&mut probe));
    // A shorter one fits, and makes room for the rest.
    replace(&fixture.setup.folder.join("socklb.toml"), &with_static(&fixture, 2, 1..=20));
    eventually("it is in force", || addresses(&fixture, "127.0.2."), |count| *count == 20);
    replace(&fixture.setup.folder.join("socklb.toml"), &with_static(&fixture, 2, 1..=40));
    eventually("so is the whole", || addresses(&fixture, "127.0.2."), |count| *count == 40);
    eventually("nothing is wrong", || fixture.setup.faults(), Vec::is_empty);
}

#[test]
fn clients_of_which_none_can_be_started_are_all_named() {
    let mut fixture = Fixture::without_daemon();
    let other = Cgroup::new();
    with_another(&fixture, &other);
    fixture.start();
    fixture.stop();
    for client in ["one", "two"] {
        let maps = fixture.setup.pins_of(client).join("maps");
        fs::rename(maps.join("counts"), maps.join("theirs")).expect("rename a pin");
    }
    let path = fixture.setup.folder.join("socklb.toml");
    let output = fixture.setup.run(&["run", "--config", path.to_str().expect("UTF-8")]);
    let (code, text) = stage::daemon::failure(&output);
    assert_eq!(code, Some(1), "{text}");
    for part in ["none of 2 clients can be started", "client one: ", "client two: ", "maps/theirs"] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

/// The instances of a user are few, and others of the user may have them all.
#[test]
fn a_start_without_an_inotify_instance_goes_on_and_looks_once_a_second() {
    let mut fixture = Fixture::without_daemon();
    let daemon = Daemon::spawn_with(&fixture.setup, |command| {
        stage::daemon::refuse(command, libc::SYS_inotify_init1, libc::EMFILE);
    });
    fixture.daemon = Some(daemon);
    eventually("it runs", || fixture.daemon().log(), |log| log.contains(" running "));
    assert!(fixture.daemon().log().contains("directories cannot be watched"), "{}", fixture.daemon().log());
    let mut probe = fixture.probe();
    fixture.write_endpoints(&[("127.0.0.1:8002", "")]);
    let names = || probe.dial_many(SERVICE, 6).into_keys().collect::<Vec<_>>();
    eventually("the list is followed", names, |names| *names == ["b2"]);
    look(|| fixture.setup.faults()).becomes(Vec::<String>::new());
}
