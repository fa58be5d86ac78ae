//! The workers of the stress test: a server with backends that show every kind of behavior, and
//! processes that dial the server through socklb in every way, record their observations, and
//! report the expected counts. The tests start the workers; `soak` starts them itself.
//!
//! Workers use only sockets. The tests read the output of socklb; `soak` reads it itself.

mod child;

mod crowd;

mod failed;

mod hammer;

mod netlink;

mod odd;

mod play;

mod reached;

mod reject;

mod serve;

mod soak;

mod socket;

use anyhow::Result;
use clap::Parser;

#[derive(Debug, Parser)]
enum Command {
    /// The server behind all services. Prepares its network namespace for the test
    Serve,
    /// A worker: plays scenarios on request
    Play(play::Options),
    /// Another server, if one process has too few descriptors
    ServeMore,
    /// Opens and closes many sockets on request
    Crowd(crowd::Options),
    /// Connects and closes on request, as fast as it can
    Hammer(hammer::Options),
    /// Make millions of connects, then count the records that remain
    Soak(soak::Options),
    /// A process that opens sockets and waits to be killed
    Child(child::Options),
    /// A process that has a socket as its standard input and waits to be killed
    Keep,
}

fn main() -> Result<()> {
    match Command::parse() {
        Command::Serve => serve::run(),
        Command::ServeMore => serve::run_more(),
        Command::Crowd(options) => crowd::run(&options),
        Command::Play(options) => play::run(&options),
        Command::Hammer(options) => hammer::run(&options),
        Command::Soak(options) => soak::run(&options),
        Command::Child(options) => child::run(&options),
        Command::Keep => child::keep(),
    }
}
