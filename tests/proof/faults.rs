//! A sample of the daemon's system calls fails, one after the other: `cargo xtask inject --all` tries them all.

use std::process::Command;

use stage::{amount, program};

/// The seed is fixed: a new find must not refuse an unrelated change. Each failing case is printed with what repeats it.
#[test]
fn a_system_call_that_fails_loses_no_link_no_connect_and_no_count() {
    let output = Command::new(program("inject"))
        .args(["--seed", "1", "--seconds", amount("30", "90")])
        .output()
        .expect("start it");
    let [told, errors] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{}\n{told}{errors}", output.status);
}
