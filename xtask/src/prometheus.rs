//! Prometheus, its `promtool` and Alertmanager's `amtool`, for tests that let the real ones scrape the daemon and check what is
//! shipped for them: out of Debian's packages, unpacked and not installed, because an installed one would start and listen on this
//! machine.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::apt::Apt;
use crate::command::{output, run as run_command, target};
use crate::toolchain::tools;

/// The suite that they are taken from: its programs need no newer libraries than any system that builds socklb has.
const SUITE: &str = "bookworm";
/// The packages, and the programs that are kept of each.
const PACKAGES: [(&str, &[&str]); 2] =
    [("prometheus", &["prometheus", "promtool"]), ("prometheus-alertmanager", &["amtool"])];

/// `cargo xtask prometheus`: fetches what is not there.
pub fn run() -> Result<()> {
    if !is_there() {
        fetch()?;
    }
    println!("prometheus: {}", program("prometheus").display());
    Ok(())
}

/// Whether all programs are there and start.
pub fn is_there() -> bool {
    PACKAGES.iter().all(|(_, programs)| start(programs))
}

fn start(programs: &[&str]) -> bool {
    // A path of its own, not whatever the machine has: of another version, another grammar.
    programs.iter().all(|name| output(Command::new(program(name)).arg("--version")).is_ok())
}

fn program(name: &str) -> PathBuf {
    tools().join("bin").join(name)
}

fn fetch() -> Result<()> {
    let folder = target().join("prometheus");
    // What an attempt that was cut off has left.
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(tools().join("bin"))?;
    // Debian's name for what this program was built for.
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let apt = Apt::of_suite(SUITE, architecture, &folder.join("apt"))?;
    // Programs that are there may be running, and cannot be written then.
    for (package, programs) in PACKAGES.into_iter().filter(|(_, programs)| !start(programs)) {
        let unpacked = folder.join(package);
        fs::create_dir_all(&unpacked).with_context(|| format!("make {}", unpacked.display()))?;
        let package = apt.newest(package)?;
        let archive = apt.download(&package.name, &package.version, &unpacked)?;
        run_command(Command::new("dpkg").arg("-x").arg(&archive).arg(&unpacked))?;
        for name in programs {
            let from = unpacked.join("usr/bin").join(name);
            fs::copy(&from, program(name)).with_context(|| format!("keep {}", from.display()))?;
        }
        println!("prometheus: {} {}", package.name, package.version);
    }
    fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display()))?;
    Ok(())
}
