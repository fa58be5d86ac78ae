//! A sample of the daemon's system calls fails, one after the other: `cargo xtask inject --all` tries them all.

use std::process::Command;

use stage::program;

/// The cases are another sample each time; the seed, and each failing case with what repeats it, are printed.
#[test]
fn a_system_call_that_fails_loses_no_link_no_connect_and_no_count() {
    let status = Command::new(program("inject")).args(["--seconds", "75"]).status().expect("start it");
    assert!(status.success(), "{status}: see above");
}
