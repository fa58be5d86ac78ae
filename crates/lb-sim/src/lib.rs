//! The planner makes the same decisions as the daemon ([`lb_core`]), for a whole fleet at once, and
//! shows them in numbers and pictures.
//!
//! The modules in reading order: a fleet and its subsets ([`fleet`]), or a job with a list as a
//! daemon reads it ([`listed`]); the quality of subsets ([`metrics`]); random draws ([`samples`]);
//! the effect of unequal clients ([`unequal`]); the quality of subsets for many fleets ([`sweep`]);
//! which subset to choose ([`advice`]); a fleet in virtual time ([`traffic`]); long
//! connections after a restart ([`rebalance`]); and pictures of all
//! results ([`report`]). Each command has a module. This crate must not depend on kernels, sockets
//! or clocks: the same arguments give the same output on every machine.
#![forbid(unsafe_code)]

pub mod advice;
pub mod fleet;
pub mod listed;
pub mod metrics;
pub mod rebalance;
pub mod report;
pub mod samples;
pub mod sweep;
pub mod traffic;
pub mod unequal;

mod commands {
    pub mod arguments;

    pub mod input;

    pub mod lists;

    pub mod subset;

    pub mod lots;

    pub mod balance;

    pub mod churn;

    pub mod sweep;

    pub mod advise;

    pub mod traffic;

    pub mod rebalance;

    pub mod report;
}

mod output;
mod table;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

/// Plans socklb's subsets: which client tasks use which backends, how even their load is, and the
/// cost of a change.
///
/// Computes what the daemons of a whole job would decide, without a kernel, without root and
/// without a network.
#[derive(Debug, Parser)]
#[command(name = "socklb-sim", version)]
struct PlannerCli {
    #[command(subcommand)]
    command: PlannerCommand,
}

#[derive(Debug, Subcommand)]
enum PlannerCommand {
    /// Shows which client tasks use which backends
    Subset(commands::subset::SubsetOptions),
    /// Shows how Rocksteadier deals backends to ten clients (the ACM article's Tables 2 to 5)
    Lots(commands::lots::LotsOptions),
    /// Measures how even the load of the subsets is, and how much the subsets have in common
    Balance(commands::balance::BalanceOptions),
    /// Shows how many connections clients drop if clients or backends are added, or if the size
    /// changes
    Churn(commands::churn::ChurnOptions),
    /// Measures how even the load of an algorithm is for all numbers of clients and backends (the
    /// ACM article's Figure 2)
    Sweep(commands::sweep::SweepOptions),
    /// Recommends a subset for a fleet, and compares it with the alternatives
    Advise(commands::advise::AdviseOptions),
    /// Simulates a fleet in virtual time: load, errors and moved connections during restarts and
    /// resizes
    Traffic(commands::traffic::TrafficOptions),
    /// Simulates pools of long connections after the restart of a backend, with `rebalance`
    Rebalance(commands::rebalance::RebalanceOptions),
    /// Draws the literature's figures with socklb's own numbers, on one page
    Report(commands::report::ReportOptions),
}

/// Returns the command line, from which the manual pages are generated.
pub fn command() -> clap::Command {
    PlannerCli::command()
}

pub fn main() -> ExitCode {
    let result = match PlannerCli::parse().command {
        PlannerCommand::Subset(options) => commands::subset::run(&options),
        PlannerCommand::Lots(options) => commands::lots::run(&options),
        PlannerCommand::Balance(options) => commands::balance::run(&options),
        PlannerCommand::Churn(options) => commands::churn::run(&options),
        PlannerCommand::Sweep(options) => commands::sweep::run(&options),
        PlannerCommand::Advise(options) => commands::advise::run(&options),
        PlannerCommand::Traffic(options) => commands::traffic::run(&options),
        PlannerCommand::Rebalance(options) => commands::rebalance::run(&options),
        PlannerCommand::Report(options) => commands::report::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("socklb-sim: {error:#}");
            ExitCode::FAILURE
        }
    }
}
