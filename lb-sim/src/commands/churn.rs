//! `socklb-sim churn`: what a change of a fleet costs, against what it must cost.

use anyhow::{Result, bail};
use clap::Args;
use lb_core::subset::Algorithm;
use serde::Serialize;

use super::arguments::{Algorithms, Range};
use crate::fleet::Fleet;
use crate::metrics::churn::{self, churn};
use crate::metrics::mean;
use crate::output;
use crate::table::{Table, percent};

/// Most that may be looked at: backends of an order and members of a subset, over all steps and algorithms. About a minute.
const MAX_LOOKS: u64 = 1 << 33;

/// A fleet of which one number changes, one by one.
#[derive(Debug, Args)]
pub struct Options {
    /// How subsets are chosen: one or several, separated by commas, or all
    #[arg(long, value_name = "A,B,..", default_value = "rocksteadier")]
    algorithm: Algorithms,
    /// Client tasks of the job: a number, or a range as in 100..110
    #[arg(long, value_name = "M", value_parser = Range::of_clients)]
    clients: Range,
    /// Backends of the service: a number, or a range
    #[arg(long, value_name = "N", value_parser = Range::of_backends)]
    backends: Range,
    /// Backends that each client task wants: a number, or a range
    #[arg(long, value_name = "K", value_parser = Range::of_sizes)]
    size: Range,
    /// The job's seed: the daemon takes XXH64 of JOB/SERVICE
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// As JSON
    #[arg(long)]
    json: bool,
}

/// Which number changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Changed {
    Clients,
    Backends,
    Size,
}

#[derive(Serialize)]
struct Document {
    schema: u32,
    changed: Changed,
    clients: [u32; 2],
    backends: [u32; 2],
    size: [u32; 2],
    seed: String,
    results: Vec<Course>,
}

#[derive(Serialize)]
struct Course {
    algorithm: &'static str,
    steps: Vec<Step>,
    overall: Overall,
}

#[derive(Clone, Copy, Serialize)]
struct Step {
    from: u32,
    to: u32,
    mean: f64,
    worst: f64,
    replaced: u32,
    minimum: f64,
}

/// From the first to the last number at once, and what the steps are like.
#[derive(Serialize)]
struct Overall {
    #[serde(flatten)]
    whole: Step,
    step_mean: f64,
    step_worst: f64,
    step_minimum: f64,
}

/// Prints what each step drops.
pub fn run(options: &Options) -> Result<()> {
    let Options { clients, backends, size, seed, .. } = *options;
    let ranges = [(Changed::Clients, clients), (Changed::Backends, backends), (Changed::Size, size)];
    let mut changes = ranges.into_iter().filter(|(_, range)| range.is_change());
    let (Some((changed, range)), None) = (changes.next(), changes.next()) else {
        bail!(
            "exactly one of --clients, --backends and --size is a range of more than one number, as in 100..110"
        );
    };
    let fleet = |algorithm, number| {
        let mut fleet =
            Fleet { algorithm, clients: clients.from, backends: backends.from, size: size.from, seed };
        match changed {
            Changed::Clients => fleet.clients = number,
            Changed::Backends => fleet.backends = number,
            Changed::Size => fleet.size = number,
        }
        fleet
    };
    check(options.algorithm.0.iter().map(|&algorithm| fleet(algorithm, range.to)), range)?;
    let courses = options.algorithm.0.iter();
    let results = courses.map(|&algorithm| Course::of(range, |number| fleet(algorithm, number))).collect();
    let ends = |range: Range| [range.from, range.to];
    let document = Document {
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

/// That the largest fleet can be held and all of them be waited for.
fn check(largest: impl Iterator<Item = Fleet>, range: Range) -> Result<()> {
    let mut looks = 0;
    for fleet in largest {
        fleet.check_size()?;
        let each = fleet.connections() + if looks_at_all(fleet.algorithm) { fleet.pairs() } else { 0 };
        looks += each * u64::from(range.to - range.from + 1);
    }
    if looks > MAX_LOOKS {
        bail!(
            "{}..{} are too many steps of so large fleets: they look at {looks} backends, and {MAX_LOOKS} are the most \
             (a shorter range, or fewer algorithms)",
            range.from,
            range.to
        );
    }
    Ok(())
}

/// Whether every client shuffles or sorts all backends.
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

impl Course {
    fn of(range: Range, fleet: impl Fn(u32) -> Fleet) -> Self {
        let first = fleet(range.from).graph();
        let mut before = first.clone();
        let mut steps = Vec::new();
        let step = |from, to, dropped: churn::Churn| {
            let churn::Churn { mean, worst, replaced } = dropped;
            Step { from, to, mean, worst, replaced, minimum: churn::minimum(&fleet(from), &fleet(to)) }
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

impl Document {
    fn text(&self) -> String {
        let range =
            |[from, to]: [u32; 2]| if from == to { from.to_string() } else { format!("{from}..{to}") };
        let mut text = format!(
            "{} clients, {} backends, size {}, seed {}: part of a subset that is dropped\n\n",
            range(self.clients),
            range(self.backends),
            range(self.size),
            self.seed
        );
        let mut table = Table::new(["algorithm", "from", "to", "mean", "worst", "replaced", "minimum"]);
        for course in &self.results {
            // A single step is the whole change.
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
        text.push_str(&table.to_string());
        text.push_str("\nreplaced: clients that drop everything. minimum: mean that evenness demands.\n");
        text
    }
}
