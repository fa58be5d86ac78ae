//! What clients do: they come and go, hear of lists, hold connections, and send.
//!
//! A client is taken out of the list of clients while something happens to it, so that it and the backends can both
//! change. Must not know when backends stop and start.

use std::time::Duration;

use lb_common::ending::Ending;
use lb_common::pick::{How, Pick};
use lb_core::subset::random::{SplitMix64, mix64};

use super::{Backend, Event, World};
use crate::traffic::assignments::Assignments;
use crate::traffic::client::{Client, Link, LinkState, SlotBackend};
use crate::traffic::document::{Closing, FailMode, Traffic};
use crate::traffic::sampling::{self, Distribution};

impl World<'_> {
    // ---- clients -------------------------------------------------------------------------------------------------------

    /// A job has so many tasks from now on.
    pub(super) fn set_tasks(&mut self, job: usize, tasks: u32) {
        while self.jobs[job].clients.len() > tasks as usize {
            let client = self.jobs[job].clients.pop().expect("the job has more than it shall have");
            self.leave(client);
        }
        let mut new = Vec::new();
        while self.jobs[job].clients.len() < tasks as usize {
            let id = u32::try_from(self.clients.len()).expect("clients are counted in 32 bits");
            let state = &mut self.jobs[job];
            let index = u32::try_from(state.clients.len()).expect("tasks are counted in 32 bits");
            state.clients.push(id);
            let named = (job, state.table.name.0.as_str());
            let most = u32::try_from(self.backends.len()).expect("backends are counted in 32 bits");
            let mut client = Client::new(state.service.clone(), named, index, most, state.holds_links());
            client.rng = SplitMix64::new(mix64(&[self.seed, 0, job as u64, id.into()]));
            if let Some(interval) = state.table.interval {
                let first = match state.table.arrivals {
                    Distribution::Even => client.rng.below(interval.us),
                    Distribution::Random => {
                        sampling::sample(Distribution::Random, interval.us, &mut client.rng)
                    }
                };
                self.queue.push(self.now + first, Event::Arrive(id));
            }
            self.clients.push(Some(Box::new(client)));
            new.push(id);
        }
        let assignments = self.tell(job);
        let version = self.version;
        // A new client knows the newest list from the beginning.
        new.into_iter().for_each(|client| self.learn(client, &assignments, version));
    }

    fn leave(&mut self, id: u32) {
        let Some(mut client) = self.clients[id as usize].take() else { return };
        self.forget_ejected(&client);
        self.counts.abandoned += client.pending.iter().map(|pending| u64::from(*pending)).sum::<u64>();
        for slot in 0..client.links.len() {
            let Some(link) = client.links[slot].as_mut() else { continue };
            self.counts.abandoned += u64::from(link.flows);
            match self.jobs[client.job].table.traffic {
                Traffic::Requests => {
                    link.flows = 0;
                    self.close(id, &mut client, slot, false);
                }
                Traffic::Connections => {
                    self.counts.closed += u64::from(link.flows);
                    self.backends[link.backend as usize].connections -= u64::from(link.flows);
                    self.unlink(id, &mut client, slot);
                }
            }
        }
    }

    /// Changes a client and whatever else it takes, unless the client is gone.
    fn with_client(&mut self, id: u32, change: impl FnOnce(&mut Self, &mut Client)) {
        if let Some(mut client) = self.clients[id as usize].take() {
            change(self, &mut client);
            self.clients[id as usize] = Some(client);
        }
    }

    pub(super) fn learn(&mut self, id: u32, assignments: &Assignments, version: u64) {
        self.with_client(id, |world, client| {
            // Notices may overtake each other: one that is older than what the client knows is dropped.
            if client.version < version {
                let job = &world.jobs[client.job];
                let (list, membership) = assignments.task(client.index, &job.service);
                client.learn(Duration::from_micros(world.now), version, list, membership);
                world.forget_pairs(client);
                world.note_ejected(client);
                if world.jobs[client.job].holds_links() {
                    world.hold_links(id, client);
                }
            }
        });
    }

    // ---- connections that are kept -------------------------------------------------------------------------------------

    /// Opens a connection to every member, and ends those to other backends.
    fn hold_links(&mut self, id: u32, client: &mut Client) {
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

    fn connect(&mut self, id: u32, client: &mut Client, slot: usize, backend: u32) {
        let serial = client.next_serial();
        let state = self.establish(id, client.job, slot, backend, serial);
        client.links[slot] = Some(Link { backend, serial, state, flows: 0 });
        self.backends[backend as usize].holders.insert((id, number(slot)));
    }

    /// Sets up a connection; returns whether it can be used.
    fn establish(&mut self, id: u32, job: usize, slot: usize, backend: u32, serial: u32) -> LinkState {
        let to = &mut self.backends[backend as usize];
        if !to.is_up() {
            return LinkState::Lost;
        }
        to.connections += 1;
        self.counts.opened += 1;
        let takes = self.jobs[job].table.connect;
        // Connections that exist at the start were set up before it.
        if takes.us == 0 || self.now == 0 {
            return LinkState::Ready;
        }
        let slot = number(slot);
        self.queue.push(self.now + takes.us, Event::Ready { client: id, slot, serial });
        LinkState::Establishing
    }

    pub(super) fn ready(&mut self, id: u32, slot: u32, serial: u32) {
        let client = self.clients[id as usize].as_mut();
        if let Some(link) = client.and_then(|client| client.link(slot, serial)) {
            link.state = LinkState::Ready;
        }
    }

    /// The client ends a connection; what is under way on it fails.
    fn close(&mut self, id: u32, client: &mut Client, slot: usize, is_moved: bool) {
        let link = client.links[slot].expect("what is closed was open");
        self.counts.errors.cut += u64::from(link.flows);
        if link.state.is_connected() {
            self.backends[link.backend as usize].connections -= 1;
            self.counts.closed += 1;
            self.counts.moved += u64::from(is_moved);
        }
        self.unlink(id, client, slot);
    }

    fn unlink(&mut self, id: u32, client: &mut Client, slot: usize) {
        if let Some(link) = client.links[slot].take() {
            self.backends[link.backend as usize].holders.remove(&(id, number(slot)));
        }
    }

    // ---- backends that stop and start ----------------------------------------------------------------------------------

    /// A backend stops.
    pub(super) fn stop(&mut self, index: u32) {
        let backend = &mut self.backends[index as usize];
        backend.running = false;
        backend.stops_at = None;
        self.end_connections(index);
    }

    /// The connections of a backend end, and what is under way on them fails.
    pub(super) fn end_connections(&mut self, index: u32) {
        let backend = &mut self.backends[index as usize];
        self.counts.dropped += backend.connections;
        backend.connections = 0;
        let holders: Vec<(u32, u32)> = backend.holders.iter().copied().collect();
        self.note_wanted(index);
        for (id, slot) in holders {
            let slot = slot as usize;
            self.with_client(id, |world, client| {
                let serial = client.next_serial();
                let is_member = client.slots[slot].is_some_and(|slot| slot.usable);
                let link = client.links[slot].as_mut().expect("a holder has a link");
                world.counts.errors.cut += u64::from(link.flows);
                if is_member && world.jobs[client.job].holds_links() {
                    *link = Link { backend: index, serial, state: LinkState::Lost, flows: 0 };
                } else {
                    world.unlink(id, client, slot);
                }
            });
        }
    }

    /// A backend runs from now on.
    pub(super) fn start(&mut self, index: u32) {
        let backend = &mut self.backends[index as usize];
        if !backend.running {
            backend.running = true;
            self.take_up(index);
        }
    }

    /// A backend serves from now on: clients that lost their connection to it set it up again.
    pub(super) fn take_up(&mut self, index: u32) {
        let backend = &self.backends[index as usize];
        if !backend.is_up() {
            return;
        }
        let holders: Vec<(u32, u32)> = backend.holders.iter().copied().collect();
        self.note_wanted(index);
        for (id, slot) in holders {
            self.with_client(id, |world, client| {
                let link = client.links[slot as usize].expect("a holder has a link");
                let state = world.establish(id, client.job, slot as usize, index, link.serial);
                client.links[slot as usize] = Some(Link { state, ..link });
            });
        }
    }

    // ---- arrivals ------------------------------------------------------------------------------------------------------

    pub(super) fn arrive(&mut self, id: u32) {
        self.with_client(id, |world, client| {
            let table = &world.jobs[client.job].table;
            let interval = table.interval.expect("what arrives has an interval");
            // Sampled in any case, so that all runs of a scenario see the same arrivals with the same lives.
            let gap = sampling::sample(table.arrivals, interval.us, &mut client.rng);
            let life = sampling::sample(table.lives, table.lasts.us, &mut client.rng);
            world.queue.push(world.now + gap.max(1), Event::Arrive(id));
            world.counts.arrivals += 1;
            let picked = client.pick(world.tick());
            if picked.how == How::Trial {
                world.try_backend(client, picked.slot);
            }
            match picked.how {
                How::Picked | How::Trial | How::Overflowed | How::Fallback | How::Diverted => {
                    world.send(id, client, picked, life);
                }
                How::Limited | How::Refused => world.counts.errors.refused += 1,
                How::Broken => unreachable!("a plan's tables agree with each other"),
            }
        });
    }

    /// A connect or request goes to the backend in a slot.
    fn send(&mut self, id: u32, client: &mut Client, Pick { how, slot }: Pick, life_us: u64) {
        let (at, is_trial) = (slot as usize, how == How::Trial);
        let backend = client.slots[at].expect("a pick is of a slot that has a backend").backend;
        let to = &mut self.backends[backend as usize];
        match self.jobs[client.job].table.traffic {
            Traffic::Requests => {
                if client.links[at].is_none_or(|link| link.state != LinkState::Ready) {
                    self.counts.errors.unready += 1;
                    return;
                }
            }
            Traffic::Connections => {
                if !to.is_up() {
                    self.fail_to_connect(id, client, slot, is_trial);
                    return;
                }
                if client.links[at].is_none() {
                    let serial = client.next_serial();
                    client.links[at] = Some(Link { backend, serial, state: LinkState::Ready, flows: 0 });
                    to.holders.insert((id, slot));
                }
                to.connections += 1;
                self.counts.opened += 1;
                self.succeed(client, slot, is_trial);
            }
        }
        let to = &mut self.backends[backend as usize];
        to.step_load += 1;
        to.load += 1;
        let link = client.links[at].as_mut().expect("there is one, or it was made");
        link.flows += 1;
        let event = Event::Finish { client: id, slot, serial: link.serial };
        self.queue.push(self.now + life_us, event);
    }

    /// A connect to a backend that is stopped or fails.
    fn fail_to_connect(&mut self, id: u32, client: &mut Client, slot: u32, is_trial: bool) {
        let SlotBackend { backend, .. } = client.slots[slot as usize].expect("as above");
        let how = match &self.backends[backend as usize] {
            Backend { running: true, failing: Some(how), .. } => *how,
            Backend { .. } => FailMode::Refuse,
        };
        match how {
            FailMode::Refuse => {
                self.counts.errors.down += 1;
                self.blame(client, slot, is_trial, Ending::Refused);
            }
            FailMode::Silent => {
                client.pending[slot as usize] += 1;
                self.queue.push(self.now + self.timeout_us, Event::GiveUp { client: id, slot, is_trial });
            }
            FailMode::Reset => {
                self.counts.opened += 1;
                self.counts.dropped += 1;
                self.counts.errors.cut += 1;
                self.blame(client, slot, is_trial, Ending::Reset);
            }
        }
    }

    /// A client gives up a connect that nobody has answered, also if somebody would by now.
    pub(super) fn give_up(&mut self, id: u32, slot: u32, is_trial: bool) {
        self.with_client(id, |world, client| {
            client.pending[slot as usize] -= 1;
            world.counts.errors.down += 1;
            world.blame(client, slot, is_trial, Ending::TimedOut);
        });
    }

    pub(super) fn finish(&mut self, id: u32, slot: u32, serial: u32) {
        self.with_client(id, |world, client| {
            let kind = world.jobs[client.job].table.traffic;
            // Without a link it was cut, which has been counted.
            if let Some(link) = client.link(slot, serial) {
                link.flows -= 1;
                let link = *link;
                world.counts.served += 1;
                match (kind, link.state) {
                    (Traffic::Requests, LinkState::Draining { is_moved }) if link.flows == 0 => {
                        world.close(id, client, slot as usize, is_moved);
                    }
                    (Traffic::Requests, _) => {}
                    (Traffic::Connections, _) => {
                        world.backends[link.backend as usize].connections -= 1;
                        world.counts.closed += 1;
                        if link.flows == 0 {
                            world.unlink(id, client, slot as usize);
                        }
                    }
                }
            }
        });
    }
}

fn number(slot: usize) -> u32 {
    u32::try_from(slot).expect("a slot is a number of 16 bits")
}
