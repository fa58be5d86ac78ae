//! Benchmarks against the real kernel: paired arms in one run, taken in turns, with an A/A arm that shows the noise.

mod connect;

mod daemon;

mod failover;

mod statistics;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// connect() and what follows it, through the programs, against direct and others
    Connect(connect::Options),
    /// Start-up time and idle CPU of the daemon
    Daemon,
    /// What a dead backend costs a client, with and without ejection
    Failover(failover::Options),
    /// The backends of a benchmark
    #[command(hide = true)]
    Serve(connect::serve::Options),
    /// One arm of a benchmark
    #[command(hide = true)]
    Work(connect::work::Options),
    /// The client of a benchmark of dead backends
    #[command(hide = true)]
    Call,
}

fn main() -> Result<()> {
    // Without whoever waits for the result it would go on, with both CPUs.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?;
    match Cli::parse().command {
        Command::Connect(options) => connect::run(&options),
        Command::Daemon => daemon::run(),
        Command::Failover(options) => failover::run(&options),
        Command::Serve(options) => connect::serve::run(&options),
        Command::Work(options) => connect::work::run(&options),
        Command::Call => failover::caller::run(),
    }
}
