//! Reports through an agent within this process.

use lb_report::agent::name::Name;
use lb_report::wire::Readiness;
use tokio::sync::mpsc;

use super::Voice;
use crate::serve::Agent;
use crate::serve::query::{AcceptedReport, Query, Verb, tell};
use crate::serve::registrations::{Claim, Registrant, draw};
use crate::utilization::own_cgroup;

/// Reports the readiness of one backend through an agent within this process.
pub struct LocalVoice {
    queries: mpsc::Sender<Query>,
    registration: u64,
}

impl LocalVoice {
    /// Registers for a backend in the agent's configuration. `readiness` is the backend's state
    /// now.
    ///
    /// # Errors
    /// If the agent does not have the backend.
    pub async fn new(agent: &Agent, backend: Name, readiness: Readiness) -> anyhow::Result<Self> {
        let registration = draw()?;
        let claim = Claim { number: registration, is_leased: false, cgroup: own_cgroup() };
        let verb = Verb::Register { backend, claim, keys: None, readiness };
        let queries = agent.queries().clone();
        tell(&queries, verb, Registrant::this()).await??;
        Ok(Self { queries, registration })
    }

    async fn readiness(&self, readiness: Option<Readiness>) -> anyhow::Result<AcceptedReport> {
        let verb = Verb::Readiness { registration: self.registration, readiness };
        Ok(tell(&self.queries, verb, Registrant::this()).await??)
    }
}

impl Voice for LocalVoice {
    async fn say(&mut self, readiness: Readiness) -> anyhow::Result<()> {
        self.readiness(Some(readiness)).await.map(drop)
    }

    async fn unheard(&mut self) -> anyhow::Result<usize> {
        Ok(self.readiness(None).await?.awaited())
    }
}
