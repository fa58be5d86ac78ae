//! File systems that do not answer: the daemon reports files on them, and everything else
//! continues.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use stage::fixture::{Fixture, SERVICE, config, endpoints};
use stage::hung::Hung;
use stage::{Cgroup, Daemon, Probe, eventually};

const SECOND: &str = "10.96.0.11:80";

/// A set-up without a running daemon. It has a second service with a file in a separate directory,
/// and a second client in another cgroup. Also returns the cgroup and the directory. `None` in
/// guests without FUSE.
fn scene() -> Option<(Fixture, Cgroup, PathBuf)> {
    if !Hung::is_possible() {
        return None;
    }
    let (fixture, other) = (Fixture::without_daemon(), Cgroup::new());
    let directory = fixture.setup.folder.join("remote");
    fs::create_dir(&directory).expect("make a directory");
    fs::write(directory.join("more.toml"), endpoints(&[("127.0.0.1:8001", "")])).expect("write");
    let text = config(&fixture.cgroup, r#"{ file = "users.toml" }"#, "");
    let client = format!("[[client]]\njob = \"other\"\ncgroup = \"{}\"\n", other.relative().display());
    let more = format!(
        "[[service]]\nname = \"more\"\naddress = \"{SECOND}\"\nbackends = {{ file = \"remote/more.toml\" }}\n"
    );
    fixture.setup.write("socklb.toml", &(client + &text + &more));
    Some((fixture, other, directory))
}

fn only(probe: &mut Probe, address: &str) -> Vec<String> {
    probe.dial_many(address, 6).into_keys().collect()
}

#[track_caller]
fn lists_are_followed(fixture: &Fixture, probe: &mut Probe) {
    for backend in ["b2", "b1"] {
        let address = format!("127.0.0.1:800{}", &backend[1..]);
        fixture.write_endpoints(&[(&address, "")]);
        eventually("the list is followed", || only(probe, SERVICE), |names| *names == [backend]);
    }
}

/// Asserts that everything except the service with the hung file continues.
#[track_caller]
fn goes_on(fixture: &Fixture, other: &Cgroup) {
    let mut probe = fixture.probe();
    lists_are_followed(fixture, &mut probe);
    other.remove();
    other.create();
    let mut elsewhere = Probe::start(other);
    let reached = || elsewhere.try_dial(SERVICE).is_ok();
    eventually("the other client is attached to the recreated cgroup", reached, |reached| *reached);
}

/// A stopping daemon releases its socket, port and locks even if a file system hangs. A successor
/// can start.
#[test]
fn a_hung_file_system_does_not_delay_a_stop() {
    let Some((mut fixture, other, directory)) = scene() else { return };
    let path = fixture.setup.folder.join("socklb.toml");
    let metrics = "[metrics]\nlisten = \"127.0.0.1:9464\"\n";
    fs::write(&path, stage::daemon::read(&path) + metrics).expect("write");
    fixture.start();
    let _hung = Hung::over(&directory);
    eventually("the hung file is reported", || fixture.setup.faults().len(), |count| *count > 0);
    let manager = stage::Manager::new(fixture.setup.folder.join("notify"));
    for _ in 0..2 {
        let begun = Instant::now();
        fixture.stop();
        // The daemon ends by itself, long before a service manager would kill it.
        assert!(begun.elapsed() < stage::patience(), "{:?}", begun.elapsed());
        let daemon =
            Daemon::spawn_with(&fixture.setup, |command| manager.starts(command, Duration::from_secs(60)));
        fixture.daemon = Some(daemon);
        manager.expect("READY=1");
    }
    // A daemon that still waits for the file at its start stops, too.
    fixture.stop();
    let daemon = Daemon::spawn(&fixture.setup);
    let bound = || fixture.setup.folder.join("run/socklb.sock.new").exists();
    eventually("the start is under way", bound, |bound| *bound);
    assert_eq!(daemon.stop(), Some(0));
    assert!(!fixture.setup.folder.join("run/socklb.sock").exists());
    fixture.start();
    goes_on(&fixture, &other);
}
