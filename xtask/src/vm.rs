//! The VM tier: programs for the guests, built statically in a folder of their own, and the driver that boots them.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::command::{cargo, describe, output, root, run as run_command, target};
use crate::{kernels, object};

/// What to run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Only this kernel.
    pub kernel: Option<String>,
    /// Only tests whose name contains this.
    pub filter: Option<String>,
    /// Record what the verifier counts, instead of testing.
    pub record: bool,
}

/// Architecture and environment of the guests.
const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// Fetches, builds, boots.
pub fn run(options: &Options) -> Result<()> {
    if cfg!(not(target_arch = "x86_64")) {
        bail!("tier vm runs programs of this machine in its guests, and the guests are x86-64");
    }
    let kernels = kernels::all(options.kernel.as_deref())?;
    let (programs, tests) = build()?;
    let mut driver = cargo();
    driver.args(["run", "--quiet", "--locked", "--package", "lb-tests", "--bin", "vm", "--"]);
    driver.arg("--programs").arg(programs).arg("--tests").arg(tests);
    driver.arg("--scratch").arg(target().join("vm"));
    if let Some(filter) = &options.filter {
        driver.args(["--filter", filter]);
    }
    if options.record {
        driver.arg("--record").arg(root().join("tests/vm/verifier.toml"));
    }
    run_command(driver.args(kernels))
}

/// Builds what runs in a guest: the folder of its programs, and its tests.
fn build() -> Result<(PathBuf, PathBuf)> {
    // A folder of its own: other flags, and the host's builds stay fresh.
    let folder = target().join("guest");
    let mut build = cargo();
    build.args(["build", "--locked", "--profile", "suite", "--target", TRIPLE, "--target-dir"]).arg(&folder);
    build.args(["--package", "lb-user", "--package", "lb-tests"]);
    build.args(["--bin", "socklb", "--bin", "probe", "--bin", "stress", "--bin", "init", "--test", "local"]);
    // A guest has no dynamic linker for them, and relocating themselves is what short programs would spend most on.
    build.env("RUSTFLAGS", "-C target-feature=+crt-static -C relocation-model=static");
    run_command(&mut build)?;
    // Built already; asked once more for the name of the tests, which has a hash in it.
    let messages = output(build.args(["--quiet", "--message-format", "json"]))?;
    let tests = executable(&messages, "local")
        .with_context(|| format!("no test `local` was built by {}", describe(&build)))?;
    let programs = folder.join(TRIPLE).join("suite");
    object::build_logging_for_tests(&programs)?;
    Ok((programs, tests))
}

/// Where cargo says that a test's executable is.
fn executable(messages: &str, name: &str) -> Option<PathBuf> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut tests = messages
        .filter(|message| message["target"]["name"] == name && message["target"]["kind"][0] == "test");
    tests.find_map(|message| message["executable"].as_str().map(PathBuf::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tests_are_where_cargo_says() {
        let messages = r#"{"reason":"compiler-artifact","target":{"kind":["bin"],"name":"local"},"executable":"/a"}
{"reason":"compiler-artifact","target":{"kind":["test"],"name":"local"},"executable":"/t/local-1"}
{"reason":"build-finished","success":true}"#;
        assert_eq!(executable(messages, "local"), Some(PathBuf::from("/t/local-1")));
        assert_eq!(executable(messages, "other"), None);
    }
}
