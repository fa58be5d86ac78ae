//! What machines do: they work on requests, and neighbours, failures and starts make them slower.
//!
//! Must not know whose requests these are.

use lb_core::subset::random::{SplitMix64, mix64};

use super::{SimulationEvent, World};
use crate::sampling::unit;
use crate::traffic::document::machines::AntagonistTable;
use crate::traffic::machine::Machine;

/// A backend's machine, and what is known of it beside.
#[derive(Debug)]
pub(super) struct SimulatedServer {
    machine: Machine,
    queue: usize,
    /// When the next event of it comes; later ones that were pushed for it are stale.
    wakes_us: u64,
    /// What neighbours take.
    antagonist: f64,
    neighbours: SplitMix64,
    /// How many times as slow it is because it fails.
    slowdown: f64,
    /// How many times as slow it is because it has just started, and until when.
    cold: (f64, u64),
    /// How long its cores had worked when measuring began, and at the end of the last step.
    busy_before_us: f64,
    busy_at_row_us: f64,
}

impl SimulatedServer {
    pub fn new(machine: Machine, queue: u32, seed: u64, index: u32) -> Self {
        Self {
            machine,
            queue: queue as usize,
            wakes_us: u64::MAX,
            antagonist: 0.0,
            neighbours: SplitMix64::new(mix64(&[seed, 3, index.into()])),
            slowdown: 1.0,
            cold: (1.0, 0),
            busy_before_us: 0.0,
            busy_at_row_us: 0.0,
        }
    }

    /// Whether it takes no further request.
    pub fn is_full(&self) -> bool {
        self.machine.requests() >= self.queue
    }

    /// How many cores it may use all the time.
    pub fn cores(&self) -> f64 {
        self.machine.usable_cores()
    }

    /// What it can do when nothing makes it slower, in cores of speed 1.
    pub fn capacity(&self) -> f64 {
        self.machine.capacity()
    }

    fn set_factor(&mut self, now_us: u64) {
        let cold = if now_us < self.cold.1 { self.cold.0 } else { 1.0 };
        self.machine.set_factor(now_us, (1.0 - self.antagonist) / self.slowdown / cold);
    }

    /// How long its cores have worked since measuring began.
    pub fn busy_us(&self) -> f64 {
        self.machine.busy_us() - self.busy_before_us
    }

    /// How long its cores have worked, and how long somebody has waited for one.
    pub fn busy_and_waited_us(&mut self, now_us: u64) -> (f64, f64) {
        self.machine.advance(now_us);
        (self.machine.busy_us(), self.machine.waited_us())
    }

    /// How long its cores have worked since the last step.
    pub fn take_step_us(&mut self, now_us: u64) -> f64 {
        self.machine.advance(now_us);
        let before = std::mem::replace(&mut self.busy_at_row_us, self.machine.busy_us());
        self.machine.busy_us() - before
    }

    /// Measuring begins.
    pub fn measure(&mut self, now_us: u64) {
        self.machine.advance(now_us);
        self.busy_before_us = self.machine.busy_us();
    }
}

impl World<'_> {
    /// A machine gets a request to work on.
    pub(super) fn work(&mut self, backend: u32, request: u32, cost_ps: u64) {
        let now = self.now;
        self.machines[backend as usize].machine.add(now, request, cost_ps);
        self.wake_in_time(backend);
    }

    /// Something may be done on a machine.
    pub(super) fn wake(&mut self, backend: u32) {
        let (now, at) = (self.now, backend as usize);
        if self.machines[at].wakes_us != now {
            return;
        }
        self.machines[at].wakes_us = u64::MAX;
        self.machines[at].machine.advance(now);
        while let Some(request) = self.machines[at].machine.next_done() {
            self.worked(request);
        }
        self.wake_in_time(backend);
    }

    /// Sees to it that somebody looks when the next request is done. An event that comes too early is put off then: that costs less
    /// than an event for each request that slows others down.
    fn wake_in_time(&mut self, backend: u32) {
        let server = &mut self.machines[backend as usize];
        if let Some(next) = server.machine.next_end()
            && next < server.wakes_us
        {
            server.wakes_us = next;
            self.queue.push(next, SimulationEvent::Wake(backend));
        }
    }

    /// A machine works on nothing any more: on what it did until now.
    pub(super) fn take_off_machine(&mut self, backend: u32) -> Vec<u32> {
        let now = self.now;
        self.machines[backend as usize].machine.clear(now)
    }

    /// What was on a machine is lost.
    pub(super) fn clear_machine(&mut self, backend: u32) {
        self.take_off_machine(backend).into_iter().for_each(|request| self.lose(request));
    }

    /// Neighbours take another part of a machine from now on.
    pub(super) fn antagonize(&mut self, backend: u32) {
        let AntagonistTable { share, every } =
            self.scenario.machines.antagonist.expect("there are antagonists");
        let server = &mut self.machines[backend as usize];
        // Not all at the same times.
        let is_first = self.now == 0;
        let lasts_us = if is_first { 1 + server.neighbours.below(every.us) } else { every.us };
        // Half of the time nobody is there.
        let is_there = server.neighbours.below(2) == 0;
        let part = f64::from(share.0) / 100.0 * unit(&mut server.neighbours);
        server.antagonist = if is_there { part } else { 0.0 };
        self.queue.push(self.now + lasts_us, SimulationEvent::Antagonize(backend));
        self.change_speed(backend);
    }

    /// A machine is so many times as slow from now on, because its backend fails; or 1, because it is well again.
    pub(super) fn set_slowdown(&mut self, backend: u32, slowdown: f64) {
        self.machines[backend as usize].slowdown = slowdown;
        self.change_speed(backend);
    }

    /// A backend has started.
    pub(super) fn warm_up(&mut self, backend: u32) {
        if let Some(cost) = self.scenario.machines.restart_cost.filter(|_| self.now > 0) {
            let until_us = self.now + cost.lasts.us;
            self.machines[backend as usize].cold = (cost.factor, until_us);
            self.queue.push(until_us, SimulationEvent::WarmedUp(backend));
            self.change_speed(backend);
        }
    }

    pub(super) fn change_speed(&mut self, backend: u32) {
        let now = self.now;
        self.machines[backend as usize].set_factor(now);
        self.wake_in_time(backend);
    }
}
