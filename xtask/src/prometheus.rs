//! Fetches Prometheus, its `promtool` and Alertmanager's `amtool`, for tests in which the real
//! programs scrape the daemon and check the files shipped for them. The programs come from Debian's
//! packages, which are unpacked and not installed, because an installed one would start and listen
//! on this machine.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::apt::Apt;
use crate::command::{output, run as run_command, target};
use crate::toolchain::tools;

/// The Debian suite of the packages. The suite is old enough that its programs run on every system
/// that can build socklb.
const SUITE: &str = "bookworm";
/// The packages, each with the programs that are used of it.
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
    // Uses the fetched programs and not the machine's, because another version has another grammar.
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
    // Debian's name for the architecture of this program.
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let apt = Apt::of_suite(SUITE, architecture, &folder.join("apt"))?;
    // Skips existing programs, because a running program cannot be overwritten.
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
