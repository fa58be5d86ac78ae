//! Adjusts a client's weights once a second, to load and for slow start, with the daemon's own
//! code.
//!
//! This module must not depend on how reports reach the client.

use std::collections::BTreeMap;
use std::time::Duration;

use lb_common::abi::NO_SLOT;
use lb_core::balancer::Fact;
use lb_core::control::factor::Factors;
use lb_core::control::flows::{Lives, OfLate};
use lb_core::control::{
    Control, ControlRules, ControlSnapshot, Look, MemberObservation, ReceivedReport, SeenRow, Switch,
};

use super::{SimulatedClient, index_of};

/// The load control of a client, and the client's data about its own flows.
#[derive(Debug)]
pub(super) struct Following {
    control: Control,
    /// The state that the daemon last saved, and the time of saving.
    saved: Option<(ControlSnapshot, Duration)>,
    /// Flows that have begun since the last tick.
    begun: u32,
    lives: Lives,
    /// Recent flows to the backend in each slot.
    of_late: Vec<OfLate>,
}

impl Following {
    pub(super) fn new(rules: ControlRules) -> Self {
        let control = Control::new(rules);
        Self { control, saved: None, begun: 0, lives: Lives::default(), of_late: Vec::new() }
    }

    pub(super) fn begin(&mut self, slot: u32) {
        if slot != NO_SLOT {
            self.begun += 1;
            self.at(slot).add(1.0, 0.0);
        }
    }

    pub(super) fn fail(&mut self, slot: u32) {
        self.at(slot).add(0.0, 1.0);
    }

    fn at(&mut self, slot: u32) -> &mut OfLate {
        let slot = slot as usize;
        if self.of_late.len() <= slot {
            self.of_late.resize(slot + 1, OfLate::default());
        }
        &mut self.of_late[slot]
    }

    /// Clears the recent flows of a slot, because another backend may get the slot.
    pub(super) fn forget(&mut self, slot: u32) {
        *self.at(slot) = OfLate::default();
    }

    /// Ignores the flows that have begun until now, because these flows existed before the first
    /// tick.
    pub(super) fn forget_begun(&mut self) {
        self.begun = 0;
    }
}

impl SimulatedClient {
    /// Evaluates the newest received reports, and updates the tables if the change is large enough.
    /// Returns whether the tables were updated.
    pub fn follow_load(&mut self, now: Duration, report_of: impl Fn(u32) -> Option<ReceivedReport>) -> bool {
        let Some(mut following) = self.following.take() else { return false };
        let open: u32 = self.links.iter().flatten().map(|link| link.flows).sum();
        following.lives.tick(f64::from(std::mem::take(&mut following.begun)), f64::from(open));
        let look = self.look(&following, report_of);
        for (slot, of_late) in (0..).zip(&mut following.of_late) {
            let open = self.links.get(slot).copied().flatten().map_or(0, |link| link.flows);
            of_late.tick(f64::from(open));
        }
        let proposal = following.control.tick(now, &look);
        let is_worth_it = proposal.is_some();
        if let Some(proposal) = proposal {
            following.control.publish(proposal.factors.clone());
            self.put_in_force(now, proposal.factors);
        }
        self.following = Some(following);
        is_worth_it
    }

    fn put_in_force(&mut self, now: Duration, factors: Factors) {
        self.balancer
            .handle(now, Fact::Factors(0, factors))
            .expect("only a list of endpoints can be refused");
        self.publish();
    }

    /// Applies an operator's setting of load control. The setting takes effect at the next tick.
    pub fn switch(&mut self, switch: Switch) {
        self.following.iter_mut().for_each(|following| following.control.set_switch(switch));
    }

    /// Saves the learnt state of load control for the next daemon.
    pub fn save_state(&mut self, now: Duration) {
        self.following
            .iter_mut()
            .for_each(|following| following.saved = Some((following.control.snapshot(now), now)));
    }

    /// Replaces the daemon. The new daemon loads the saved state of load control, if there is any,
    /// but has no data about recent flows.
    pub fn replace_daemon(&mut self, now: Duration, is_saved: bool, switch: Switch) {
        let Some(before) = self.following.take() else { return };
        let mut following = Following::new(before.control.rules());
        if let Some((snapshot, at)) = before.saved.filter(|_| is_saved) {
            let age = now.saturating_sub(at);
            let mut starting = snapshot.starting.clone();
            starting.values_mut().for_each(|ready_for| *ready_for += age);
            following.control.adopt(&ControlSnapshot { switch, ..snapshot }, age);
            following.control.resume_slow_starts(&starting, now);
        }
        let factors = following.control.in_force().clone();
        self.following = Some(following);
        self.put_in_force(now, factors);
    }

    /// The factors that currently apply to the client's members.
    pub fn factors(&self) -> Vec<f64> {
        let Some(following) = &self.following else { return Vec::new() };
        let in_force = following.control.in_force();
        let members = self.balancer.weights(0).iter().filter(|(_, weight)| *weight > 0);
        members.map(|(address, _)| in_force.of(*address).number()).collect()
    }

    /// Handles members that are new or have changed their availability. The slow starts of these
    /// members begin now, not at the next tick.
    pub(super) fn start_slowly(&mut self, now: Duration) {
        let Some(mut following) = self.following.take() else { return };
        let row = self.look(&following, |_| None);
        let members = row.row.iter().map(|(address, seen)| (*address, seen.is_available));
        if let Some(factors) = following.control.arrange(now, members, row.is_panic) {
            following.control.publish(factors.clone());
            self.put_in_force(now, factors);
        }
        self.following = Some(following);
    }

    /// The client's observations of its members, which are the input of load control.
    fn look(&self, following: &Following, report_of: impl Fn(u32) -> Option<ReceivedReport>) -> Look {
        let slots: BTreeMap<u32, u32> =
            (0..).zip(&self.slots).filter_map(|(slot, of)| Some((of.as_ref()?.backend, slot))).collect();
        let limit = self.rules.active_limit;
        let seen = |&(address, weight): &(_, u64)| {
            let backend = index_of(address);
            let slot = slots[&backend];
            let is_ejected =
                self.ejector.as_ref().is_some_and(|ejector| ejector.state(slot).is_held_back() != 0);
            let seen = MemberObservation {
                weight,
                report: report_of(backend),
                errors: following.of_late.get(slot as usize).and_then(OfLate::errors),
                life: following.of_late.get(slot as usize).and_then(OfLate::life),
                is_available: !self.lame[slot as usize] && !is_ejected,
                is_at_limit: limit != 0 && self.flows(slot) >= limit,
                is_overridden: false,
            };
            (address, seen)
        };
        let row: SeenRow = self.balancer.weights(0).iter().map(seen).collect();
        Look {
            row,
            flows: following.lives.flows(),
            is_panic: self.balancer.row(0).is_some_and(|row| row.is_panic),
            is_idle: false,
            entries: u32::try_from(self.schedule.len()).expect("a table's length fits into 32 bits"),
        }
    }
}
