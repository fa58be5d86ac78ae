//! The soak test: makes millions of connects through a release build, and counts the flow records
//! that exist afterwards.

use anyhow::{Result, bail};

use crate::command::{cargo, run as run_command, target};

/// `cargo xtask soak`
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Number of connects
    #[arg(long, default_value_t = 10_000_000)]
    connects: u64,
    /// Maximum duration in minutes
    #[arg(long)]
    minutes: Option<u64>,
}

/// `cargo xtask soak`.
pub fn run(options: &Options) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("the soak needs root: it creates a cgroup and a network namespace and loads kernel programs");
    }
    let mut build = cargo();
    build.args(["build", "--release", "--locked", "--package", "lb-user", "--package", "lb-tests"]);
    run_command(build.args(["--bin", "socklb", "--bin", "stress"]))?;
    let mut soak = std::process::Command::new(target().join("release/stress"));
    soak.args(["soak", "--connects", &options.connects.to_string()]);
    if let Some(minutes) = options.minutes {
        soak.args(["--minutes", &minutes.to_string()]);
    }
    run_command(&mut soak)
}
