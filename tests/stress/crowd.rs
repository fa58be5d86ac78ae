//! Many sockets that are open at once: opens, replaces and closes as many as it is told, which ones by chance.

use fastrand::Rng;
use std::io::{BufRead, Write};
use std::os::fd::OwnedFd;

use anyhow::{Context, Result, bail, ensure};
use stage::stress::Service;

use crate::serve::many_files;
use crate::socket;

/// `stress crowd`
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Options {
    /// Decides which sockets are closed
    #[arg(long)]
    seed: u64,
}

/// `stress crowd`: one request a line, answered with the number of open sockets.
pub fn run(options: &Options) -> Result<()> {
    many_files()?;
    let mut crowd =
        Crowd { sockets: Vec::new(), random: Rng::with_seed(options.seed), service: Service::of("crowd") };
    for request in std::io::stdin().lock().lines() {
        let request = request?;
        let answer = match request.split(' ').collect::<Vec<_>>().as_slice() {
            ["ready"] => "ok".to_owned(),
            [what, count] => {
                let count: u32 = count.parse().context("a number of sockets")?;
                for _ in 0..count {
                    match *what {
                        "open" => crowd.open()?,
                        "close" => crowd.close()?,
                        "replace" => crowd.close().and_then(|()| crowd.open())?,
                        _ => bail!("unknown request: {request}"),
                    }
                }
                crowd.sockets.len().to_string()
            }
            _ => bail!("unknown request: {request}"),
        };
        let mut out = std::io::stdout().lock();
        writeln!(out, "{answer}").and_then(|()| out.flush())?;
    }
    Ok(())
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
        ensure!(!self.sockets.is_empty(), "nothing is open");
        let at = self.random.usize(..self.sockets.len());
        self.sockets.swap_remove(at);
        Ok(())
    }
}
