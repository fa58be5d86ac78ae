//! The work of machines on requests, and the slowdowns of machines by neighbours, failures and
//! starts.
//!
//! This module must not depend on the clients that sent the requests.

use lb_core::subset::random::{SplitMix64, mix64};

use super::{Simulation, SimulationEvent};
use crate::samples::unit;
use crate::traffic::document::machines::AntagonistTable;
use crate::traffic::machine::Machine;

/// A backend's machine and its current slowdowns.
#[derive(Debug)]
pub(super) struct SimulatedServer {
    machine: Machine,
    queue: usize,
    /// The time of the machine's next event. If the queue has later events for the machine, they
    /// are ignored.
    wakes_us: u64,
    /// The part of the machine that neighbours use now.
    antagonist: f64,
    neighbours: SplitMix64,
    /// The factor by which a failure makes the machine slower.
    slowdown: f64,
    /// The factor by which a recent start makes the machine slower, and the time at which this
    /// slowdown ends.
    cold: (f64, u64),
    /// How long the cores had worked when measuring began.
    busy_before_us: f64,
    /// How long the cores had worked at the end of the last step.
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

    /// Returns whether the machine accepts no further request.
    pub fn is_full(&self) -> bool {
        self.machine.requests() >= self.queue
    }

    /// The average number of cores that the backend may use.
    pub fn cores(&self) -> f64 {
        self.machine.usable_cores()
    }

    /// The machine's capacity without any slowdown, in cores of speed 1.
    pub fn capacity(&self) -> f64 {
        self.machine.capacity()
    }

    fn set_factor(&mut self, now_us: u64) {
        let cold = if now_us < self.cold.1 { self.cold.0 } else { 1.0 };
        self.machine.set_factor(now_us, (1.0 - self.antagonist) / self.slowdown / cold);
    }

    /// How long the cores have worked since measuring began, summed over all cores.
    pub fn busy_us(&self) -> f64 {
        self.machine.busy_us() - self.busy_before_us
    }

    /// How long the cores have worked, and how long a request has waited for a core or for more
    /// quota.
    pub fn busy_and_waited_us(&mut self, now_us: u64) -> (f64, f64) {
        self.machine.advance(now_us);
        (self.machine.busy_us(), self.machine.waited_us())
    }

    /// How long the cores have worked since the previous call, which was at the end of the last
    /// step.
    pub fn take_step_us(&mut self, now_us: u64) -> f64 {
        self.machine.advance(now_us);
        let before = std::mem::replace(&mut self.busy_at_row_us, self.machine.busy_us());
        self.machine.busy_us() - before
    }

    /// Begins the measurement of the machine's work.
    pub fn measure(&mut self, now_us: u64) {
        self.machine.advance(now_us);
        self.busy_before_us = self.machine.busy_us();
    }
}

impl Simulation<'_> {
    /// Adds a request to a machine.
    pub(super) fn work(&mut self, backend: u32, request: u32, cost_ps: u64) {
        let now = self.now;
        self.machines[backend as usize].machine.add(now, request, cost_ps);
        self.wake_in_time(backend);
    }

    /// Checks whether a machine has finished requests.
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

    /// Ensures that the machine is checked when its next request is done. An event that comes too
    /// early is scheduled again. This costs less than scheduling an event whenever a request slows
    /// others down.
    fn wake_in_time(&mut self, backend: u32) {
        let server = &mut self.machines[backend as usize];
        if let Some(next) = server.machine.next_end()
            && next < server.wakes_us
        {
            server.wakes_us = next;
            self.queue.push(next, SimulationEvent::Wake(backend));
        }
    }

    /// Removes and returns all requests of a machine.
    pub(super) fn take_off_machine(&mut self, backend: u32) -> Vec<u32> {
        let now = self.now;
        self.machines[backend as usize].machine.clear(now)
    }

    /// Removes all requests of a machine. The requests are lost.
    pub(super) fn clear_machine(&mut self, backend: u32) {
        self.take_off_machine(backend).into_iter().for_each(|request| self.lose(request));
    }

    /// Changes the part of a machine that neighbours use.
    pub(super) fn antagonize(&mut self, backend: u32) {
        let AntagonistTable { share, every } =
            self.scenario.machines.antagonist.expect("the scenario has neighbours");
        let server = &mut self.machines[backend as usize];
        // The neighbours must not change on all machines at the same times.
        let is_first = self.now == 0;
        let lasts_us = if is_first { 1 + server.neighbours.below(every.us) } else { every.us };
        // Neighbours are absent half of the time.
        let is_there = server.neighbours.below(2) == 0;
        let part = f64::from(share.0) / 100.0 * unit(&mut server.neighbours);
        server.antagonist = if is_there { part } else { 0.0 };
        self.queue.push(self.now + lasts_us, SimulationEvent::Antagonize(backend));
        self.change_speed(backend);
    }

    /// Sets the factor by which a failure makes a machine slower; 1 after recovery.
    pub(super) fn set_slowdown(&mut self, backend: u32, slowdown: f64) {
        self.machines[backend as usize].slowdown = slowdown;
        self.change_speed(backend);
    }

    /// Handles the start of a backend.
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
