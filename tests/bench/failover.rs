//! The cost of a dead backend for a client, with and without ejection; whether healthy backends are
//! ejected; and how soon a recovered backend has its share again.
//!
//! This is a benchmark, not a test: it runs in real time, and its results depend on timing. It runs
//! the program as an operator does. A process in the client's cgroup makes the connects, and
//! records which of them fail.

mod cell;

pub mod caller;

mod slow;

mod clients;

mod outcome;

mod play;

mod mistake;

mod recovery;

mod print;

use std::path::PathBuf;

use anyhow::{Context, Result};
use lb_common::abi::Policy;
use serde::Serialize;
use stage::Stage;

/// `bench failover`
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Measure only this policy; may be given several times
    #[arg(long = "policy", value_parser = policy)]
    policies: Vec<Policy>,
    /// Measure only this fault: `refuse`, `blackhole`, `reset`, `slow-accept`
    #[arg(long)]
    fault: Option<cell::Fault>,
    /// Measure every fault in every fleet under every policy
    #[arg(long, conflicts_with_all = ["mistakes", "recovery"])]
    all: bool,
    /// Test whether healthy backends are ejected
    #[arg(long = "false", conflicts_with = "recovery")]
    mistakes: bool,
    /// With `--false`: number of connects, of which one in a thousand fails; on the link that loses
    /// packets, a tenth of this number
    #[arg(long, default_value_t = 1_000_000)]
    connects: u64,
    /// Measure how soon a recovered backend has its share again
    #[arg(long)]
    recovery: bool,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Fail if a requirement is missed
    #[arg(long)]
    check: bool,
}

fn policy(name: &str) -> Result<Policy, String> {
    let names = Policy::ALL.map(Policy::name).join(", ");
    let found = Policy::ALL.into_iter().find(|policy| policy.name() == name);
    found.ok_or_else(|| format!("write one of {names}"))
}

/// A cell with its results, in the JSON document.
#[derive(Serialize)]
struct Row<'m> {
    #[serde(flatten)]
    cell: cell::Described,
    #[serde(flatten)]
    figures: &'m outcome::Figures,
}

/// `bench failover`.
pub fn run(options: &Options) -> Result<()> {
    let stage = Stage::new();
    let or = |otherwise: &[Policy]| match options.policies.as_slice() {
        [] => otherwise.to_vec(),
        named => named.to_vec(),
    };
    let missed: Vec<String> = if options.mistakes {
        let wanted =
            mistake::Options { connects: options.connects, policies: or(&[Policy::WeightedRoundRobin]) };
        let seen = mistake::run(&stage, &wanted)?;
        println!("{}", mistake::print(&seen));
        write(options, &seen)?;
        seen.iter().filter_map(mistake::Seen::missed).collect()
    } else if options.recovery {
        let seen = recovery::run(&stage, &or(&Policy::ALL))?;
        println!("{}", recovery::print(&seen));
        write(options, &seen)?;
        seen.iter().filter_map(recovery::Seen::missed).collect()
    } else {
        let mut cells = cell::matrix(&or(&Policy::ALL), options.all);
        cells.retain(|cell| options.fault.is_none_or(|fault| cell.fault == fault));
        let measured = play::play(&stage, &cells)?;
        println!("{}", print::cells(&measured));
        let aborted: u64 = measured.iter().map(|(_, figures)| figures.taken_for_aborted).sum();
        if aborted > 0 {
            println!("resets that were counted as aborted: {aborted}");
        }
        let rows = measured.iter().map(|(cell, figures)| Row { cell: cell.describe(), figures });
        write(options, &rows.collect::<Vec<_>>())?;
        let named = |(cell, figures): &(cell::Cell, outcome::Figures)| {
            let named = format!("{:?}", cell.describe());
            outcome::missed(*cell, figures).into_iter().map(move |missed| format!("{named}: {missed}"))
        };
        measured.iter().flat_map(|measured| named(measured).collect::<Vec<_>>()).collect()
    };
    crate::results::conclude(&missed, options.check)
}

fn write(options: &Options, measured: &impl Serialize) -> Result<()> {
    let Some(path) = &options.json else { return Ok(()) };
    let text = serde_json::to_string_pretty(measured)?;
    std::fs::write(path, text + "\n").with_context(|| format!("write {}", path.display()))
}
