//! Events that end `socklb drain --close` while it closes connections on this kernel.

use std::fs;
use std::process::Stdio;

use lb_view::overrides::OverridesDocument;
use rustix::process::Signal;
use stage::daemon::{ChildGuard, failure, signal};
use stage::eventually;
use stage::fixture::{Fixture, SERVICE};
use stage::probe::die_with_us;

const FIRST: &str = "127.0.0.1:8001";
/// Number of connections to the first backend. The drain closes one per second, so the command ends
/// before all are closed.
const OPEN: u64 = 120;
/// The file for the output of the command.
const OUTPUT: &str = "beside";

fn open(fixture: &Fixture) -> u64 {
    fixture.setup.backend(FIRST).map_or(0, |backend| backend.active)
}

/// Starts a drain that waits, and then closes one connection per second. After the first connection
/// is closed, calls `ends`. The command must then exit with `code` before all connections are
/// closed. Returns the command's output.
#[track_caller]
fn ended_by(ends: impl FnOnce(&Fixture, &ChildGuard), code: i32) -> String {
    let fixture = Fixture::new();
    let mut probe = fixture.probe();
    let _open: Vec<_> = (0..3 * OPEN).map(|_| probe.dial(SERVICE)).collect();
    assert_eq!(open(&fixture), OPEN);
    let arguments = ["drain", "users", FIRST, "--close", "all", "--after", "1s", "--rate", "1/s", "--wait"];
    let path = fixture.setup.folder.join(OUTPUT);
    let file = fs::File::create(&path).expect("create a file");
    let mut command = fixture.setup.socklb(&arguments);
    command.stdin(Stdio::null()).stderr(file.try_clone().expect("clone the file's handle")).stdout(file);
    die_with_us(&mut command);
    let mut child = ChildGuard::of(command.spawn().expect("start the command"));
    eventually("the first connection is closed", || open(&fixture), |open| *open < OPEN);
    ends(&fixture, &child);
    let ending = || child.try_wait().expect("read the command's status").and_then(|status| status.code());
    let seen = eventually("the command ends", ending, Option::is_some);
    let text = fs::read_to_string(&path).expect("read the output");
    assert_eq!(seen, Some(code), "{text}");
    let log = || fixture.daemon().log();
    eventually("the job ends", log, |log| log.contains("is_canceled=true"));
    assert!(open(&fixture) > OPEN / 2, "{} are open: {text}", open(&fixture));
    text
}

#[test]
fn a_signal_ends_the_closing_after_the_waiting() {
    let text = ended_by(|_, child| signal(child, Signal::INT), 130);
    assert!(text.contains("stopped closing; the backends stay drained"), "{text}");
    ended_by(|_, child| signal(child, Signal::TERM), 143);
}

#[test]
fn an_undrain_ends_the_closing() {
    let undrain = |fixture: &Fixture, _: &ChildGuard| {
        assert!(fixture.setup.run(&["undrain", "users", FIRST]).status.success());
    };
    let text = ended_by(undrain, 1);
    assert!(text.contains("127.0.0.1:8001 is no longer drained"), "{text}");
}

/// The command first checks that the daemon can drain and close, and sends no change to a daemon
/// that does not answer.
#[test]
fn a_daemon_that_hangs_before_the_command_drains_and_closes_nothing() {
    let fixture = Fixture::new();
    let mut probe = fixture.probe();
    let _open: Vec<_> = (0..6).map(|_| probe.dial(SERVICE)).collect();
    fixture.daemon().signal(Signal::STOP);
    let output = fixture.setup.run(&["drain", "users", FIRST, "--close", "all", "--wait"]);
    fixture.daemon().signal(Signal::CONT);
    let (code, text) = failure(&output);
    assert!(
        code == Some(1) && text.ends_with("does not answer: nothing was changed"),
        "exit code {code:?}: {text}"
    );
    let daemon = || fixture.setup.status().daemon;
    eventually("the daemon has answered the earlier requests", daemon, Option::is_some);
    assert_eq!(fixture.setup.document::<OverridesDocument>(&["overrides"]).overrides, []);
    assert_eq!(open(&fixture), 2);
}

#[test]
fn a_daemon_that_hangs_meanwhile_ends_the_closing_and_leaves_the_drain_in_force() {
    let hang = |fixture: &Fixture, child: &ChildGuard| {
        fixture.daemon().signal(Signal::STOP);
        let output = || fs::read_to_string(fixture.setup.folder.join(OUTPUT)).expect("read the output");
        eventually("the command reports the hung daemon", output, |text| text.contains("does not answer"));
        fixture.daemon().signal(Signal::CONT);
        // The command still waits for the end of the flows.
        signal(child, Signal::INT);
    };
    let text = ended_by(hang, 130);
    assert!(text.contains("the backends stay drained"), "{text}");
}
