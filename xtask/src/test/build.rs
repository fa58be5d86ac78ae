//! Builds everything that tests run, once. The programs are static, so that they run on the host
//! and in guests.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::tiers::{KERNEL_TESTS, Target, Tier};
use crate::command::{cargo, describe, output, target};

/// The cargo profile of the test suite, see the root `Cargo.toml`.
pub const PROFILE: &str = "suite";

/// The programs of the whole workspace that tests start.
const PROGRAMS: [&str; 7] = ["init", "inject", "machine", "probe", "socklb", "stress", "vm"];

/// A program that cargo has built from a test target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TestProgram {
    /// The target from which it was built.
    pub target: Target,
    /// The folder in which the program runs, which is the folder of its package.
    pub folder: PathBuf,
    pub path: PathBuf,
}

/// The results of a build.
pub struct Built {
    /// The folder of the programs, such as `socklb` and `probe`.
    pub folder: PathBuf,
    pub tests: Vec<TestProgram>,
}

impl Built {
    /// The test program of an integration test in the package [`KERNEL_TESTS`].
    pub fn kernel_test(&self, name: &str) -> Result<&TestProgram> {
        let is_it = |test: &&TestProgram| test.target.package == KERNEL_TESTS && test.target.name == name;
        self.tests.iter().find(is_it).with_context(|| format!("cargo has built no test program {name}"))
    }
}

/// What to build.
#[derive(Clone, Copy, Debug)]
pub enum What {
    /// The whole workspace.
    Everything,
    /// The programs and tests of one tier. If `filtered` is set, the unit tests of the tier's
    /// packages are left out.
    Tier { tier: Tier, filtered: bool },
}

impl What {
    fn arguments(self) -> Vec<String> {
        let words = |words: &[&str]| -> Vec<String> { words.iter().map(|word| (*word).to_owned()).collect() };
        match self {
            Self::Everything => {
                let programs = PROGRAMS.iter().flat_map(|program| ["--bin", program]);
                let rest = words(&["--workspace", "--tests", "--examples"]);
                programs.map(str::to_owned).chain(rest).collect()
            }
            Self::Tier { tier: tier @ (Tier::Pure | Tier::Product), .. } => {
                let packages = tier.packages().flat_map(|package| ["--package", package]);
                packages.map(str::to_owned).chain(words(&["--tests"])).collect()
            }
            Self::Tier { tier, filtered } => {
                let mut arguments = words(&["--package", "lb-user", "--package", KERNEL_TESTS, "--bins"]);
                if tier == Tier::Proof {
                    // These tests also need the program of the fault injection.
                    arguments.extend(words(&["--package", "lb-inject"]));
                }
                if tier == Tier::Package {
                    arguments.extend(words(&["--package", "lb-sim", "--examples"]));
                }
                let tests: &[&str] = match tier {
                    Tier::Local if !filtered => &["--tests"],
                    Tier::Local => &["--test", "local", "--test", "metrics", "--test", "servers"],
                    Tier::Proof => &["--test", "proof"],
                    Tier::Package => &["--test", "package"],
                    _ => &["--test", "local"],
                };
                arguments.extend(words(tests));
                arguments
            }
        }
    }
}

/// The target triple of this machine.
pub fn triple() -> Result<String> {
    let version = output(Command::new("rustc").arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("`rustc -vV` names no host")?.to_owned())
}

/// A cargo command with the profile and the flags of the suite. All these commands share the built
/// dependencies.
pub fn suite_cargo(subcommand: &str) -> Result<Command> {
    let mut command = cargo();
    command.args([subcommand, "--locked", "--profile", PROFILE, "--target", &triple()?]);
    if cfg!(target_os = "linux") {
        // Guests have no dynamic linker. Without these flags, relocation takes most of the run time
        // of short programs.
        command.env("RUSTFLAGS", "-C target-feature=+crt-static -C relocation-model=static");
    }
    if std::env::var_os("CI").is_some() {
        // On a build server, no later build uses the incremental state.
        command.env("CARGO_INCREMENTAL", "0");
    }
    Ok(command)
}

/// Builds the programs, and returns them.
pub fn build(what: What) -> Result<Built> {
    let mut command = suite_cargo("build")?;
    command.args(what.arguments()).args(["--message-format", "json-render-diagnostics"]);
    println!("$ {}", describe(&command));
    let built = command.stderr(Stdio::inherit()).output().context("start cargo")?;
    if !built.status.success() {
        bail!("{}: {}", describe(&command), built.status);
    }
    let messages = String::from_utf8_lossy(&built.stdout);
    let folder = target().join(triple()?).join(PROFILE);
    Ok(Built { folder, tests: test_programs(&messages) })
}

/// The test programs that cargo names in its messages.
fn test_programs(messages: &str) -> Vec<TestProgram> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    messages
        .filter(|message| message["profile"]["test"] == true)
        .filter_map(|message| program(&message))
        .collect()
}

fn program(message: &Value) -> Option<TestProgram> {
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
    let target = Target {
        package: package(message["package_id"].as_str()?)?,
        kind: message["target"]["kind"][0].as_str()?.to_owned(),
        name: message["target"]["name"].as_str()?.to_owned(),
    };
    Some(TestProgram { target, folder, path: PathBuf::from(message["executable"].as_str()?) })
}

/// The name of the package in a package id: `path+file:///a/lb-core#0.1.0`, or
/// `path+file:///a/tests#lb-tests@0.1.0`.
fn package(id: &str) -> Option<String> {
    let (path, version) = id.rsplit_once('#')?;
    let name = version.split_once('@').map_or_else(|| path.rsplit('/').next(), |(name, _)| Some(name));
    name.map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_those_that_cargo_names() {
        let messages = r#"{"reason":"compiler-artifact","package_id":"path+file:///s/tests#lb-tests@0.1.0","manifest_path":"/s/tests/Cargo.toml","target":{"kind":["bin"],"name":"probe"},"profile":{"test":false},"executable":"/t/probe"}
{"reason":"compiler-artifact","package_id":"path+file:///s/tests#lb-tests@0.1.0","manifest_path":"/s/tests/Cargo.toml","target":{"kind":["test"],"name":"local"},"profile":{"test":true},"executable":"/t/local-1"}
{"reason":"compiler-artifact","package_id":"path+file:///s/lb-core#0.1.0","manifest_path":"/s/lb-core/Cargo.toml","target":{"kind":["lib"],"name":"lb_core"},"profile":{"test":true},"executable":"/t/lb_core-2"}
{"reason":"build-finished","success":true}"#;
        let program = |package: &str, kind: &str, name: &str, folder: &str, path: &str| TestProgram {
            target: Target { package: package.to_owned(), kind: kind.to_owned(), name: name.to_owned() },
            folder: PathBuf::from(folder),
            path: PathBuf::from(path),
        };
        let expected = [
            program("lb-tests", "test", "local", "/s/tests", "/t/local-1"),
            program("lb-core", "lib", "lb_core", "/s/lb-core", "/t/lb_core-2"),
        ];
        assert_eq!(test_programs(messages), expected);
    }
}
