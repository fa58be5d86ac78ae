//! Benchmarks on the real kernel. Arms are compared within one run, in which they take turns. Two
//! equal arms (A/A) show the noise.

mod close;

mod connect;

mod daemon;

mod failover;

mod lame_duck;

mod load;

mod pause;

mod place;

mod results;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// How much slower connects are while `socklb close` closes many flows
    Close(close::Options),
    /// connect() and later operations through socklb's programs, compared with direct connections
    /// and other balancers
    Connect(connect::Options),
    /// Start-up time of the daemon, and CPU time of an idle daemon
    Daemon,
    /// The cost of a dead backend for a client, with and without ejection
    Failover(failover::Options),
    /// The benefits and costs of backends' reports
    LameDuck(lame_duck::Options),
    /// How even load is on backends with different capacities, and the cost of weights that follow
    /// load
    Load(load::Options),
    /// The flows that `bench close` closes
    #[command(hide = true)]
    Hold,
    /// The backends of a benchmark
    #[command(hide = true)]
    Serve(connect::serve::Options),
    /// One arm of a benchmark
    #[command(hide = true)]
    Work(connect::work::Options),
    /// The application of a backend
    #[command(hide = true)]
    Application(lame_duck::fleet::application::Options),
    /// The client of the lame-duck benchmark
    #[command(hide = true)]
    Ask(lame_duck::load::Options),
    /// A backend of the load benchmark
    #[command(hide = true)]
    ServeLoad(load::server::Options),
    /// A client of the load benchmark
    #[command(hide = true)]
    Send(load::sender::Options),
    /// The client of the failover benchmark
    #[command(hide = true)]
    Call,
}

fn main() -> Result<()> {
    let command = Cli::parse().command;
    // This process ends with its parent, because it would otherwise continue and occupy both CPUs.
    // Only an application continues without the `socklb agent run` that has started it.
    if !matches!(command, Command::Application(_)) {
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?;
    }
    match command {
        Command::Close(options) => close::run(&options),
        Command::Hold => close::hold(),
        Command::Connect(options) => connect::run(&options),
        Command::Daemon => daemon::run(),
        Command::Failover(options) => failover::run(&options),
        Command::LameDuck(options) => lame_duck::run(&options),
        Command::Application(options) => lame_duck::fleet::application::run(&options),
        Command::Load(options) => load::run(&options),
        Command::Ask(options) => lame_duck::load::run(&options),
        Command::ServeLoad(options) => load::server::run(&options),
        Command::Send(options) => load::sender::run(&options),
        Command::Serve(options) => connect::serve::run(&options),
        Command::Work(options) => connect::work::run(&options),
        Command::Call => failover::caller::run(),
    }
}
