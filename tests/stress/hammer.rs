//! Connects and closes as fast as it can. Most connections end with a reset, some end in an orderly
//! way, and a few connects fail.

use anyhow::Result;
use fastrand::Rng;
use rustix::io::Errno;
use rustix::net::{SocketFlags, connect};
use stage::ending::Seen;
use stage::ledger::Ledger;
use stage::rpc;
use stage::stress::Service;
use stage::workers::Connects;

use crate::failed::UNROUTED;
use crate::socket::{dial, fails, linger_not, tcp};

/// `stress hammer`
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Options {
    /// Determines how each connection ends
    #[arg(long)]
    seed: u64,
}

/// `stress hammer`.
pub fn run(options: &Options) -> Result<()> {
    let mut random = Rng::with_seed(options.seed);
    let [crowd, refused, unrouted] = ["crowd", "refused", "no-route"].map(Service::of);
    rpc::serve(|Connects(connects)| {
        let mut ledger = Ledger::default();
        for _ in 0..*connects {
            match random.u32(..100) {
                0..75 => {
                    linger_not(dial(crowd)?)?;
                    ledger.ended(crowd.name, Seen::Lingered);
                }
                // Each of these connections leaves its port in TIME_WAIT for a minute.
                75..90 => {
                    drop(dial(crowd)?);
                    ledger.ended(crowd.name, Seen::Closed);
                }
                90..95 => {
                    fail(refused, &[Errno::CONNREFUSED])?;
                    ledger.ended(refused.name, Seen::Refused);
                }
                _ => {
                    fail(unrouted, &UNROUTED)?;
                    ledger.ended(unrouted.name, Seen::NotSent);
                }
            }
        }
        Ok(ledger)
    })
}

fn fail(service: Service, with: &[Errno]) -> Result<()> {
    let socket = tcp(service.address(), SocketFlags::empty())?;
    fails(connect(&socket, &service.address()), with)
}
