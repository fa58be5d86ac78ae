//! Programs that some tests need, and that some machines cannot fetch. If a program cannot be
//! fetched, a file in the program's folder contains the reason, and the tests that need the program
//! are skipped.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::command::{cached, output, target};
use crate::object::hex;

/// The time after a failed attempt until setup makes the next attempt.
const FRESH: Duration = Duration::from_secs(24 * 3600);

/// A program that is unpacked into the cache, but not installed.
pub struct OptionalProgram {
    /// The file name of the program.
    pub name: &'static str,
    pub version: &'static str,
    /// The name of the program's folder in the cache. Tests contain the same name.
    pub folder: &'static str,
    /// The program's argument that prints its version.
    pub version_argument: &'static str,
    /// A text that the program prints with `version_argument`.
    pub prints: &'static str,
    /// Unpacks the package into a folder, and returns the path of the program there.
    pub fetch: fn(&Path) -> Result<PathBuf>,
}

impl OptionalProgram {
    /// Fetches the program if it is missing. A failure is only recorded.
    pub fn run(&self) -> Result<()> {
        let Self { name, version, folder, .. } = self;
        let folder = cached(folder);
        if !self.starts() {
            fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
            if let Err(error) = self.unpack() {
                let why = format!("{name} {version} cannot be fetched: {error:#}");
                println!("{why}; the tests that need it will be skipped");
                return fs::write(self.reason(), why)
                    .with_context(|| format!("write {}", self.reason().display()));
            }
            let _ = fs::remove_file(self.reason());
        }
        println!("{name}: {}", self.program().display());
        Ok(())
    }

    /// Whether the program exists and starts, or an attempt to fetch it has failed during the last
    /// day.
    pub fn is_settled(&self) -> bool {
        let failed = fs::metadata(self.reason()).and_then(|metadata| metadata.modified()).ok();
        let is_fresh = failed.and_then(|failed| failed.elapsed().ok()).is_some_and(|age| age < FRESH);
        is_fresh || self.starts()
    }

    fn unpack(&self) -> Result<()> {
        let folder = target().join(self.name);
        // Removes the remains of an interrupted attempt.
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
        let unpacked = (self.fetch)(&folder)?;
        // A running program cannot be overwritten, but it can be replaced.
        let new = self.program().with_extension("new");
        fs::copy(&unpacked, &new).with_context(|| format!("copy {}", unpacked.display()))?;
        make_executable(&new)?;
        fs::rename(&new, self.program()).with_context(|| format!("replace {}", self.program().display()))?;
        fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display()))
    }

    fn starts(&self) -> bool {
        let printed = output(Command::new(self.program()).arg(self.version_argument));
        printed.is_ok_and(|printed| printed.contains(self.prints))
    }

    fn program(&self) -> PathBuf {
        cached(self.folder).join(self.name)
    }

    /// The file with the reason why the program is missing.
    fn reason(&self) -> PathBuf {
        cached(self.folder).join("missing")
    }
}

fn make_executable(file: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    let mode = fs::Permissions::from_mode(0o755);
    fs::set_permissions(file, mode).with_context(|| format!("make {} executable", file.display()))
}

/// Returns an error if the SHA-256 of the package is not the recorded one.
pub fn check_hash(package: &Path, sha256: &str) -> Result<()> {
    let hash = hex(&fs::read(package)?);
    if hash != sha256 {
        bail!("the package has hash {hash}, and {sha256} is recorded");
    }
    Ok(())
}
