//! A fleet in virtual time: clients send, backends restart, and jobs are resized. The daemon's own
//! code makes every decision.
//!
//! The modules in reading order: the keys of a scenario file ([`values`], [`document`]) and their
//! meaning ([`scenario`], [`shipped`]); the cost of requests ([`demand`]); the order of events
//! ([`queue`]); the decisions for all tasks of a job ([`assignments`]), and how one task applies
//! them ([`client`]); the machine of a backend, and the part of the machine that the backend may
//! use ([`quota`], [`machine`]); the events ([`world`]); the counts of these events ([`tally`],
//! [`ejections`]); and figures over several seeds ([`figures`]).
//!
//! A run is a pure function of a scenario and a seed: virtual time is in whole microseconds, and
//! CPU time in whole femtoseconds.

pub mod assignments;
pub mod client;
pub mod demand;
pub mod document;
pub mod ejections;
pub mod figures;
pub mod machine;
pub mod queue;
pub mod quota;
pub mod scenario;
pub mod shipped;
pub mod tally;
pub mod values;
pub mod world;

use rayon::iter::{IntoParallelIterator as _, ParallelIterator as _};
use serde::Serialize;

use ejections::Ejections;
use figures::RunFigures;
use scenario::Scenario;
use tally::{StepRow, Total};

/// The counts of a simulated scenario. Serializes as the document of `socklb-sim traffic --json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrafficReport {
    pub schema: u32,
    pub scenario: String,
    /// The first seed of all random numbers, in decimal. Only the figures cover the other seeds;
    /// all counts are from this seed.
    pub seed: String,
    /// The number of seeds that were simulated: `seed` and the following ones.
    pub seeds: u32,
    /// A row for every step of every run, run after run.
    pub steps: Vec<StepRow>,
    /// The counts of whole runs.
    pub summary: Totals,
    /// Ejections, if any run ejects backends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ejection: Option<Ejections>,
    /// How even the load was and how long requests took, if requests cost CPU time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub figures: Option<Figures>,
}

/// The measurements of whole runs, over all seeds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// One entry for each run, in the order of the scenario.
    pub runs: Vec<RunFigures>,
}

/// The counts of whole runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Totals {
    /// One entry for each run, in the order of the scenario.
    pub runs: Vec<Total>,
}

/// Simulates all runs of a scenario with all its seeds. Each run has its own fleet. Runs with the
/// same seed have the same arrivals.
pub fn play(scenario: &Scenario, seed: u64) -> TrafficReport {
    play_with(scenario, seed, || ())
}

/// How often [`play_with`] calls `done`.
pub fn plays(scenario: &Scenario) -> u64 {
    scenario.runs.len() as u64 * u64::from(scenario.seeds)
}

/// Simulates like [`play`], and calls `done` after each run with each seed.
pub fn play_with(scenario: &Scenario, seed: u64, done: impl Fn() + Sync) -> TrafficReport {
    let seeds = u64::from(scenario.seeds);
    let plays: Vec<(usize, u64)> =
        (0..scenario.runs.len()).flat_map(|run| (0..seeds).map(move |number| (run, number))).collect();
    let played = plays.into_par_iter().map(|(run, number)| {
        // With the first seed, subsets have the seed that a daemon would use. With each later seed,
        // they have another seed, unless the file sets the seed of the subsets.
        let subset_seed = (number > 0).then_some(number);
        let mut played = world::play(scenario, &scenario.runs[run], seed.wrapping_add(number), subset_seed);
        if number > 0 {
            // Rows are returned only for the first seed.
            (played.rows, played.ejections.0) = (Vec::new(), Vec::new());
        }
        done();
        played
    });
    let mut played = played.collect::<Vec<_>>().into_iter();
    let mut report = TrafficReport {
        schema: crate::output::SCHEMA,
        scenario: scenario.name.clone(),
        seed: seed.to_string(),
        seeds: scenario.seeds,
        steps: Vec::new(),
        summary: Totals { runs: Vec::new() },
        ejection: None,
        figures: None,
    };
    let mut ejections = Ejections { steps: Vec::new(), runs: Vec::new() };
    let mut figures = Figures { runs: Vec::new() };
    for _ in &scenario.runs {
        let mut of_run = Vec::new();
        for number in 0..seeds {
            let played = played.next().expect("every run was simulated with every seed");
            of_run.push((played.total, played.load));
            if number == 0 {
                report.steps.extend(played.rows);
                ejections.steps.extend(played.ejections.0);
                ejections.runs.push(played.ejections.1);
            }
        }
        figures.runs.push(RunFigures::of(&of_run));
        report.summary.runs.extend(of_run.into_iter().take(1).map(|(total, _)| total));
    }
    report.ejection = scenario.ejects().then_some(ejections);
    report.figures = scenario.has_costs().then_some(figures);
    report
}
