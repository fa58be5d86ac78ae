//! What the event loop is asked: how all is, and to take in what somebody says of a backend.

use std::time::Duration;

use lb_report::agent::name::Name;
use lb_report::keys::{BackendKey, Keys};
use lb_report::wire::Readiness;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};

use super::kept::Receipt;
use super::registrations::{Claim, Registrant};
use crate::status::AgentStatus;

/// A query.
#[derive(Debug)]
pub enum Query {
    /// How all backends are.
    Status(oneshot::Sender<AgentStatus>),
    /// Somebody says something.
    Verb {
        /// What.
        verb: Verb,
        /// Who.
        who: Registrant,
        /// Whether it was taken in; and, of an operator, when a restart of the agent no longer forgets it.
        answer: oneshot::Sender<(Result<AcceptedReport, QueryRefusal>, Option<Receipt>)>,
    },
    /// To read the configuration again.
    Reload,
    /// The end has begun.
    Stopping,
}

/// What somebody says.
#[derive(Debug)]
pub enum Verb {
    /// The operator: these backends are lame ducks, or no more.
    Operator {
        /// Which; `None` is all.
        backend: Option<Name>,
        /// Whether they are.
        lame_duck: bool,
    },
    /// An application: how loaded it is.
    Load {
        /// Which; `None` is the only one.
        backend: Option<Name>,
        /// How loaded.
        load: SaidLoad,
    },
    /// A program: it runs this backend.
    Register {
        /// Which.
        backend: Name,
        /// What the program says of itself.
        claim: Claim,
        /// Its keys, where the configuration does not have it.
        keys: Option<Keys<BackendKey>>,
        /// How it is.
        readiness: Readiness,
    },
    /// A program shows that it lives.
    Readiness {
        /// The number by which it has registered.
        registration: u64,
        /// How the backend is from now on, if that is another than before.
        readiness: Option<Readiness>,
    },
    /// A program gives its backend back.
    Unregister {
        /// The number by which it has registered.
        registration: u64,
    },
}

/// What an application says of its load. Numbers are in thousandths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SaidLoad {
    /// Requests a second.
    pub qps: Option<u32>,
    /// Errors a second.
    pub eps: Option<u32>,
    /// Of what it can do.
    pub utilization: Option<u32>,
    /// Over how long it was measured.
    pub window: Duration,
    /// How long it is believed.
    pub valid_for: Duration,
}

/// What was taken in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptedReport {
    /// The version of this structure.
    pub schema: u32,
    /// The backends that it is about.
    pub backends: Vec<String>,
    /// Clients that have asked lately and have not acknowledged what was said last, of these backends together.
    pub unheard: usize,
    /// Whether there may be more of them: the agent has spoken for one of these backends for a shorter time than clients take to ask.
    pub is_new: bool,
}

impl AcceptedReport {
    /// How many clients there are to wait for, as far as that is known: one if there may be some.
    pub fn awaited(&self) -> usize {
        self.unheard.max(usize::from(self.is_new))
    }
}

/// Why something was not taken in.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueryRefusal {
    /// There is no such backend or registration here.
    #[error("{0}")]
    Absent(String),
    /// Somebody else has it.
    #[error("{0}")]
    Taken(String),
    /// It makes no sense.
    #[error("{0}")]
    Wrong(String),
}

/// Has the event loop take something in. What an operator says outlives the agent from then on, if the disk keeps it in time.
///
/// # Errors
/// The refusal; or that the agent is stopping.
pub async fn tell(
    queries: &mpsc::Sender<Query>,
    verb: Verb,
    who: Registrant,
) -> anyhow::Result<Result<AcceptedReport, QueryRefusal>> {
    let (answer, told) = oneshot::channel();
    let stopping = || anyhow::anyhow!("the agent is stopping");
    queries.send(Query::Verb { verb, who, answer }).await.map_err(|_| stopping())?;
    let (told, receipt) = told.await.map_err(|_| stopping())?;
    if let Some(receipt) = receipt {
        receipt.settled().await;
    }
    Ok(told)
}

/// How all backends are; nothing if the agent is stopping.
pub async fn status(queries: &mpsc::Sender<Query>) -> Option<AgentStatus> {
    let (answer, status) = oneshot::channel();
    queries.send(Query::Status(answer)).await.ok()?;
    status.await.ok()
}
