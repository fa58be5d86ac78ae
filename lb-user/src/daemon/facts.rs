//! What metrics tell and the maps do not hold. Everything else is read beside the loop.

use std::time::Instant;

use super::Daemon;
use crate::agent::Agent;
use crate::metrics::{ClientFacts, Facts, Reloads};

impl Daemon {
    /// A few system calls per client.
    pub fn facts(&self, now: Instant) -> Facts {
        let client = |agent: &Agent| ClientFacts {
            pins: agent.pins.clone(),
            is_attached: agent.is_effective(),
            repair: self.repair(agent),
            sources: self.sources(agent, now),
            // A cost that cannot be told is left out; what it is the cost of goes on.
            runs: agent.datapath().runs().unwrap_or_default(),
        };
        // One that runs and cannot be changed is among them as well.
        let runs = |name: &str| self.agents.iter().any(|agent| agent.client.name == name);
        let unstarted = self.unstarted.iter().filter(|(client, _)| !runs(&client.name));
        Facts {
            started: self.started,
            reloads: Reloads {
                taken_on: self.reload.taken_on,
                refused: self.reload.refused,
                in_force_since: self.reload.in_force_since,
                is_faulty: self.reload.error.is_some(),
            },
            clients: self.agents.iter().map(client).collect(),
            unstarted: unstarted.map(|(client, _)| client.name.clone()).collect(),
        }
    }
}
