//! Makes a sample of the daemon's system calls fail, one after the other. `cargo xtask inject
//! --seconds 3600` makes more of them fail.

use std::process::Command;

use stage::{amount, program};

/// The seed is fixed, so that a failure with another seed does not block an unrelated change. Each
/// failing case is printed with the command that repeats it.
#[test]
fn a_failed_system_call_loses_no_link_no_connect_and_no_count() {
    let output = Command::new(program("inject"))
        .args(["--seed", "1", "--seconds", amount("30", "90")])
        .output()
        .expect("start inject");
    let [shown, errors] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{}\n{shown}{errors}", output.status);
}
