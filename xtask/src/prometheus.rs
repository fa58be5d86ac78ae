//! Prometheus and its `promtool`, for tests that let the real one scrape the daemon: out of Debian's package, unpacked and not
//! installed, because an installed one would start and listen on this machine.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::apt::Apt;
use crate::command::{output, run as run_command, target};
use crate::toolchain::tools;

/// The suite that it is taken from: its programs need no newer libraries than any system that builds socklb has.
const SUITE: &str = "bookworm";
/// What is kept of the package.
const PROGRAMS: [&str; 2] = ["prometheus", "promtool"];

/// `cargo xtask prometheus`: fetches it if it is not there.
pub fn run() -> Result<()> {
    if !is_there() {
        fetch()?;
    }
    println!("prometheus: {}", program(PROGRAMS[0]).display());
    Ok(())
}

/// Whether both programs are there and start.
pub fn is_there() -> bool {
    // A path of its own, not whatever the machine has: of another version, another grammar.
    PROGRAMS.iter().all(|name| output(Command::new(program(name)).arg("--version")).is_ok())
}

fn program(name: &str) -> PathBuf {
    tools().join("bin").join(name)
}

fn fetch() -> Result<()> {
    let folder = target().join("prometheus");
    let unpacked = folder.join("unpacked");
    // What an attempt that was cut off has left.
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&unpacked).with_context(|| format!("make {}", unpacked.display()))?;
    // Debian's name for what this program was built for.
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let apt = Apt::of_suite(SUITE, architecture, &folder.join("apt"))?;
    let package = apt.newest(PROGRAMS[0])?;
    let archive = apt.download(&package.name, &package.version, &folder)?;
    run_command(Command::new("dpkg").arg("-x").arg(&archive).arg(&unpacked))?;
    fs::create_dir_all(tools().join("bin"))?;
    for name in PROGRAMS {
        let from = unpacked.join("usr/bin").join(name);
        fs::copy(&from, program(name)).with_context(|| format!("keep {}", from.display()))?;
    }
    fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display()))?;
    println!("prometheus: {} {}", package.name, package.version);
    Ok(())
}
