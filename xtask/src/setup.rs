//! Checks that this machine has the tools that testing needs in addition to stable Rust. Installs
//! missing tools, and prints each command before it runs.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::command::{self, describe, output, target};
use crate::downloads::consul::CONSUL;
use crate::downloads::envoy::ENVOY;
use crate::downloads::prometheus;
use crate::toolchain::{self, LINKER_VERSION, LLVM, tool, tools};

/// `cargo xtask setup`
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Install nothing; print what is missing and how to install it, and fail if anything is
    /// missing
    #[arg(long)]
    check: bool,
    /// Whether the licence checker is needed. A run of the tests that skips the licence check does
    /// not wait for the build of the checker.
    #[arg(skip = true)]
    licences: bool,
}

impl Options {
    /// Options to install missing tools.
    pub fn install(licences: bool) -> Self {
        Self { check: false, licences }
    }
}

/// Version of the checker of licences and bans (cargo-deny).
const DENY_VERSION: &str = "0.20.2";

/// Debian packages, each with one of its files that socklb needs, and the purpose.
const PACKAGES: [(&str, &str, &str); 22] = [
    ("gcc", "/usr/bin/gcc", "compiles the cryptography of TLS, in the crate ring"),
    ("libc6-dev", "/usr/include/stdlib.h", "C headers for the crate ring"),
    ("rustc-web", toolchain::RUSTC, "compiles the kernel programs"),
    ("cargo-web", toolchain::CARGO, "builds the kernel programs"),
    ("rust-web-src", "/usr/lib/rustlib/src/rust/library/core/Cargo.toml", "`core` for the kernel programs"),
    ("rust-web-clippy", "/usr/bin/cargo-clippy", "lints the kernel programs"),
    ("llvm-22-dev", "/usr/lib/llvm-22/bin/llvm-config", "bpf-linker is built against it"),
    ("libpolly-22-dev", "/usr/lib/llvm-22/lib/libPolly.a", "bpf-linker is built against it"),
    ("bpftool", "/usr/sbin/bpftool", "reads maps in tests"),
    ("iproute2", "/usr/bin/ip", "connects network namespaces and lists sockets in tests"),
    ("dpkg-dev", "/usr/bin/dpkg-shlibdeps", "describes the Debian package and the libraries that it needs"),
    (
        "systemd",
        "/usr/bin/systemd-analyze",
        "checks the package's unit, and makes the unit's user and directories; systemd itself need not run",
    ),
    ("groff-base", "/usr/bin/groff", "sets the manual pages"),
    ("qemu-system-x86", "/usr/bin/qemu-system-x86_64", "runs the guests of the VM tests"),
    ("xz-utils", "/usr/bin/xz", "unpacks kernel modules for the VM tests"),
    ("debian-archive-keyring", "/usr/share/keyrings/debian-archive-keyring.gpg", "verifies packages"),
    ("nftables", "/usr/sbin/nft", "is compared with socklb in the benchmark of connects"),
    (
        "haproxy",
        "/usr/sbin/haproxy",
        "is compared with socklb in the benchmark of connects; a backend in tests; its service has nothing to listen on",
    ),
    ("nginx-light", "/usr/sbin/nginx", "a backend in tests; if systemd runs, its service listens on port 80"),
    ("gunicorn", "/usr/bin/gunicorn", "a backend in tests; it has no service"),
    ("bind9", "/usr/sbin/named", "a DNS server in tests; if systemd runs, its service listens on port 53"),
    ("bind9-dnsutils", "/usr/bin/nsupdate", "changes records of the DNS server in tests"),
];

/// The maximum time for which setup waits for another package manager. A machine that has just been
/// booted may be installing updates.
const PATIENCE: Duration = Duration::from_secs(600);

/// The pause between two attempts while another package manager works.
const PAUSE: Duration = Duration::from_secs(2);

/// A part of apt's English message that another package manager holds a lock.
const LOCKED: &str = "Could not get lock";

/// A missing tool, and the commands that install it.
struct Missing {
    what: String,
    commands: Vec<Command>,
}

/// `cargo xtask setup`.
pub fn run(options: &Options) -> Result<()> {
    let missing = missing(options.licences);
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
        bail!("{} tools are missing", missing.len());
    }
    if !Path::new("/usr/bin/apt-get").exists() {
        bail!(
            "this machine has no apt-get, and setup can install only packages of Debian and Ubuntu; {by_hand}"
        );
    }
    if !rustix::process::geteuid().is_root() {
        bail!("packages are installed as root; {by_hand}");
    }
    for mut one in missing {
        for command in &mut one.commands {
            run_patiently(command, PATIENCE, PAUSE)
                .map_err(|error| error.context(format!("cannot install {}; {by_hand}", one.what)))?;
        }
    }
    let _ = std::fs::remove_dir_all(build_folder());
    let still = self::missing(options.licences);
    if let Some(first) = still.first() {
        bail!("{} is still missing after its installation; {by_hand}", first.what);
    }
    println!("setup: done");
    Ok(())
}

/// Installs missing components of the stable toolchain. A run of the tests checks the host's code
/// with these components while [`run`] installs the other tools.
pub fn install_components() -> Result<()> {
    for mut one in missing_components() {
        println!("missing: {}", one.what);
        for command in &mut one.commands {
            command::run(command).with_context(|| format!("cannot install {}", one.what))?;
        }
    }
    Ok(())
}

fn missing(licences: bool) -> Vec<Missing> {
    let mut missing = missing_components();
    let packages: Vec<_> = PACKAGES.iter().filter(|(name, file, _)| !is_installed(name, file)).collect();
    if !packages.is_empty() {
        let mut update = apt_get();
        update.arg("update");
        let mut install = apt_get();
        install
            .args(["install", "--yes", "--no-install-recommends"])
            .env("DEBIAN_FRONTEND", "noninteractive");
        install.args(packages.iter().map(|(name, _, _)| name));
        let what: Vec<String> = packages.iter().map(|(name, _, what)| format!("{name} ({what})")).collect();
        missing
            .push(Missing { what: format!("packages {}", what.join(", ")), commands: vec![update, install] });
    }
    if !has_version("bpf-linker", LINKER_VERSION) {
        let mut install = cargo_install("bpf-linker", LINKER_VERSION);
        install.args(["--no-default-features", "--features", "llvm-22"]);
        // bpf-linker's build script finds the library by the first variable, and llvm-sys finds
        // headers by the second.
        install.env("LLVM_PREFIX", LLVM).env("LLVM_SYS_221_PREFIX", LLVM);
        let what = format!("bpf-linker {LINKER_VERSION} (links the kernel programs; about a minute)");
        missing.push(Missing { what, commands: vec![install] });
    }
    if licences && !has_version("cargo-deny", DENY_VERSION) {
        let what = format!("cargo-deny {DENY_VERSION} (checks licences; about a minute)");
        missing.push(Missing { what, commands: vec![cargo_install("cargo-deny", DENY_VERSION)] });
    }
    let programs = [
        (prometheus::is_there(), "prometheus", "scrapes the daemon in tests"),
        (CONSUL.is_settled(), "consul", "serves endpoint lists in tests"),
        (ENVOY.is_settled(), "envoy", "reads the daemon's files in a test"),
    ];
    for (_, name, purpose) in programs.into_iter().filter(|(is_there, ..)| !is_there) {
        // This program is started directly, because `cargo xtask` waits for the check that runs at
        // the same time.
        let mut fetch = Command::new(std::env::current_exe().expect("the path of the running program"));
        fetch.arg(name);
        missing.push(Missing {
            what: format!("{name} ({purpose}; unpacked, not installed)"),
            commands: vec![fetch],
        });
    }
    missing
}

fn missing_components() -> Vec<Missing> {
    let mut missing = Vec::new();
    for component in ["rustfmt", "clippy"] {
        let name = if component == "clippy" { "cargo-clippy" } else { component };
        if output(Command::new(name).arg("--version")).is_err() {
            let mut add = Command::new("rustup");
            add.args(["component", "add", component]);
            missing
                .push(Missing { what: format!("{component} of the stable toolchain"), commands: vec![add] });
        }
    }
    missing
}

fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    // `run_patiently` parses apt's output, so the output must be in English. apt itself waits only
    // for dpkg's lock.
    command.env("LC_ALL", "C");
    command.args(["--option", &format!("DPkg::Lock::Timeout={}", PATIENCE.as_secs())]);
    command
}

/// Prints a command and runs it. If the command fails because another package manager holds a lock,
/// repeats the command: apt waits for dpkg's lock, but not for the locks of its own lists and
/// archives.
fn run_patiently(command: &mut Command, patience: Duration, pause: Duration) -> Result<()> {
    let text = describe(command);
    println!("$ {text}");
    let deadline = Instant::now() + patience;
    loop {
        let mut child = command.stderr(Stdio::piped()).spawn().with_context(|| format!("start {text}"))?;
        let mut is_locked = false;
        for line in BufReader::new(child.stderr.take().expect("standard error is piped")).lines() {
            let line = line.with_context(|| format!("read the output of {text}"))?;
            eprintln!("{line}");
            is_locked |= line.contains(LOCKED);
        }
        let status = child.wait().with_context(|| format!("wait for {text}"))?;
        if status.success() {
            return Ok(());
        }
        if !is_locked {
            bail!("{text}: {status}");
        }
        if Instant::now() >= deadline {
            bail!("{text}: another package manager has held the lock for {} s", patience.as_secs());
        }
        println!("setup: another package manager is at work; retrying");
        std::thread::park_timeout(pause);
    }
}

/// Checks with dpkg whether the package is installed, because a file of the same name may belong to
/// another package.
fn is_installed(package: &str, file: &str) -> bool {
    let mut query = Command::new("dpkg-query");
    query.args(["--show", "--showformat", "${db:Status-Status}", package]);
    Path::new(file).exists() && output(&mut query).is_ok_and(|status| status == "installed")
}

fn has_version(name: &str, version: &str) -> bool {
    output(Command::new(tool(name)).arg("--version")).is_ok_and(|text| text.contains(version))
}

/// The command that installs a tool. The build is not optimized, because each tool runs only for
/// seconds.
fn cargo_install(name: &str, version: &str) -> Command {
    let mut install = Command::new("cargo");
    install.args(["install", name, "--version", version, "--locked", "--debug", "--root"]).arg(tools());
    install.arg("--target-dir").arg(build_folder()).env("CARGO_PROFILE_DEV_DEBUG", "0");
    install
}

/// The folder in which all tools are built, because they share dependencies.
fn build_folder() -> PathBuf {
    target().join("tools")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A substitute for apt. Each run removes a line of the file `lines` and fails with the message
    /// of a held lock, until the file is empty.
    fn fails_as_often_as(lines: &Path) -> Command {
        let mut command = Command::new("sh");
        let script = "test -s $0 || exit 0; sed -i 1d $0; echo 'E: Could not get lock /l. It is held by 1 (apt)' >&2; exit 100";
        command.args(["-c", script]).arg(lines);
        command
    }

    #[test]
    fn setup_waits_for_another_package_manager_for_a_limited_time() {
        let folder = target().join(format!("setup-test-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let lines = folder.join("lines");
        std::fs::write(&lines, "1\n2\n3\n").unwrap();
        run_patiently(&mut fails_as_often_as(&lines), PATIENCE, Duration::ZERO).unwrap();
        std::fs::write(&lines, "1\n2\n3\n").unwrap();
        let error = run_patiently(&mut fails_as_often_as(&lines), Duration::ZERO, Duration::ZERO);
        assert!(error.unwrap_err().to_string().contains("held the lock for 0 s"));
        let mut other = Command::new("sh");
        other.args(["-c", "echo 'E: Unable to locate package a' >&2; exit 100"]);
        let error = run_patiently(&mut other, PATIENCE, Duration::ZERO).unwrap_err();
        assert!(error.to_string().contains("exit status: 100"), "every other failure is returned: {error}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
