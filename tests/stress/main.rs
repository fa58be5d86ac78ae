//! The workers of the stress test: a server whose backends behave in every way, and processes that dial it through socklb
//! in every way, know what they saw, and say what must therefore have been counted. Started by the tests; `soak` starts
//! them itself.
//!
//! They drive sockets and nothing else: what socklb says is read by whoever started them, but for `soak`.

mod child;

mod failed;

mod netlink;

mod odd;

mod play;

mod random;

mod reached;

mod reject;

mod serve;

mod socket;

use anyhow::Result;
use clap::Parser;

#[derive(Debug, Parser)]
enum Command {
    /// The server behind all services; changes its network namespace to the needs of the test
    Serve,
    /// A worker: plays on request, one line in, one line out
    Play(play::Options),
    /// A process that opens sockets and waits to be killed
    Child(child::Options),
    /// A process that has a socket as its standard input and waits to be killed
    Keep,
}

fn main() -> Result<()> {
    match Command::parse() {
        Command::Serve => serve::run(),
        Command::Play(options) => play::run(&options),
        Command::Child(options) => child::run(&options),
        Command::Keep => child::keep(),
    }
}
