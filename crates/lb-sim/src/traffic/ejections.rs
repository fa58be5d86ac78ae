//! Counts for failing backends, for each step and for each run: ejections, trials and their
//! results.
//!
//! These counts are separate from those of the [tally](super::tally). A report contains them only
//! if one of its runs ejects backends. This module must not decide anything.

use serde::Serialize;

/// Counts since the start. They never decrease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EjectionCounts {
    /// Connects that failed at their backend: refused, not answered, or reset at once. Trials are
    /// included.
    pub failed: u64,
    /// How often a client ejected a backend. If a failed trial prolongs an ejection, this is
    /// counted as another ejection.
    pub ejections: u64,
    /// Connects that were trials of an ejected backend.
    pub trials: u64,
    /// How often a client readmitted a backend.
    pub readmissions: u64,
    /// How often a failing backend was not ejected, because it was the client's last available
    /// backend.
    pub withheld: u64,
}

impl EjectionCounts {
    /// Returns these counts minus earlier ones.
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

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EjectionRow {
    pub run: String,
    /// The end of the step.
    pub at_us: u64,
    /// Ejected members at the end of the step, over all clients.
    pub ejected: u64,
    /// The counts of the step.
    #[serde(flatten)]
    pub counts: EjectionCounts,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EjectionTotal {
    pub run: String,
    #[serde(flatten)]
    pub counts: EjectionCounts,
    /// The largest part of a client's members that was ejected at one time.
    pub most_ejected: f64,
    /// The smallest number of members that a client with ejected members had left; `None` if no
    /// client ejected any member.
    pub fewest_left: Option<u32>,
    /// The largest counts of any pair of a client and a backend.
    pub most: Most,
    /// The longest remaining time of any ejection when the last failure ended.
    pub longest_left_us: u64,
    /// The time from the end of the last failure until no backend was ejected. `None` if a backend
    /// was still ejected at the end of the run, or if no backend failed.
    pub well_after_us: Option<u64>,
}

/// The largest counts of any pair of a client and a backend. Different counts may be those of
/// different pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Most {
    /// Failed connects that were not trials, of a pair without a withheld ejection.
    pub failed: u32,
    /// Failed connects that were not trials, of a pair with a withheld ejection.
    pub failed_withheld: u32,
    pub ejections: u32,
    pub trials: u32,
}

/// The counts of a pair of a client and a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PairCounts {
    /// Failed connects that were not trials.
    pub failed: u32,
    pub ejections: u32,
    pub trials: u32,
    /// Ejections that were withheld.
    pub withheld: u32,
}

impl Most {
    /// Raises the maxima to the counts of a pair.
    pub fn add(&mut self, pair: PairCounts) {
        let failed = if pair.withheld == 0 { &mut self.failed } else { &mut self.failed_withheld };
        *failed = pair.failed.max(*failed);
        self.ejections = pair.ejections.max(self.ejections);
        self.trials = pair.trials.max(self.trials);
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ejections {
    /// A row for every step of every run, run after run.
    pub steps: Vec<EjectionRow>,
    /// One entry for each run, in the order of the scenario.
    pub runs: Vec<EjectionTotal>,
}
