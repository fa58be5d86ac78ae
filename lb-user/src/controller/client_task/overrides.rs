//! What operators have set for backends of a client task: which backends are drained, and by which
//! factors weights are multiplied.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Instant;

use lb_core::balancer::Fact;
use lb_core::control::factor::Factors;
use lb_core::health::{Health, Who, Why};
use lb_view::overrides::ClientEffect;

use super::ClientTask;

/// Whether connects that began before the last override may still follow the earlier state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OverrideGrace {
    /// No such connect runs any more.
    #[default]
    Over,
    /// The override is not in the maps yet, or the wait for running programs has not begun.
    Due,
    /// The daemon waits for the programs that were running when the override was in the maps.
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

    /// The state of an overridden backend; `None` if this task does not have the backend.
    pub fn effect(&self, service: &str, backend: SocketAddr) -> Option<ClientEffect> {
        let position = self.position(service)?;
        let at = self.balancer.slot(position, backend)?;
        let may_be_chosen = self.balancer.row(position)?.usable.get(&backend)?.0.is_usable();
        let (_, schedule) = self.balancer.schedule(position)?;
        let entries = schedule.iter().filter(|slot| **slot == at.slot && may_be_chosen).count();
        let tables = self.datapath.tables();
        // If the counts cannot be read, the tick logs the error.
        let untracked = tables.counts(at.slot).map_or(0, |counts| counts.sums.untracked);
        #[expect(clippy::cast_precision_loss, reason = "schedules are far below 2^53 entries")]
        let share = entries as f64 / (schedule.len().max(1)) as f64;
        Some(ClientEffect {
            client: self.client.name.clone(),
            is_settled: self.override_grace == OverrideGrace::Over,
            open_flows: tables.active(at.slot),
            untracked,
            share,
        })
    }

    /// Whether a drain of these backends concerns this task and would leave it without an available
    /// member.
    pub fn would_be_left_without(&self, service: &str, drained: &BTreeSet<SocketAddr>) -> bool {
        let Some(row) = self.position(service).and_then(|position| self.balancer.row(position)) else {
            return false;
        };
        let is_left = |address: &SocketAddr| {
            let is_available = row.usable.get(address).is_some_and(|(_, health)| *health <= Health::Unproven);
            is_available && !drained.contains(address)
        };
        let mut members = row.members.iter().map(|(address, _)| address);
        let is_concerned = members.clone().any(|address| drained.contains(address));
        is_concerned && !members.any(is_left)
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
