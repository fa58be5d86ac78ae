//! A process with many open sockets. On request it opens, closes or replaces a number of them, and
//! chooses the sockets to close at random.

use std::os::fd::OwnedFd;

use anyhow::{Result, ensure};
use fastrand::Rng;
use stage::rpc;
use stage::stress::Service;
use stage::workers::Change;

use crate::serve::many_files;
use crate::socket;

/// `stress crowd`
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Options {
    /// Determines which sockets are closed
    #[arg(long)]
    seed: u64,
}

/// `stress crowd`.
pub fn run(options: &Options) -> Result<()> {
    many_files()?;
    let mut crowd =
        Crowd { sockets: Vec::new(), random: Rng::with_seed(options.seed), service: Service::of("crowd") };
    rpc::serve(|change| {
        match *change {
            Change::Open(count) => (0..count).try_for_each(|_| crowd.open())?,
            Change::Close(count) => (0..count).try_for_each(|_| crowd.close())?,
            Change::Replace(count) => {
                (0..count).try_for_each(|_| crowd.close().and_then(|()| crowd.open()))?;
            }
        }
        Ok(crowd.sockets.len())
    })
}

struct Crowd {
    sockets: Vec<OwnedFd>,
    random: Rng,
    service: Service,
}

impl Crowd {
    fn open(&mut self) -> Result<()> {
        self.sockets.push(socket::dial(self.service)?);
        Ok(())
    }

    fn close(&mut self) -> Result<()> {
        ensure!(!self.sockets.is_empty(), "no connection is open");
        let at = self.random.usize(..self.sockets.len());
        self.sockets.swap_remove(at);
        Ok(())
    }
}
