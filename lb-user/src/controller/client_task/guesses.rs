//! Guesses: if the client and the daemon are in different network namespaces, a failed probe of a
//! backend is only a guess, which the client's own connections can refute.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Instant;

use lb_core::health::probed::seen_from;
use lb_core::health::{Health, Who, Why};
use lb_core::ids::{BackendRef, ServiceIndex, Slot};
use lb_core::service::Service;

use super::{ClientTask, ServiceTask};

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
        let fails =
            |address: &SocketAddr| found.get(address).is_some_and(|(health, _)| *health == Health::Refusing);
        let guesses = &mut self.services[position].guesses;
        guesses.retain(|address, _| is_elsewhere && fails(address));
        for address in found.keys().filter(|address| is_elsewhere && fails(address)) {
            guesses.entry(*address).or_default();
        }
        // The health of a backend for this client.
        let seen = |(address, (health, why))| {
            let is_refuted = guesses.get(&address).is_some_and(|guess| guess.is_refuted);
            (address, (seen_from(health, is_elsewhere, is_refuted), why))
        };
        let verdicts = found.into_iter().map(seen).collect();
        self.apply_verdicts(position, Who::Probe, verdicts, now);
    }

    /// Ejects backends for new guesses, so that the kernel programs test them by trials. Marks the
    /// guesses that connections have refuted; the marks take effect when probe results are next
    /// applied. Does nothing until the maps match the plan, because until then, connects may have
    /// no other backends to choose than the ones that this function ejects.
    pub fn judge_guesses(&mut self) {
        if !self.is_settled() || self.services.iter().all(|service| service.guesses.is_empty()) {
            return;
        }
        let services = self.balancer.services().zip(&mut self.services);
        let of_index = |((service, index, _), of_service)| (index, (service, of_service));
        let mut services: BTreeMap<ServiceIndex, (&Service, &mut ServiceTask)> =
            services.map(of_index).collect();
        let (tables, backends) = (self.datapath.tables(), &self.datapath.applied().backends);
        let mut to_eject: Vec<Slot> = Vec::new();
        for (&slot, backend) in backends {
            let Some((service, of_service)) = services.get_mut(&backend.service) else { continue };
            let guess = of_service.guesses.get_mut(&backend.address);
            let Some(guess) = guess.filter(|guess| !guess.is_refuted) else { continue };
            let Ok(counts) = tables.counts(slot) else { continue };
            let (at, established) =
                (BackendRef { slot, generation: backend.generation }, counts.sums.established);
            match guess.ejected {
                Some((known, before)) if known == at => guess.is_refuted = established != before,
                _ => {
                    guess.ejected = Some((at, established));
                    let is_ejected = tables.slot(slot).is_some_and(|view| view.is_ejected);
                    to_eject.extend((service.ejection.is_some() && !is_ejected).then_some(slot));
                }
            }
            if guess.is_refuted {
                self.applied_probes = None;
            }
        }
        self.datapath.eject(&to_eject);
    }
}
