//! The benefits and costs of backends' reports: restarts and crashes; the time from SIGTERM to the
//! last connect that chose a lame duck; pushes to many clients; the time until a datagram is
//! stored, and until a request is answered; probes of many backends; and datagrams of senders
//! without a key.
//!
//! This is a benchmark, not a test: it runs in real time, and its results depend on timing. It runs
//! daemon, agent and backends as processes, as an operator does. For thousands of agents, and for
//! forged reports, the benchmark itself sends and receives the protocol's datagrams.

mod verdicts;

mod reports;

pub mod load;

pub mod fleet;

mod shutdown;

mod restart;

use anyhow::Result;
use clap::ValueEnum as _;
use stage::Stage;

use crate::results::{Finding, conclude, show};
use reports::{answered, flood, hostile, many, pushes, stored};

/// `bench lame-duck`
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Measure only these parts; default: all
    parts: Vec<Part>,
    /// Fail if a requirement is missed
    #[arg(long)]
    check: bool,
}

/// A part that can be measured separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Backends that are restarted or crash under load
    Restart,
    /// Time from SIGTERM to the last connect that chose the backend
    Shutdown,
    /// Pushes to 1,000 and 10,000 clients
    Pushes,
    /// Time from a datagram to the stored verdict
    Stored,
    /// Time from a request to its answer
    Answered,
    /// 10,000 backends probed by one daemon
    Many,
    /// 100,000 datagrams that must change nothing
    Hostile,
    /// Millions of frames per second to an interface where the kernel processes reports
    Flood,
}

impl Part {
    fn measure(self, stage: &Stage) -> Result<Vec<Finding>> {
        match self {
            Self::Restart => restart::run(stage),
            Self::Shutdown => shutdown::run(stage),
            Self::Pushes => pushes::run(stage),
            Self::Stored => stored::run(stage),
            Self::Answered => answered::run(stage),
            Self::Many => many::run(stage),
            Self::Hostile => hostile::run(stage),
            Self::Flood => flood::run(stage),
        }
    }
}

/// `bench lame-duck`.
pub fn run(options: &Options) -> Result<()> {
    let mut missed = Vec::new();
    let wanted = |part: &&Part| options.parts.is_empty() || options.parts.contains(part);
    for part in Part::value_variants().iter().filter(wanted) {
        // Each part has its own network, so that no devices and addresses of another part remain in
        // it.
        let stage = Stage::new();
        missed.extend(show(&part.measure(&stage)?));
    }
    conclude(&missed, options.check)
}
