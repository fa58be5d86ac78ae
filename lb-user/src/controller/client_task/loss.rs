//! Closes the open connections to lost backends.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Instant;

use lb_core::health::loss::{MissingBackends, OnBackendLoss, delay};
use lb_kernel::Datapath;
use tracing::warn;

use super::ClientTask;
use crate::closing::{CloseOrder, DEFAULT_RATE, IDLE};

impl ClientTask {
    /// Registers which backends are missing, and returns an order to close the connections to one
    /// lost backend, if this is due. If `is_closing`, a job already closes connections of this
    /// client, so the result is `None`.
    pub fn follow_losses(&mut self, is_closing: bool, now: Instant) -> Option<CloseOrder> {
        let mut order = None;
        for (position, configured) in self.client.services.iter().enumerate() {
            let service = &configured.service;
            let on_loss = service.health.on_backend_loss;
            if on_loss == OnBackendLoss::Keep {
                self.missing.remove(&service.name);
                continue;
            }
            // A service that is new has no members yet.
            let new = || MissingBackends::new(BTreeSet::new());
            let missing = self.missing.entry(service.name.clone()).or_insert_with(new);
            let Some(presence) = self.balancer.presence(position, missing.known()) else { continue };
            let before = missing.withheld();
            missing.note(now, presence);
            if let Some((lost, of)) = missing.withheld()
                && before.is_none()
            {
                warn!(
                    client = %self.client.name,
                    service = ?service.name,
                    lost,
                    of,
                    "more than a third of the backends are lost together, so their connections are not closed"
                );
            }
            if is_closing || order.is_some() {
                continue;
            }
            let tables = self.datapath.tables();
            let slot = |address| self.balancer.slot(position, address);
            let has_flows = |address| slot(address).is_some_and(|at| tables.active(at.slot) > 0);
            let delay_here = |address| delay(&self.host, &service.name, address);
            order = missing.take_due(now, delay_here, has_flows).map(|backend| CloseOrder {
                service: service.name.clone(),
                backend,
                client: Some(self.client.name.clone()),
                idle: (on_loss == OnBackendLoss::CloseIdle).then_some(IDLE),
                rate: DEFAULT_RATE,
                is_dry_run: false,
                most: None,
            });
        }
        let services = &self.client.services;
        self.missing.retain(|name, _| services.iter().any(|configured| configured.service.name == *name));
        order
    }

    /// Continues to close the connections of a lost backend, because the last job has left some
    /// connections open.
    pub fn continue_loss(&mut self, service: &str, backend: SocketAddr, now: Instant) {
        if let Some(missing) = self.missing.get_mut(service) {
            missing.continue_with(backend, now);
        }
    }
}

/// The state of each service that the kernel's tables already contain, keyed by service name.
/// Members of an earlier daemon's tables are included, because the first list of this daemon may
/// lack all of them.
pub fn adopted(datapath: &Datapath) -> BTreeMap<String, MissingBackends> {
    let plan = datapath.applied();
    let of_service = |(index, service): (&_, &lb_core::plan::ServicePlan)| {
        let in_use = service.schedule.iter().chain(&service.replaced).collect::<BTreeSet<_>>();
        let backends =
            plan.backends.iter().filter(|(slot, one)| one.service == *index && in_use.contains(slot));
        let members = backends.map(|(_, backend)| backend.address).collect();
        (service.name.clone(), MissingBackends::new(members))
    };
    plan.services.iter().map(of_service).collect()
}
