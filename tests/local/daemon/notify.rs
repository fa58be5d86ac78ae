//! The daemon's notifications to its service manager (sd_notify(3)), at a socket of the test.

use std::time::Duration;

use rustix::process::Signal;
use stage::{Daemon, Manager};

use stage::fixture::{Fixture, SERVICE};

fn started(fixture: &Fixture, watchdog: Duration) -> (Manager, Daemon) {
    let manager = Manager::new(fixture.setup.folder.join("notify"));
    let daemon = Daemon::spawn_with(&fixture.setup, |command| manager.starts(command, watchdog));
    (manager, daemon)
}

#[test]
fn ready_means_that_the_tables_are_in_the_kernel_and_the_main_loop_feeds_the_watchdog() {
    let fixture = Fixture::without_daemon();
    let mut probe = fixture.probe();
    let (manager, daemon) = started(&fixture, Duration::from_millis(200));
    let ready = manager.expect("READY=1");
    // Connects are balanced as soon as the daemon has sent `READY=1`.
    assert_eq!(probe.dial_many(SERVICE, 30).len(), 3);
    assert!(ready.contains(&"STATUS=1 of 1 clients attached".to_owned()), "{ready:?}");
    assert_eq!(fixture.setup.run(&["status"]).status.code(), Some(0));
    for _ in 0..3 {
        manager.expect("WATCHDOG=1");
    }
    // A hung daemon does not feed the watchdog.
    daemon.signal(Signal::STOP);
    manager.drain();
    assert!(!manager.receives_within("WATCHDOG=1", Duration::from_millis(500)));
    daemon.signal(Signal::CONT);
    manager.expect("WATCHDOG=1");
    assert_eq!(daemon.stop(), Some(0));
    manager.expect("STOPPING=1");
}

/// The socket of a manager that does not read blocks its senders.
#[test]
fn a_manager_that_does_not_read_does_not_block_the_daemon() {
    let fixture = Fixture::without_daemon();
    let (manager, daemon) = started(&fixture, Duration::from_millis(2));
    manager.expect("READY=1");
    // The daemon notifies a thousand times per second, and nothing reads, so the queue is full at
    // once.
    for round in 1..=3 {
        daemon.signal(Signal::HUP);
        let taken_on = || daemon.log().matches("configuration applied").count();
        stage::eventually("the event loop continues", taken_on, |times| *times >= round);
    }
    assert_eq!(fixture.setup.run(&["status"]).status.code(), Some(0));
    assert_eq!(daemon.stop(), Some(0));
}
