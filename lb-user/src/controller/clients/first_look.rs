//! The first look: if a client has no pins on this host yet, the daemon probes or polls the
//! client's backends once before it balances the client's connects. Without a first look, a connect
//! could choose a backend that is dead or a lame duck, because the daemon does not know the
//! backend's state yet.
//!
//! The first look is short: the client is attached after each of its backends has answered, or
//! after [`AT_MOST`] at the latest. A client has no first look if it has pins, if a reload adds it,
//! or if its cgroup does not exist yet; such a client is attached as soon as its cgroup exists.

use std::time::{Duration, Instant};

use lb_core::health::BackendEvidence;
use lb_core::slots::Identity;

use crate::config::{ProbeConfig, ProbeKind};
use crate::controller::Controller;
use crate::controller::client_task::ClientTask;
use crate::controller::probe_targets::{Probing, name_of};
use crate::probes::BETWEEN;

/// How long a first look waits for answers after its last probe or request.
const ANSWER: Duration = Duration::from_millis(150);

/// The longest duration of a first look.
const AT_MOST: Duration = Duration::from_millis(500);

/// The longest random delay before a first look begins, so that hosts that start together do not
/// probe or poll the same backend at the same moment.
const MAX_JITTER: Duration = Duration::from_millis(50);

/// The assumed time between the probes of two backends: twice [`BETWEEN`], because a timer of 1 ms
/// may expire after 2 ms.
const SPACING: Duration = BETWEEN.saturating_mul(2);

impl Controller {
    /// Begins the first look of each client that is new on this host. Call this after the clients'
    /// lists are delivered and before the clients' backends become targets of probes.
    pub fn begin_first_looks(&mut self, now: Instant) {
        let jitter = MAX_JITTER.mul_f64(f64::from(self.environment.jitter) / 256.0);
        for client_task in &mut self.clients.tasks {
            if client_task.is_new && client_task.has_probes() && client_task.has_cgroup() {
                let positions = 0..client_task.client.services.len();
                let members: usize = positions.map(|at| client_task.balancer().weights(at).len()).sum();
                let polling = SPACING.saturating_mul(u32::try_from(members).unwrap_or(u32::MAX));
                client_task.first_look = Some(now + AT_MOST.min(jitter + ANSWER + polling));
            }
        }
        if self.next_end_of_first_look().is_some() {
            self.probing.network().hold_back(jitter);
            self.first_look_jitter = jitter;
        }
    }

    /// Polls the backends of all first looks that are under way. Without this call, the first poll
    /// follows at a random time within the poll interval. Call this after the backends have become
    /// targets.
    pub fn poll_first(&self) {
        let Some(listener) = self.probing.listener() else { return };
        let looking = self.clients.tasks.iter().filter(|client_task| client_task.first_look.is_some());
        let names = looking.flat_map(|client_task| {
            let services = client_task.client.services.iter().enumerate();
            let polled = services
                .filter(|(_, configured)| configured.probe.as_ref().is_some_and(ProbeConfig::is_by_report));
            polled.flat_map(|(position, configured)| {
                let members = client_task.balancer().weights(position).iter();
                members.map(|(address, _)| name_of(configured.service.protocol, *address))
            })
        });
        listener.poll_first(names.collect::<Vec<_>>(), self.first_look_jitter, SPACING);
    }

    /// The time at which the next first look ends at the latest.
    pub fn next_end_of_first_look(&self) -> Option<Instant> {
        self.clients.tasks.iter().filter_map(|client_task| client_task.first_look).min()
    }

    /// Attaches each client for which the first look is over.
    pub fn end_first_looks(&mut self, now: Instant) {
        let Self { clients, probing, .. } = self;
        let mut is_over = false;
        for client_task in &mut clients.tasks {
            if client_task.first_look.is_some_and(|until| until <= now || has_results(client_task, probing)) {
                client_task.first_look = None;
                is_over = true;
            }
        }
        if is_over {
            self.follow_cgroups(now);
        }
    }
}

/// Whether there is a result for each backend that the client uses and probes.
fn has_results(client_task: &ClientTask, probing: &Probing) -> bool {
    let balancer = client_task.balancer();
    let services = client_task.client.services.iter().zip(balancer.services()).enumerate();
    let mut probed = services.filter_map(|(at, (configured, (_, index, _)))| {
        Some((at, configured, configured.probe.as_ref()?, index))
    });
    probed.all(|(at, configured, probe, service)| {
        let mut members = balancer.weights(at).iter().map(|(address, _)| *address);
        match probe.kind {
            ProbeKind::Connect { .. } => members.all(|address| {
                balancer.standing(Identity { service, address }).is_some_and(BackendEvidence::is_proven)
            }),
            ProbeKind::Report { .. } => {
                let Some(listener) = probing.listener() else { return true };
                let name = |address| name_of(configured.service.protocol, address);
                listener.look(|senders, _, _| {
                    members.all(|address| {
                        senders.get(name(address)).is_none_or(|(_, reported)| reported.report().is_some())
                    })
                })
            }
        }
    })
}
