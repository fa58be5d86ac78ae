//! `socklb-sim sweep`: how even the load of an algorithm is, for all numbers of clients and
//! backends.
//!
//! Prints the results of [`crate::sweep`]. A progress bar shows that the command works, because a
//! sweep may take minutes.

use anyhow::Result;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::arguments::{Algorithms, OutOfRange, size};
use crate::output;
use crate::sweep::summary::{RatioGroup, Summary, by_ratio};
use crate::sweep::{MAX_MAX, Sweep};
use crate::table::{TextTable, ratio};

/// The options of `socklb-sim sweep`.
#[derive(Debug, Args)]
pub struct SweepOptions {
    /// Subsetting algorithms: one or several, separated by commas, or all
    #[arg(long, value_name = "A,B,..", default_value = "rocksteadier")]
    algorithm: Algorithms,
    /// Wanted backends per client task
    #[arg(long, value_name = "K", default_value = "20", value_parser = size)]
    size: u32,
    /// Largest number of clients and of backends, 1 to 1024
    #[arg(long, value_name = "MAX", default_value = "256", value_parser = most)]
    max: u32,
    /// Seed of the job; the daemon uses XXH64 of JOB/SERVICE
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// Use structural weights, as the daemon does; aperture algorithms always use their own weights
    #[arg(long)]
    weighted: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn most(text: &str) -> Result<u32, OutOfRange> {
    super::arguments::within(text, MAX_MAX)
}

#[derive(Serialize)]
struct SweepDocument {
    schema: u32,
    size: u32,
    max: u32,
    seed: String,
    weighted: bool,
    cells: u64,
    results: Vec<AlgorithmSummary>,
}

#[derive(Serialize)]
struct AlgorithmSummary {
    algorithm: &'static str,
    adjusted: Summary,
    raw: Summary,
    by_ratio: Vec<RatioGroup>,
}

pub fn run(options: &SweepOptions) -> Result<()> {
    let SweepOptions { size, max, seed, weighted, .. } = *options;
    let sweep = Sweep { size, max, seed, weighted };
    for &algorithm in &options.algorithm.0 {
        sweep.check(algorithm)?;
    }
    // The bar appears only if standard error is a terminal.
    let columns = u64::from(max - size + 1) * options.algorithm.0.len() as u64;
    let bar = ProgressBar::new(columns).with_style(style()?);
    let mut results = Vec::new();
    for &algorithm in &options.algorithm.0 {
        bar.set_message(algorithm.name());
        let cells = sweep.run(algorithm, || bar.inc(1));
        results.push(AlgorithmSummary {
            algorithm: algorithm.name(),
            adjusted: Summary::of(cells.iter().map(|cell| cell.adjusted)),
            raw: Summary::of(cells.iter().map(|cell| cell.raw)),
            by_ratio: by_ratio(&cells),
        });
    }
    bar.finish_and_clear();
    let cells = sweep.cells();
    let document =
        SweepDocument { schema: output::SCHEMA, size, max, seed: seed.to_string(), weighted, cells, results };
    if options.json { output::json(&document) } else { output::text(document.text()) }
}

fn style() -> Result<ProgressStyle> {
    Ok(ProgressStyle::with_template("{msg:<22} {bar:40} {percent:>3} % {eta:>4}")?)
}

impl SweepDocument {
    fn text(&self) -> String {
        let Self { size, max, cells, seed, .. } = self;
        let weighted = if self.weighted { ", structural weights" } else { "" };
        let headings = |first| [first, "mean", "min", "p1", "p5", "p50"];
        let mut adjusted = TextTable::new(headings("adjusted utilization"));
        let mut raw = TextTable::new(headings("raw utilization"));
        let mut ratios = TextTable::new([
            "adjusted by clients per backend",
            "< 1/4",
            "< 1/2",
            "< 1",
            "< 2",
            "< 4",
            ">= 4",
        ]);
        for AlgorithmSummary { algorithm, adjusted: of_adjusted, raw: of_raw, by_ratio } in &self.results {
            let row = |summary: &Summary| {
                let Summary { mean, min, p1, p5, p50 } = *summary;
                [(*algorithm).to_owned(), ratio(mean), ratio(min), ratio(p1), ratio(p5), ratio(p50)]
            };
            adjusted.row(row(of_adjusted));
            raw.row(row(of_raw));
            let mut cells = vec![(*algorithm).to_owned()];
            cells.extend(by_ratio.iter().map(|group| match group.cells {
                0 => "-".to_owned(),
                _ => ratio(group.adjusted),
            }));
            ratios.row(cells);
        }
        format!(
            "{cells} fleets of 1 to {max} clients and {size} to {max} backends, size {size}, seed {seed}{weighted}\n\n\
             {adjusted}\n{raw}\n{ratios}"
        )
    }
}
