//! The actions of clients: they are added and removed, receive lists and lame-duck reports, and
//! open and close connections.
//!
//! While an event changes a client, this client is taken out of the list of clients, so that the
//! event can change both the client and the backends. The requests that clients send are in the
//! module `requests`. This module must not decide when backends stop and start.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use lb_core::load_band::LOOK;
use lb_core::service::{Size, Subset};
use lb_core::subset::random::{SplitMix64, mix64};

use super::requests::{RequestFailure, SimulatedRequest};
use super::{Simulation, SimulationEvent};
use crate::samples::{self, Distribution};
use crate::traffic::assignments::JobAssignments;
use crate::traffic::client::{LinkState, SimulatedClient, SlotBackend, SlotConnections};
use crate::traffic::document::{Closing, Traffic};

impl Simulation<'_> {
    // ---- clients ----

    /// Changes the number of tasks of a job.
    pub(super) fn set_tasks(&mut self, job: usize, tasks: u32) {
        let stay = self.jobs[job].clients.len().min(tasks as usize);
        let leaving: BTreeSet<u32> = self.jobs[job].clients.split_off(stay).into_iter().collect();
        self.leave(&leaving);
        let mut new = Vec::new();
        while self.jobs[job].clients.len() < tasks as usize {
            let id = u32::try_from(self.clients.len()).expect("the number of clients fits into 32 bits");
            let state = &mut self.jobs[job];
            let index = u32::try_from(state.clients.len()).expect("the number of tasks fits into 32 bits");
            state.clients.push(id);
            if state.is_missing(index) {
                self.clients.push(None);
                continue;
            }
            let named = (job, state.table.name.0.as_str());
            let most = u32::try_from(self.backends.len()).expect("the number of backends fits into 32 bits");
            let cpus = state.table.cpus.0;
            let mut client =
                SimulatedClient::new(state.service.clone(), named, index, cpus, most, state.holds_links());
            client.rng = SplitMix64::new(mix64(&[self.seed, 0, job as u64, id.into()]));
            client.lasting_rng = SplitMix64::new(mix64(&[self.seed, 12, job as u64, id.into()]));
            let control = state.service.control;
            if control.law.is_some() || control.slow_start.is_some() {
                client.follow(control);
                client.switch(self.switch);
                // The first ticks of clients are at random times, so that clients do not all tick
                // at the same time.
                let first = SplitMix64::new(mix64(&[self.seed, 11, id.into()])).below(1_000_000);
                self.queue.push(self.now + first, SimulationEvent::TickControl(id));
            }
            if let Subset::Sized { size: Size::Band(band), .. } = state.service.subset {
                client.follow_flows(band);
                let first = SplitMix64::new(mix64(&[self.seed, 13, id.into()])).below(micros(LOOK));
                self.queue.push(self.now + first, SimulationEvent::LookAtFlows(id));
            }
            for _ in 0..state.table.closed.map_or(1, |closed| closed.clients.0) {
                let Some(gap_us) = state.gap_us(index) else { break };
                let first = match state.table.arrivals {
                    Distribution::Even => client.rng.below(gap_us),
                    Distribution::Random => samples::sample(Distribution::Random, gap_us, &mut client.rng),
                };
                self.queue.push(state.due(self.now, first), SimulationEvent::Arrive(id));
            }
            self.clients.push(Some(Box::new(client)));
            new.push(id);
        }
        let assignments = self.publish_to_job(job);
        let version = self.version;
        // A new client receives the newest list without a delay.
        for client in new {
            self.apply_list(client, &assignments, version);
            self.request_reports(client);
            if self.now > 0 {
                self.open_lasting(client);
            }
        }
    }

    fn leave(&mut self, leaving: &BTreeSet<u32>) {
        if leaving.is_empty() {
            return;
        }
        for request in self.requests.of(|request| leaving.contains(&request.client)) {
            self.counts.abandoned += u64::from(self.requests.is_waited_for(request));
            self.forget(request);
        }
        for &id in leaving {
            let Some(mut client) = self.clients[id as usize].take() else { continue };
            self.forget_ejected(&client);
            for slot in 0..client.links.len() {
                let Some(link) = client.links[slot].as_mut() else { continue };
                let flows = std::mem::take(&mut link.flows);
                match self.jobs[client.job].table.traffic {
                    Traffic::Requests => self.close(id, &mut client, slot, false),
                    Traffic::Connections => {
                        self.counts.closed += u64::from(flows);
                        self.backends[link.backend as usize].connections -= u64::from(flows);
                        self.unlink(id, &mut client, slot);
                    }
                }
            }
        }
    }

    /// Calls `change` with the simulation and a client. Does nothing if the client was removed.
    pub(super) fn with_client(&mut self, id: u32, change: impl FnOnce(&mut Self, &mut SimulatedClient)) {
        if let Some(mut client) = self.clients[id as usize].take() {
            change(self, &mut client);
            self.clients[id as usize] = Some(client);
        }
    }

    pub(super) fn apply_list(&mut self, id: u32, assignments: &Rc<JobAssignments>, version: u64) {
        self.with_client(id, |world, client| {
            // A notice may overtake an earlier one, so a notice is dropped if its list is older
            // than the client's list.
            if client.version < version {
                world.assign(id, client, assignments, version);
            }
        });
    }

    /// Makes a client compare its size with its open flows, and adjust the size.
    pub(super) fn look_at_flows(&mut self, id: u32) {
        self.with_client(id, |world, client| {
            if let Some(assignments) = client.look_at_flows(Duration::from_micros(world.now)) {
                world.assign(id, client, &assignments, client.version);
            }
            world.queue.push(world.now + micros(LOOK), SimulationEvent::LookAtFlows(id));
        });
    }

    fn assign(
        &mut self,
        id: u32,
        client: &mut SimulatedClient,
        assignments: &Rc<JobAssignments>,
        version: u64,
    ) {
        let size = client.size_in(assignments);
        let (list, membership) = assignments.task(client.index, &self.jobs[client.job].service, size);
        client.apply_list(Duration::from_micros(self.now), version, list, membership);
        self.forget_pairs(client);
        self.note_ejected(client);
        if self.jobs[client.job].holds_links() {
            self.hold_links(id, client);
        }
    }

    /// Delivers a backend's own report to a client.
    pub(super) fn on_report(&mut self, id: u32, backend: u32, report: u32, is_lame: bool) {
        self.with_client(id, |world, client| {
            // A report may overtake an earlier one, so the client drops a report that is older than
            // the newest received one.
            if client.on_report(Duration::from_micros(world.now), backend, report, is_lame) {
                world.note_ejected(client);
                if world.jobs[client.job].holds_links() {
                    world.hold_links(id, client);
                }
            }
        });
    }

    // ---- connections that stay open ----

    /// Makes a client open a connection to every member, and end its connections to all other
    /// backends.
    fn hold_links(&mut self, id: u32, client: &mut SimulatedClient) {
        let closing = self.jobs[client.job].table.closing;
        for slot in 0..client.slots.len() {
            let Some(SlotBackend { backend, usable }) = client.slots[slot] else { continue };
            let link = client.links[slot].as_mut();
            match (usable, link) {
                (true, None) => self.connect(id, client, slot, backend),
                (true, Some(link)) => {
                    if let LinkState::Draining { .. } = link.state {
                        link.state = LinkState::Ready;
                    }
                }
                (false, None) => {}
                (false, Some(link)) => {
                    let is_moved = self.backends[backend as usize].wanted_since.is_some();
                    if link.state == LinkState::Ready && link.flows > 0 && closing == Closing::Drain {
                        link.state = LinkState::Draining { is_moved };
                    } else if !matches!(link.state, LinkState::Draining { .. }) {
                        self.close(id, client, slot, is_moved);
                    }
                }
            }
        }
    }

    fn connect(&mut self, id: u32, client: &mut SimulatedClient, slot: usize, backend: u32) {
        let serial = client.next_serial();
        let state = self.establish(id, client.job, slot, backend, serial);
        client.links[slot] = Some(SlotConnections { backend, serial, state, flows: 0 });
        self.backends[backend as usize].holders.insert((id, number(slot)));
    }

    /// Begins to establish a connection, and returns its state.
    fn establish(&mut self, id: u32, job: usize, slot: usize, backend: u32, serial: u32) -> LinkState {
        let to = &mut self.backends[backend as usize];
        if !to.is_up() {
            return LinkState::Lost;
        }
        to.connections += 1;
        self.note_opened(job);
        let takes = self.jobs[job].table.connect;
        // Connections that are open at the start were established before the run.
        if takes.us == 0 || self.now == 0 {
            return LinkState::Ready;
        }
        let slot = number(slot);
        self.queue.push(self.now + takes.us, SimulationEvent::Ready { client: id, slot, serial });
        LinkState::Establishing
    }

    pub(super) fn ready(&mut self, id: u32, slot: u32, serial: u32) {
        let client = self.clients[id as usize].as_mut();
        if let Some(link) = client.and_then(|client| client.link(slot, serial)) {
            link.state = LinkState::Ready;
        }
    }

    /// Closes a connection of the client. The requests on the connection fail.
    pub(super) fn close(&mut self, id: u32, client: &mut SimulatedClient, slot: usize, is_moved: bool) {
        let link = client.links[slot].expect("the slot has a link");
        if link.flows > 0 {
            let at = number(slot);
            let is_on_it =
                |request: &SimulatedRequest| (request.client, request.slot) == (id, at) && request.is_on_link;
            for request in self.requests.of(is_on_it) {
                self.fail_request(request, RequestFailure::Cut);
            }
        }
        if link.state.is_connected() {
            self.backends[link.backend as usize].connections -= 1;
            self.counts.closed += 1;
            self.counts.moved += u64::from(is_moved);
            self.counts_of_job(client.job).moved += u64::from(is_moved);
        }
        self.unlink(id, client, slot);
    }

    pub(super) fn unlink(&mut self, id: u32, client: &mut SimulatedClient, slot: usize) {
        if let Some(link) = client.links[slot].take() {
            self.backends[link.backend as usize].holders.remove(&(id, number(slot)));
        }
    }

    // ---- backends that stop and start ----

    pub(super) fn stop(&mut self, index: u32) {
        let backend = &mut self.backends[index as usize];
        backend.running = false;
        backend.stops_at = None;
        self.end_connections(index);
    }

    /// Ends the connections of a backend. The requests on them fail.
    pub(super) fn end_connections(&mut self, index: u32) {
        let backend = &mut self.backends[index as usize];
        self.counts.dropped += backend.connections;
        backend.connections = 0;
        let holders: Vec<(u32, u32)> = backend.holders.iter().copied().collect();
        self.note_wanted(index);
        for request in self.requests.of(|request| request.backend == index && request.is_on_link) {
            self.fail_request(request, RequestFailure::Cut);
        }
        self.clear_machine(index);
        let tick = self.tick();
        for (id, slot) in holders {
            let at = slot as usize;
            self.with_client(id, |world, client| {
                let serial = client.next_serial();
                let is_member = client.slots[at].is_some_and(|slot| slot.usable);
                let link = client.links[at].as_mut().expect("a holder has a link in its slot");
                let flows = link.flows;
                if world.jobs[client.job].holds_links() {
                    if is_member {
                        *link = SlotConnections { backend: index, serial, state: LinkState::Lost, flows: 0 };
                    } else {
                        world.unlink(id, client, at);
                    }
                } else {
                    world.unlink(id, client, at);
                    (0..flows).for_each(|_| client.count_error(slot, tick));
                }
            });
        }
    }

    /// Starts a backend.
    pub(super) fn start(&mut self, index: u32) {
        let backend = &mut self.backends[index as usize];
        if !backend.running {
            backend.running = true;
            self.warm_up(index);
            self.take_up(index);
        }
    }

    /// Makes clients establish their lost connections to a backend again, because the backend
    /// serves again.
    pub(super) fn take_up(&mut self, index: u32) {
        let backend = &self.backends[index as usize];
        if !backend.is_up() {
            return;
        }
        let holders: Vec<(u32, u32)> = backend.holders.iter().copied().collect();
        self.note_wanted(index);
        for (id, slot) in holders {
            self.with_client(id, |world, client| {
                let link = client.links[slot as usize].expect("a holder has a link in its slot");
                let state = world.establish(id, client.job, slot as usize, index, link.serial);
                client.links[slot as usize] = Some(SlotConnections { state, ..link });
            });
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).expect("virtual time fits into 64 bits")
}

pub(super) fn number(slot: usize) -> u32 {
    u32::try_from(slot).expect("a slot number fits into 32 bits")
}
