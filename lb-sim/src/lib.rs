//! The planner: the same decisions as the daemon's ([`lb_core`]), for a whole fleet at once, in numbers and pictures.
//!
//! In reading order: a fleet and its subsets ([`fleet`]), what they are worth ([`metrics`]); then one module per command.
//! Must not know of kernels, sockets or clocks: the same arguments give the same output on every machine.
#![forbid(unsafe_code)]

pub mod fleet;

pub mod metrics;

mod commands {
    pub mod subset;
}

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Plans socklb's subsets: which client tasks use which backends, how even that is, and what a change costs.
///
/// It computes what the daemons of a whole job would decide, without a kernel, without root and without a network.
#[derive(Debug, Parser)]
#[command(name = "socklb-sim", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Who uses whom
    Subset(commands::subset::Options),
}

/// Runs the command line.
pub fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Subset(options) => commands::subset::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("socklb-sim: {error:#}");
            ExitCode::FAILURE
        }
    }
}
