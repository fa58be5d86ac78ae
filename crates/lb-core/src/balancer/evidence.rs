//! The evidence on backends: how the verdicts of witnesses and of the kernel programs change it,
//! and which backends have returned.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::Add;
use std::time::Duration;

use lb_common::abi::HealthReason;
use lb_common::ejection::doubled_if;

use super::{Balancer, KernelVerdict, ServiceState};
use crate::health::{self, BackendEvidence, Health, ReportedVerdict, Who, Why};
use crate::ids::{ServiceIndex, Slot};
use crate::plan::Plan;
use crate::service::HealthRules;
use crate::tables::slots::Identity;

impl<T: Copy + Ord + Add<Duration, Output = T>> Balancer<T> {
    /// The evidence on a backend.
    pub fn standing(&self, identity: Identity) -> Option<&BackendEvidence<T>> {
        self.standings.get(&identity)
    }

    /// The backends of the service at a position that operators have drained.
    pub fn drained_by_operator(&self, position: usize) -> impl Iterator<Item = SocketAddr> + '_ {
        let known = self.standings.range(Identity::all_of(self.services[position].index));
        known.filter(|(_, standing)| standing.is_drained_by_operator()).map(|(known, _)| known.address)
    }

    /// Applies the verdicts of one witness on a service's backends
    /// ([`Fact::Verdicts`](super::Fact::Verdicts)). Returns whether anything changed.
    pub(super) fn apply_verdicts(
        &mut self,
        service: ServiceIndex,
        who: Who,
        reported: &BTreeMap<SocketAddr, (Health, Why)>,
        now: T,
    ) -> bool {
        let mut is_news = false;
        let identity = |address: &SocketAddr| Identity { service, address: *address };
        for (address, (health, why)) in reported {
            let standing =
                self.standings.entry(identity(address)).or_insert_with(|| BackendEvidence::new(now));
            let verdict = ReportedVerdict { health: *health, why: *why, until: None };
            let is_well = *health == Health::Healthy;
            let has_changed = standing.set_verdict(who, (!is_well).then_some(verdict), now);
            if has_changed && is_well {
                self.returned.extend(standing.is_ejected().then(|| identity(address)));
            }
            let is_first = who == Who::Probe && standing.prove();
            is_news |= has_changed || is_first;
        }
        if who == Who::Probe {
            self.end_freshness(service);
        }
        let slots = &self.slots;
        self.standings.retain(|known, standing| {
            if known.service == service && who != Who::Probe && !reported.contains_key(&known.address) {
                let has_changed = standing.set_verdict(who, None, now);
                self.returned.extend((has_changed && standing.is_ejected()).then_some(*known));
                is_news |= has_changed;
            }
            known.service != service || slots.get(*known).is_some() || standing.is_known()
        });
        is_news
    }

    /// Ends the time in which a service treats all backends alike, if a probe of each member has
    /// ended.
    fn end_freshness(&mut self, service: ServiceIndex) {
        let standings = &self.standings;
        let is_proven = |address: SocketAddr| {
            standings.get(&Identity { service, address }).is_some_and(BackendEvidence::is_proven)
        };
        for state in self.services.iter_mut().filter(|state| state.index == service) {
            let members = state.list.iter().flat_map(|in_use| &in_use.membership.members);
            if members.map(|member| member.endpoint.address).all(is_proven) {
                state.fresh_until = None;
            }
        }
    }

    /// Applies the kernel programs' verdicts. Returns the services that have a backend with a
    /// changed verdict.
    pub(super) fn apply_kernel_verdicts(
        &mut self,
        verdicts: BTreeMap<Slot, KernelVerdict>,
        now: T,
    ) -> BTreeSet<ServiceIndex> {
        if verdicts == self.verdicts {
            return BTreeSet::new();
        }
        let of =
            |verdicts: &BTreeMap<Slot, KernelVerdict>, slot| verdicts.get(&slot).copied().unwrap_or_default();
        let of_slot = self
            .slots
            .iter()
            .map(|(identity, at)| (identity, of(&self.verdicts, at.slot), of(&verdicts, at.slot)));
        let changed: Vec<_> = of_slot.filter(|(_, before, after)| before != after).collect();
        let concerned: BTreeSet<ServiceIndex> =
            changed.iter().map(|(identity, ..)| identity.service).collect();
        let limit = |state: &ServiceState<T>| state.service.ejection.map_or(u8::MAX, |rules| rules.failures);
        let services = self.services.iter().filter(|state| concerned.contains(&state.index));
        let services: BTreeMap<ServiceIndex, (u8, BTreeSet<SocketAddr>)> =
            services.map(|state| (state.index, (limit(state), self.available(state, &verdicts)))).collect();
        for (identity, before, after) in changed {
            let standing = self.standings.entry(identity).or_insert_with(|| BackendEvidence::new(now));
            let verdict =
                ReportedVerdict { health: Health::Ejected, why: Why::Failures(after.failures), until: None };
            // A backend that has reached the limit of failures is treated as ejected even if its
            // ejection is withheld because it is the last available backend. The programs double
            // the limit for a backend that probes have found healthy, unless it is the last
            // available backend.
            let limit = services.get(&identity.service).map_or(u8::MAX, |(failures, available)| {
                let has_others = available.iter().any(|address| *address != identity.address);
                doubled_if(*failures, (standing.is_probed_healthy() && has_others).into())
            });
            let is_ejected = after.is_ejected || after.failures >= limit;
            standing.set_verdict(Who::Kernel, is_ejected.then_some(verdict), now);
            if after.failures > before.failures {
                standing.note_failure(now);
            }
        }
        self.verdicts = verdicts;
        concerned
    }

    /// The backends of a service that are available after `verdicts`, and the backup.
    fn available(
        &self,
        state: &ServiceState<T>,
        verdicts: &BTreeMap<Slot, KernelVerdict>,
    ) -> BTreeSet<SocketAddr> {
        let Some(row) = state.list.as_ref().map(|in_use| &in_use.row) else { return BTreeSet::new() };
        let is_ejected = |address: SocketAddr| {
            let at = self.slots.get(Identity { service: state.index, address });
            at.and_then(|at| verdicts.get(&at.slot)).is_some_and(|verdict| verdict.is_ejected)
        };
        let health = row.usable.iter().map(|(address, (_, health))| (*address, *health));
        let available =
            health.filter(|(address, health)| *health <= Health::Unproven && !is_ejected(*address));
        available.map(|(address, _)| address).chain(row.backup).collect()
    }

    /// Forgets the probe results of backends that have left the list of a service. If such a
    /// backend has no slot and is not drained by an operator, removes all evidence on it.
    pub(super) fn forget_unlisted(&mut self, position: usize) {
        let Some(ServiceState { index, list: Some(in_use), .. }) = self.services.get(position) else {
            return;
        };
        let (slots, index, endpoints) = (&self.slots, *index, &in_use.endpoints);
        let mut forgotten = Vec::new();
        for (known, standing) in self.standings.range_mut(Identity::all_of(index)) {
            if endpoints.get(known.address).is_none() {
                // Another backend may have this address later.
                standing.unprove();
                // A drain by an operator also applies to a backend that a later list contains
                // again.
                let is_needed = slots.get(*known).is_some() || standing.is_drained_by_operator();
                forgotten.extend((!is_needed).then_some(*known));
            }
        }
        for known in forgotten {
            self.standings.remove(&known);
        }
    }

    /// The slots of replaced backends with a withheld ejection: they failed, but each was the last
    /// available backend at that time. Connects no longer choose them. So only a trial can show
    /// that they have recovered, and a trial requires an ejection.
    pub fn replaced_without_ejection(&self) -> Vec<Slot> {
        let is_withheld = |slot: &Slot| {
            self.verdicts.get(slot).is_some_and(|verdict| !verdict.is_ejected && verdict.failures > 0)
        };
        let of_service = |state: &ServiceState<T>| {
            let identity = |address: &SocketAddr| Identity { service: state.index, address: *address };
            let replaced = state.list.iter().flat_map(|in_use| in_use.row.replaced.keys().map(identity));
            let ejected =
                replaced.filter(|one| self.standings.get(one).is_some_and(BackendEvidence::is_ejected));
            ejected.filter_map(|one| Some(self.slots.get(one)?.slot)).filter(is_withheld).collect::<Vec<_>>()
        };
        self.services.iter().flat_map(of_service).collect()
    }

    /// Notes that backends of the service at this position have started again. If they are ejected,
    /// [`Balancer::take_returned`] returns them.
    pub fn note_returns(&mut self, position: usize, has_started: impl Fn(SocketAddr) -> bool) {
        let service = self.services[position].index;
        let ejected = self.standings.iter().filter(|(known, standing)| {
            known.service == service && standing.is_ejected() && has_started(known.address)
        });
        self.returned.extend(ejected.map(|(known, _)| *known));
    }

    /// The slots of ejected backends that have returned since the last call: a witness has
    /// withdrawn its verdict against the backend, or the backend has started again. The caller
    /// makes the trial of each of these backends due at once.
    pub fn take_returned(&mut self) -> Vec<Slot> {
        let returned = std::mem::take(&mut self.returned);
        returned.into_iter().filter_map(|identity| Some(self.slots.get(identity)?.slot)).collect()
    }
}

/// The evidence on the backends of adopted tables, from their state words. Each verdict is valid
/// until its witness reports again. A state word that an older daemon wrote contains no reason:
/// then the backend is treated as healthy if it was usable, and as refusing if it was not.
pub(super) fn adopted_standings<T: Copy + Ord>(
    states: &[ServiceState<T>],
    adopted: &Plan,
    now: T,
) -> BTreeMap<Identity, BackendEvidence<T>> {
    let mut standings = BTreeMap::new();
    for state in states {
        let Some(table) = adopted.services.get(&state.index) else { continue };
        // Verdicts of a witness that is no longer configured are not adopted, because the witness
        // would never withdraw them.
        let HealthRules { first_look, heeds_reports, .. } = state.service.health;
        let is_probed = first_look.is_some();
        let slots: BTreeSet<Slot> = table.schedule.iter().chain(&table.replaced).copied().collect();
        for backend in slots.iter().filter_map(|slot| adopted.backends.get(slot)) {
            let reason = health::stated_reason(backend.reason, backend.state, backend.usable);
            let mut standing = BackendEvidence::new(now);
            match (reason, health::meaning(reason)) {
                (_, (health, Some((who @ Who::Probe, why)))) if is_probed => {
                    standing.take_over();
                    standing.set_verdict(who, Some(ReportedVerdict { health, why, until: None }), now);
                }
                (_, (health, Some((who @ Who::Report, why)))) if heeds_reports => {
                    standing.set_verdict(who, Some(ReportedVerdict { health, why, until: None }), now);
                }
                // Until the operators' overrides are read, the drain remains in force.
                (_, (health, Some((who @ Who::Operator, why)))) => {
                    standing.set_verdict(who, Some(ReportedVerdict { health, why, until: None }), now);
                }
                (HealthReason::Healthy, _) if is_probed => standing.take_over(),
                _ => continue,
            }
            let identity = Identity { service: state.index, address: backend.address };
            standings.insert(identity, standing);
        }
    }
    standings
}
