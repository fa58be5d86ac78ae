//! The report of a tier. Tests on the host and in guests have equal reports. The driver of the
//! guests sends its report to the driver on the host as JSON.

use serde::{Deserialize, Serialize};

/// A test that ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ran {
    /// The test's path, prefixed with the program if a tier has several.
    pub name: String,
    pub seconds: f64,
    pub passed: bool,
}

/// A test that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    /// The name, as in [`Ran`].
    pub name: String,
    pub output: String,
}

/// The results of a tier or of a guest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The name of the tier or guest, such as `local` or `vm 5.10`.
    pub name: String,
    /// Every test, in the order of their ends. A second try does not add an entry.
    pub ran: Vec<Ran>,
    /// Tests that did not run, with the reason: `NAME: needs Linux 5.18 (FEATURE)`.
    pub skipped: Vec<String>,
    /// Tests that failed in the normal run and passed alone, with the output of the failure.
    pub unsteady: Vec<Failed>,
    pub failed: Vec<Failed>,
    /// Wall time in seconds, without builds.
    pub seconds: f64,
}

impl Summary {
    /// The number of tests that passed, including unsteady ones.
    pub fn passed(&self) -> usize {
        self.ran.len().saturating_sub(self.failed.len())
    }
}
