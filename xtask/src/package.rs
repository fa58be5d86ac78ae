//! Builds the Debian package: the programs `socklb` and `socklb-sim`, files generated from the
//! command line, pages of documentation, and everything in `packaging/`.
//!
//! `[package.metadata.deb]` of `lb-user/Cargo.toml` lists the paths of these files; this module
//! only makes the files exist there.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command::{cargo, root, run as run_command};
use crate::test::{PROFILE, suite_cargo, triple};
use crate::toolchain::tool;

/// `cargo xtask package`.
pub fn run() -> Result<()> {
    let package = build(From::Release)?;
    println!("package: {}", package.display());
    Ok(())
}

/// The build from which the packaged programs are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum From {
    Release,
    /// The build of the test suite, which already exists. With a package of this build, tests show
    /// that the package can be installed and used. It must not be shipped.
    Suite,
}

/// Builds the package and returns its path. The folder contains no other package.
pub fn build(from: From) -> Result<PathBuf> {
    // The check for cargo-deb comes before the build, because the build takes minutes.
    let cargo_deb = tool("cargo-deb");
    if let Err(error) = Command::new(&cargo_deb).arg("--version").output() {
        bail!(
            "cannot start {}: {error}; `cargo xtask setup --check` lists all missing tools, `cargo xtask setup` installs them",
            cargo_deb.display()
        );
    }
    // The manifest names the generated files by this path, so the folder is in the repository even
    // if cargo's target folder is elsewhere.
    let folder = root().join("target/package");
    let files = folder.join("files");
    // The folder is emptied first, because the page of a removed command must not be packaged.
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display()))?;
    }
    fs::create_dir_all(&files).with_context(|| format!("create {}", files.display()))?;
    let mut build = match from {
        From::Release => {
            let mut build = cargo();
            build.args(["build", "--release", "--locked"]);
            build
        }
        From::Suite => suite_cargo("build")?,
    };
    run_command(build.args(["--package", "lb-user", "--package", "lb-sim", "--bins"]))?;
    // This example writes the manual pages and completions. A run of the tests has already built it
    // with the suite's flags, so it is built with these.
    let mut manual = suite_cargo("run")?;
    manual.args(["--quiet", "--package", "lb-user", "--example", "manual", "--"]);
    run_command(manual.arg(&files))?;
    let mut deb = Command::new(cargo_deb);
    deb.current_dir(root()).args(["--package", "lb-user", "--no-build", "--locked", "--output"]).arg(&folder);
    if from == From::Suite {
        deb.args(["--profile", PROFILE, "--target", &triple()?]);
    }
    run_command(&mut deb)?;
    let mut entries = fs::read_dir(&folder)?.flatten().map(|entry| entry.path());
    let is_package = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "deb");
    entries.find(is_package).with_context(|| format!("cargo-deb left no package in {}", folder.display()))
}
