//! Idle connections that are closed so that the pools of a client spread over all backends again.

use std::collections::BTreeMap;
use std::time::Instant;

use lb_common::abi::{EjectionPhase, Usable};
use lb_common::ejection::is_over;
use lb_common::ticks::tick;
use lb_core::control::Hold;
use lb_core::health::Health;
use lb_core::ids::Slot;
use lb_core::plan::entries_by_slot;
use lb_core::rebalance::{ClosingOutcome, MemberFlows, MemberState, Rebalance, RebalanceView};
use lb_view::status::{RebalanceStatus, ShortBackend};

use super::control::is_available;
use super::{ClientTask, ServiceTask};
use crate::close_jobs::{CloseCause, CloseOrder, DEFAULT_RATE};

impl ClientTask {
    /// For each service with `rebalance`, compares the open flows to the members' shares. Returns
    /// an order to close connections of one backend of one service, if this is due. If
    /// `is_closing`, a job already closes connections of this client, so the result is `None`. If
    /// the order is for the trial of an ejected backend, the next connect becomes this trial.
    /// `tick` is the number of this tick; each tick begins with another service.
    pub fn rebalance(&mut self, is_closing: bool, tick: u32, now: Instant) -> Option<CloseOrder> {
        for (configured, service) in self.client.services.iter().zip(&mut self.services) {
            service.rebalance.take_if(|_| configured.service.rebalance.is_none());
        }
        // Before the tables match the plan, connects do not follow the shares.
        if self.is_unpinned || self.settled.is_none() {
            return None;
        }
        let (at, task, count) = (self.clock.monotonic(now), self.client.task, self.client.services.len());
        let mut order = None;
        for position in (0..count).map(|number| (number + tick as usize) % count) {
            let service = &self.client.services[position].service;
            let (Some(rules), Some(row)) = (service.rebalance, self.balancer.row(position)) else { continue };
            let (is_panic, members) = (row.is_panic, self.member_flows(position));
            let new = || Rebalance::new(rules, task);
            let rebalance = self.services[position].rebalance.get_or_insert_with(new);
            if (rebalance.rules(), rebalance.task()) != (rules, task) {
                *rebalance = new();
            }
            let Some(closing) = rebalance.tick(at, &members, is_panic) else { continue };
            if is_closing || order.is_some() {
                rebalance.handle_outcome(at, ClosingOutcome::Postponed);
                continue;
            }
            // Without this call, the client's next connect might not be the trial: after a failed
            // trial, the programs begin the next trial only after as many other connects as there
            // are available backends.
            if let Some(at) = closing.trial.and_then(|address| self.balancer.slot(position, address)) {
                self.datapath.try_at_once(&[at.slot]);
            }
            order = Some(CloseOrder {
                service: service.name.clone(),
                backend: closing.address,
                client: Some(self.client.name.clone()),
                idle: Some(rules.idle),
                rate: DEFAULT_RATE,
                is_dry_run: false,
                most: Some(closing.most.into()),
            });
        }
        order
    }

    /// Handles the outcome of an order that [`Self::rebalance`] returned for this service.
    pub fn rebalanced(&mut self, service: &str, outcome: ClosingOutcome, now: Instant) {
        let at = self.clock.monotonic(now);
        let position = self.position(service);
        if let Some(rebalance) = position.and_then(|position| self.services[position].rebalance.as_mut()) {
            rebalance.handle_outcome(at, outcome);
        }
    }

    /// The members of a service's table with their open flows.
    fn member_flows(&self, position: usize) -> Vec<MemberFlows> {
        let (Some(row), Some((_, schedule))) =
            (self.balancer.row(position), self.balancer.schedule(position))
        else {
            return Vec::new();
        };
        let (entries, tables) = (entries_by_slot(schedule), self.datapath.tables());
        let limit = self.client.services[position].service.active_limit;
        let control = self.services[position].control.as_ref();
        let is_starting =
            |address| control.is_some_and(|controlled| controlled.hold(address) == Some(Hold::SlowStart));
        let flows_of = |slot: Slot| u32::try_from(tables.active(slot)).unwrap_or(u32::MAX);
        let member = |(address, _): &(std::net::SocketAddr, u64)| {
            let slot = self.balancer.slot(position, *address)?.slot;
            let open = flows_of(slot);
            let is_ejected = row.usable.get(address) == Some(&(Usable::UnlessEjected, Health::Ejected));
            let state = if is_available(row, *address) && !is_starting(*address) {
                MemberState::Warm
            } else if is_ejected {
                self.due_trial(slot).unwrap_or(MemberState::Held)
            } else {
                MemberState::Held
            };
            Some(MemberFlows {
                address: *address,
                entries: entries.get(&slot).copied().unwrap_or(0),
                open,
                state,
                is_at_limit: limit.is_some_and(|limit| open >= limit),
            })
        };
        row.members.iter().filter_map(member).collect()
    }

    /// The state of an ejected backend whose trial is due; `None` if its trial may not begin now,
    /// or if its counters cannot be read.
    fn due_trial(&self, slot: Slot) -> Option<MemberState> {
        let (tables, now_ns) = (self.datapath.tables(), self.datapath.kernel().now_ns());
        let view = tables.slot(slot)?;
        let rules = self.datapath.applied().services.get(&view.service)?.ejection;
        let is_due = view.is_ejected
            && view.ejection.phase == EjectionPhase::Ejected as u8
            && is_over(view.ejection.at, rules, tick(now_ns))
            && view.lame_until_ns <= now_ns;
        if !is_due {
            return None;
        }
        let trials = tables.counts(slot).ok()?.sums.trials;
        Some(MemberState::TrialDue { trials })
    }

    /// The part of status about `rebalance`, keyed by service name.
    pub fn rebalance_views(&self, now: Instant) -> BTreeMap<String, RebalanceStatus> {
        let at = self.clock.monotonic(now);
        let view = |(name, service): (&str, &ServiceTask)| {
            let RebalanceView { state, short, retry_at } = service.rebalance.as_ref()?.view();
            let short = short.iter().map(|member| ShortBackend {
                address: member.address,
                open: member.open,
                share: member.share,
            });
            let status = RebalanceStatus {
                state: state.name().to_owned(),
                backends: short.collect(),
                retry_s: retry_at.map(|retry_at| retry_at.saturating_sub(at).as_secs()),
                closed: self.closed.get(&(name.to_owned(), CloseCause::Rebalance)).copied().unwrap_or(0),
            };
            Some((name.to_owned(), status))
        };
        self.named().filter_map(view).collect()
    }
}
