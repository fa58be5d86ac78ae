//! The overrides of operators for backends of a client task: drained backends, and factors of
//! weights.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Instant;

use lb_core::balancer::Fact;
use lb_core::control::factor::Factors;
use lb_core::health::{Health, Who, Why};
use lb_core::ids::{ServiceIndex, Slot};
use lb_core::plan::entries_by_slot;
use lb_kernel::Tables;
use lb_view::overrides::ClientEffect;

use super::ClientTask;

/// Whether connects that began before the last override may still follow the earlier state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OverrideGrace {
    /// No connect that began before the last override runs any more.
    #[default]
    Over,
    /// The override is not in the maps yet, or the wait for running programs has not begun.
    Due,
    /// The daemon waits for the end of the programs that were running when the wait began.
    Waiting,
}

impl ClientTask {
    /// Applies the operators' overrides of the service at this position.
    pub fn set_overrides(
        &mut self,
        position: usize,
        drained: &BTreeSet<SocketAddr>,
        weights: Factors,
        now: Instant,
    ) {
        if *self.balancer.operator_weights(position) != weights {
            self.take_in(Fact::OperatorWeights(position, weights), now);
        }
        if self.drained(position) != *drained {
            let verdicts: BTreeMap<_, _> =
                drained.iter().map(|address| (*address, (Health::Drained, Why::Drain))).collect();
            self.apply_verdicts(position, Who::Operator, verdicts, now);
            self.override_grace = OverrideGrace::Due;
        }
    }

    /// The backends of the service at this position that operators have drained.
    pub fn drained(&self, position: usize) -> BTreeSet<SocketAddr> {
        self.balancer.drained_by_operator(position).collect()
    }

    /// The effects of overrides on these backends of a service, for each backend that has a slot. A
    /// removed backend retains its slot until its last flow ends, even if its service was removed.
    pub fn effects(
        &self,
        service: &str,
        backends: &BTreeSet<SocketAddr>,
    ) -> BTreeMap<SocketAddr, ClientEffect> {
        let (plan, tables) = (self.datapath.applied(), self.datapath.tables());
        let is_meant = |index: &ServiceIndex| plan.services.get(index).is_some_and(|one| one.name == service);
        let named: BTreeMap<Slot, SocketAddr> = plan
            .backends
            .iter()
            .filter(|(_, backend)| backends.contains(&backend.address) && is_meant(&backend.service))
            .map(|(slot, backend)| (*slot, backend.address))
            .collect();
        let mut effects =
            effects(&self.client.name, self.override_grace == OverrideGrace::Over, tables, &named);
        let open = plan.services.values().find(|one| one.name == service && one.open);
        let mut entries = open.map(|one| entries_by_slot(&one.schedule)).unwrap_or_default();
        entries.retain(|slot, _| plan.backends.get(slot).is_some_and(|backend| backend.usable.is_usable()));
        let all: u32 = entries.values().sum();
        for (slot, entries) in entries {
            if let Some(effect) = named.get(&slot).and_then(|address| effects.get_mut(address)) {
                effect.share += f64::from(entries) / f64::from(all);
            }
        }
        effects
    }

    /// Whether a drain of these backends changes this task and leaves it without an available
    /// member.
    pub fn would_be_left_without(&self, service: &str, drained: &BTreeSet<SocketAddr>) -> bool {
        let Some(row) = self.position(service).and_then(|position| self.balancer.row(position)) else {
            return false;
        };
        let is_left = |address: &SocketAddr| {
            let is_available = row.usable.get(address).is_some_and(|(_, health)| *health <= Health::Unproven);
            is_available && !drained.contains(address)
        };
        let is_changed = |address: &SocketAddr| {
            let is_drained = row.usable.get(address).is_some_and(|(_, health)| *health == Health::Drained);
            drained.contains(address) && !is_drained
        };
        let mut members = row.members.iter().map(|(address, _)| address);
        members.clone().any(is_changed) && !members.any(is_left)
    }

    /// Whether the overrides must wait for the end of running programs.
    pub(super) fn overrides_want_wait(&self) -> bool {
        self.override_grace == OverrideGrace::Due && self.is_settled()
    }

    pub(super) fn before_override_wait(&mut self) {
        if self.overrides_want_wait() {
            self.override_grace = OverrideGrace::Waiting;
        }
    }

    pub(super) fn after_override_wait(&mut self) {
        if self.override_grace == OverrideGrace::Waiting {
            self.override_grace = OverrideGrace::Over;
        }
    }
}

/// The open and untracked flows to the backends of these slots, as effects of overrides on a
/// client. The share of each backend is 0.
pub fn effects(
    client: &str,
    is_settled: bool,
    tables: &Tables,
    slots: &BTreeMap<Slot, SocketAddr>,
) -> BTreeMap<SocketAddr, ClientEffect> {
    let mut effects: BTreeMap<SocketAddr, ClientEffect> = BTreeMap::new();
    for (slot, address) in slots {
        let effect = effects.entry(*address).or_insert_with(|| ClientEffect {
            client: client.to_owned(),
            is_settled,
            open_flows: 0,
            untracked: 0,
            share: 0.0,
        });
        effect.open_flows += tables.active(*slot);
    }
    let order: Vec<Slot> = slots.keys().copied().collect();
    // If the counts cannot be read, the tick logs the error.
    let _ = tables.visit_counts(&order, |slot, counts| {
        if let Some(effect) = effects.get_mut(&slots[&slot]) {
            effect.untracked += counts.sums.untracked;
        }
    });
    effects
}
