//! Rules that existing tools can check: format, lints for the host and for the kernel target,
//! documentation, and licences and bans.

use anyhow::Result;

use crate::command::{cargo, root, run as run_command};
use crate::test::{Part, note_passed, suite_cargo};
use crate::toolchain::{ebpf_cargo, tool};

/// `cargo xtask check`.
pub fn run() -> Result<()> {
    host()?;
    docs()?;
    kernel()?;
    licences()?;
    note_passed(&[Part::Lints, Part::Licences])?;
    println!("check: good");
    Ok(())
}

/// Checks the format of all code, and the lints of the code for the host. Needs only the stable
/// toolchain.
pub fn host() -> Result<()> {
    run_command(cargo().args(["fmt", "--all", "--check"]))?;
    run_command(cargo().args(["fmt", "--manifest-path", "lb-ebpf/Cargo.toml", "--check"]))?;
    // The feature adds the benchmarks of decisions, which no other command compiles.
    let scope = ["--workspace", "--all-targets", "--features", "lb-bench/decisions"];
    // Clippy uses the profile of the tests, so that both share compiled macros and build scripts.
    run_command(suite_cargo("clippy")?.args(scope).args(["--", "--deny", "warnings"]))
}

/// Checks the lints of the kernel programs.
pub fn kernel() -> Result<()> {
    run_command(ebpf_cargo("clippy").args(["--release", "--bins", "--", "--deny", "warnings"]))
}

/// Builds the documentation of the code, and fails if there are warnings.
pub fn docs() -> Result<()> {
    run_command(
        suite_cargo("doc")?
            .args(["--workspace", "--no-deps", "--document-private-items"])
            .env("RUSTDOCFLAGS", "--deny warnings"),
    )
}

/// Checks licences, bans and sources of dependencies.
pub fn licences() -> Result<()> {
    for manifest in ["Cargo.toml", "lb-ebpf/Cargo.toml"] {
        let mut deny = std::process::Command::new(tool("cargo-deny"));
        deny.current_dir(root()).args(["--manifest-path", manifest, "--config", "deny.toml"]);
        run_command(deny.args(["check", "bans", "licenses", "sources"]))?;
    }
    Ok(())
}
