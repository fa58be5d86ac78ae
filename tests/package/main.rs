//! The Debian package on machines like this one: installed, used, upgraded and removed.
//!
//! `cargo xtask test package` builds it. Each test has a machine of its own, with systemd or without, whatever this one
//! runs; this one is not changed.

mod contents;

mod service;

mod agent;

use std::fs;
use std::path::{Path, PathBuf};

use stage::Machine;

/// Where the package lies on a machine.
const PACKAGE: &str = "/shared/socklb.deb";

/// Brings the package to a machine and installs it.
#[track_caller]
fn install(machine: &Machine) {
    fs::copy(package(), machine.shared().join("socklb.deb")).expect("copy the package");
    let known = machine.run(&["dpkg-query", "--show", "socklb"]);
    assert!(!known.status.success(), "socklb is installed on this host: remove it first");
    machine.good(&["dpkg", "--install", PACKAGE]);
}

/// The package that was built last.
fn package() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/package");
    let entries = fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let packages: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|extension| extension == "deb")).collect();
    let [package] = packages.as_slice() else {
        panic!("not one package in {}: `cargo xtask test package` builds it", folder.display());
    };
    package.clone()
}
