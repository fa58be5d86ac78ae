//! A small fleet with different machines, clients and subsets, but without unevenness by chance.
//! The tests of weights that follow load use it.

use lb_sim::traffic::TrafficReport;
use lb_sim::traffic::tally::{StepRow, WeightChanges};

/// The fleet as a scenario. Half of its machines have less than half of the capacity of the others.
/// The demand is a third of the total capacity.
pub const FLEET: &str = include_str!("fleet.toml");

/// The rows of a run that end after `from` and at or before `to`, in seconds.
pub fn rows<'a>(report: &'a TrafficReport, run: &str, (from, to): (u64, u64)) -> Vec<&'a StepRow> {
    let is_within = |row: &&StepRow| row.at_us > from * 1_000_000 && row.at_us <= to * 1_000_000;
    let rows: Vec<&StepRow> = report.steps.iter().filter(|row| row.run == run).filter(is_within).collect();
    assert!(!rows.is_empty(), "{run}: no row from {from} to {to} s");
    rows
}

pub fn weights(row: &StepRow) -> WeightChanges {
    row.weights.expect("load control adjusts weights")
}

/// For each of these rows, CPU utilization of the busiest backend divided by that of the least busy
/// one.
pub fn busiest_over_least(rows: &[&StepRow]) -> Vec<f64> {
    rows.iter().filter_map(|row| row.cpu).map(|cpu| cpu.max / cpu.min).collect()
}

pub fn most(numbers: &[f64]) -> f64 {
    numbers.iter().copied().fold(0.0, f64::max)
}
