//! All integration tests of the planner, in one program, because several programs would take longer
//! to compile and to link.

mod band;
mod commands;
mod ejections;
mod failures;
mod figures;
mod fleet;
mod lists;
mod load;
mod rebalance;
mod report;
mod scenario_files;
mod shipped;
mod traffic;
mod unequal;

use lb_sim::traffic::scenario::Scenario;
use lb_sim::traffic::{TrafficReport, play};

/// Reads a scenario from a file `x.toml` with this text.
fn read(text: &str) -> Result<Scenario, String> {
    Scenario::read("x", "x.toml", text).map_err(|fault| fault.to_string())
}

/// Reads a scenario, which must be valid.
#[track_caller]
fn scenario(text: &str) -> Scenario {
    read(text).unwrap_or_else(|fault| panic!("{fault}\n{text}"))
}

/// Simulates a scenario with seed 1.
#[track_caller]
fn played(text: &str) -> TrafficReport {
    play(&scenario(text), 1)
}
