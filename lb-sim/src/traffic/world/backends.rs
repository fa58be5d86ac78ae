//! What becomes of backends: they are listed, start, stop and restart, and clients are told.

use std::ops::Range;
use std::rc::Rc;

use lb_core::endpoint::{Endpoint, EndpointList, EndpointState};
use lb_core::subset::random::{SplitMix64, mix64};

use super::{Backend, Event, Stage, World};
use crate::traffic::client::{SERVICE, address};
use crate::traffic::job::Job;

impl World<'_> {
    /// The service has so many backends from now on.
    pub(super) fn set_backends(&mut self, count: u32, lame_duck_us: u64) {
        for index in self.count..count {
            let backend = &mut self.backends[index as usize];
            backend.exists = true;
            backend.exists_since = self.now;
            backend.stops_at = None;
            self.list(index, Some(EndpointState::Healthy));
            self.start(index);
        }
        for index in count..self.count {
            self.backends[index as usize].exists = false;
            self.list(index, None);
            if lame_duck_us == 0 {
                self.stop(index);
            } else {
                self.backends[index as usize].stops_at = Some(self.now + lame_duck_us);
            }
        }
        if lame_duck_us > 0 && count < self.count {
            self.queue.push(self.now + lame_duck_us, Event::Stop(count..self.count));
        }
        self.count = count;
    }

    /// One stage of a batch; each sets the next one off.
    pub(super) fn restart(&mut self, restart: usize, batch: Range<u32>, last: u32, stage: Stage) {
        let table = self.scenario.restarts[restart];
        let lame_duck = self.run.lame_duck.unwrap_or(table.lame_duck);
        // The restart is of those that are there when it begins, and of them, of those that are still there.
        let last = if batch.start == 0 && matches!(stage, Stage::LameDuck) { self.count } else { last };
        let indexes = batch.start..batch.end.min(last).min(self.count);
        let stage = match stage {
            Stage::LameDuck if lame_duck.us == 0 => Stage::Down,
            Stage::LameDuck | Stage::Down | Stage::Up => stage,
        };
        let (after_us, next) = match stage {
            Stage::LameDuck => {
                indexes.for_each(|index| self.list(index, Some(EndpointState::LameDuck)));
                (lame_duck.us, Stage::Down)
            }
            Stage::Down => {
                for index in indexes {
                    self.list(index, None);
                    self.stop(index);
                }
                (table.down.us, Stage::Up)
            }
            Stage::Up => {
                for index in indexes {
                    self.list(index, Some(EndpointState::Healthy));
                    self.start(index);
                }
                (table.pause.us, Stage::LameDuck)
            }
        };
        self.publish();
        let batch = match next {
            Stage::LameDuck => batch.end..batch.end.saturating_add(table.batch.0),
            Stage::Down | Stage::Up => batch,
        };
        if batch.start < last {
            self.queue.push(self.now + after_us, Event::Restart { restart, batch, last, stage: next });
        }
    }

    /// What the source says of a backend from now on.
    fn list(&mut self, index: u32, state: Option<EndpointState>) {
        self.backends[index as usize].listed = state;
        self.note_wanted(index);
    }

    pub(super) fn note_wanted(&mut self, index: u32) {
        let backend = &mut self.backends[index as usize];
        let is_wanted = backend.running && backend.is_wanted();
        backend.wanted_since = is_wanted.then(|| backend.wanted_since.unwrap_or(self.now));
    }

    /// A new list is with the source. Clients hear of it later.
    pub(super) fn publish(&mut self) {
        for job in 0..self.jobs.len() {
            self.tell(job);
        }
    }

    /// What the tasks of a job use from now on is on its way to them.
    pub(super) fn tell(&mut self, job: usize) -> Rc<Job> {
        self.version += 1;
        let version = self.version;
        let state = &self.jobs[job];
        let tasks = u32::try_from(state.clients.len()).expect("tasks are counted in 32 bits");
        let known = Rc::new(Job::of(&state.service, tasks, self.endpoints(), state.shares));
        let notice = self.scenario.notice;
        for &client in &state.clients {
            let mut rng = SplitMix64::new(mix64(&[self.seed, 1, version, client.into()]));
            let at_us = self.now + notice.delay.us + rng.below(notice.spread.us + 1);
            self.queue.push(at_us, Event::Learn { client, job: Rc::clone(&known), version });
        }
        known
    }

    fn endpoints(&self) -> EndpointList {
        let endpoint = |(index, backend): (u32, &Backend)| {
            let state = backend.listed?;
            Some(Endpoint { address: address(index), index, weight: backend.weight, state, zone: None })
        };
        let endpoints = (0..).zip(&self.backends).filter_map(endpoint).collect();
        EndpointList::new(endpoints, SERVICE, &[])
            .expect("indexes and addresses are unique and in their bounds")
    }
}
