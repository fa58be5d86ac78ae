//! What may be wrong with a host, finding by finding.

use serde::{Deserialize, Serialize};

/// Version of the JSON form.
pub const SCHEMA: u32 = 1;

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// As it should be.
    Ok,
    /// Worth knowing; nothing has to be done.
    Note,
    /// Something does not work as it could.
    Warning,
    /// socklb cannot work, or does not balance what it should.
    Problem,
}

/// What was found about one thing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The thing that was looked at.
    pub check: String,
    /// The severity.
    pub state: Severity,
    /// In words.
    pub text: String,
    /// What to do about it.
    pub help: Option<String>,
}

/// Everything that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The findings, in the order in which things build on each other.
    pub findings: Vec<Finding>,
}

impl Diagnosis {
    /// Whether an operator should act: there is a warning or a problem.
    pub fn is_degraded(&self) -> bool {
        self.findings.iter().any(|finding| finding.state >= Severity::Warning)
    }

    /// Adds a finding.
    pub fn add(&mut self, check: &str, state: Severity, text: impl Into<String>, help: Option<&str>) {
        let help = help.map(str::to_owned);
        self.findings.push(Finding { check: check.to_owned(), state, text: text.into(), help });
    }

    /// Adds that something is as it should be.
    pub fn ok(&mut self, check: &str, text: impl Into<String>) {
        self.add(check, Severity::Ok, text, None);
    }
}
