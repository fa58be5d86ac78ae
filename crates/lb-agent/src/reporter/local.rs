//! Reports through an agent within this process.

use lb_report::agent::name::Name;
use lb_report::wire::Readiness;
use tokio::sync::mpsc;

use super::ReadinessReporter;
use crate::control::submit;
use crate::serve::Agent;
use crate::serve::query::{AcceptedReport, Query, Verb};
use crate::serve::registrations::{Claim, Registrant, draw};
use crate::utilization::own_cgroup;

/// Reports the readiness of one backend through an agent within this process.
pub struct LocalReporter {
    queries: mpsc::Sender<Query>,
    registration: u64,
}

impl LocalReporter {
    /// Registers this process as the program that runs `backend`, which must be in the agent's
    /// configuration. `readiness` is the present state of the backend.
    ///
    /// # Errors
    /// If the agent does not have the backend.
    pub async fn new(agent: &Agent, backend: Name, readiness: Readiness) -> anyhow::Result<Self> {
        let registration = draw()?;
        let claim = Claim { number: registration, is_leased: false, cgroup: own_cgroup() };
        let verb = Verb::Register { backend, claim, keys: None, readiness };
        let queries = agent.queries().clone();
        submit(&queries, verb, Registrant::this()).await??;
        Ok(Self { queries, registration })
    }

    async fn readiness(&self, readiness: Option<Readiness>) -> anyhow::Result<AcceptedReport> {
        let verb = Verb::Readiness { registration: self.registration, readiness };
        Ok(submit(&self.queries, verb, Registrant::this()).await??)
    }
}

impl ReadinessReporter for LocalReporter {
    async fn report(&mut self, readiness: Readiness) -> anyhow::Result<()> {
        self.readiness(Some(readiness)).await.map(drop)
    }

    async fn unacknowledged(&mut self) -> anyhow::Result<usize> {
        Ok(self.readiness(None).await?.awaited())
    }
}
