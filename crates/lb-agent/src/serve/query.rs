//! The queries to the event loop: for the status, and for reports about backends.

use std::time::Duration;

use lb_report::agent::name::Name;
use lb_report::keys::{BackendKey, Keys};
use lb_report::wire::Readiness;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use super::lame_duck_store::Receipt;
use super::registrations::{Claim, Registrant};
use crate::status::AgentStatus;

#[derive(Debug)]
pub enum Query {
    /// Requests the status of all backends.
    Status(oneshot::Sender<AgentStatus>),
    /// A report or a command about backends.
    Verb {
        verb: Verb,
        /// The process that sent the report or command.
        who: Registrant,
        /// Receives the result: whether the report or command was accepted, and for an operator's
        /// command a receipt. The receipt arrives when the command is stored; from then on the
        /// command survives a restart of the agent.
        answer: oneshot::Sender<(Result<AcceptedReport, QueryRefusal>, Option<Receipt>)>,
    },
    /// Requests that the configuration is read again.
    Reload,
    /// The agent is about to end.
    Stopping,
}

/// A report or a command about backends.
#[derive(Debug)]
pub enum Verb {
    /// The operator makes these backends lame ducks, or ends this state.
    Operator {
        /// The backend; `None` for all backends.
        backend: Option<Name>,
        lame_duck: bool,
    },
    /// An application reports its load.
    Load {
        /// The backend; `None` if the agent has only one backend.
        backend: Option<Name>,
        load: ApplicationLoad,
    },
    /// A program reports that it runs this backend.
    Register {
        backend: Name,
        claim: Claim,
        /// The backend's keys, if the configuration does not have the backend.
        keys: Option<Keys<BackendKey>>,
        readiness: Readiness,
    },
    /// A program reports that it is alive.
    Readiness {
        /// The number with which the program has registered.
        registration: u64,
        /// The new readiness of the backend, if it has changed.
        readiness: Option<Readiness>,
    },
    /// A program releases its backend.
    Unregister {
        /// The number with which the program has registered.
        registration: u64,
    },
}

/// The load that an application reports. Numbers are in thousandths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApplicationLoad {
    /// Requests per second.
    pub qps: Option<u32>,
    /// Errors per second.
    pub eps: Option<u32>,
    /// Used part of the capacity.
    pub utilization: Option<u32>,
    /// The time over which the load was measured.
    pub window: Duration,
    /// How long the report is valid.
    pub valid_for: Duration,
}

/// The answer to an accepted report or command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptedReport {
    /// The version of this structure.
    pub schema: u32,
    /// The backends to which the report or command applies.
    pub backends: Vec<String>,
    /// The number of clients that have sent a request recently and have not acknowledged the last
    /// change, added up over these backends.
    pub unheard: usize,
    /// Whether more clients may have to acknowledge. The value is true if the agent has reported
    /// one of these backends for less time than clients take to send a request.
    pub is_new: bool,
}

impl AcceptedReport {
    /// The number of clients to wait for. The number is at least 1 if some clients may be unknown.
    pub fn awaited(&self) -> usize {
        self.unheard.max(usize::from(self.is_new))
    }
}

/// The reason why a report or command was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueryRefusal {
    /// There is no such backend or registration here.
    #[error("{0}")]
    Absent(String),
    /// Another program runs the backend.
    #[error("{0}")]
    Taken(String),
    /// The report or command is invalid.
    #[error("{0}")]
    Wrong(String),
}
