//! What testing needs beyond stable Rust: found, or installed by commands that are printed before they run.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use crate::command::{cargo, describe, output, run as run_command};
use crate::prometheus;
use crate::toolchain::{self, LINKER_VERSION, LLVM, tool, tools};

/// `cargo xtask setup`
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Install nothing; say what is missing and how to get it, and fail if anything is
    #[arg(long)]
    check: bool,
}

impl Options {
    /// Install what is missing.
    pub fn install() -> Self {
        Self { check: false }
    }
}

/// Version of the licence and ban checker.
const DENY_VERSION: &str = "0.20.2";

/// Version of the program that writes the Debian package.
const DEB_VERSION: &str = "3.8.0";

/// Debian packages, each with a file that we use of it and what it is for.
const PACKAGES: [(&str, &str, &str); 15] = [
    ("rustc-web", toolchain::RUSTC, "compiles the kernel programs"),
    ("cargo-web", toolchain::CARGO, "builds them"),
    ("rust-web-src", "/usr/lib/rustlib/src/rust/library/core/Cargo.toml", "their `core`"),
    ("rust-web-clippy", "/usr/bin/cargo-clippy", "lints them"),
    ("llvm-22-dev", "/usr/lib/llvm-22/bin/llvm-config", "the linker is built against it"),
    ("libpolly-22-dev", "/usr/lib/llvm-22/lib/libPolly.a", "likewise"),
    ("bpftool", "/usr/sbin/bpftool", "reads maps in tests"),
    ("dpkg-dev", "/usr/bin/dpkg-shlibdeps", "tells which libraries the package depends on"),
    (
        "systemd",
        "/usr/bin/systemd-analyze",
        "verifies the unit, makes its user and directories; need not run",
    ),
    ("groff-base", "/usr/bin/groff", "sets the manual pages"),
    ("qemu-system-x86", "/usr/bin/qemu-system-x86_64", "runs the guests of the VM tests"),
    ("xz-utils", "/usr/bin/xz", "unpacks modules of their kernels"),
    ("debian-archive-keyring", "/usr/share/keyrings/debian-archive-keyring.gpg", "signs these"),
    ("nftables", "/usr/sbin/nft", "a peer in the benchmark of connect"),
    ("haproxy", "/usr/sbin/haproxy", "likewise; its service has nothing to listen on"),
];

/// Something that is missing, and the commands that bring it.
struct Missing {
    what: String,
    commands: Vec<Command>,
}

/// `cargo xtask setup`.
pub fn run(options: &Options) -> Result<()> {
    let missing = missing();
    if missing.is_empty() {
        println!("setup: everything that testing needs is here");
        return Ok(());
    }
    for one in &missing {
        println!("missing: {}", one.what);
    }
    let commands: Vec<String> = missing.iter().flat_map(|one| one.commands.iter().map(describe)).collect();
    let by_hand = format!("to install by hand:\n  {}", commands.join("\n  "));
    if options.check {
        println!("{by_hand}");
        bail!("{} things are missing", missing.len());
    }
    if !Path::new("/usr/bin/apt-get").exists() {
        bail!(
            "this machine has no apt-get, and only Debian's and Ubuntu's packages are known here; {by_hand}"
        );
    }
    if !rustix::process::geteuid().is_root() {
        bail!("packages are installed as root; {by_hand}");
    }
    for mut one in missing {
        for command in &mut one.commands {
            run_command(command)
                .map_err(|error| error.context(format!("cannot install {}; {by_hand}", one.what)))?;
        }
    }
    let still = self::missing();
    if let Some(first) = still.first() {
        bail!("{} is still missing after its installation; {by_hand}", first.what);
    }
    println!("setup: done");
    Ok(())
}

fn missing() -> Vec<Missing> {
    let mut missing = Vec::new();
    let packages: Vec<_> = PACKAGES.iter().filter(|(name, file, _)| !is_installed(name, file)).collect();
    if !packages.is_empty() {
        let mut update = Command::new("apt-get");
        update.arg("update");
        let mut install = Command::new("apt-get");
        install
            .args(["install", "--yes", "--no-install-recommends"])
            .env("DEBIAN_FRONTEND", "noninteractive");
        install.args(packages.iter().map(|(name, _, _)| name));
        let what: Vec<String> = packages.iter().map(|(name, _, what)| format!("{name} ({what})")).collect();
        missing
            .push(Missing { what: format!("packages {}", what.join(", ")), commands: vec![update, install] });
    }
    for component in ["rustfmt", "clippy"] {
        let name = if component == "clippy" { "cargo-clippy" } else { component };
        if output(Command::new(name).arg("--version")).is_err() {
            let mut add = Command::new("rustup");
            add.args(["component", "add", component]);
            missing
                .push(Missing { what: format!("{component} of the stable toolchain"), commands: vec![add] });
        }
    }
    if !has_version("bpf-linker", LINKER_VERSION) {
        let mut install = cargo_install("bpf-linker", LINKER_VERSION);
        install.args(["--no-default-features", "--features", "llvm-22"]);
        // The first is where its build script looks for the library, the second where llvm-sys looks for headers.
        install.env("LLVM_PREFIX", LLVM).env("LLVM_SYS_221_PREFIX", LLVM);
        let what = format!("bpf-linker {LINKER_VERSION} (links the kernel programs; about a minute)");
        missing.push(Missing { what, commands: vec![install] });
    }
    if !has_version("cargo-deny", DENY_VERSION) {
        let what = format!("cargo-deny {DENY_VERSION} (checks licences; about three minutes)");
        missing.push(Missing { what, commands: vec![cargo_install("cargo-deny", DENY_VERSION)] });
    }
    if !has_version("cargo-deb", DEB_VERSION) {
        let what = format!("cargo-deb {DEB_VERSION} (writes the Debian package; about a minute)");
        missing.push(Missing { what, commands: vec![cargo_install("cargo-deb", DEB_VERSION)] });
    }
    if !prometheus::is_there() {
        let mut fetch = cargo();
        fetch.args(["xtask", "prometheus"]);
        let what = "prometheus (scrapes the daemon in tests; unpacked, not installed)".to_owned();
        missing.push(Missing { what, commands: vec![fetch] });
    }
    missing
}

/// The package manager knows whether a package is there; a file of the same name may be another package's.
fn is_installed(package: &str, file: &str) -> bool {
    let mut query = Command::new("dpkg-query");
    query.args(["--show", "--showformat", "${db:Status-Status}", package]);
    Path::new(file).exists() && output(&mut query).is_ok_and(|status| status == "installed")
}

fn has_version(name: &str, version: &str) -> bool {
    output(Command::new(tool(name)).arg("--version")).is_ok_and(|text| text.contains(version))
}

fn cargo_install(name: &str, version: &str) -> Command {
    let mut install = Command::new("cargo");
    install.args(["install", name, "--version", version, "--locked", "--root"]).arg(tools());
    install
}
