//! A process that is killed with its sockets open.

use std::io::Write;
use std::os::fd::OwnedFd;

use anyhow::Result;
use rustix::process::{Signal, set_parent_process_death_signal};
use stage::ending::Seen;
use stage::ledger::Ledger;
use stage::stress::Service;

use crate::reached::with_unread_data;
use crate::serve::ECHO;
use crate::socket::{begin, dial, exchange};

/// `stress child`
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Options {
    /// Sockets of each kind
    #[arg(long)]
    sockets: u32,
}

/// `stress child`: opens sockets, reports the counts that are expected after it is killed, and
/// waits to be killed.
pub fn run(options: &Options) -> Result<()> {
    let mut ledger = Ledger::default();
    let mut sockets: Vec<OwnedFd> = Vec::new();
    for _ in 0..options.sockets {
        let socket = dial(Service::of("killed"))?;
        exchange(&socket, ECHO)?;
        sockets.push(socket);
        ledger.ended("killed", Seen::Closed);
        sockets.push(with_unread_data("killed")?);
        ledger.ended("killed", Seen::Unread);
        sockets.push(begin(Service::of("killed-early"))?);
        ledger.ended("killed-early", Seen::GaveUp);
    }
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(&ledger)?).and_then(|()| out.flush())?;
    keep()
}

/// Waits to be killed.
pub fn keep() -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // A parked thread may wake without a reason.
    loop {
        std::thread::park();
    }
}
