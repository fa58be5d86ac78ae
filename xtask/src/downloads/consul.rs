//! Fetches Consul for the tests of its provider. The program comes from a package of Debian. The
//! package is unpacked but not installed, because an installed Consul would be a service of this
//! machine.
//!
//! The newest Debian suite with Consul is so old that a mirror may no longer have it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::apt::Apt;
use super::optional::{OptionalProgram, check_hash};
use crate::command::run;

/// The last suite with Consul. Its program needs only libc.
const SUITE: &str = "bullseye";
/// Debian's names of architectures, each with the SHA-256 of the package.
const ARCHIVES: [(&str, &str, &str); 2] = [
    ("x86_64", "amd64", "e4e888bba104daba1d9161f49bfc52649a7e4efd45b1a7ead5bc54f2cb9c89d9"),
    ("aarch64", "arm64", "7318cfa77a7ba6f71dd096e44353279de246ffc6561216ace42353685dcf8255"),
];

/// `cargo xtask consul`
pub static CONSUL: OptionalProgram = OptionalProgram {
    name: "consul",
    version: "1.8.7+dfsg1-2+b3",
    folder: "consul-1.8.7",
    version_argument: "version",
    prints: "1.8.7",
    fetch,
};

fn fetch(folder: &Path) -> Result<PathBuf> {
    let architecture = std::env::consts::ARCH;
    let (_, architecture, sha256) = ARCHIVES
        .into_iter()
        .find(|(name, _, _)| *name == architecture)
        .with_context(|| format!("no package is recorded for {architecture}"))?;
    let apt = Apt::of_suite(SUITE, architecture, &folder.join("apt"))?;
    let archive = apt.download("consul", CONSUL.version, folder)?;
    check_hash(&archive, sha256)?;
    run(Command::new("dpkg").arg("-x").arg(&archive).arg(folder))?;
    Ok(folder.join("usr/bin/consul"))
}
