//! Events that end commands while they close connections on this kernel.

use rustix::process::Signal;
use stage::daemon::{Beside, signal};
use stage::eventually;
use stage::fixture::{Fixture, SERVICE};

const FIRST: &str = "127.0.0.1:8001";
/// Number of connections to the first backend. The command closes one per second, so it ends before
/// all are closed.
const OPEN: u64 = 120;

fn open(fixture: &Fixture) -> u64 {
    fixture.setup.backend(FIRST).map_or(0, |backend| backend.active)
}

/// Starts a command that closes one connection per second. After the first connection is closed,
/// calls `ends`. The command must then exit with `code` and this text before all connections are
/// closed.
#[track_caller]
fn ended_by(arguments: &[&str], ends: impl FnOnce(&Fixture, &Beside), code: i32, text: &str) {
    let fixture = Fixture::new();
    let mut probe = fixture.probe();
    let _open: Vec<_> = (0..3 * OPEN).map(|_| probe.dial(SERVICE)).collect();
    assert_eq!(open(&fixture), OPEN);
    let mut command = Beside::start(&fixture.setup, arguments);
    eventually("the first connection is closed", || open(&fixture), |open| *open < OPEN);
    ends(&fixture, &command);
    command.ends(code);
    assert!(command.text().contains(text), "{}", command.text());
    let log = || fixture.daemon().log();
    eventually("the job ends", log, |log| log.contains("is_canceled=true"));
    assert!(open(&fixture) > OPEN / 2, "{} are open: {}", open(&fixture), command.text());
}

#[test]
fn a_signal_an_undrain_or_a_hung_daemon_ends_the_closing() {
    let close = ["close", "users", FIRST, "--rate", "1/s"];
    let text = "stopped closing; connections that are closed stay closed";
    ended_by(&close, |_, command| signal(&command.child, Signal::TERM), 143, text);
    let drain = ["drain", "users", FIRST, "--close", "all", "--after", "1s", "--rate", "1/s", "--wait"];
    let text = "stopped closing; the backends stay drained";
    for (end, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        ended_by(&drain, |_, command| signal(&command.child, end), code, text);
    }
    let undrain = |fixture: &Fixture, _: &Beside| {
        assert!(fixture.setup.run(&["undrain", "users", FIRST]).status.success());
    };
    ended_by(&drain, undrain, 1, "127.0.0.1:8001 is no longer drained");
    let hang = |fixture: &Fixture, command: &Beside| {
        fixture.daemon().signal(Signal::STOP);
        command.prints("does not answer");
        fixture.daemon().signal(Signal::CONT);
        // The command still waits for the end of the flows.
        signal(&command.child, Signal::INT);
    };
    ended_by(&drain, hang, 130, "the backends stay drained");
}
