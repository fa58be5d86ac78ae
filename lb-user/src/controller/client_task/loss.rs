//! Backends that are lost, and whose open connections are to be closed.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use lb_core::health::loss::{OnBackendLoss, delay};
use tracing::warn;

use super::ClientTask;
use crate::closing::{CloseOrder, DEFAULT_RATE};

/// How long a connection is idle before `close-idle` closes it; the same as for `socklb drain
/// --close idle`.
pub const IDLE: Duration = Duration::from_secs(30);

impl ClientTask {
    /// Notes which backends are missing, and returns what to close now: the connections of one
    /// backend, or nothing. If `is_closing`, the client is losing connections already, so nothing
    /// is returned.
    pub fn follow_losses(&mut self, is_closing: bool, now: Instant) -> Option<CloseOrder> {
        let mut order = None;
        for (position, configured) in self.client.services.iter().enumerate() {
            let service = &configured.service;
            let on_loss = service.health.on_backend_loss;
            if on_loss == OnBackendLoss::Keep {
                self.missing.remove(&service.name);
                continue;
            }
            let Some(presence) = self.balancer.presence(position) else { continue };
            let missing = self.missing.entry(service.name.clone()).or_default();
            let before = missing.withheld();
            missing.note(now, &presence);
            if let Some((lost, all)) = missing.withheld()
                && before.is_none()
            {
                warn!(
                    client = %self.client.name,
                    service = ?service.name,
                    lost,
                    all,
                    "more than a third of the backends are lost, so on_backend_loss closes no connection"
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

    /// Continues to close the connections of a lost backend: the last job has left some.
    pub fn continue_loss(&mut self, service: &str, backend: SocketAddr, now: Instant) {
        if let Some(missing) = self.missing.get_mut(service) {
            missing.continue_with(backend, now);
        }
    }
}
