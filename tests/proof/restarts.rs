//! The service and the daemon are restarted and killed repeatedly.

use lb_view::status::StatusDocument;
use stage::daemon::active;
use stage::{Probe, Setup, address, amount, eventually, look};

use stage::fixture::{Fixture, SERVICE};

/// The number of connects to addresses that are no service, as the client's programs have counted
/// them.
pub fn elsewhere(setup: &Setup) -> u64 {
    setup.client().not_a_service
}

/// A process that connects without pause.
pub fn busy(fixture: &Fixture, cpu: usize) -> Probe {
    let mut probe = Probe::start(&fixture.cgroup);
    probe.pin(cpu);
    probe.start_dialling(SERVICE);
    probe
}

/// Stops dialling; returns how many connects were made, and asserts that all reached backends.
#[track_caller]
pub fn all_reached(probe: &mut Probe) -> u64 {
    let counts = probe.stop_dialling();
    assert!(counts.keys().all(|name| name.starts_with('b')), "{counts:?}");
    let connects = counts.values().map(|count| u64::from(*count)).sum();
    assert!(connects > 0, "connects were made");
    connects
}

/// As [`Setup::active_becomes`], but includes leaving clients. The time limit is too short to
/// reclaim a lost flow, so a lost flow makes this function fail.
#[track_caller]
pub fn open_flows_become(setup: &Setup, wanted: u64) {
    let open = |status: &StatusDocument| {
        let leaving: Option<u64> = status.leaving.iter().map(|leaving| leaving.active).sum();
        Some(active(status) + leaving?)
    };
    eventually(&format!("{wanted} flows are open"), || setup.status(), |status| open(status) == Some(wanted));
}

/// Number of counted connects to all backends.
pub fn connects(setup: &Setup) -> u64 {
    let backends = setup.backends("web", "users");
    backends.iter().map(|backend| backend.started).sum()
}

/// Waits until some more connects were counted.
pub fn some_connects(setup: &Setup) {
    let before = connects(setup);
    eventually("clients make more connects", || connects(setup), |now| *now > before + 50);
}

#[test]
fn restarts_of_the_service_leak_no_connect() {
    let fixture = Fixture::new();
    let mut made = 0;
    for round in 0..amount(10, 100) {
        fixture.cgroup.remove();
        fixture.cgroup.create();
        let mut probe = Probe::start(&fixture.cgroup);
        assert_eq!(probe.socklb(&fixture.setup, &["wait", "web"]), 0, "round {round}");
        probe.start_dialling(SERVICE);
        some_connects(&fixture.setup);
        // Every second round kills the service in the middle of a connect.
        if round % 2 == 0 {
            made += all_reached(&mut probe);
        }
        look(|| fixture.setup.client().cgroup_id).becomes(Some(fixture.cgroup.id()));
    }
    assert!(made > 0);
    assert_eq!(elsewhere(&fixture.setup), 0);
    open_flows_become(&fixture.setup, 0);
    assert_eq!(fixture.setup.run(&["status"]).status.code(), Some(0));
}

#[test]
fn kills_of_the_daemon_fail_no_connect() {
    let mut fixture = Fixture::new();
    let mut held = fixture.probe();
    let open: Vec<_> = (0..50).map(|_| held.dial(SERVICE)).collect();
    let mut clients = [busy(&fixture, 0), busy(&fixture, 1)];
    for _ in 0..amount(4, 20) {
        some_connects(&fixture.setup);
        fixture.daemon.take().expect("a daemon runs").kill();
        some_connects(&fixture.setup);
        fixture.start();
    }
    let made: u64 = clients.iter_mut().map(all_reached).sum();
    assert_eq!(connects(&fixture.setup), made + 50, "every connect was counted once");
    open_flows_become(&fixture.setup, 50);
    for dialled in open {
        assert_eq!(held.peer(dialled.socket), address(SERVICE));
        held.close(dialled.socket);
    }
    open_flows_become(&fixture.setup, 0);
    assert_eq!(elsewhere(&fixture.setup), 0);
}

/// The service manager repeatedly restarts a daemon that cannot start.
#[test]
fn a_crash_loop_fails_no_connect() {
    let mut fixture = Fixture::new();
    let mut clients = [busy(&fixture, 0), busy(&fixture, 1)];
    fixture.stop();
    let good = std::fs::read_to_string(fixture.setup.folder.join("socklb.toml")).expect("read it");
    for round in 0..amount(6, 20) {
        some_connects(&fixture.setup);
        if round % 2 == 0 {
            fixture.setup.write("socklb.toml", "[[client]]\n");
            assert_eq!(stage::Daemon::spawn(&fixture.setup).wait(), Some(1));
        } else {
            fixture.setup.write("socklb.toml", &good);
            // Kills the daemon at some moment of its start.
            stage::Daemon::spawn(&fixture.setup).kill();
        }
    }
    fixture.setup.write("socklb.toml", &good);
    fixture.start();
    let made: u64 = clients.iter_mut().map(all_reached).sum();
    assert_eq!(connects(&fixture.setup), made);
    open_flows_become(&fixture.setup, 0);
    assert_eq!(elsewhere(&fixture.setup), 0);
}
