//! The diagnosis of a host, as a list of findings.

use serde::{Deserialize, Serialize};

pub const SCHEMA: u32 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// Nothing is wrong.
    Ok,
    /// Useful information; no action is needed.
    Note,
    /// Something works less well than it could.
    Warning,
    /// socklb cannot work, or does not balance connects that it should balance.
    Problem,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The name of the check.
    pub check: String,
    pub state: Severity,
    pub text: String,
    /// The remedy; `None` if there is no remedy or none is needed.
    pub help: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diagnosis {
    pub schema: u32,
    /// The findings. If a finding depends on other findings, it comes after them.
    pub findings: Vec<Finding>,
}

impl Diagnosis {
    /// Whether an operator should act: there is a warning or a problem.
    pub fn is_degraded(&self) -> bool {
        self.findings.iter().any(|finding| finding.state >= Severity::Warning)
    }

    pub fn add(&mut self, check: &str, state: Severity, text: impl Into<String>, help: Option<&str>) {
        let help = help.map(str::to_owned);
        self.findings.push(Finding { check: check.to_owned(), state, text: text.into(), help });
    }

    pub fn ok(&mut self, check: &str, text: impl Into<String>) {
        self.add(check, Severity::Ok, text, None);
    }
}
