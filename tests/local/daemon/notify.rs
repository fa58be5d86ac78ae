//! The daemon's notifications to its service manager (sd_notify(3)), at a socket of the test.

use std::time::Duration;

use rustix::process::Signal;
use stage::fixture::{Fixture, SERVICE};
use stage::{Daemon, Manager, eventually};

/// The first daemon notifies a thousand times per second. The socket of a manager that does not
/// read blocks its senders.
#[test]
fn ready_means_balanced_the_main_loop_feeds_the_watchdog_and_no_manager_blocks_the_daemon() {
    let fixture = Fixture::without_daemon();
    let mut probe = fixture.probe();
    let manager = Manager::new(fixture.setup.folder.join("notify"));
    let watchdog = Duration::from_millis(2);
    let daemon = Daemon::spawn_with(&fixture.setup, |command| manager.starts(command, watchdog));
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
    let feeds = || {
        manager.drain();
        manager.receives_within("WATCHDOG=1", Duration::from_millis(500))
    };
    eventually("the watchdog is not fed", feeds, |feeds| !*feeds);
    daemon.signal(Signal::CONT);
    manager.expect("WATCHDOG=1");
    // From here on nothing reads.
    let is_full = || daemon.is_blocked_in(libc::SYS_write);
    eventually("the manager's queue is full", is_full, |is_full| *is_full);
    for round in 1..=3 {
        daemon.signal(Signal::HUP);
        let taken_on = || daemon.log().matches("configuration applied").count();
        eventually("the event loop continues", taken_on, |times| *times >= round);
    }
    assert_eq!(fixture.setup.run(&["status"]).status.code(), Some(0));
    // The daemon ends, although it cannot send the notification of its end.
    assert_eq!(daemon.stop(), Some(0));
    manager.drain();
    // A manager that reads receives this notification. This daemon feeds the watchdog too rarely to
    // fill a queue.
    let watchdog = Duration::from_secs(60);
    let daemon = Daemon::spawn_with(&fixture.setup, |command| manager.starts(command, watchdog));
    manager.expect("READY=1");
    assert_eq!(daemon.stop(), Some(0));
    manager.expect("STOPPING=1");
}
