//! A configuration that cannot be applied, or not as a whole, while the daemon runs: the one in
//! force stays, and the daemon reports the problem and the remedy.

use stage::{Cgroup, eventually, look};

use stage::fixture::{Fixture, SERVICE};

use crate::reload::write;
use crate::reload_clients::two_clients;

/// The message about changed limits has a command for all clients.
#[test]
fn limits_change_after_the_commands_in_the_message() {
    let mut fixture = Fixture::without_daemon();
    let other = Cgroup::new();
    let two = |fixture: &Fixture, more: &str| two_clients(fixture, [&fixture.cgroup, &other], more);
    fixture.setup.write("socklb.toml", &two(&fixture, ""));
    fixture.start();
    write(&fixture.setup, &two(&fixture, "[limits]\nslots = 1024\n"));
    let faults = eventually("the fault is reported", || fixture.setup.faults(), |faults| !faults.is_empty());
    let pins = fixture.setup.pins.display();
    let loop_ = format!("`for client in one two; do socklb detach $client --pins '{pins}'; done`");
    assert!(faults[0].contains(&loop_) && faults[0].starts_with("limits.slots cannot"), "{faults:?}");
    // Without this command, a restart is refused and names every client at once.
    fixture.stop();
    let path = fixture.setup.folder.join("socklb.toml");
    let output = fixture.setup.run(&["run", "--config", path.to_str().expect("UTF-8")]);
    let (code, text) = stage::daemon::failure(&output);
    assert_eq!(code, Some(1), "{text}");
    for part in ["cannot start any of 2 clients", "client one: ", "client two: ", "maps/backends", &loop_] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    for client in ["one", "two"] {
        assert!(fixture.setup.run(&["detach", client]).status.success());
    }
    fixture.start();
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3);
    look(|| fixture.setup.faults()).becomes(Vec::<String>::new());
}
