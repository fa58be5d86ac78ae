//! Passes over the flow records: records whose socket is gone, and whose end no program saw, are given back.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use lb_common::ticks;
use lb_kernel::{Doubts, Pass, Patient, Repair};
use tracing::warn;

use super::{Daemon, Event};
use crate::agent::Agent;
use crate::reclaimed::{Ends, Reclaimed};
use crate::status;

/// What the daemon knows of the passes.
#[derive(Default)]
pub struct Passes {
    /// What they have to remember; `None` while one is under way.
    doubts: Option<Doubts>,
    /// When the last one began.
    last: Option<Instant>,
    clients: BTreeMap<String, Found>,
    /// Why it is not known which sockets processes hold, if that was asked and is not.
    holders: Option<String>,
}

/// What passes found of one client.
#[derive(Default)]
struct Found {
    last: Repair,
    passes: u64,
    /// Since the daemon started.
    removed: u64,
    lately: Reclaimed,
    /// Why the last one failed, if it did.
    error: Option<String>,
}

impl Passes {
    pub fn new() -> Self {
        Self { doubts: Some(Doubts::default()), ..Self::default() }
    }

    /// Of clients without an open flow there is nothing to find.
    fn nothing_open(&mut self, agents: &[Agent], patients: &[Patient], now: Instant) {
        let is_patient = |name: &str| patients.iter().any(|patient| patient.pins.client == name);
        let agent = |name: &str| agents.iter().find(|agent| agent.client.name == name);
        self.clients.retain(|name, _| is_patient(name) || agent(name).is_some());
        for (name, found) in self.clients.iter_mut().filter(|(name, _)| !is_patient(name)) {
            let seen = agent(name).map_or(0, |agent| agent.window().ended());
            found.last = Repair::default();
            found.error = None;
            found.lately.push(now, Ends { seen, ..Ends::default() });
        }
    }

    /// Whether it is time for the next one.
    fn is_due(&self, now: Instant, interval: Duration) -> bool {
        self.last.is_none_or(|last| now.duration_since(last) >= interval)
    }
}

impl Daemon {
    /// Starts to compare flow records with the kernel's lists of sockets, if it is time and any flow is open.
    pub fn reclaim_flows(&mut self, now: Instant) {
        let interval = self.config.reclaim_interval;
        if !self.passes.is_due(now, interval) {
            return;
        }
        let tick = ticks::tick(lb_kernel::monotonic_ns());
        self.agents.iter().filter(|agent| !agent.is_unpinned()).for_each(|agent| agent.forget_errors(tick));
        let open = self.agents.iter().filter(|agent| !agent.is_unpinned() && agent.open_flows() > 0);
        let patient =
            |agent: &Agent| Patient { pins: agent.pins.clone(), cgroup: Some(agent.path().to_owned()) };
        let mut patients: Vec<Patient> = open.map(patient).collect();
        // Those that leave wait for nothing else. Of another version we do not know the records.
        let leaving = self.leaving.iter().filter(|leaving| leaving.pins.is_of_this_version());
        patients.extend(leaving.map(|leaving| Patient { pins: leaving.pins.clone(), cgroup: None }));
        // One that takes longer than the interval is waited for.
        let Some(mut doubts) = self.passes.doubts.take() else { return };
        self.passes.last = Some(now);
        self.passes.nothing_open(&self.agents, &patients, now);
        if patients.is_empty() {
            self.passes.doubts = Some(doubts);
            return;
        }
        let (events, knows_mptcp) = (self.events.clone(), self.features.knows_mptcp);
        tokio::task::spawn_blocking(move || {
            let pass = lb_kernel::repair(&patients, &mut doubts, knows_mptcp, now, interval);
            let _ = events.blocking_send(Event::Reclaimed(pass, doubts));
        });
    }

    pub fn reclaimed(&mut self, pass: Pass, doubts: Doubts, now: Instant) {
        self.passes.doubts = Some(doubts);
        self.passes.holders = pass.holders.err().map(|error| crate::error::chain(&error));
        for (client, result) in pass.clients {
            let seen = self.agents.iter().find(|agent| agent.client.name == client);
            let seen = seen.map_or(0, |agent| agent.window().ended());
            let found = self.passes.clients.entry(client.clone()).or_default();
            match result {
                Ok(repair) => {
                    let Repair { removed, removed_mptcp, in_doubt, kept_open, kept_elsewhere } = repair;
                    if removed > 0 {
                        warn!(
                            client,
                            removed,
                            removed_mptcp,
                            in_doubt,
                            kept_open,
                            kept_elsewhere,
                            "flow records of sockets that are gone were removed"
                        );
                    }
                    found.last = repair;
                    found.passes += 1;
                    found.removed += removed;
                    found.error = None;
                    let ends = Ends { seen, reclaimed: removed, reclaimed_mptcp: removed_mptcp };
                    found.lately.push(now, ends);
                }
                Err(error) => {
                    let error = crate::error::chain(&error);
                    // Said once, not once per pass.
                    if found.error.as_ref() != Some(&error) {
                        warn!(client, error, "flow records were not checked");
                    }
                    found.error = Some(error);
                }
            }
        }
    }

    /// What became of a client's flow records.
    pub fn repair(&self, agent: &Agent) -> status::Repair {
        let Some(found) = self.passes.clients.get(&agent.client.name) else {
            return status::Repair::default();
        };
        let Repair { in_doubt, kept_open, kept_elsewhere, .. } = found.last;
        status::Repair { passes: found.passes, removed: found.removed, in_doubt, kept_open, kept_elsewhere }
    }

    /// What is wrong with the counts of open flows, by client.
    pub fn uncertain_counts(&self) -> Vec<String> {
        let mut faults = Vec::new();
        for (client, found) in &self.passes.clients {
            faults.extend(found.lately.fault().map(|fault| format!("client {client}: {fault}")));
            if let Some(error) = &found.error {
                faults.push(format!("client {client}: flow records were not checked: {error}"));
            }
            let kept = found.last.kept_elsewhere;
            if let Some(why) = self.passes.holders.as_ref().filter(|_| kept > 0) {
                faults.push(format!(
                    "client {client}: {kept} open flows are in network namespaces that cannot be looked into, and are \
                     counted for ever if their end is not seen: {why}"
                ));
            }
        }
        faults
    }
}
