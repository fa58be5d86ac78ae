//! Changes of backends: they enter the list, start, stop and restart, and clients are notified.
//!
//! This module must not depend on the reactions of clients.

use std::rc::Rc;

use lb_core::endpoint::{Endpoint, EndpointList, EndpointState};
use lb_core::subset::random::{SplitMix64, mix64};

use super::{BatchRestart, ListNotice, RestartStage, SimulatedBackend, Simulation, SimulationEvent};
use crate::traffic::assignments::JobAssignments;
use crate::traffic::client::{SERVICE, address};
use crate::traffic::document::operator::ReweightTable;
use crate::traffic::document::{FailMode, ReportsTable};

impl Simulation<'_> {
    /// Changes the number of backends of the service.
    pub(super) fn set_backends(&mut self, count: u32, lame_duck_us: u64) {
        for index in self.count..count {
            let backend = &mut self.backends[index as usize];
            backend.exists = true;
            backend.exists_since = self.now;
            backend.stops_at = None;
            // If the backend belonged to the service before, its last report is no longer valid.
            self.report(index, false);
            self.set_reported(index, Some(EndpointState::Healthy));
            self.start(index);
        }
        for index in count..self.count {
            self.backends[index as usize].exists = false;
            self.set_reported(index, None);
            if lame_duck_us == 0 {
                self.stop(index);
            } else {
                self.backends[index as usize].stops_at = Some(self.now + lame_duck_us);
            }
        }
        if lame_duck_us > 0 && count < self.count {
            self.queue.push(self.now + lame_duck_us, SimulationEvent::Stop(count..self.count));
        }
        self.count = count;
    }

    /// Performs one stage of a batch, and queues the next stage.
    pub(super) fn restart(&mut self, BatchRestart { restart, batch, last, stage }: BatchRestart) {
        let table = self.scenario.restarts[restart];
        let lame_duck = self.run.differs.lame_duck.unwrap_or(table.lame_duck);
        // The restart covers the backends that belong to the service when the restart begins, but
        // skips backends that have left the service since then.
        let last =
            if batch.start == 0 && matches!(stage, RestartStage::LameDuck) { self.count } else { last };
        let indexes = batch.start..batch.end.min(last).min(self.count);
        let stage = match stage {
            RestartStage::LameDuck if lame_duck.us == 0 => RestartStage::Down,
            RestartStage::LameDuck | RestartStage::Down | RestartStage::Up => stage,
        };
        let (after_us, next) = match stage {
            RestartStage::LameDuck => {
                for index in indexes {
                    if self.reports.is_some() {
                        self.report(index, true);
                    } else {
                        self.set_reported(index, Some(EndpointState::LameDuck));
                    }
                }
                (lame_duck.us, RestartStage::Down)
            }
            RestartStage::Down => {
                for index in indexes {
                    self.set_reported(index, None);
                    self.stop(index);
                }
                (table.down.us, RestartStage::Up)
            }
            RestartStage::Up => {
                for index in indexes {
                    self.report(index, false);
                    self.set_reported(index, Some(EndpointState::Healthy));
                    self.start(index);
                }
                (table.pause.us, RestartStage::LameDuck)
            }
        };
        self.publish();
        let batch = match next {
            RestartStage::LameDuck => batch.end..batch.end.saturating_add(table.batch.0),
            RestartStage::Down | RestartStage::Up => batch,
        };
        if batch.start < last {
            let next = BatchRestart { restart, batch, last, stage: next };
            self.queue.push(self.now + after_us, SimulationEvent::Restart(Box::new(next)));
        }
    }

    /// Reports to all clients whether a backend is a lame duck, if backends send reports.
    fn report(&mut self, backend: u32, is_lame: bool) {
        let Some(reports) = self.reports else { return };
        if self.backends[backend as usize].is_lame == is_lame {
            return;
        }
        let of = &mut self.backends[backend as usize];
        of.is_lame = is_lame;
        of.reports += 1;
        self.note_wanted(backend);
        let clients: Vec<u32> = self.jobs.iter().flat_map(|job| job.clients.iter().copied()).collect();
        clients.into_iter().for_each(|client| self.report_to(client, backend, reports));
    }

    /// Sends a backend's current report to one client.
    fn report_to(&mut self, client: u32, backend: u32, ReportsTable { delay, spread, .. }: ReportsTable) {
        let SimulatedBackend { reports: report, is_lame, .. } = self.backends[backend as usize];
        let mut rng = SplitMix64::new(mix64(&[self.seed, 7, self.now, backend.into(), client.into()]));
        let at_us = self.now + delay.us + rng.below(spread.us + 1);
        self.queue.push(at_us, SimulationEvent::ReceiveReport { client, backend, report, is_lame });
    }

    /// Sends a new client the reports of all lame ducks, as if it had requested reports from all
    /// backends.
    pub(super) fn request_reports(&mut self, client: u32) {
        let Some(reports) = self.reports else { return };
        let lame: Vec<u32> = (0..)
            .zip(&self.backends)
            .filter(|(_, backend)| backend.is_lame)
            .map(|(index, _)| index)
            .collect();
        lame.into_iter().for_each(|backend| self.report_to(client, backend, reports));
    }

    /// Makes some backends fail, without a notice to any client.
    pub(super) fn fail(&mut self, position: usize, times: u32) {
        let fail = self.scenario.fails[position];
        // The choice of the backends depends only on the seed, so it is the same for each failure
        // and in each run. A larger part includes all backends of a smaller part.
        let mut indexes: Vec<u32> = (0..self.count).collect();
        indexes.sort_by_cached_key(|&index| mix64(&[self.seed, 2, index.into()]));
        indexes.truncate(fail.part.of(self.count) as usize);
        for &index in &indexes {
            self.backends[index as usize].failing = Some(fail.how);
            match fail.how {
                FailMode::Refuse | FailMode::Blackhole | FailMode::ResetAtOnce => self.end_connections(index),
                FailMode::Slow => self.set_slowdown(index, fail.slowdown),
                FailMode::Hang => self.hang(index),
                FailMode::Errors | FailMode::Lies | FailMode::Silent => {}
            }
        }
        self.failing = indexes;
        (self.timeout_us, self.lie) = (fail.timeout.us, fail.utilization);
        self.queue.push(self.now + fail.lasts.us, SimulationEvent::Recover);
        if times > 1 {
            self.queue
                .push(self.now + fail.every.us, SimulationEvent::Fail { fail: position, times: times - 1 });
        }
    }

    /// Restores the backends that currently fail.
    pub(super) fn recover(&mut self) {
        for index in std::mem::take(&mut self.failing) {
            match self.backends[index as usize].failing.take() {
                Some(FailMode::Slow) => self.set_slowdown(index, 1.0),
                Some(FailMode::Errors | FailMode::Lies | FailMode::Silent) | None => {}
                // A hung process recovers only by a restart.
                Some(FailMode::Hang) => {
                    self.end_connections(index);
                    self.take_up(index);
                }
                Some(FailMode::Refuse | FailMode::Blackhole | FailMode::ResetAtOnce) => self.take_up(index),
            }
        }
        self.note_recovery();
    }

    /// Changes the weight of backends in the list.
    pub(super) fn reweight(&mut self, ReweightTable { from, to, weight, .. }: ReweightTable) {
        let weight = u16::try_from(weight.0).expect("a weight fits into u16");
        for index in from.0..=to.0 {
            self.backends[index as usize].weight = weight;
            self.note_wanted(index);
        }
        self.publish();
    }

    /// Sets the state that the source reports for a backend.
    fn set_reported(&mut self, index: u32, state: Option<EndpointState>) {
        self.backends[index as usize].reported = state;
        self.note_wanted(index);
    }

    pub(super) fn note_wanted(&mut self, index: u32) {
        let backend = &mut self.backends[index as usize];
        let is_wanted = backend.is_up() && backend.is_wanted();
        backend.wanted_since = is_wanted.then(|| backend.wanted_since.unwrap_or(self.now));
    }

    /// Publishes a new list. Clients receive it later.
    pub(super) fn publish(&mut self) {
        for job in 0..self.jobs.len() {
            self.publish_to_job(job);
        }
    }

    /// Computes the assignments of a job's tasks, and sends them to the tasks.
    pub(super) fn publish_to_job(&mut self, job: usize) -> Rc<JobAssignments> {
        self.version += 1;
        let version = self.version;
        let state = &self.jobs[job];
        let tasks = u32::try_from(state.clients.len()).expect("the number of tasks fits into 32 bits");
        let assignments = Rc::new(JobAssignments::of(&state.service, tasks, self.endpoints(), state.shares));
        let notice = self.scenario.notice;
        for &client in &state.clients {
            let mut rng = SplitMix64::new(mix64(&[self.seed, 1, version, client.into()]));
            let at_us = self.now + notice.delay.us + rng.below(notice.spread.us + 1);
            let notice = ListNotice { client, assignments: Rc::clone(&assignments), version };
            self.queue.push(at_us, SimulationEvent::ReceiveList(Box::new(notice)));
        }
        assignments
    }

    fn endpoints(&self) -> EndpointList {
        let endpoint = |(index, backend): (u32, &SimulatedBackend)| {
            let state = backend.reported?;
            Some(Endpoint {
                address: address(index),
                index,
                weight: backend.weight,
                state,
                zone: None,
                agent: None,
            })
        };
        let endpoints = (0..).zip(&self.backends).filter_map(endpoint).collect();
        EndpointList::new(endpoints, SERVICE, &[])
            .expect("indexes and addresses are unique and in their bounds")
    }
}
