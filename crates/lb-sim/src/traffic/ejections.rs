//! What is counted of backends that fail: ejections, trials, and what they spare, by step and by run.
//!
//! Beside the [tally](super::tally), and part of a report only if one of its runs ejects backends. Must not decide anything.

use serde::Serialize;

/// What has happened up to now. Counts only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EjectionCounts {
    /// Connects that their backend failed: refused, not answered, or reset at once. Trials are among them.
    pub failed: u64,
    /// Times that a client ejected a backend; one that stays ejected after a trial counts again.
    pub ejections: u64,
    /// Connects that were the trial of an ejected backend.
    pub trials: u64,
    /// Times that a client took a backend back.
    pub readmissions: u64,
    /// Times that a backend was not ejected because too many were.
    pub withheld: u64,
}

impl EjectionCounts {
    /// What has happened since earlier counts.
    pub const fn since(self, before: Self) -> Self {
        Self {
            failed: self.failed - before.failed,
            ejections: self.ejections - before.ejections,
            trials: self.trials - before.trials,
            readmissions: self.readmissions - before.readmissions,
            withheld: self.withheld - before.withheld,
        }
    }
}

/// One step of one run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EjectionRow {
    /// The run.
    pub run: String,
    /// The end of the step.
    pub at_us: u64,
    /// Members that their client has ejected, at its end, over all clients.
    pub ejected: u64,
    /// What happened during the step.
    #[serde(flatten)]
    pub counts: EjectionCounts,
}

/// A whole run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EjectionTotal {
    /// The run.
    pub run: String,
    /// What happened.
    #[serde(flatten)]
    pub counts: EjectionCounts,
    /// The largest part of a client's members that was ejected at a time.
    pub most_ejected: f64,
    /// The fewest members that a client had left that were not ejected; `None` if nobody ejected any.
    pub fewest_left: Option<u32>,
    /// What happened most between one client and one backend.
    pub most: Most,
    /// The longest ejection that was left when the last failure was over.
    pub longest_left_us: u64,
    /// How long after the last failure was over nobody was ejected any more; `None` if somebody was at the end, or nothing
    /// ever failed.
    pub well_after_us: Option<u64>,
}

/// What happened most between one client and one backend: each number by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Most {
    /// Failed connects that were no trials, to a backend whose ejection was never withheld.
    pub failed: u32,
    /// The same, to a backend whose ejection was withheld.
    pub failed_withheld: u32,
    /// Ejections.
    pub ejections: u32,
    /// Trials.
    pub trials: u32,
}

/// What happened between one client and one backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PairCounts {
    /// Failed connects that were no trials.
    pub failed: u32,
    /// Ejections.
    pub ejections: u32,
    /// Trials.
    pub trials: u32,
    /// Ejections that were withheld.
    pub withheld: u32,
}

impl Most {
    /// Takes in a pair.
    pub fn add(&mut self, pair: PairCounts) {
        let failed = if pair.withheld == 0 { &mut self.failed } else { &mut self.failed_withheld };
        *failed = pair.failed.max(*failed);
        self.ejections = pair.ejections.max(self.ejections);
        self.trials = pair.trials.max(self.trials);
    }
}

/// Ejections of all runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ejections {
    /// A row for every step of every run, run after run.
    pub steps: Vec<EjectionRow>,
    /// In the order of the scenario.
    pub runs: Vec<EjectionTotal>,
}
