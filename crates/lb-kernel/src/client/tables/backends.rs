//! The backends of a client task in its maps: this module reads the row of each slot into a view,
//! and writes rows step by step.
//!
//! A free slot contains the generation of its next backend. The counts of a backend that leaves are
//! stored under its service and address (see `retired`), in case the backend returns.

use std::collections::BTreeMap;
use std::mem::offset_of;
use std::net::SocketAddr;
use std::time::Duration;

use bytemuck::Zeroable;
use lb_common::abi::{
    Backend, BackendAddress, BackendState, DaemonState, EjectionPhase, EjectionState, HealthReason,
    NextTrial, RecentErrors, RetiredCounters, SlotCounters, StateWord, Usable, map,
};
use lb_common::ejection;
use lb_common::load::{self, HalfLife};
use lb_common::net::{Address, Be16, socket_addr};
use lb_common::ticks::{TICK_LOG2, tick};
use lb_core::balancer::KernelVerdict;
use lb_core::control::error_load::MemberLoad;
use lb_core::ids::{BackendRef, Generation, ServiceIndex, Slot};
use lb_core::plan::BackendPlan;

use super::counts::low_half;
use super::services::name_of;
use super::{Counts, Tables};
use crate::client::retired;
use crate::error::DatapathError;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotView {
    pub at: BackendRef,
    pub service: ServiceIndex,
    pub address: SocketAddr,
    pub weight: u16,
    /// The use of the slot.
    pub state: BackendState,
    /// The backend's health according to the daemon, and its reason.
    pub reason: HealthReason,
    /// Whether the daemon permits connects to choose the backend.
    pub usable: Usable,
    /// Whether a probe has found the backend healthy.
    pub is_probed_healthy: bool,
    pub is_ejected: bool,
    /// Whether the backend has failed often enough to be ejected, but the programs have withheld
    /// the ejection because the backend is the last available one.
    pub is_withheld: bool,
    /// The backend's recent failures, and the time until which it is ejected.
    pub ejection: EjectionState,
    /// The number of the slot's entries in the service's table.
    pub entries: u32,
    /// The backend's report id; [`NO_REPORT`](lb_common::abi::host::NO_REPORT) if the daemon
    /// receives no reports of it.
    pub report: u32,
    /// The time until which the backend is a lame duck according to its own report, in nanoseconds
    /// of `CLOCK_MONOTONIC`; 0 if the backend is not a lame duck.
    pub lame_until_ns: u64,
}

fn report_id(number: u32) -> u16 {
    u16::try_from(number).expect("report ids have 16 bits")
}

impl SlotView {
    /// Whether connects may choose this backend.
    pub fn may_be_chosen(&self) -> bool {
        match self.usable {
            Usable::No => false,
            Usable::UnlessEjected => !self.is_ejected,
            Usable::EvenEjected => true,
        }
    }
}

impl Tables {
    pub fn slots(&self) -> Vec<SlotView> {
        self.all_slots().filter_map(|slot| self.slot(slot)).collect()
    }

    fn all_slots(&self) -> impl Iterator<Item = Slot> {
        Slot::below(u32::try_from(self.maps.backends.length()).unwrap_or(u32::MAX))
    }

    /// The content of a slot; `None` if it is free.
    pub fn slot(&self, slot: Slot) -> Option<SlotView> {
        let Backend { state, entries, ejection, endpoint, .. } = self.maps.backends.get(slot.index());
        let known = BackendState::from_u8(state.state).filter(|state| *state != BackendState::Free)?;
        let daemon = state.daemon();
        let rules = self.maps.services.get(usize::from(endpoint.service)).ejection;
        let is_enough = rules.failures > 0 && ejection.run >= ejection::failures_to_eject(rules, state);
        Some(SlotView {
            at: BackendRef { slot, generation: Generation(endpoint.generation) },
            service: ServiceIndex(endpoint.service),
            address: socket_addr(endpoint.address, endpoint.port),
            weight: endpoint.weight,
            state: known,
            reason: daemon.reason(),
            usable: daemon.usable(),
            is_probed_healthy: daemon.is_probed_healthy(),
            is_ejected: state.ejected != 0,
            is_withheld: state.ejected == 0 && is_enough,
            ejection,
            entries,
            report: u32::from(endpoint.report),
            lame_until_ns: self.verdicts.lame_until_ns(u32::from(endpoint.report)),
        })
    }

    /// For each free slot, the generation of its next backend. Omits slots that were never used.
    pub fn next_generations(&self) -> Vec<BackendRef> {
        let next = |slot: Slot| {
            let Backend { state, endpoint, .. } = self.maps.backends.get(slot.index());
            let is_free = state.state == BackendState::Free as u8 && endpoint.generation != 0;
            is_free.then_some(BackendRef { slot, generation: Generation(endpoint.generation) })
        };
        self.all_slots().filter_map(next).collect()
    }

    /// The programs' verdicts on these backends. Omits backends that are not ejected and have no
    /// failures. The daemon calls this every second, so the function reads only two words of each
    /// row, in the order of the rows.
    pub fn kernel_verdicts(&self, backends: &BTreeMap<Slot, BackendPlan>) -> BTreeMap<Slot, KernelVerdict> {
        let verdict = |slot: Slot| {
            let row = &self.maps.backends;
            let word = row.load64(slot.index(), offset_of!(Backend, ejection));
            let state = StateWord::from_word(row.load32(slot.index(), offset_of!(Backend, state)));
            let found = KernelVerdict {
                is_ejected: state.ejected != 0,
                failures: EjectionState::from_word(word).run,
            };
            (found != KernelVerdict::default() && backends.contains_key(&slot)).then_some((slot, found))
        };
        let end = backends.last_key_value().map_or(0, |(last, _)| last.number() + 1);
        Slot::below(end).filter_map(verdict).collect()
    }

    /// Ensures that each service with ejected backends has one of them as its next trial. A service
    /// may have no next trial, because the backend of its next trial was removed or was readmitted
    /// by an operator. In this case the function selects the backend whose ejection ends first.
    ///
    /// The function also replaces the backend of the next trial if this backend cannot have a trial
    /// now and the ejection of another backend is over. (The programs select the next trial
    /// whenever they judge a flow, but the next judgement may be far in the future.) If the rules
    /// of a service no longer eject backends, the function readmits the service's ejected backends.
    pub(crate) fn renew_trials(&mut self, ejected: &[Slot], now_ns: u64) {
        let now = tick(now_ns);
        // The ejected backends of each service: the ticks until the ejection is over, the slot, and
        // whether the backend cannot have its trial now, because it is on trial, at the limit, or a
        // lame duck.
        let mut services: BTreeMap<ServiceIndex, Vec<(u32, Slot, bool)>> = BTreeMap::new();
        for slot in ejected {
            let Some(view) = self.slot(*slot).filter(|view| view.is_ejected) else { continue };
            let row = self.maps.services.get(view.service.index());
            if row.ejection.failures == 0 {
                self.readmit(*slot);
                continue;
            }
            if view.usable != Usable::UnlessEjected {
                continue;
            }
            let left = ejection::left(view.ejection.at, row.ejection, now);
            let limit = u64::from(row.rules.active_limit);
            let waits = view.ejection.phase == EjectionPhase::Trial as u8 && left > 0
                || limit != 0 && self.active(*slot) >= limit
                || view.lame_until_ns > now_ns;
            services.entry(view.service).or_default().push((left, *slot, waits));
        }
        for (service, mut backends) in services {
            backends.sort_unstable();
            let named = self.next_trial(service).slot();
            let due = backends.iter().find(|(left, _, waits)| *left == 0 && !waits);
            let next = match backends.iter().find(|(_, slot, _)| slot.number() == named) {
                Some((left, _, false)) if *left == 0 || due.is_none() => None,
                Some(_) => due,
                None => due.or(backends.first()),
            };
            if let Some((left, slot, _)) = next {
                self.set_next_trial(service, NextTrial::of(slot.number(), now.wrapping_add(*left), 0));
            }
        }
    }

    pub fn active(&self, slot: Slot) -> u64 {
        self.maps.backends.load64(slot.index(), offset_of!(Backend, flows))
    }

    /// The load of a slot's backend, and whether any of its recent errors remain; `None` if the
    /// slot has no entry in a table. The daemon calls this every second for each member of a policy
    /// that compares load, so the function reads only four words of the row.
    pub fn member_load(&self, slot: Slot, error_half_life: u32, now_ns: u64) -> Option<(MemberLoad, bool)> {
        let (rows, index) = (&self.maps.backends, slot.index());
        let entries = rows.load32(index, offset_of!(Backend, entries));
        if entries == 0 {
            return None;
        }
        let state = StateWord::from_word(rows.load32(index, offset_of!(Backend, state)));
        let errors = RecentErrors::from_word(rows.load64(index, offset_of!(Backend, errors)));
        let has_errors =
            errors.count != 0 && load::decayed(errors, tick(now_ns), HalfLife::new(error_half_life)) > 0;
        let load = MemberLoad { flows: self.active(slot), entries, is_usable: state.may_be_chosen() == 1 };
        Some((load, has_errors))
    }

    /// Reduces the recent errors of a slot's backend to at most `most`. If a program adds an error
    /// at the same moment, the function changes nothing; the daemon's next tick repeats the call.
    pub(crate) fn limit_errors(&self, slot: Slot, most: u32, now_ns: u64) {
        let (slot, at) = (slot.index(), offset_of!(Backend, errors));
        let before = self.maps.backends.load64(slot, at);
        let errors = RecentErrors::from_word(before);
        let service = self.maps.backends.get(slot).endpoint.service;
        let half_life = self.maps.services.get(usize::from(service)).rules.error_half_life;
        if load::decayed(errors, tick(now_ns), HalfLife::new(half_life)) > most {
            let after = RecentErrors { count: most, since: tick(now_ns) };
            self.maps.backends.replace64(slot, at, before, after.to_word());
        }
    }

    /// Delays the next halving of the recent errors of a slot's backend by `delay`, but at most
    /// until a half-life from now. If a program adds an error at the same moment, the function
    /// changes nothing; the daemon's next tick repeats the call.
    pub(crate) fn hold_errors(&self, slot: Slot, delay: Duration, now_ns: u64) {
        let (slot, at) = (slot.index(), offset_of!(Backend, errors));
        let before = self.maps.backends.load64(slot, at);
        let errors = RecentErrors::from_word(before);
        if load::are_stale(errors, tick(now_ns)) {
            return;
        }
        let age = tick(now_ns).wrapping_sub(errors.since);
        let since = errors
            .since
            .wrapping_add(u32::try_from(delay.as_nanos() >> TICK_LOG2).map_or(age, |delay| delay.min(age)));
        self.maps.backends.replace64(slot, at, before, RecentErrors { since, ..errors }.to_word());
    }

    /// Clears the recent errors of a slot's backend if they are stale at the tick `now`. An error
    /// that a program adds meanwhile remains.
    pub fn forget_errors(&self, slot: Slot, now: u32) {
        let (slot, errors) = (slot.index(), offset_of!(Backend, errors));
        let word = self.maps.backends.load64(slot, errors);
        if load::are_stale(RecentErrors::from_word(word), now) {
            self.maps.backends.replace64(slot, errors, word, 0);
        }
    }

    /// Adds recent errors to a slot's backend, if its service counts errors. If a program adds an
    /// error at the same moment, the added errors may be lost.
    pub(crate) fn add_errors(&self, slot: Slot, more: u32, now_ns: u64) {
        let Some(view) = self.slot(slot) else { return };
        let half_life = self.maps.services.get(view.service.index()).rules.error_half_life;
        if half_life == 0 {
            return;
        }
        let (slot, errors) = (slot.index(), offset_of!(Backend, errors));
        let before = self.maps.backends.load64(slot, errors);
        let half_life = HalfLife::new(half_life);
        let after = load::with_more(RecentErrors::from_word(before), more, tick(now_ns), half_life);
        self.maps.backends.replace64(slot, errors, before, after.to_word());
    }

    /// Writes a backend to a slot to which nothing refers. If there are retired counts of the
    /// backend, the function first copies them to the slot, so that counting continues from them,
    /// and at the end removes them from the map of retired counters. Returns the copied counts.
    ///
    /// # Errors
    /// If the kernel refuses. The slot is then free.
    pub(crate) fn write_backend(
        &mut self,
        slot: Slot,
        backend: &BackendPlan,
        service: &str,
    ) -> Result<Option<SlotCounters>, DatapathError> {
        let name = retired::name(service, backend.address);
        let fail = |error| self.fail_io(map::RETIRED, "read", error);
        let retired = self.maps.retired.get(&name).map_err(fail)?;
        let RetiredCounters { counts, reclaimed, .. } = retired.unwrap_or_else(Zeroable::zeroed);
        self.maps.counts.set(slot, &counts).map_err(|error| self.fail_io(map::COUNTS, "write", error))?;
        self.maps.backends.set_part(
            slot.index(),
            offset_of!(Backend, endpoint),
            &BackendAddress {
                address: Address::from(backend.address.ip()),
                port: Be16::from_host(backend.address.port()),
                service: backend.service.0,
                report: report_id(backend.report),
                weight: backend.weight,
                generation: backend.generation.0,
            },
        );
        // No flow is open, so no program writes these words.
        self.maps.backends.store64(slot.index(), offset_of!(Backend, errors), 0);
        self.maps.backends.store32(slot.index(), offset_of!(Backend, chosen), low_half(counts.chosen));
        self.maps.reclaimed.store64(slot.index(), 0, reclaimed);
        self.set_entries(slot, 0);
        self.readmit(slot);
        self.set_state(slot, backend.daemon_state());
        if retired.is_some()
            && let Err(error) = self.maps.retired.remove(&name)
        {
            // The step has failed, so the stored plan will not contain this row. If the row
            // remained, the backend could get another slot, and the next daemon would read the
            // backend twice.
            self.set_state(slot, DaemonState::new(Usable::No, BackendState::Free));
            return Err(self.fail_io(map::RETIRED, "write", error));
        }
        Ok(retired.map(|_| counts))
    }

    /// Frees a slot to which no table, reader or flow refers any longer. Stores the counts of its
    /// backend first.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(crate) fn free_backend(&mut self, slot: Slot, now_ns: u64) -> Result<(), DatapathError> {
        if let Some(view) = self.slot(slot) {
            let Counts { sums, active: _, reclaimed } = self.counts(slot)?;
            let service = name_of(&self.maps.services.get(view.service.index()));
            let name = retired::name(&service, view.address);
            let stored = self.maps.retired.store(&name, sums, reclaimed, now_ns);
            stored.map_err(|error| self.fail_io(map::RETIRED, "write", error))?;
            if self.next_trial(view.service).slot() == slot.number() {
                self.set_next_trial(view.service, NextTrial::default());
            }
        }
        // A free row stores the generation of the slot's next backend.
        let mut row = BackendAddress::zeroed();
        row.generation = Generation(self.maps.backends.get(slot.index()).endpoint.generation).next().0;
        self.set_state(slot, DaemonState::new(Usable::No, BackendState::Free));
        self.maps.backends.set_part(slot.index(), offset_of!(Backend, endpoint), &row);
        Ok(())
    }

    pub(crate) fn set_weight(&mut self, slot: Slot, weight: u16) {
        let at = offset_of!(Backend, endpoint.weight);
        self.maps.backends.store16(slot.index(), at, weight);
    }

    /// Stores a backend's report id. The next connect that chooses the backend already reads the
    /// verdict of this id.
    pub(crate) fn set_report(&mut self, slot: Slot, report: u32) {
        let at = offset_of!(Backend, endpoint.report);
        self.maps.backends.store16(slot.index(), at, report_id(report));
    }

    /// Stores the daemon's half of a slot's state word. The kernel programs write the other half.
    pub(crate) fn set_state(&mut self, slot: Slot, state: DaemonState) {
        self.maps.backends.store16(slot.index(), offset_of!(Backend, state), state.to_word());
    }

    /// Readmits a slot's backend if it is ejected, and resets its count of consecutive failures. A
    /// program that is ejecting the backend at the same moment may still eject it.
    pub(crate) fn readmit(&mut self, slot: Slot) {
        // The order matters: after the first store no trial of the backend begins, so the second
        // store does not overwrite the state of a trial.
        self.set_ejected(slot, 0);
        let none = EjectionState::default().to_word();
        self.maps.backends.store64(slot.index(), offset_of!(Backend, ejection), none);
    }

    /// Ejects the backend in a slot, unless a program changes the backend's ejection word at the
    /// same moment.
    pub(crate) fn eject(&mut self, slot: Slot, now_ns: u64) {
        let Some(view) = self.slot(slot) else { return };
        let rules = self.maps.services.get(view.service.index()).ejection;
        let after = ejection::ejected(view.ejection, rules, tick(now_ns), ejection::NO_JITTER).to_word();
        let at = offset_of!(Backend, ejection);
        if self.maps.backends.replace64(slot.index(), at, view.ejection.to_word(), after) {
            self.set_ejected(slot, 1);
        }
    }

    fn set_ejected(&mut self, slot: Slot, ejected: u8) {
        let at = offset_of!(Backend, state) + offset_of!(StateWord, ejected);
        self.maps.backends.store8(slot.index(), at, ejected);
    }

    /// Ends the ejection time of the backend in a slot, so that the next connect is its trial.
    /// After several calls for one service, the backend of the last call has its trial first, and
    /// the others follow. If a program judges the backend at the same moment, the program's result
    /// remains.
    pub(crate) fn end_ejection(&mut self, slot: Slot, now_ns: u64) {
        let at = offset_of!(Backend, ejection);
        let before = self.maps.backends.load64(slot.index(), at);
        let after = ejection::time_over(EjectionState::from_word(before), tick(now_ns)).to_word();
        if after != before
            && self.maps.backends.replace64(slot.index(), at, before, after)
            && let Some(view) = self.slot(slot)
        {
            self.set_next_trial(view.service, NextTrial::of(slot.number(), tick(now_ns), 0));
        }
    }

    /// Stores the number of entries of a slot in its service's table.
    pub(super) fn set_entries(&mut self, slot: Slot, entries: u32) {
        self.maps.backends.store32(slot.index(), offset_of!(Backend, entries), entries);
    }
}
