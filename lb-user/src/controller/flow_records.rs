//! Passes over the flow records. A pass reclaims a record if its socket is gone and no program
//! recorded the end of its flow.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use lb_common::ticks;
use lb_kernel::{Pass, ReclaimCounts, ReclaimTarget, Suspects};
use lb_view::fault::{Fault, FaultCode};
use lb_view::status::Reclaim;
use tracing::warn;

use super::{BackgroundWork, Controller};
use crate::controller::client_task::ClientTask;
use crate::counts::reclaimed::{Ends, Reclaimed};

#[derive(Default)]
pub struct ReclaimPasses {
    /// The records without a socket in the last pass, which the next pass checks again; `None`
    /// while a pass is under way.
    suspects: Option<Suspects>,
    /// When the last pass began.
    last: Option<Instant>,
    clients: BTreeMap<String, ClientReclaim>,
    /// Why the last pass could not determine which sockets processes have open; `None` if it could,
    /// or if this was not necessary.
    holders: Option<String>,
}

/// The results of passes for one client.
#[derive(Default)]
struct ClientReclaim {
    last: ReclaimCounts,
    passes: u64,
    /// Records reclaimed since the daemon started.
    removed: u64,
    lately: Reclaimed,
    /// Why the last pass failed for this client; `None` if it succeeded.
    error: Option<String>,
}

impl ReclaimPasses {
    pub fn new() -> Self {
        Self { suspects: Some(Suspects::default()), ..Self::default() }
    }

    /// Records an empty result for each client without an active flow: such a client has no flow
    /// records, so a pass would find nothing.
    fn nothing_open(&mut self, client_tasks: &[ClientTask], targets: &[ReclaimTarget], now: Instant) {
        let is_target = |name: &str| targets.iter().any(|target| target.pins.client == name);
        let client_task =
            |name: &str| client_tasks.iter().find(|client_task| client_task.client.name == name);
        self.clients.retain(|name, _| is_target(name) || client_task(name).is_some());
        for (name, reclaim) in self.clients.iter_mut().filter(|(name, _)| !is_target(name)) {
            let seen = client_task(name).map_or(0, |client_task| client_task.window().ended());
            reclaim.last = ReclaimCounts::default();
            reclaim.error = None;
            reclaim.lately.push(now, Ends { seen, ..Ends::default() });
        }
    }

    /// Whether the next pass is due.
    fn is_due(&self, now: Instant, interval: Duration) -> bool {
        self.last.is_none_or(|last| now.duration_since(last) >= interval)
    }
}

impl Controller {
    /// Starts a pass, which compares flow records with the kernel's lists of sockets, if a pass is
    /// due and any flow is active.
    pub fn reclaim_flows(&mut self, now: Instant) {
        let interval = self.config.reclaim_interval;
        if !self.passes.is_due(now, interval) {
            return;
        }
        let tick = ticks::tick(self.environment.kernel.now_ns());
        self.clients
            .tasks
            .iter()
            .filter(|client_task| !client_task.is_unpinned())
            .for_each(|client_task| client_task.forget_errors(tick));
        let open = self
            .clients
            .tasks
            .iter()
            .filter(|client_task| !client_task.is_unpinned() && client_task.open_flows() > 0);
        let target = |client_task: &ClientTask| ReclaimTarget {
            pins: client_task.pins.clone(),
            cgroup: Some(client_task.path().to_owned()),
        };
        let mut targets: Vec<ReclaimTarget> = open.map(target).collect();
        // Leaving clients are examined too, because they are removed only after their last flow has
        // ended. Leaving clients of another version are not examined, because this version does not
        // know the layout of their records.
        let leaving = self.clients.leaving.iter().filter(|leaving| leaving.pins.is_of_this_version());
        targets.extend(leaving.map(|leaving| ReclaimTarget { pins: leaving.pins.clone(), cgroup: None }));
        // If a pass takes longer than the interval, the next one begins when that pass has ended.
        let Some(suspects) = self.passes.suspects.take() else { return };
        self.passes.last = Some(now);
        self.passes.nothing_open(&self.clients.tasks, &targets, now);
        if targets.is_empty() {
            self.passes.suspects = Some(suspects);
            return;
        }
        self.effects.push(BackgroundWork::Reclaim { targets, suspects, now, interval }.into());
    }

    pub fn reclaimed(&mut self, pass: Pass, suspects: Suspects, now: Instant) {
        self.passes.suspects = Some(suspects);
        self.passes.holders = pass.holders.err().map(|error| crate::error::chain(&error));
        for (client, result) in pass.clients {
            let seen = self.clients.task(&client);
            let seen = seen.map_or(0, |client_task| client_task.window().ended());
            let reclaim = self.passes.clients.entry(client.clone()).or_default();
            match result {
                Ok(counts) => {
                    let ReclaimCounts { removed, removed_mptcp, suspected, kept_open, kept_elsewhere } =
                        counts;
                    if removed > 0 {
                        warn!(
                            client,
                            removed,
                            removed_mptcp,
                            suspected,
                            kept_open,
                            kept_elsewhere,
                            "reclaimed flow records of sockets that are gone"
                        );
                    }
                    reclaim.last = counts;
                    reclaim.passes += 1;
                    reclaim.removed += removed;
                    reclaim.error = None;
                    let ends = Ends { seen, reclaimed: removed, reclaimed_mptcp: removed_mptcp };
                    reclaim.lately.push(now, ends);
                }
                Err(error) => {
                    let error = crate::error::chain(&error);
                    // An error is logged once, not at each pass.
                    if reclaim.error.as_ref() != Some(&error) {
                        warn!(
                            client,
                            error, "the flow records could not be checked; retrying at the next pass"
                        );
                    }
                    reclaim.error = Some(error);
                }
            }
        }
    }

    pub fn reclaim(&self, client_task: &ClientTask) -> Reclaim {
        let Some(reclaim) = self.passes.clients.get(&client_task.client.name) else {
            return Reclaim::default();
        };
        let ReclaimCounts { suspected, kept_open, kept_elsewhere, .. } = reclaim.last;
        Reclaim { passes: reclaim.passes, reclaimed: reclaim.removed, suspected, kept_open, kept_elsewhere }
    }

    /// The faults that make counts of active flows uncertain.
    pub fn uncertain_counts(&self) -> Vec<Fault> {
        let mut faults = Vec::new();
        for (client, reclaim) in &self.passes.clients {
            let mut add = |code, text| faults.push(Fault::of_client(code, client, text));
            if let Some(text) = reclaim.lately.fault() {
                add(FaultCode::EndsUnseen, text);
            }
            if let Some(error) = &reclaim.error {
                add(FaultCode::RecordsUnchecked, format!("the flow records could not be checked: {error}"));
            }
            let unknown = reclaim.last.kept_elsewhere;
            if let Some(why) = self.passes.holders.as_ref().filter(|_| unknown > 0) {
                let text = format!(
                    "{unknown} active flows are in network namespaces that the daemon cannot inspect; if no \
                     program records the end of such a flow, the flow is counted as active for ever: {why}"
                );
                add(FaultCode::RecordsUnchecked, text);
            }
        }
        faults
    }
}
