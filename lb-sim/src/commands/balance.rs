//! `socklb-sim balance`: how even a fleet's subsets are, and how much they have in common.
//!
//! Prints what [`crate::metrics`] computes. The JSON types are here, because a shape that scripts rely on shall not
//! change with a metric.

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use super::arguments::{Algorithms, FleetArguments, size};
use crate::fleet::{Fleet, Sharing};
use crate::metrics::overlap::{Overlap, distinct, overlap};
use crate::metrics::{Spread, adjusted_utilization, block_shares, raw_utilization};
use crate::output;
use crate::table::{TextTable, percent, ratio};

/// A fleet, and what to look at.
#[derive(Debug, Args)]
pub struct Options {
    /// How subsets are chosen: one or several, separated by commas, or all
    #[arg(long, value_name = "A,B,..", default_value = "rocksteadier")]
    algorithm: Algorithms,
    #[command(flatten)]
    job: FleetArguments,
    /// With structural weights, as the daemon has them; aperture forms always have their own
    #[arg(long)]
    weighted: bool,
    /// How many neighbouring backends a rolling restart takes down at once [default: a tenth of them]
    #[arg(long, value_name = "B", value_parser = size)]
    block: Option<u32>,
    /// As JSON
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
    results: Vec<Balance>,
}

#[derive(Serialize)]
struct Balance {
    algorithm: &'static str,
    connections: BackendConnections,
    utilization: Utilization,
    distinct: u32,
    overlap: Overlap,
    /// Largest part of a subset within a block, over all clients.
    spread: f64,
    /// Largest part of a subset within a block, mean over the clients.
    spread_mean: f64,
}

/// Connections of a backend.
#[derive(Serialize)]
struct BackendConnections {
    min: u32,
    mean: f64,
    max: u32,
    rsd: f64,
}

#[derive(Serialize)]
struct Utilization {
    raw: f64,
    adjusted: f64,
}

/// Prints what the algorithms are worth.
pub fn run(options: &Options) -> Result<()> {
    let FleetArguments { clients, backends, size, seed } = options.job;
    let block = options.block.unwrap_or(backends.div_ceil(10));
    let mut results = Vec::new();
    for &algorithm in &options.algorithm.0 {
        let fleet = options.job.fleet(algorithm);
        fleet.check_size()?;
        results.push(Balance::of(&fleet, options.weighted, block));
    }
    let document = BalanceDocument {
        schema: output::SCHEMA,
        clients,
        backends,
        size,
        seed: seed.to_string(),
        weighted: options.weighted,
        block,
        results,
    };
    if options.json { output::json(&document) } else { output::text(document.text()) }
}

impl Balance {
    fn of(fleet: &Fleet, weighted: bool, block: u32) -> Self {
        let graph = fleet.graph();
        let connections = graph.connections();
        let Spread { mean, rsd, .. } = Spread::of_counts(&connections);
        let loads = Sharing::of(fleet, &graph, weighted).loads(&graph);
        let blocks = block_shares(&graph, block);
        Self {
            algorithm: fleet.algorithm.name(),
            connections: BackendConnections {
                min: connections.iter().copied().min().unwrap_or(0),
                mean,
                max: connections.iter().copied().max().unwrap_or(0),
                rsd,
            },
            utilization: Utilization {
                raw: raw_utilization(&loads),
                adjusted: adjusted_utilization(&connections, fleet.clients, fleet.wanted()),
            },
            distinct: distinct(&graph),
            overlap: overlap(&graph, fleet.wanted()),
            spread: blocks.max,
            spread_mean: blocks.mean,
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
            "{clients} clients, {backends} backends, size {size}, seed {seed}{weighted}\n\n{table}\n\
             min, mean, max, rsd: connections of a backend. raw: mean load over largest load. \
             adjusted: best possible over largest count of connections.\n\
             overlap: what two subsets share, mean and largest. \
             spread: most of a subset among {block} neighbours.\n"
        );
        for result in self.results.iter().filter(|result| result.overlap.compared < *clients) {
            let Balance { algorithm, overlap: Overlap { compared, .. }, .. } = result;
            text.push_str(&format!("{algorithm}: largest overlap of {compared} clients with all others.\n"));
        }
        text
    }
}
