//! The requests and connects of clients, from arrival to end.
//!
//! A request has the same number from its arrival to its end, even if it is retried. There is one
//! exception: if a backend still works on the failed request, the retry gets a new number. Clients
//! do not notify a backend when they give up a request, so the backend completes the work. This
//! module must not decide when backends stop and start, nor how machines share time.

use std::time::Duration;

use lb_common::ending::{Attempt, Ending};
use lb_common::pick::{How, Pick};

use super::clients::number;
use super::{SimulatedBackend, Simulation, SimulationEvent};
use crate::metrics::float;
use crate::samples::{self, Distribution, unit};
use crate::traffic::client::{LinkState, SimulatedClient, SlotBackend, SlotConnections};
use crate::traffic::document::{FailMode, Traffic};

/// The time after which the kernel sends a SYN again (RFC 6298; Linux's `TCP_TIMEOUT_INIT`).
const FIRST_RETRANSMIT: Duration = Duration::from_secs(1);

/// An arrival that has not ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct SimulatedRequest {
    pub client: u32,
    job: usize,
    /// The slot and the backend to which the request was last sent.
    pub slot: u32,
    pub backend: u32,
    began_us: u64,
    cost_ps: u64,
    /// How long the request is held in addition to its CPU time.
    wait_us: u64,
    tries_left: u32,
    /// The time at which the client gives up the request.
    gives_up_us: u64,
    /// The time until which the request's connection remains open.
    open_until_us: u64,
    /// Whether a user has sent the request. The user sends the next request after the end of this
    /// one.
    is_users: bool,
    /// Whether the number of flows on the client's link to the backend includes the request.
    pub is_on_link: bool,
    stage: RequestStage,
}

/// The stage of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestStage {
    /// The request was not sent yet, or will be retried.
    Unsent,
    /// The connect for the request was sent at `since_us`, and is not answered yet.
    Unanswered { since_us: u64, is_trial: bool },
    /// The backend has the request, which needs CPU time.
    OnMachine,
    /// The backend has the request, which needs no more CPU time.
    Held,
    /// The request has ended, and its connection stays open for the next request.
    Idle,
    /// The backend works on the request, but the client has given it up.
    Forsaken,
}

impl SimulatedRequest {
    const fn is_under_way(&self) -> bool {
        !matches!(self.stage, RequestStage::Forsaken | RequestStage::Idle)
    }
}

/// A reference to a request: its place, which is an index of [`Requests::places`], and a
/// generation, which distinguishes the request from earlier requests in this place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RequestRef {
    place: u32,
    generation: u32,
}

/// Requests that have not ended.
#[derive(Debug, Default)]
pub(super) struct Requests {
    places: Vec<(u32, Option<SimulatedRequest>)>,
    free: Vec<u32>,
}

impl Requests {
    fn insert(&mut self, request: SimulatedRequest) -> RequestRef {
        if let Some(place) = self.free.pop() {
            let (generation, here) = &mut self.places[place as usize];
            *here = Some(request);
            return RequestRef { place, generation: *generation };
        }
        self.places.push((0, Some(request)));
        RequestRef { place: number(self.places.len() - 1), generation: 0 }
    }

    fn remove(&mut self, place: u32) {
        let (generation, here) = &mut self.places[place as usize];
        *generation = generation.wrapping_add(1);
        *here = None;
        self.free.push(place);
    }

    /// The request in this place. The place must contain a request.
    fn at(&mut self, place: u32) -> &mut SimulatedRequest {
        self.places[place as usize].1.as_mut().expect("there is a request in this place")
    }

    /// Returns the place of a request; `None` if the request has ended.
    fn find(&self, RequestRef { place, generation }: RequestRef) -> Option<u32> {
        let (here, request) = &self.places[place as usize];
        (*here == generation && request.is_some()).then_some(place)
    }

    fn reference(&self, place: u32) -> RequestRef {
        RequestRef { place, generation: self.places[place as usize].0 }
    }

    /// Returns a new reference to the same request. Pending events with the old reference then have
    /// no effect.
    fn renew(&mut self, place: u32) -> RequestRef {
        let (generation, _) = &mut self.places[place as usize];
        *generation = generation.wrapping_add(1);
        RequestRef { place, generation: *generation }
    }

    /// Returns whether a client waits for the request in a place.
    pub fn is_waited_for(&self, place: u32) -> bool {
        self.places[place as usize].1.as_ref().is_some_and(SimulatedRequest::is_under_way)
    }

    /// Returns the places of the requests for which `is_meant` is true. A connection that stays
    /// open for its next request is included as a request.
    pub fn of(&self, is_meant: impl Fn(&SimulatedRequest) -> bool) -> Vec<u32> {
        let places = (0..).zip(&self.places);
        let meant = places.filter(|(_, (_, request))| {
            request
                .as_ref()
                .is_some_and(|request| request.stage != RequestStage::Forsaken && is_meant(request))
        });
        meant.map(|(place, _)| place).collect()
    }

    /// Returns how many requests have not ended.
    pub fn under_way(&self) -> u64 {
        self.of(SimulatedRequest::is_under_way).len() as u64
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestFailure {
    Refused,
    Limited,
    Unready,
    Down,
    Cut,
    Rejected,
    Answered,
    TimedOut,
}

impl Simulation<'_> {
    /// Begins a request or connect that is due, and schedules the client's next arrival.
    pub(super) fn arrive(&mut self, id: u32) {
        self.with_client(id, |world, client| {
            let job = &world.jobs[client.job];
            if job.table.closed.is_none() {
                let gap_us = job.gap_us(client.index).expect("the job of an arriving request has a rate");
                let gap = samples::sample(job.table.arrivals, gap_us, &mut client.rng);
                world.queue.push(job.due(world.now, gap.max(1)), SimulationEvent::Arrive(id));
            }
            world.begin(id, client, 1.0);
        });
    }

    /// Begins a request or connect. `left` is the part of its connection's lifetime that remains, 0
    /// to 1.
    fn begin(&mut self, id: u32, client: &mut SimulatedClient, left: f64) {
        let table = &self.jobs[client.job].table;
        // Draws all values, even if they are not used, so that all runs of a scenario have the same
        // arrivals with the same lifetimes and costs.
        let cost_ps = table.cost.map_or(0, |cost| cost.0.sample(&mut client.rng));
        let wait = if table.cost.is_some() { table.wait.unwrap_or_default() } else { table.lasts };
        let wait_us = samples::sample(table.lives, wait.us, &mut client.rng);
        let life = table.connection_life.unwrap_or_default();
        let life_us = samples::sample(table.lives, life.us, &mut client.lasting_rng);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most the lifetime")]
        let life_us = (float(life_us) * left) as u64;
        let gives_up_us = table.timeout.map_or(u64::MAX, |timeout| self.now + timeout.us);
        let (tries_left, is_users) = (table.retries.0, table.closed.is_some());
        self.note_arrival(client.job, cost_ps);
        let request = self.requests.insert(SimulatedRequest {
            client: id,
            job: client.job,
            slot: 0,
            backend: 0,
            began_us: self.now,
            cost_ps,
            wait_us,
            tries_left,
            gives_up_us,
            open_until_us: self.now + life_us,
            is_users,
            is_on_link: false,
            stage: RequestStage::Unsent,
        });
        self.time_out_in_time(request);
        self.send(id, client, request.place);
    }

    fn note_arrival(&mut self, job: usize, cost_ps: u64) {
        self.counts.arrivals += 1;
        self.counts_of_job(job).arrivals += 1;
        self.floor.arrive(self.now >= self.scenario.measure_from.us, cost_ps);
    }

    /// Schedules the time at which the client gives up a request.
    fn time_out_in_time(&mut self, request: RequestRef) {
        let gives_up_us = self.requests.at(request.place).gives_up_us;
        if gives_up_us != u64::MAX {
            self.queue.push(gives_up_us, SimulationEvent::TimeOut(request));
        }
    }

    pub(super) fn try_again(&mut self, request: RequestRef) {
        if let Some(place) = self.requests.find(request) {
            let id = self.requests.at(place).client;
            self.with_client(id, |world, client| world.send(id, client, place));
        }
    }

    /// Chooses a backend and sends the request to it.
    fn send(&mut self, id: u32, client: &mut SimulatedClient, request: u32) {
        let picked = client.pick(self.tick());
        if picked.how == How::Trial {
            self.try_backend(client, picked.slot);
        }
        match picked.how {
            How::Picked | How::Trial | How::Overflowed | How::Fallback | How::Diverted => {
                self.send_to(id, client, picked, request);
            }
            How::Limited => self.fail_request(request, RequestFailure::Limited),
            How::Refused => self.fail_request(request, RequestFailure::Refused),
            How::Broken => unreachable!("the tables of a plan are consistent"),
        }
    }

    /// Sends a request to the backend in a slot.
    fn send_to(&mut self, id: u32, client: &mut SimulatedClient, Pick { how, slot }: Pick, request: u32) {
        let (at, is_trial) = (slot as usize, how == How::Trial);
        let backend = client.slots[at].expect("the picked slot has a backend").backend;
        let sent = self.requests.at(request);
        (sent.slot, sent.backend) = (slot, backend);
        let to = &mut self.backends[backend as usize];
        match self.jobs[client.job].table.traffic {
            Traffic::Requests => {
                if client.links[at].is_none_or(|link| link.state != LinkState::Ready) {
                    self.fail_request(request, RequestFailure::Unready);
                    return;
                }
            }
            Traffic::Connections => {
                if !to.is_up() {
                    self.fail_to_connect(client, slot, is_trial, request);
                    return;
                }
                if client.links[at].is_none() {
                    let serial = client.next_serial();
                    client.links[at] =
                        Some(SlotConnections { backend, serial, state: LinkState::Ready, flows: 0 });
                    to.holders.insert((id, slot));
                }
                to.connections += 1;
                self.note_opened(client.job);
                self.succeed(client, slot, is_trial);
            }
        }
        client.links[at].as_mut().expect("a request is sent over a link").flows += 1;
        self.requests.at(request).is_on_link = true;
        self.serve(id, client, request);
    }

    /// Makes the backend begin to work on a request on an established connection, or reject the
    /// request.
    fn serve(&mut self, id: u32, client: &mut SimulatedClient, request: u32) {
        let SimulatedRequest { job, backend, cost_ps, .. } = *self.requests.at(request);
        let to = &mut self.backends[backend as usize];
        to.step_load += 1;
        to.load += 1;
        let is_broken = to.failing == Some(FailMode::Errors);
        if is_broken || self.machines[backend as usize].is_full() {
            to.errors += 1;
            self.requests.at(request).stage = RequestStage::Held;
            self.end_flow(id, client, request);
            let why = if is_broken { RequestFailure::Answered } else { RequestFailure::Rejected };
            self.fail_request(request, why);
        } else if to.failing == Some(FailMode::Hang) {
            to.hung += 1;
            self.requests.at(request).stage = RequestStage::Held;
        } else if self.jobs[job].table.cost.is_some() {
            self.requests.at(request).stage = RequestStage::OnMachine;
            self.work(backend, request, cost_ps);
        } else {
            self.hold(request);
        }
    }

    /// Holds a request that needs no more CPU time.
    fn hold(&mut self, request: u32) {
        let held = self.requests.at(request);
        held.stage = RequestStage::Held;
        let ends_us = self.now + held.wait_us;
        self.queue.push(ends_us, SimulationEvent::Finish(self.requests.reference(request)));
    }

    /// Stops all work of a backend. Requests that need no more CPU time end at the same time as
    /// without the failure.
    pub(super) fn hang(&mut self, backend: u32) {
        for request in self.take_off_machine(backend) {
            if self.requests.is_waited_for(request) {
                self.requests.at(request).stage = RequestStage::Held;
            } else {
                self.lose(request);
            }
        }
    }

    /// Handles a request that has received its CPU time from a machine.
    pub(super) fn worked(&mut self, request: u32) {
        match *self.requests.at(request) {
            SimulatedRequest { stage: RequestStage::Forsaken, .. } => self.requests.remove(request),
            SimulatedRequest { wait_us: 0, .. } => self.finish(self.requests.reference(request)),
            _ => self.hold(request),
        }
    }

    /// Handles a request that has succeeded.
    pub(super) fn finish(&mut self, request: RequestRef) {
        let Some(place) = self.requests.find(request) else { return };
        let SimulatedRequest { client: id, job, began_us, is_users, open_until_us, .. } =
            *self.requests.at(place);
        self.counts.served += 1;
        if self.now >= self.scenario.measure_from.us {
            self.latency.saturating_record(self.now - began_us);
        }
        let (lives, pause) = (self.jobs[job].table.lives, self.jobs[job].table.pause);
        if open_until_us > self.now {
            self.requests.at(place).stage = RequestStage::Idle;
            self.with_client(id, |world, client| {
                let pause_us = samples::sample(lives, pause.us, &mut client.lasting_rng);
                world.queue.push(world.now + pause_us, SimulationEvent::Next(request));
            });
            return;
        }
        self.with_client(id, |world, client| world.end_flow(id, client, place));
        self.requests.remove(place);
        if is_users {
            self.queue.push(self.now, SimulationEvent::Think(id));
        }
    }

    /// Sends the next request over a connection that stays open, unless the connection's lifetime
    /// has ended.
    pub(super) fn next_request(&mut self, request: RequestRef) {
        let Some(place) = self.requests.find(request) else { return };
        let SimulatedRequest { client: id, job, open_until_us, .. } = *self.requests.at(place);
        self.with_client(id, |world, client| {
            if open_until_us <= world.now {
                world.end_flow(id, client, place);
                world.requests.remove(place);
                return;
            }
            let table = &world.jobs[job].table;
            let cost_ps = table.cost.map_or(0, |cost| cost.0.sample(&mut client.lasting_rng));
            let wait = table.wait.unwrap_or_default();
            let wait_us = samples::sample(table.lives, wait.us, &mut client.lasting_rng);
            let next = world.requests.at(place);
            (next.cost_ps, next.wait_us, next.began_us) = (cost_ps, wait_us, world.now);
            world.note_arrival(job, cost_ps);
            world.serve(id, client, place);
        });
    }

    /// Opens connections for a new client, as many as the client has open on average.
    pub(super) fn open_lasting(&mut self, id: u32) {
        self.with_client(id, |world, client| {
            // The number of opened connections is random. Its mean is `mean_open`, even if this is
            // less than one.
            let some = world.jobs[client.job].mean_open(client.index) + unit(&mut client.lasting_rng);
            let mut opened = 1.0;
            while opened <= some {
                // The remaining time of an exponentially distributed lifetime does not depend on
                // the connection's age.
                let left = match world.jobs[client.job].table.lives {
                    Distribution::Even => unit(&mut client.lasting_rng),
                    Distribution::Random => 1.0,
                };
                world.begin(id, client, left);
                opened += 1.0;
            }
            client.forget_begun();
        });
    }

    /// Schedules a user's next request after a pause.
    pub(super) fn think(&mut self, id: u32) {
        self.with_client(id, |world, client| {
            let job = &world.jobs[client.job];
            let gap_us = job.gap_us(client.index).expect("a job with users has a mean pause");
            let pause = samples::sample(job.table.arrivals, gap_us, &mut client.rng);
            world.queue.push(world.now + pause, SimulationEvent::Arrive(id));
        });
    }

    /// Removes a sent request from its connection.
    fn end_flow(&mut self, id: u32, client: &mut SimulatedClient, request: u32) {
        let ended = self.requests.at(request);
        ended.is_on_link = false;
        let at = ended.slot as usize;
        let link = client.links[at].as_mut().expect("a sent request has a link");
        link.flows -= 1;
        let link = *link;
        match (self.jobs[client.job].table.traffic, link.state) {
            (Traffic::Requests, LinkState::Draining { is_moved }) if link.flows == 0 => {
                self.close(id, client, at, is_moved);
            }
            (Traffic::Requests, _) => {}
            (Traffic::Connections, _) => {
                self.backends[link.backend as usize].connections -= 1;
                self.counts.closed += 1;
                if link.flows == 0 {
                    self.unlink(id, client, at);
                }
            }
        }
    }

    /// Handles a connect to a backend that is stopped or fails.
    fn fail_to_connect(&mut self, client: &mut SimulatedClient, slot: u32, is_trial: bool, request: u32) {
        let SlotBackend { backend, .. } = client.slots[slot as usize].expect("the picked slot has a backend");
        let how = match &self.backends[backend as usize] {
            SimulatedBackend { running: true, failing: Some(how), .. } => *how,
            SimulatedBackend { .. } => FailMode::Refuse,
        };
        match how {
            FailMode::Refuse => {
                self.blame(client, slot, is_trial, Ending::Refused);
                self.fail_request(request, RequestFailure::Down);
            }
            FailMode::Blackhole => {
                client.pending[slot as usize] += 1;
                self.requests.at(request).stage = RequestStage::Unanswered { since_us: self.now, is_trial };
                let given_up = self.requests.reference(request);
                self.queue.push(self.now + self.timeout_us, SimulationEvent::GiveUp(given_up));
            }
            FailMode::ResetAtOnce => {
                self.note_opened(client.job);
                self.counts.dropped += 1;
                self.blame(client, slot, is_trial, Ending::Reset);
                self.fail_request(request, RequestFailure::Cut);
            }
            FailMode::Slow | FailMode::Errors | FailMode::Hang | FailMode::Lies | FailMode::Silent => {
                unreachable!("connects to backends in these modes are established")
            }
        }
    }

    /// Makes a client give up an unanswered connect, even if the backend would answer now.
    pub(super) fn give_up(&mut self, request: RequestRef) {
        let Some(place) = self.requests.find(request) else { return };
        let SimulatedRequest { client: id, slot, stage: RequestStage::Unanswered { is_trial, .. }, .. } =
            *self.requests.at(place)
        else {
            return;
        };
        self.with_client(id, |world, client| {
            client.pending[slot as usize] -= 1;
            world.blame(client, slot, is_trial, Ending::TimedOut);
        });
        self.fail_request(place, RequestFailure::Down);
    }

    /// Makes a client give up a request because of its timeout. The request is not retried, because
    /// the client no longer waits for it.
    pub(super) fn time_out(&mut self, request: RequestRef) {
        let Some(place) = self.requests.find(request) else { return };
        let timed_out = self.requests.at(place);
        if !timed_out.is_under_way() {
            return;
        }
        timed_out.tries_left = 0;
        let SimulatedRequest { client: id, slot, stage, is_on_link, .. } = *timed_out;
        self.with_client(id, |world, client| {
            if is_on_link {
                world.end_flow(id, client, place);
            } else if let RequestStage::Unanswered { since_us, is_trial } = stage {
                client.pending[slot as usize] -= 1;
                let ending = world.ending_of_wait(client, since_us);
                world.blame(client, slot, is_trial, ending);
            }
        });
        self.fail_request(place, RequestFailure::TimedOut);
    }

    /// The ending of an unanswered connect that the client gives up now.
    fn ending_of_wait(&self, client: &SimulatedClient, since_us: u64) -> Ending {
        let waited = Duration::from_micros(self.now - since_us);
        let due = self.jobs[client.job].service.unanswered_after;
        let retransmits = u32::from(waited >= FIRST_RETRANSMIT);
        Attempt { soft_error: 0, retransmits, is_due: !due.is_zero() && waited >= due }.ending()
    }

    /// Handles a failed request that is on no connection. Retries the request if it has tries left.
    pub(super) fn fail_request(&mut self, request: u32, why: RequestFailure) {
        let failed = self.requests.at(request);
        failed.is_on_link = false;
        if failed.stage == RequestStage::Idle {
            // An idle request has only lost its connection: no client waits for the request.
            self.forget(request);
            return;
        }
        if failed.tries_left > 0 {
            failed.tries_left -= 1;
            self.counts.retries += 1;
            let again = if failed.stage == RequestStage::OnMachine {
                // The backend still works on this request, so the retry is a new request.
                let again = SimulatedRequest { stage: RequestStage::Unsent, ..*failed };
                failed.stage = RequestStage::Forsaken;
                self.requests.insert(again)
            } else {
                failed.stage = RequestStage::Unsent;
                self.requests.renew(request)
            };
            self.time_out_in_time(again);
            self.queue.push(self.now, SimulationEvent::TryAgain(again));
            return;
        }
        let (id, job, is_users) = (failed.client, failed.job, failed.is_users);
        self.counts_of_job(job).errors += 1;
        let errors = &mut self.counts.errors;
        *match why {
            RequestFailure::Refused => &mut errors.refused,
            RequestFailure::Limited => &mut errors.limited,
            RequestFailure::Unready => &mut errors.unready,
            RequestFailure::Down => &mut errors.down,
            RequestFailure::Cut => &mut errors.cut,
            RequestFailure::Rejected => &mut errors.rejected,
            RequestFailure::Answered => &mut errors.answered,
            RequestFailure::TimedOut => &mut errors.timed_out,
        } += 1;
        self.forget(request);
        if is_users {
            self.queue.push(self.now, SimulationEvent::Think(id));
        }
    }

    /// Removes a request for which no client waits any more.
    pub(super) fn forget(&mut self, request: u32) {
        let forgotten = self.requests.at(request);
        forgotten.is_on_link = false;
        if forgotten.stage == RequestStage::OnMachine {
            forgotten.stage = RequestStage::Forsaken;
        } else {
            self.requests.remove(request);
        }
    }

    /// Removes a request that a machine has lost.
    pub(super) fn lose(&mut self, request: u32) {
        assert!(
            !self.requests.at(request).is_under_way(),
            "a request that its machine has lost is still under way"
        );
        self.requests.remove(request);
    }
}
