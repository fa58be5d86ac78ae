//! `socklb-sim churn`: the cost of a change of a fleet, compared with the minimum cost.
//!
//! One of the fleet's three numbers (clients, backends, size) takes every value of a range. Each
//! step compares the fleets of two successive values. The command rejects a run that would take too
//! long.

use anyhow::{Result, bail};
use clap::Args;
use lb_core::subset::Algorithm;
use serde::Serialize;

use super::arguments::{Algorithms, NumberRange};
use crate::fleet::Fleet;
use crate::metrics::churn::{self, churn};
use crate::metrics::mean;
use crate::output;
use crate::table::{TextTable, percent};

/// The maximum number of entries that a run may examine in all steps and algorithms together. An
/// entry is a backend in a client's order, or a member of a subset. A run that examines this many
/// entries takes about a minute.
const MAX_LOOKS: u64 = 1 << 33;

/// The options of `socklb-sim churn`.
#[derive(Debug, Args)]
pub struct ChurnOptions {
    /// Subsetting algorithms: one or several, separated by commas, or all
    #[arg(long, value_name = "A,B,..", default_value = "rocksteadier")]
    algorithm: Algorithms,
    /// Client tasks of the job: a number, or a range such as 100..110
    #[arg(long, value_name = "M", value_parser = NumberRange::of_clients)]
    clients: NumberRange,
    /// Backends of the service: a number, or a range
    #[arg(long, value_name = "N", value_parser = NumberRange::of_backends)]
    backends: NumberRange,
    /// Wanted backends per client task: a number, or a range
    #[arg(long, value_name = "K", value_parser = NumberRange::of_sizes)]
    size: NumberRange,
    /// Seed of the job; the daemon uses XXH64 of JOB/SERVICE
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Which of the fleet's three numbers changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Dimension {
    Clients,
    Backends,
    Size,
}

#[derive(Serialize)]
struct ChurnDocument {
    schema: u32,
    changed: Dimension,
    clients: [u32; 2],
    backends: [u32; 2],
    size: [u32; 2],
    seed: String,
    results: Vec<ChurnCourse>,
}

#[derive(Serialize)]
struct ChurnCourse {
    algorithm: &'static str,
    steps: Vec<ChurnStep>,
    overall: Overall,
}

#[derive(Clone, Copy, Serialize)]
struct ChurnStep {
    from: u32,
    to: u32,
    mean: f64,
    worst: f64,
    replaced: u32,
    minimum: f64,
}

/// The cost of the whole change as one step, from the first number of the range to the last. Also a
/// summary of the single steps: the means of their mean and minimum costs, and the largest worst
/// cost.
#[derive(Serialize)]
struct Overall {
    #[serde(flatten)]
    whole: ChurnStep,
    step_mean: f64,
    step_worst: f64,
    step_minimum: f64,
}

pub fn run(options: &ChurnOptions) -> Result<()> {
    let ChurnOptions { clients, backends, size, seed, .. } = *options;
    let ranges = [(Dimension::Clients, clients), (Dimension::Backends, backends), (Dimension::Size, size)];
    let mut changes = ranges.into_iter().filter(|(_, range)| range.is_change());
    let (Some((changed, range)), None) = (changes.next(), changes.next()) else {
        bail!(
            "write exactly one of --clients, --backends and --size as a range of several numbers, as in 100..110"
        );
    };
    let fleet = |algorithm, number| {
        let mut fleet =
            Fleet { algorithm, clients: clients.from, backends: backends.from, size: size.from, seed };
        match changed {
            Dimension::Clients => fleet.clients = number,
            Dimension::Backends => fleet.backends = number,
            Dimension::Size => fleet.size = number,
        }
        fleet
    };
    check(options.algorithm.0.iter().map(|&algorithm| fleet(algorithm, range.to)), range)?;
    let courses = options.algorithm.0.iter();
    let results =
        courses.map(|&algorithm| ChurnCourse::of(range, |number| fleet(algorithm, number))).collect();
    let ends = |range: NumberRange| [range.from, range.to];
    let document = ChurnDocument {
        schema: output::SCHEMA,
        changed,
        clients: ends(clients),
        backends: ends(backends),
        size: ends(size),
        seed: seed.to_string(),
        results,
    };
    if options.json { output::json(&document) } else { output::text(document.text()) }
}

/// Checks that the largest fleet fits into memory, and that the run takes at most about a minute.
fn check(largest: impl Iterator<Item = Fleet>, range: NumberRange) -> Result<()> {
    let mut looks = 0;
    for fleet in largest {
        fleet.check_size()?;
        let each = fleet.connections() + if looks_at_all(fleet.algorithm) { fleet.pairs() } else { 0 };
        looks += each * u64::from(range.to - range.from + 1);
    }
    if looks > MAX_LOOKS {
        bail!(
            "{}..{}: too many steps for fleets of this size: they would examine {looks} backends, but the \
             limit is {MAX_LOOKS} (use a shorter range, or fewer algorithms)",
            range.from,
            range.to
        );
    }
    Ok(())
}

/// Whether, with this algorithm, every client shuffles or sorts all backends.
const fn looks_at_all(algorithm: Algorithm) -> bool {
    match algorithm {
        Algorithm::Random
        | Algorithm::Rendezvous
        | Algorithm::DeterministicBook
        | Algorithm::Deterministic
        | Algorithm::Consistent
        | Algorithm::ApertureShuffled => true,
        Algorithm::RoundRobin
        | Algorithm::Ring
        | Algorithm::Ringsteady
        | Algorithm::RingsteadyScaled
        | Algorithm::RingsteadyBothScaled
        | Algorithm::Rocksteadier
        | Algorithm::RocksteadierScaled
        | Algorithm::Aperture => false,
    }
}

impl ChurnCourse {
    fn of(range: NumberRange, fleet: impl Fn(u32) -> Fleet) -> Self {
        let first = fleet(range.from).graph();
        let mut before = first.clone();
        let mut steps = Vec::new();
        let step = |from, to, dropped: churn::Churn| {
            let churn::Churn { mean, worst, replaced } = dropped;
            ChurnStep { from, to, mean, worst, replaced, minimum: churn::minimum(&fleet(from), &fleet(to)) }
        };
        for to in range.from + 1..=range.to {
            let after = fleet(to).graph();
            steps.push(step(to - 1, to, churn(&before, &after)));
            before = after;
        }
        let whole = step(range.from, range.to, churn(&first, &before));
        let overall = Overall {
            whole,
            step_mean: mean(steps.iter().map(|step| step.mean)),
            step_worst: steps.iter().map(|step| step.worst).fold(0.0, f64::max),
            step_minimum: mean(steps.iter().map(|step| step.minimum)),
        };
        Self { algorithm: fleet(range.from).algorithm.name(), steps, overall }
    }
}

impl ChurnDocument {
    fn text(&self) -> String {
        let range =
            |[from, to]: [u32; 2]| if from == to { from.to_string() } else { format!("{from}..{to}") };
        let mut table = TextTable::new(["algorithm", "from", "to", "mean", "worst", "replaced", "minimum"]);
        for course in &self.results {
            // A single step is already the whole change.
            let steps = if course.steps.len() > 1 { course.steps.as_slice() } else { &[] };
            for step in steps.iter().chain([&course.overall.whole]) {
                table.row([
                    course.algorithm.to_owned(),
                    step.from.to_string(),
                    step.to.to_string(),
                    format!("{:.2} %", 100.0 * step.mean),
                    percent(step.worst),
                    step.replaced.to_string(),
                    format!("{:.2} %", 100.0 * step.minimum),
                ]);
            }
        }
        let [clients, backends, size] = [self.clients, self.backends, self.size].map(range);
        format!(
            "{clients} clients, {backends} backends, size {size}, seed {}: dropped parts of subsets\n\n{table}\n\
             replaced: clients that drop their whole subset. minimum: the mean that an even load requires.\n",
            self.seed
        )
    }
}
