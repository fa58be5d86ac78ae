//! Fetches Consul for the tests of its provider. The program comes from a package of Debian. The
//! package is unpacked but not installed, because an installed Consul would be a service of this
//! machine.
//!
//! Debian's newest suite with Consul is an old one, which a mirror may no longer have. Then a file
//! beside the program's place has the reason, and the tests that need Consul are skipped.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::apt::Apt;
use crate::command::{cached, output, run as run_command, target};
use crate::object::hex;

/// The last suite with Consul. Its program needs only libc.
const SUITE: &str = "bullseye";
const VERSION: &str = "1.8.7+dfsg1-2+b3";
/// Debian's names of architectures, each with the SHA-256 of the package.
const ARCHIVES: [(&str, &str, &str); 2] = [
    ("x86_64", "amd64", "e4e888bba104daba1d9161f49bfc52649a7e4efd45b1a7ead5bc54f2cb9c89d9"),
    ("aarch64", "arm64", "7318cfa77a7ba6f71dd096e44353279de246ffc6561216ace42353685dcf8255"),
];
/// The folder of the cache, which tests know.
const FOLDER: &str = "consul-1.8.7";
/// How long setup does not try again after a failure.
const FRESH: Duration = Duration::from_secs(24 * 3600);

/// `cargo xtask consul`: fetches Consul if it is missing. A failure is only recorded.
pub fn run() -> Result<()> {
    let folder = cached(FOLDER);
    if !starts() {
        fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
        if let Err(error) = fetch() {
            let why = format!("Consul {VERSION} cannot be fetched: {error:#}");
            println!("consul: {why}; the tests that need it will be skipped");
            return fs::write(reason(), why).with_context(|| format!("write {}", reason().display()));
        }
        let _ = fs::remove_file(reason());
    }
    println!("consul: {}", program().display());
    Ok(())
}

/// Whether Consul exists and starts, or could not be fetched during the last day.
pub fn is_settled() -> bool {
    let failed = fs::metadata(reason()).and_then(|metadata| metadata.modified()).ok();
    let is_fresh = failed.and_then(|failed| failed.elapsed().ok()).is_some_and(|age| age < FRESH);
    is_fresh || starts()
}

fn starts() -> bool {
    output(Command::new(program()).arg("version")).is_ok()
}

fn program() -> PathBuf {
    cached(FOLDER).join("consul")
}

/// The file with the reason why Consul is missing.
fn reason() -> PathBuf {
    cached(FOLDER).join("missing")
}

fn fetch() -> Result<()> {
    let architecture = std::env::consts::ARCH;
    let (_, architecture, sha256) = ARCHIVES
        .into_iter()
        .find(|(name, _, _)| *name == architecture)
        .with_context(|| format!("no package is recorded for {architecture}"))?;
    let folder = target().join("consul");
    // Removes what an interrupted attempt has left.
    let _ = fs::remove_dir_all(&folder);
    let apt = Apt::of_suite(SUITE, architecture, &folder.join("apt"))?;
    let archive = apt.download("consul", VERSION, &folder)?;
    let hash = hex(&fs::read(&archive)?);
    if hash != sha256 {
        bail!("the package has hash {hash}, and {sha256} is recorded");
    }
    run_command(Command::new("dpkg").arg("-x").arg(&archive).arg(&folder))?;
    // A running program cannot be overwritten, but replaced.
    let new = program().with_extension("new");
    fs::copy(folder.join("usr/bin/consul"), &new).with_context(|| format!("copy {}", new.display()))?;
    fs::rename(&new, program()).with_context(|| format!("replace {}", program().display()))?;
    fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display()))?;
    Ok(())
}
