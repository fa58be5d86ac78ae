//! Starts with a fault. The fault of one client affects only that client, is reported, and ends
//! without an operator's action.

use stage::fixture::{Fixture, SERVICE, config};
use stage::sys::Exclusive;
use stage::{Cgroup, Probe, eventually};

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
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3, "the other client is balanced");
    let faults = fixture.setup.faults();
    assert!(
        faults.len() == 1 && faults[0].starts_with("client two: ") && faults[0].contains("cannot attach"),
        "{faults:?}"
    );
    let mut probe = Probe::start(&other);
    assert!(!reached(&mut probe));
    // The daemon retries by itself.
    drop(exclusive);
    eventually("the client is attached once the cgroup permits", || fixture.setup.faults(), Vec::is_empty);
    assert!(reached(&mut probe));
}
