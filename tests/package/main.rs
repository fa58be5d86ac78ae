//! The Debian package on machines like this one: installed, used, upgraded and removed.
//!
//! `cargo xtask test package` builds the package. Each test has a separate machine, with or without
//! systemd, independent of the host's init. The tests do not change the host.

mod contents;

mod service;

mod agent;

use std::fs;
use std::path::{Path, PathBuf};

use stage::Machine;

/// The path of the package on a machine.
const PACKAGE: &str = "/shared/socklb.deb";

/// Copies the package to a machine and installs it.
#[track_caller]
fn install(machine: &Machine) {
    fs::copy(package(), machine.shared().join("socklb.deb")).expect("copy the package");
    let known = machine.run(&["dpkg-query", "--show", "socklb"]);
    assert!(!known.status.success(), "socklb is installed on this host: remove it first");
    machine.good(&["dpkg", "--install", PACKAGE]);
}

/// The built package. The folder must contain exactly one.
fn package() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/package");
    let entries = fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let packages: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|extension| extension == "deb")).collect();
    let [package] = packages.as_slice() else {
        panic!("expected one package in {}: `cargo xtask test package` builds it", folder.display());
    };
    package.clone()
}
