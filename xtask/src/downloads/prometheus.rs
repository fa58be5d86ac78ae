//! Fetches Prometheus, its `promtool` and Alertmanager's `amtool` for tests. In these tests,
//! Prometheus scrapes the daemon, and the tools check the files that are shipped for them. The
//! programs come from Debian's packages. The packages are unpacked but not installed, because an
//! installed Prometheus would start and listen on this machine.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use super::apt::Apt;
use crate::command::{output, run as run_command, target};
use crate::toolchain::tools;

/// The Debian suite of the packages. Its programs run on every system that can build socklb,
/// because the suite is old.
const SUITE: &str = "bookworm";
/// The packages, each with the programs that tests use.
const PACKAGES: [(&str, &[&str]); 2] =
    [("prometheus", &["prometheus", "promtool"]), ("prometheus-alertmanager", &["amtool"])];

/// `cargo xtask prometheus`: fetches missing programs.
pub fn run() -> Result<()> {
    if !is_there() {
        fetch()?;
    }
    println!("prometheus: {}", program("prometheus").display());
    Ok(())
}

/// Whether all programs exist and start.
pub fn is_there() -> bool {
    PACKAGES.iter().all(|(_, programs)| start(programs))
}

fn start(programs: &[&str]) -> bool {
    // The tests do not use installed programs, because the shipped files may be invalid for another
    // version.
    programs.iter().all(|name| output(Command::new(program(name)).arg("--version")).is_ok())
}

fn program(name: &str) -> PathBuf {
    tools().join("bin").join(name)
}

fn fetch() -> Result<()> {
    let folder = target().join("prometheus");
    // Removes the remains of an interrupted attempt.
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(tools().join("bin"))?;
    // Debian's name for the architecture that this program is built for.
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let apt = Apt::of_suite(SUITE, architecture, &folder.join("apt"))?;
    // Existing programs are skipped, because a running program cannot be overwritten.
    for (package, programs) in PACKAGES.into_iter().filter(|(_, programs)| !start(programs)) {
        let unpacked = folder.join(package);
        fs::create_dir_all(&unpacked).with_context(|| format!("make {}", unpacked.display()))?;
        let package = apt.newest(package)?;
        let archive = apt.download(&package.name, &package.version, &unpacked)?;
        run_command(Command::new("dpkg").arg("-x").arg(&archive).arg(&unpacked))?;
        for name in programs {
            let from = unpacked.join("usr/bin").join(name);
            fs::copy(&from, program(name)).with_context(|| format!("copy {}", from.display()))?;
        }
        println!("prometheus: {} {}", package.name, package.version);
    }
    fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display()))?;
    Ok(())
}
