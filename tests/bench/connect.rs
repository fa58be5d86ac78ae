//! The cost of a connect() through socklb's programs, and through other balancers.
//!
//! Each arm is a process in its own cgroup, in a network namespace without other traffic. In each
//! round every arm of a group makes a few hundred connects or other operations; the order of the
//! arms is random. The ratio to the first arm is computed within each round, so a disturbance of
//! the machine affects both arms. The second arm is a copy of the first, so its ratio shows the
//! noise. Connections end with a reset, so that no port stays occupied. The backends poll on
//! another CPU, so that the time to wake them is not measured.

pub mod arms;

pub mod work;

pub mod serve;

pub mod worker;

mod layers;

mod play;

mod programs;

mod outcome;

mod report;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, bail};
use clap::ValueEnum as _;
use stage::Stage;

use crate::results::table;
use arms::Build;
use arms::groups::{self, Name};
use layers::Layers;
use outcome::{Measured, Outcome};
use play::Player;
use report::{print, runs};

/// `bench connect`
#[derive(Debug, clap::Args)]
pub struct Options {
    /// The object with the empty program and the floor program
    #[arg(long)]
    floor: PathBuf,
    /// Number of rounds; in each round every arm has a turn
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Connects in a turn, at most the length of a listener's queue; turns of other operations have
    /// as many operations as are possible in about the same time
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=1000))]
    chunk: u32,
    /// Measure only this group; may be given several times
    #[arg(long = "group")]
    groups: Vec<Name>,
    /// Program of another build of socklb; compares three arms: this build, this build again, and
    /// the other build
    #[arg(long, value_name = "PROGRAM", conflicts_with = "report")]
    other: Option<PathBuf>,
    /// Compares three arms: this build, this build again, and this build with backends that report
    /// each second
    #[arg(long, conflicts_with_all = ["other", "report"])]
    reports: bool,
    /// Number of repetitions; each has new processes, programs and maps; also prints the spread
    /// over all of them
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=99), conflicts_with = "report")]
    runs: u32,
    /// Write the results into the documents of this folder
    #[arg(long, conflicts_with = "groups")]
    report: Option<PathBuf>,
}

/// `bench connect`.
pub fn run(options: &Options) -> Result<()> {
    let stage = Stage::new();
    let started = Instant::now();
    let mut outcomes = Vec::new();
    let wanted = |name: &&Name| options.groups.is_empty() || options.groups.contains(name);
    let names = || Name::value_variants().iter().filter(wanted);
    for name in (0..options.runs).flat_map(|_| names()) {
        let mut clients = groups::group(*name).clients().into_iter();
        if options.reports && clients.any(|client| client.protocol != "tcp") {
            println!("left out: {name:?} (the agent of this benchmark reports only TCP services)\n");
            continue;
        }
        let outcome = measure(*name, &stage, options)?;
        println!("{}", print::group(&outcome, "\n", table));
        outcomes.push(outcome);
    }
    if options.runs > 1 {
        for number in 0..names().count() {
            let of_group: Vec<&Outcome> = outcomes.iter().skip(number).step_by(names().count()).collect();
            println!("{}", runs::compare(&of_group));
        }
    }
    println!("{}; {} s", print::summary(&outcomes), started.elapsed().as_secs());
    if let Some(folder) = &options.report {
        report::write(folder, &outcomes, started.elapsed())?;
    }
    let rows = outcomes.iter().flat_map(|outcome| &outcome.rows);
    match rows.filter(|row| row.figures.is_err()).count() {
        0 => Ok(()),
        arms => bail!("{arms} arms were not run: their build rejects the configuration"),
    }
}

fn measure(name: Name, stage: &Stage, options: &Options) -> Result<Outcome> {
    let mut group = groups::group(name);
    if options.reports {
        group = group.of_two_builds(Build::Reported);
    } else if options.other.is_some() {
        group = group.of_two_builds(Build::Other);
    }
    let layers = Layers::of(&group, stage, &options.floor, options.other.as_deref())?;
    let mut players = Vec::new();
    let mut measured = Vec::new();
    for (arm, value) in group.arms.iter().enumerate() {
        let worker = layers.worker(&group, value)?;
        measured.push(Err(worker.as_ref().err().cloned().unwrap_or_default()));
        players.extend(worker.ok().map(|worker| Player { arm, worker, turns: Vec::new() }));
    }
    let operations = group.work.operations(options.chunk);
    play::play(&group, &layers, &mut players, options.rounds, operations)?;
    for Player { arm, mut worker, turns } in players {
        let ids = layers.programs(&group.arms[arm])?;
        let costs =
            if ids.is_empty() { Vec::new() } else { programs::costs(&mut worker, &ids, operations * 4)? };
        let [_, p99_of_all] = worker.all();
        measured[arm] = Ok(Measured { turns, p99_of_all, costs });
    }
    Ok(Outcome::of(group, options.rounds, operations, &measured))
}
