//! Weights that follow load, on this kernel. The benchmark measures how even the load of backends
//! with different capacities is, and compares this with the planner's result for the same fleet. It
//! also measures the cost of load control for many backends in the daemon.
//!
//! Backends are processes with quotas of CPU time. Agents report how much of their quotas the
//! backends use. Clients send at different rates. The kernel's count of CPU time for a backend's
//! cgroup shows the backend's load; this count does not depend on socklb.

pub mod server;

pub mod sender;

mod fleet;

mod series;

mod arm;

mod planned;

mod print;

mod publication;

use std::time::{Duration, Instant};

use anyhow::Result;
use stage::{Quota, Setup, Stage};

use crate::results::{Finding, conclude, show};
use arm::Arm;
use fleet::{Cost, Mode};

/// `bench load`
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Measure only these parts; default: both
    parts: Vec<Part>,
    /// Measure only these arms
    #[arg(long = "arm")]
    arms: Vec<Arm>,
    /// Measure only this way to dial
    #[arg(long = "mode")]
    modes: Vec<Mode>,
    /// Number of turns that each arm has
    #[arg(long, default_value_t = 1)]
    rounds: u32,
    /// Seconds for which clients send before the measurement
    #[arg(long, default_value_t = 45)]
    settle: u64,
    /// Seconds of the measurement
    #[arg(long, default_value_t = 45)]
    measure: u64,
    /// Seconds of the measurement after a quota has changed; 0: no change
    #[arg(long, default_value_t = 60)]
    change: u64,
    /// Mean CPU time of a request, in microseconds
    #[arg(long, default_value_t = 1_500)]
    cost: u64,
    /// Standard deviation of the logarithm of the cost; 0: all requests cost the same
    #[arg(long, default_value_t = 0.0)]
    sigma: f64,
    /// Fail if a requirement is missed
    #[arg(long)]
    check: bool,
}

/// A part that can be measured separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Backends with different quotas
    Fleet,
    /// 64 clients that follow the load of ten services
    Publication,
}

/// The durations of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    settle: Duration,
    measure: Duration,
    change: Duration,
}

/// `bench load`.
pub fn run(options: &Options) -> Result<()> {
    let wanted = |part| options.parts.is_empty() || options.parts.contains(&part);
    let arms = if options.arms.is_empty() { &Arm::USUAL } else { &*options.arms };
    let mut findings = Vec::new();
    if wanted(Part::Fleet) {
        findings.extend(fleets(options, arms)?);
    }
    if wanted(Part::Publication) {
        findings.extend(publication::run(arms)?);
    }
    conclude(&show(&findings), options.check)
}

fn fleets(options: &Options, arms: &[Arm]) -> Result<Vec<Finding>> {
    let started = Instant::now();
    let modes = if options.modes.is_empty() { &Mode::ALL } else { &*options.modes };
    let cost = Cost { mean: Duration::from_micros(options.cost), sigma: options.sigma };
    let times = Times {
        settle: Duration::from_secs(options.settle),
        measure: Duration::from_secs(options.measure),
        change: Duration::from_secs(options.change),
    };
    let stage = Stage::new();
    let setup = Setup::new(&stage, "planned");
    let mut planned = Vec::new();
    for mode in modes {
        planned.push((*mode, planned::play(&setup, arms, *mode, cost, times)?));
    }
    let mut outcomes = Vec::new();
    for round in 0..options.rounds {
        let mut turns = arms.to_vec();
        fastrand::shuffle(&mut turns);
        for arm in turns {
            outcomes.extend(arm::run(&stage, arm, modes, cost, times, round)?);
            print::progress(&outcomes[outcomes.len() - modes.len()..]);
        }
    }
    let planned = |arm: Arm, mode: Mode| {
        let of_mode = planned.iter().find(|(of, _)| *of == mode);
        let at = arms.iter().position(|of| *of == arm);
        of_mode.zip(at).and_then(|((_, figures), at)| figures.get(at).copied())
    };
    println!("\nquotas by cgroup{}; the run took {} s\n", version(), started.elapsed().as_secs());
    println!("{}", print::outcomes(&outcomes, planned));
    println!("{}", print::backends(&outcomes));
    Ok(print::findings(&outcomes, planned))
}

/// The cgroup version that provides quotas on this host, as a part of a sentence.
fn version() -> String {
    Quota::new().map_or_else(|error| format!("s: {error:#}"), |quota| format!(" v{}", quota.version()))
}
