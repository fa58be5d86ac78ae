//! Starts with a fault. The fault of one client affects only that client, is reported, and heals by
//! itself.

use std::collections::BTreeSet;
use std::fs;

use stage::fixture::{Fixture, SERVICE, config};
use stage::sys::Exclusive;
use stage::{Cgroup, Probe, eventually, look, within};

/// Clients `one` in the fixture's cgroup and `two` in another, with the same service.
fn with_another(fixture: &Fixture, other: &Cgroup) {
    let text = config(&fixture.cgroup, r#"{ file = "users.toml" }"#, "").replace("\"web\"", "\"one\"");
    let two = format!("[[client]]\njob = \"two\"\ncgroup = \"{}\"\n", other.relative().display());
    fixture.setup.write("socklb.toml", &(two + &text));
}

fn reached(probe: &mut Probe) -> bool {
    probe.dial_many(SERVICE, 3).keys().all(|name| name.starts_with('b'))
}

#[test]
fn a_client_that_cannot_attach_does_not_prevent_other_clients_from_starting() {
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
    // The daemon retries by itself.
    drop(exclusive);
    eventually("it is attached once it can be", || fixture.setup.faults(), Vec::is_empty);
    assert!(reached(&mut probe));
    // The only client of a configuration is retried as well; its tables exist already.
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

/// The daemon opens clients on all CPUs at once, and reports each fault for its own client.
#[test]
fn two_failed_clients_of_64_are_reported_and_the_others_are_balanced() {
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
    // The programs of the previous daemon continue if the pins do not fit.
    assert_eq!(alone, [exclusive]);
    drop(program);
    fs::rename(maps.join("theirs"), maps.join("counts")).expect("put it back");
    let healed = within(3 * stage::patience(), || fixture.setup.faults(), Vec::is_empty);
    assert!(healed.is_ok(), "both are tried again by themselves: {healed:?}");
}
