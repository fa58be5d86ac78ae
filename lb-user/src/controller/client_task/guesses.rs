//! Guesses: if the client and the daemon are in different network namespaces, a failed probe of a
//! backend is only a guess, which the client's own connections can refute.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Instant;

use lb_core::health::probed::seen_from;
use lb_core::health::{Health, Who, Why};
use lb_core::ids::{BackendRef, ServiceIndex, Slot};
use lb_core::slots::Identity;

use super::ClientTask;

/// A backend that fails probes from another network namespace than the client's.
#[derive(Debug, Default)]
pub struct Guess {
    /// The backend, and how many connections the client had established to it, at the time when
    /// this guess ejected it; `None` before the backend has a slot.
    ejected: Option<(BackendRef, u64)>,
    /// Whether the client has established a connection after that ejection. Once set, this stays
    /// set until a probe succeeds. If the backend fails later, the client's own connects eject it.
    is_refuted: bool,
}

impl ClientTask {
    /// Applies the results of connect probes to the backends of the service at this position.
    pub fn apply_findings(
        &mut self,
        position: usize,
        found: BTreeMap<SocketAddr, (Health, Why)>,
        now: Instant,
    ) {
        let is_elsewhere = self.is_elsewhere();
        let Some(service) = self.index(position) else { return };
        let fails =
            |address: &SocketAddr| found.get(address).is_some_and(|(health, _)| *health == Health::Refusing);
        self.guesses.retain(|of, _| of.service != service || is_elsewhere && fails(&of.address));
        for address in found.keys().filter(|address| is_elsewhere && fails(address)) {
            self.guesses.entry(Identity { service, address: *address }).or_default();
        }
        let seen =
            |(address, (health, why))| (address, (self.seen(Identity { service, address }, health), why));
        let verdicts = found.into_iter().map(seen).collect();
        self.apply_verdicts(position, Who::Probe, verdicts, now);
    }

    /// The health of a backend for this client, if the probes have the result `found`.
    fn seen(&self, identity: Identity, found: Health) -> Health {
        let is_refuted = self.guesses.get(&identity).is_some_and(|guess| guess.is_refuted);
        seen_from(found, self.is_elsewhere(), is_refuted)
    }

    pub(super) fn index(&self, position: usize) -> Option<ServiceIndex> {
        self.balancer.services().nth(position).map(|(_, index, _)| index)
    }

    /// Ejects backends for new guesses, so that the kernel programs test them by trials. Marks the
    /// guesses that connections have refuted; the marks take effect when probe results are next
    /// applied. Does nothing until the maps match the plan, because until then, connects may have
    /// no other backends to choose than the ones that this function ejects.
    pub fn judge_guesses(&mut self) {
        if self.guesses.is_empty() || !self.is_settled() {
            return;
        }
        let services = self.balancer.services();
        let ejects: BTreeMap<ServiceIndex, bool> =
            services.map(|(service, index, _)| (index, service.ejection.is_some())).collect();
        self.guesses.retain(|of, _| ejects.contains_key(&of.service));
        let (tables, backends) = (self.datapath.tables(), &self.datapath.applied().backends);
        let mut to_eject: Vec<Slot> = Vec::new();
        for (&slot, backend) in backends {
            let identity = Identity { service: backend.service, address: backend.address };
            let Some(guess) = self.guesses.get_mut(&identity).filter(|guess| !guess.is_refuted) else {
                continue;
            };
            let Ok(counts) = tables.counts(slot) else { continue };
            let (at, established) =
                (BackendRef { slot, generation: backend.generation }, counts.sums.established);
            match guess.ejected {
                Some((known, before)) if known == at => guess.is_refuted = established != before,
                _ => {
                    guess.ejected = Some((at, established));
                    let is_ejected = tables.slot(slot).is_some_and(|view| view.is_ejected);
                    to_eject.extend((ejects[&backend.service] && !is_ejected).then_some(slot));
                }
            }
            if guess.is_refuted {
                self.applied_probes = None;
            }
        }
        self.datapath.eject(&to_eject);
    }
}
