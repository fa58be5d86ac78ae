//! The results of `socklb source refresh` and `socklb source check`.

use serde::{Deserialize, Serialize};

use crate::text::counted;

pub const SCHEMA: u32 = 1;

/// The result of a request to read or query the source of a service's list at once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refreshed {
    pub schema: u32,
    pub service: String,
    /// The origin of the service's list; `None` if no client dials the service, or if the list is
    /// in the configuration.
    pub origin: Option<String>,
}

/// The answer of a source of lists to a command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckedSource {
    pub service: String,
    pub origin: String,
    /// The number of endpoints; `None` if the list cannot be used, or if the source provides the
    /// service's address.
    pub endpoints: Option<u64>,
    /// Why the list cannot be used; `None` if it can be used.
    pub error: Option<String>,
    /// Facts that an operator may not expect, each with the reason.
    pub notes: Vec<String>,
    /// Which certificate has expired, and when; `None` if none has expired.
    #[serde(default)]
    pub expired: Option<String>,
    /// The number of host names in the list.
    #[serde(default)]
    pub host_names: u64,
    /// Which host names do not resolve, since when and why; `None` if all host names resolve.
    #[serde(default)]
    pub unresolved: Option<String>,
    /// How long the source took to answer.
    pub took_ms: u64,
}

impl CheckedSource {
    /// The result for people: a line, and a line for each note.
    pub fn describe(&self) -> String {
        let Self { service, origin, endpoints, error, notes, expired, host_names: _, unresolved, took_ms } =
            self;
        let result = match (error, endpoints) {
            (Some(error), _) => error.clone(),
            (None, Some(endpoints)) => format!("ok, {} in {took_ms} ms", counted(*endpoints, "endpoint")),
            (None, None) => format!("ok in {took_ms} ms"),
        };
        let notes: String = notes.iter().chain(unresolved).map(|note| format!("  note: {note}\n")).collect();
        let expired = expired.iter().map(|expired| format!("  warning: {expired}\n")).collect::<String>();
        format!("{service}: {origin}: {result}\n{expired}{notes}")
    }
}
