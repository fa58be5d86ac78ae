//! `socklb-sim balance`: how even the load of a fleet's subsets is, and how much the subsets have
//! in common.
//!
//! Prints the results of [`crate::metrics`]. The JSON types are in this module, so that a change of
//! a metric does not change a JSON shape on which scripts rely.

use anyhow::Result;
use clap::Args;
use lb_core::subset::Algorithm;
use serde::Serialize;

use super::arguments::{Algorithms, FleetArguments, size, variation};
use super::lists::ListArguments;
use crate::fleet::{Fleet, Sharing};
use crate::listed::ListedJob;
use crate::metrics::interval::Interval;
use crate::metrics::overlap::{Overlap, distinct, overlap};
use crate::metrics::{Spread, adjusted_utilization, block_shares, raw_utilization};
use crate::output;
use crate::table::{TextTable, percent, ratio};
use crate::unequal::{DRAWS, Inequality, UnequalLoads};
use lb_view::text::counted;

/// The options of `socklb-sim balance`.
#[derive(Debug, Args)]
pub struct BalanceOptions {
    /// Subsetting algorithms: one or several, separated by commas, or all [default: rocksteadier,
    /// or the configured algorithm]
    #[arg(long, value_name = "A,B,..")]
    algorithm: Option<Algorithms>,
    #[command(flatten)]
    job: FleetArguments,
    #[command(flatten)]
    list: ListArguments,
    /// Use structural weights, as the daemon does; aperture algorithms always use their own weights
    #[arg(long, conflicts_with_all = ["endpoints", "config"])]
    weighted: bool,
    /// Neighbouring backends that a rolling restart takes down at once [default: a tenth of the
    /// backends]
    #[arg(long, value_name = "B", value_parser = size, conflicts_with_all = ["endpoints", "config"])]
    block: Option<u32>,
    /// How unequal the clients are: standard deviation of their rates over the mean rate, 0 to 10
    #[arg(long, value_name = "CV", default_value_t = 0.0, value_parser = variation)]
    skew: f64,
    /// Percent of the clients that are absent, 0 to 99: subsets and weights are computed as if they
    /// were present, but they send nothing
    #[arg(long, value_name = "P", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=99))]
    missing: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct BalanceDocument {
    schema: u32,
    clients: u32,
    backends: u32,
    size: u32,
    seed: String,
    weighted: bool,
    block: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    inequality: Option<Inequality>,
    results: Vec<Balance>,
}

#[derive(Serialize)]
struct Balance {
    algorithm: &'static str,
    connections: BackendConnections,
    utilization: MeasuredUtilization,
    distinct: u32,
    overlap: Overlap,
    /// The largest part of a client's subset that lies within one block: the maximum over all
    /// clients.
    spread: f64,
    /// The largest part of a client's subset that lies within one block: the mean over all clients.
    spread_mean: f64,
    /// Loads with unequal or absent clients.
    #[serde(skip_serializing_if = "Option::is_none")]
    unequal: Option<UnequalLoads>,
}

#[derive(Serialize)]
struct BackendConnections {
    min: u32,
    mean: f64,
    max: u32,
    rsd: f64,
}

impl BackendConnections {
    fn of(connections: &[u32]) -> Self {
        let Spread { mean, rsd, .. } = Spread::of_counts(connections);
        let [min, max] = [connections.iter().min(), connections.iter().max()];
        Self { min: min.copied().unwrap_or(0), mean, max: max.copied().unwrap_or(0), rsd }
    }
}

#[derive(Serialize)]
struct MeasuredUtilization {
    raw: f64,
    adjusted: f64,
}

pub fn run(options: &BalanceOptions) -> Result<()> {
    let inequality = Inequality { skew: options.skew, missing: options.missing };
    let inequality = Some(inequality).filter(|inequality| !inequality.is_none());
    let algorithms = options.algorithm.as_ref().map(|algorithms| &algorithms.0[..]);
    let jobs = options.list.jobs(&options.job, algorithms)?;
    if !jobs.is_empty() {
        return of_list(options, &jobs, inequality);
    }
    let Fleet { clients, backends, size, seed, .. } = options.job.fleet(Algorithm::Rocksteadier);
    let block = options.block.unwrap_or(backends.div_ceil(10));
    let mut results = Vec::new();
    for &algorithm in algorithms.unwrap_or(&[Algorithm::Rocksteadier]) {
        let fleet = options.job.fleet(algorithm);
        fleet.check_size()?;
        results.push(Balance::of(&fleet, options.weighted, block, inequality));
    }
    let document = BalanceDocument {
        schema: output::SCHEMA,
        clients,
        backends,
        size,
        seed: seed.to_string(),
        weighted: options.weighted,
        block,
        inequality,
        results,
    };
    if options.json { output::json(&document) } else { output::text(document.text()) }
}

/// Prints how even the load of a job with a list is, if the tasks divide their traffic as their
/// daemons do.
fn of_list(options: &BalanceOptions, jobs: &[ListedJob], inequality: Option<Inequality>) -> Result<()> {
    let mut results = Vec::new();
    for job in jobs {
        job.check_size()?;
        results.push(ListedBalance::of(job, inequality));
    }
    let job = jobs.first().expect("there is at least one job");
    let document = ListedBalanceDocument {
        schema: output::SCHEMA,
        clients: job.tasks,
        endpoints: job.list.as_slice().len(),
        seed: job.service.seed.to_string(),
        inequality,
        results,
    };
    if options.json { output::json(&document) } else { output::text(document.text()) }
}

#[derive(Serialize)]
struct ListedBalanceDocument {
    schema: u32,
    clients: u32,
    endpoints: usize,
    seed: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    inequality: Option<Inequality>,
    results: Vec<ListedBalance>,
}

/// How even the load is for a job with a list. Only endpoints that are healthy in the list and have
/// a weight above 0 are included.
#[derive(Serialize)]
struct ListedBalance {
    algorithm: &'static str,
    connections: BackendConnections,
    /// The mean load divided by the largest load. A load is relative to the share that follows from
    /// the endpoint's weight.
    raw: f64,
    /// The same ratio as `raw`, with unequal or absent clients.
    #[serde(skip_serializing_if = "Option::is_none")]
    unequal: Option<Interval>,
}

impl ListedBalance {
    fn of(job: &ListedJob, inequality: Option<Inequality>) -> Self {
        let (subsets, capacities) = (job.subsets(), job.capacities());
        let connections = subsets.connections(&capacities);
        let raw = |rates: &[f64]| capacity_utilization(&subsets.loads(&capacities, rates), &capacities);
        let draws = |inequality: Inequality| {
            Interval::of(inequality.draws(job.tasks, job.service.seed).map(|rates| raw(&rates)))
        };
        Self {
            algorithm: job.algorithm(),
            connections: BackendConnections::of(&connections),
            raw: raw(&vec![1.0; job.tasks as usize]),
            unequal: inequality.map(draws),
        }
    }
}

impl ListedBalanceDocument {
    fn text(&self) -> String {
        let Self { clients, endpoints, seed, .. } = self;
        let mut table = TextTable::new(["algorithm", "min", "mean", "max", "rsd", "raw", "unequal"]);
        for ListedBalance { algorithm, connections, raw, unequal } in &self.results {
            let unequal = unequal.map_or_else(
                || "-".into(),
                |unequal| format!("{} ± {}", ratio(unequal.mean), ratio(unequal.high - unequal.mean)),
            );
            table.row([
                (*algorithm).to_owned(),
                connections.min.to_string(),
                format!("{:.1}", connections.mean),
                connections.max.to_string(),
                percent(connections.rsd),
                ratio(*raw),
                unequal,
            ]);
        }
        format!(
            "{}, {}, seed {seed}\n\n{table}\n\
             All columns: only healthy endpoints with a weight above 0. min, mean, max, rsd: connections of an endpoint. raw: mean load over largest\n\
             load, relative to weights. unequal: the ratio raw with unequal or absent clients.\n",
            counted(*clients, "client"),
            counted(*endpoints, "endpoint")
        )
    }
}

/// The part of the total capacity that is usable before the first backend is full. `loads` contains
/// the load of each backend divided by its capacity.
fn capacity_utilization(loads: &[f64], capacities: &[u16]) -> f64 {
    let capacities = capacities.iter().filter(|capacity| **capacity > 0).map(|capacity| f64::from(*capacity));
    let (all, sum) = capacities
        .zip(loads)
        .fold((0.0, 0.0), |(all, sum), (capacity, load)| (all + capacity, sum + capacity * load));
    let most = loads.iter().copied().fold(0.0, f64::max);
    if most > 0.0 { sum / all / most } else { 0.0 }
}

impl Balance {
    fn of(fleet: &Fleet, weighted: bool, block: u32, inequality: Option<Inequality>) -> Self {
        let graph = fleet.graph();
        let connections = graph.connections();
        let sharing = Sharing::of(fleet, &graph, weighted);
        let loads = sharing.loads(&graph);
        let blocks = block_shares(&graph, block);
        Self {
            algorithm: fleet.algorithm.name(),
            connections: BackendConnections::of(&connections),
            utilization: MeasuredUtilization {
                raw: raw_utilization(&loads),
                adjusted: adjusted_utilization(&connections),
            },
            distinct: distinct(&graph),
            overlap: overlap(&graph),
            spread: blocks.max,
            spread_mean: blocks.mean,
            unequal: inequality.map(|inequality| UnequalLoads::of(fleet, &graph, &sharing, inequality)),
        }
    }
}

impl BalanceDocument {
    fn text(&self) -> String {
        let Self { clients, backends, size, seed, block, .. } = self;
        let weighted = if self.weighted { ", structural weights" } else { "" };
        let mut table = TextTable::new([
            "algorithm",
            "min",
            "mean",
            "max",
            "rsd",
            "raw",
            "adjusted",
            "distinct",
            "overlap",
            "largest",
            "spread",
        ]);
        for result in &self.results {
            table.row([
                result.algorithm.to_owned(),
                result.connections.min.to_string(),
                format!("{:.1}", result.connections.mean),
                result.connections.max.to_string(),
                percent(result.connections.rsd),
                ratio(result.utilization.raw),
                ratio(result.utilization.adjusted),
                result.distinct.to_string(),
                percent(result.overlap.mean),
                percent(result.overlap.max),
                percent(result.spread),
            ]);
        }
        let mut text = format!(
            "{}, {}, size {size}, seed {seed}{weighted}\n\n{table}\n\
             min, mean, max, rsd: connections of a backend. raw: mean load over largest load. \
             adjusted: smallest possible maximum of connections of a backend over the actual maximum.\n\
             overlap, largest: the part that two subsets share, mean and largest. \
             spread: largest part of a subset within {block} neighbouring backends.\n",
            counted(*clients, "client"),
            counted(*backends, "backend")
        );
        for result in self.results.iter().filter(|result| result.overlap.compared < *clients) {
            let Balance { algorithm, overlap: Overlap { compared, .. }, .. } = result;
            text.push_str(&format!(
                "{algorithm}: largest overlap of {compared} clients, each compared with all others.\n"
            ));
        }
        if let Some(inequality) = self.inequality {
            text.push_str(&self.unequal(inequality));
        }
        text
    }

    /// Formats the effect of unequal or absent clients as a table.
    fn unequal(&self, Inequality { skew, missing }: Inequality) -> String {
        let mut table = TextTable::new(["algorithm", "raw", "at least", "rsd", "by formula"]);
        for result in &self.results {
            let unequal =
                result.unequal.as_ref().expect("unequal loads are computed if an inequality is given");
            let half = |interval: &Interval| interval.high - interval.mean;
            table.row([
                result.algorithm.to_owned(),
                format!("{} ± {}", ratio(unequal.raw.mean), ratio(half(&unequal.raw))),
                unequal.guarantee.map_or_else(|| "-".into(), ratio),
                format!("{} ± {}", percent(unequal.rsd.mean), percent(half(&unequal.rsd))),
                percent(unequal.law),
            ]);
        }
        format!(
            "\nClient rates vary by {skew}, and {missing} % of the clients are absent: means of {DRAWS} draws ± half of the 95 % interval.\n\
             at least: the lower bound with structural weights, if all present clients send the same. by formula:\n\
             variation x sqrt(N / (M K)) x sqrt(1 - K / N), for every algorithm.\n\n{table}"
        )
    }
}
