//! Closes the open connections to lost backends.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Instant;

use lb_core::health::loss::{MissingBackends, OnBackendLoss, delay};
use lb_kernel::Datapath;
use tracing::warn;

use super::ClientTask;
use crate::close_jobs::{CloseOrder, DEFAULT_RATE, IDLE};
use crate::config::ClientService;

impl ClientTask {
    /// Registers which backends are missing, and returns an order to close the connections to one
    /// lost backend, if this is due. If `is_closing`, a job already closes connections of this
    /// client, so the result is `None`.
    pub fn follow_losses(&mut self, is_closing: bool, now: Instant) -> Option<CloseOrder> {
        let mut order = None;
        let services = self.client.services.iter().zip(&mut self.services).enumerate();
        for (position, (ClientService { service, .. }, of_service)) in services {
            let on_loss = service.health.on_backend_loss;
            if on_loss == OnBackendLoss::Keep {
                of_service.missing = None;
                continue;
            }
            // A service that is new has no members yet.
            let new = || MissingBackends::new(BTreeSet::new());
            let missing = of_service.missing.get_or_insert_with(new);
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
        order
    }

    /// Continues to close the connections of a lost backend, because the last job has left some
    /// connections open.
    pub fn continue_loss(&mut self, service: &str, backend: SocketAddr, now: Instant) {
        let position = self.position(service);
        if let Some(missing) = position.and_then(|position| self.services[position].missing.as_mut()) {
            missing.continue_with(backend, now);
        }
    }
}

/// The state of the service with this name, if the kernel's tables already contain the service.
/// Members of an earlier daemon's tables are included, because the first list of this daemon may
/// lack all of them.
pub fn adopted(datapath: &Datapath, service: &str) -> Option<MissingBackends> {
    let plan = datapath.applied();
    let (index, known) = plan.services.iter().rfind(|(_, known)| known.name == service)?;
    let in_use = known.schedule.iter().chain(&known.replaced).filter_map(|slot| plan.backends.get(slot));
    let backends = in_use.filter(|backend| backend.service == *index);
    Some(MissingBackends::new(backends.map(|backend| backend.address).collect()))
}
