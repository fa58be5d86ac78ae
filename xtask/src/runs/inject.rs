//! Builds and runs the fault injection. The fault injection makes daemon calls that need a resource
//! or a privilege fail, one call in each case.

use anyhow::{Result, bail};

use crate::command::{cargo, run as run_command};

/// `cargo xtask inject`
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Arguments of the fault injection: `--seconds N --seed N`, or `--case` with the case that a
    /// failure has printed
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// `cargo xtask inject`.
pub fn run(options: &Options) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!(
            "fault injection needs root: it creates cgroups and network namespaces and loads kernel programs"
        );
    }
    run_command(cargo().args([
        "build",
        "--locked",
        "--package",
        "lb-user",
        "--package",
        "lb-tests",
        "--package",
        "lb-inject",
        "--bins",
    ]))?;
    let mut inject = cargo();
    inject.args(["run", "--quiet", "--locked", "--package", "lb-inject", "--bin", "inject", "--"]);
    run_command(inject.args(&options.arguments))
}
