//! A fleet in virtual time: clients send, backends restart, jobs are resized, and every decision is the daemon's.
//!
//! In reading order: what a scenario file says ([`values`], [`document`]) and means ([`scenario`], [`shipped`]); random
//! times ([`sampling`]) and the order of events ([`queue`]); what all tasks of a job decide ([`assignments`]), what one
//! of them does with it ([`client`]); what happens ([`world`]) and what is counted of it ([`tally`],
//! [`ejections`]). A run is a pure
//! function of a scenario and a seed: virtual time is whole microseconds, and no floating point decides in which order
//! things happen.

pub mod values;

pub mod document;

pub mod scenario;

pub mod shipped;

pub mod sampling;

pub mod queue;

pub mod assignments;

pub mod client;

pub mod world;

pub mod tally;

pub mod ejections;

use serde::Serialize;

use ejections::Ejections;
use scenario::Scenario;
use tally::{Row, Total};

/// What was counted while a scenario was played. Serializes as the document of `socklb-sim traffic --json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Version of this document.
    pub schema: u32,
    /// The scenario's name.
    pub scenario: String,
    /// The seed of everything random, in decimal.
    pub seed: String,
    /// A row for every step of every run, run after run.
    pub steps: Vec<Row>,
    /// What was counted over whole runs.
    pub summary: Totals,
    /// Ejections, if any run ejects backends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ejection: Option<Ejections>,
}

/// What was counted over whole runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Totals {
    /// In the order of the scenario.
    pub runs: Vec<Total>,
}

/// Plays all runs of a scenario, each in a fleet of its own with the same arrivals.
pub fn play(scenario: &Scenario, seed: u64) -> Report {
    let mut steps = Vec::new();
    let mut runs = Vec::new();
    let mut ejections = Ejections { steps: Vec::new(), runs: Vec::new() };
    for run in &scenario.runs {
        let played = world::play(scenario, run, seed);
        steps.extend(played.rows);
        runs.push(played.total);
        ejections.steps.extend(played.ejections.0);
        ejections.runs.push(played.ejections.1);
    }
    Report {
        schema: crate::output::SCHEMA,
        scenario: scenario.name.clone(),
        seed: seed.to_string(),
        steps,
        summary: Totals { runs },
        ejection: scenario.ejects().then_some(ejections),
    }
}
