//! A configuration that cannot be taken on, or not as a whole, while the daemon runs: what is in force stays, and it is said
//! what is wrong and what helps.

use rustix::process::Signal;
use stage::{Cgroup, eventually, look};

use stage::fixture::{Fixture, SERVICE};

use crate::reload::{second_service, services, text, write};
use crate::reload_clients::two_clients;

#[test]
fn a_configuration_with_a_fault_changes_nothing_and_is_reported() {
    let fixture = Fixture::new();
    let good = text(&fixture, "", "", "");
    write(&fixture.setup, &text(&fixture, "index = 9", "polcy = \"p2c\"", ""));
    let faults = eventually("it is reported", || fixture.setup.faults(), |faults| !faults.is_empty());
    for part in ["socklb.toml:4:", "index", "socklb.toml:10:", "polcy"] {
        assert!(faults[0].contains(part), "{part:?} is not in {faults:?}");
    }
    assert_eq!(fixture.setup.run(&["status"]).status.code(), Some(3));
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3);
    // A missing file is one, too.
    std::fs::remove_file(fixture.setup.folder.join("socklb.toml")).expect("remove it");
    eventually("it is reported", || fixture.setup.faults(), |faults| faults[0].contains("No such file"));
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3);
    write(&fixture.setup, &good);
    eventually("it is good again", || fixture.setup.faults(), Vec::is_empty);
}

/// Each SIGHUP is answered in the log, and so is the end of a fault.
#[test]
fn what_becomes_of_a_faulty_configuration_is_said() {
    let fixture = Fixture::new();
    let good = text(&fixture, "", "", "");
    let said = |what: &str| fixture.daemon().log().matches(what).count();
    let bad = || said("the configuration cannot be used");
    write(&fixture.setup, &text(&fixture, "index = 9", "", ""));
    eventually("it is said", bad, |times| *times == 1);
    for times in 2..=3 {
        fixture.daemon().signal(Signal::HUP);
        eventually("whoever asks is answered", bad, |count| *count == times);
    }
    write(&fixture.setup, &good);
    eventually("its end is said", || said("the configuration is good again"), |times| *times == 1);
    look(|| fixture.setup.faults()).becomes(Vec::<String>::new());
    assert_eq!(said("configuration taken on"), 0, "nothing has changed");
}

#[test]
fn what_cannot_change_while_running_is_named_and_the_rest_changes() {
    let fixture = Fixture::new();
    let limits = "[limits]\nflow_records = 64\n[paths]\nrun = \"elsewhere\"\n";
    write(&fixture.setup, &text(&fixture, "", "", &(second_service() + limits)));
    eventually("the rest is taken on", || services(&fixture.setup).len(), |count| *count == 2);
    let faults = fixture.setup.faults();
    // Paths are given on the command line here, which goes before the file.
    let pins = fixture.setup.pins.display();
    assert_eq!(
        faults,
        [format!(
            "limits.flow_records cannot change while running, nor by a restart alone, for the clients' maps outlive it: \
             stop socklb, run `socklb detach web --pins '{pins}'` (connects then go unbalanced), and start it again"
        )]
    );
    assert!(fixture.daemon().log().contains(&faults[0]), "it is in the log as well");
    // Only that is put back: nothing else changes.
    write(&fixture.setup, &text(&fixture, "", "", &second_service()));
    eventually("it is taken back", || fixture.setup.faults(), Vec::is_empty);
}

#[test]
fn an_address_of_metrics_that_changed_is_named_until_a_restart() {
    let mut fixture = Fixture::new();
    let metrics = "[metrics]\nlisten = \"127.0.0.1:9464\"\n";
    write(&fixture.setup, &text(&fixture, "", "", &(second_service() + metrics)));
    eventually("the rest is taken on", || services(&fixture.setup).len(), |count| *count == 2);
    let fault = "metrics.listen cannot change while running; restart socklb to apply it";
    look(|| fixture.setup.faults()).becomes([fault]);
    assert!(fixture.daemon().log().contains(fault), "it is in the log as well");
    fixture.stop();
    fixture.start();
    look(|| fixture.setup.faults()).becomes(Vec::<String>::new());
}

/// What the message about limits says to do: for every client.
#[test]
fn limits_change_as_the_message_says() {
    let mut fixture = Fixture::without_daemon();
    let other = Cgroup::new();
    let two = |fixture: &Fixture, more: &str| two_clients(fixture, [&fixture.cgroup, &other], more);
    fixture.setup.write("socklb.toml", &two(&fixture, ""));
    fixture.start();
    write(&fixture.setup, &two(&fixture, "[limits]\nslots = 1024\n"));
    let faults = eventually("it is told", || fixture.setup.faults(), |faults| !faults.is_empty());
    let pins = fixture.setup.pins.display();
    let loop_ = format!("`for client in one two; do socklb detach $client --pins '{pins}'; done`");
    assert!(faults[0].contains(&loop_) && faults[0].starts_with("limits.slots cannot"), "{faults:?}");
    // A restart all the same is refused with every client named at once.
    fixture.stop();
    let path = fixture.setup.folder.join("socklb.toml");
    let output = fixture.setup.run(&["run", "--config", path.to_str().expect("UTF-8")]);
    let (code, text) = stage::daemon::failure(&output);
    assert_eq!(code, Some(1), "{text}");
    for part in ["none of 2 clients can be started", "client one: ", "client two: ", "maps/backends", &loop_]
    {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    for client in ["one", "two"] {
        assert!(fixture.setup.run(&["detach", client]).status.success());
    }
    fixture.start();
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3);
    look(|| fixture.setup.faults()).becomes(Vec::<String>::new());
}
