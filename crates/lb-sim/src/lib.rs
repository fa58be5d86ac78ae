//! The planner: the same decisions as the daemon's ([`lb_core`]), for a whole fleet at once, in numbers and pictures.
//!
//! In reading order: a fleet and its subsets ([`fleet`]), or a job before a list as a daemon reads it ([`listed`]); what subsets are
//! worth ([`metrics`]), what is drawn by lot ([`sampling`]), what unequal clients do to subsets ([`unequal`]), and all that over many
//! fleets ([`sweep`]); which to choose ([`advice`]), a fleet in virtual time ([`traffic`]), and pictures of all of it ([`report`]); then
//! one module per command. Must not know of kernels, sockets or clocks: the same arguments give the same output on every machine.
#![forbid(unsafe_code)]

pub mod fleet;

pub mod listed;

pub mod metrics;

pub mod sampling;

pub mod unequal;

pub mod sweep;

pub mod advice;

pub mod traffic;

pub mod report;

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

    pub mod report;
}

mod table;

mod output;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

/// Plans socklb's subsets: which client tasks use which backends, how even that is, and what a change costs.
///
/// It computes what the daemons of a whole job would decide, without a kernel, without root and without a network.
#[derive(Debug, Parser)]
#[command(name = "socklb-sim", version)]
struct PlannerCli {
    #[command(subcommand)]
    command: PlannerCommand,
}

#[derive(Debug, Subcommand)]
enum PlannerCommand {
    /// Who uses whom
    Subset(commands::subset::SubsetOptions),
    /// How Rocksteadier deals backends to ten clients (the ACM article's Tables 2 to 5)
    Lots(commands::lots::LotsOptions),
    /// How even the subsets are, and how much they have in common
    Balance(commands::balance::BalanceOptions),
    /// What one more client or backend, or another size, costs in connections
    Churn(commands::churn::ChurnOptions),
    /// How even an algorithm is before all numbers of clients and backends (the ACM article's Figure 2)
    Sweep(commands::sweep::SweepOptions),
    /// What to configure for a fleet, and what that trades for what
    Advise(commands::advise::AdviseOptions),
    /// A fleet in virtual time: load, errors and moved connections through restarts and resizes
    Traffic(commands::traffic::TrafficOptions),

    /// Draws the literature's figures with our own numbers, as one page to look at
    Report(commands::report::ReportOptions),
}

/// What the command line takes, for its manual pages.
pub fn command() -> clap::Command {
    PlannerCli::command()
}

/// Runs the command line.
pub fn main() -> ExitCode {
    let result = match PlannerCli::parse().command {
        PlannerCommand::Subset(options) => commands::subset::run(&options),
        PlannerCommand::Lots(options) => commands::lots::run(&options),
        PlannerCommand::Balance(options) => commands::balance::run(&options),
        PlannerCommand::Churn(options) => commands::churn::run(&options),
        PlannerCommand::Sweep(options) => commands::sweep::run(&options),
        PlannerCommand::Advise(options) => commands::advise::run(&options),
        PlannerCommand::Traffic(options) => commands::traffic::run(&options),

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
