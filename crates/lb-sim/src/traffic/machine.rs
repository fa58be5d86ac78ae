//! A backend's machine: the cores that requests share, slowdowns of these cores, and the part of
//! the machine that the backend may use.
//!
//! The model is processor sharing. With `n` requests on `c` cores, each request has a whole core
//! while there are enough cores, and otherwise `c / n` of a core, as with the time slices of an
//! operating system's scheduler. When a quota is used up, all requests pause until the end of the
//! period. CPU time is counted in whole numbers, so that a run is the same on every machine: costs
//! are in picoseconds of a core of speed 1, and progress is in femtoseconds. This module must not
//! depend on the clients that sent the requests.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::quota::{Bandwidth, Quota};
use crate::metrics::float;

/// The CPU time that a core of speed 1 provides in a microsecond, in picoseconds.
pub const PS_PER_US: u64 = 1_000_000;

/// The number of internal units of CPU time in a picosecond. The unit is this small because each of
/// thousands of requests on a slow core receives little CPU time per microsecond.
const FINER: u64 = 1_000;

/// The cores of one backend and the requests on them.
#[derive(Debug)]
pub struct Machine {
    cores: u32,
    bandwidth: Option<Bandwidth>,
    /// The speed of a core without any slowdown, in femtoseconds per microsecond.
    full_speed: u64,
    /// The current speed, in the same unit.
    speed: u64,
    at_us: u64,
    /// The CPU time that one request would have received if it had been on the machine since the
    /// start.
    served: u128,
    /// For each request, the value of `served` at which the request is done, and its number.
    ends: BinaryHeap<Reverse<(u128, u32)>>,
    /// The time in which cores worked, summed over all cores.
    busy_us: f64,
    /// The time in which at least one request waited for a core or for more quota.
    waited_us: f64,
}

impl Machine {
    /// Creates a machine without requests. Each of its cores has `speed` times the speed of the
    /// cores for which costs are stated. `quota` limits the time for which the cores may work.
    pub fn new(cores: u32, speed: f64, quota: Option<Quota>) -> Self {
        let speed = scaled(PS_PER_US * FINER, speed);
        Self {
            cores,
            bandwidth: quota.map(Bandwidth::new),
            full_speed: speed,
            speed,
            at_us: 0,
            served: 0,
            ends: BinaryHeap::new(),
            busy_us: 0.0,
            waited_us: 0.0,
        }
    }

    /// The number of requests on the machine.
    pub fn requests(&self) -> usize {
        self.ends.len()
    }

    /// The time in which the machine's cores have worked until now, summed over all cores, in
    /// microseconds.
    pub const fn busy_us(&self) -> f64 {
        self.busy_us
    }

    /// The time until now in which at least one request has waited for a core or for more quota, in
    /// microseconds. Linux calls this "some" pressure.
    pub const fn waited_us(&self) -> f64 {
        self.waited_us
    }

    /// The average number of cores that may work: all cores, or fewer because of the quota.
    pub fn usable_cores(&self) -> f64 {
        let cores = f64::from(self.cores);
        self.bandwidth.map_or(cores, |bandwidth| bandwidth.quota.cores().min(cores))
    }

    /// The CPU time that all cores provide per second without any slowdown, in seconds of a core of
    /// speed 1.
    pub fn capacity(&self) -> f64 {
        float(self.full_speed) / float(PS_PER_US * FINER) * self.usable_cores()
    }

    /// Simulates the time until `now_us`. Finished requests remain until [`Machine::next_done`]
    /// removes them.
    pub fn advance(&mut self, now_us: u64) {
        let passed = now_us - self.at_us;
        self.at_us = now_us;
        let requests = self.ends.len() as u64;
        if requests == 0 || passed == 0 {
            return;
        }
        let at_work = self.at_work();
        let began = now_us - passed;
        let ran = self.bandwidth.as_mut().map_or(passed, |bandwidth| bandwidth.run(began, passed, at_work));
        self.served += u128::from(ran) * u128::from(self.speed_of_each());
        self.busy_us += float(ran) * float(at_work);
        self.waited_us += float(if requests > at_work { passed } else { passed - ran });
    }

    /// Sets the machine's speed to `factor` times its full speed, from now on.
    pub fn set_factor(&mut self, now_us: u64, factor: f64) {
        self.advance(now_us);
        self.speed = scaled(self.full_speed, factor);
    }

    /// Adds a request that takes this much CPU time.
    pub fn add(&mut self, now_us: u64, request: u32, cost_ps: u64) {
        self.advance(now_us);
        let cost = u128::from(cost_ps) * u128::from(FINER);
        self.ends.push(Reverse((self.served + cost, request)));
    }

    /// The time at which the next request is done if no other request arrives before.
    pub fn next_end(&self) -> Option<u64> {
        let Reverse((end, _)) = self.ends.peek()?;
        let (left, speed) = (end.saturating_sub(self.served), self.speed_of_each());
        // Divides in 64 bits if possible, because a division in 128 bits takes ten times as long.
        let left_us = match u64::try_from(left) {
            Ok(left) => left.div_ceil(speed),
            Err(_) => u64::try_from(left.div_ceil(speed.into())).unwrap_or(u64::MAX),
        };
        Some(match &self.bandwidth {
            None => self.at_us.saturating_add(left_us),
            Some(bandwidth) => bandwidth.done(self.at_us, left_us, self.at_work()),
        })
    }

    /// Removes and returns a finished request.
    pub fn next_done(&mut self) -> Option<u32> {
        let Reverse((end, _)) = self.ends.peek()?;
        if *end > self.served {
            return None;
        }
        self.ends.pop().map(|Reverse((_, request))| request)
    }

    /// Removes all requests, and returns their numbers in ascending order.
    pub fn clear(&mut self, now_us: u64) -> Vec<u32> {
        self.advance(now_us);
        let mut requests: Vec<u32> = self.ends.drain().map(|Reverse((_, request))| request).collect();
        requests.sort_unstable();
        requests
    }

    /// The number of busy cores; 1 if there are no requests.
    fn at_work(&self) -> u64 {
        (self.ends.len() as u64).clamp(1, self.cores.into())
    }

    /// The CPU time that each request receives in a microsecond in which cores work, in
    /// femtoseconds. It is at least 1, because with 0 the request would never end.
    fn speed_of_each(&self) -> u64 {
        let requests = self.ends.len().max(1) as u64;
        let cores = u64::from(self.cores);
        if requests <= cores { self.speed } else { (self.speed * cores / requests).max(1) }
    }
}

/// A speed times a factor, rounded; never 0.
fn scaled(speed: u64, factor: f64) -> u64 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "speeds are far below 2^53")]
    let scaled = (float(speed) * factor).round() as u64;
    scaled.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000;
    /// A millisecond of CPU time.
    const COST: u64 = 1_000 * PS_PER_US;

    /// Returns the completion time of each request, in the order of completion.
    fn run(machine: &mut Machine) -> Vec<(u64, u32)> {
        let mut done = Vec::new();
        while let Some(at) = machine.next_end() {
            machine.advance(at);
            while let Some(request) = machine.next_done() {
                done.push((at, request));
            }
        }
        done
    }

    #[test]
    fn each_request_has_a_core_while_there_are_enough_cores() {
        let mut machine = Machine::new(2, 1.0, None);
        machine.add(0, 7, 10 * COST);
        machine.add(0, 8, 20 * COST);
        assert_eq!(run(&mut machine), [(10 * MS, 7), (20 * MS, 8)]);
        assert_eq!(machine.busy_us(), 30_000.0);
    }

    #[test]
    fn more_requests_than_cores_share_them_evenly() {
        // Four requests on two cores run at half speed. The short request is done at 20 ms. The
        // other three then share two cores, so 10 ms of CPU take 15 ms.
        let mut machine = Machine::new(2, 1.0, None);
        for (request, cost) in [(1, 10), (2, 20), (3, 20), (4, 20)] {
            machine.add(0, request, cost * COST);
        }
        let done = run(&mut machine);
        // Rounding loses one picosecond in a thousand.
        assert_eq!(done[0], (20 * MS, 1));
        for (at, _) in &done[1..] {
            assert!(at.abs_diff(35 * MS) <= 1, "{done:?}");
        }
        assert!((machine.busy_us() - 70_000.0).abs() < 10.0, "{}", machine.busy_us());
    }

    #[test]
    fn a_later_request_slows_down_the_first_one() {
        let mut machine = Machine::new(1, 1.0, None);
        machine.add(0, 1, 10 * COST);
        machine.add(5 * MS, 2, 10 * COST);
        assert_eq!(run(&mut machine), [(15 * MS, 1), (20 * MS, 2)]);
    }

    #[test]
    fn the_speed_of_a_machine_may_change() {
        let mut machine = Machine::new(1, 2.5, None);
        assert!((machine.capacity() - 2.5).abs() < 1e-9);
        machine.add(0, 1, 10 * COST);
        machine.set_factor(2 * MS, 0.8);
        // 5 ms of CPU time remain, and the core has twice the speed.
        assert_eq!(run(&mut machine), [(4_500, 1)]);
        machine.set_factor(5 * MS, 1.0);
        machine.add(5 * MS, 2, 10 * COST);
        machine.add(5 * MS, 1, 10 * COST);
        assert_eq!(machine.clear(6 * MS), [1, 2]);
        assert_eq!((machine.requests(), machine.next_end()), (0, None));
        assert_eq!(machine.busy_us(), 5_500.0);
    }

    #[test]
    fn the_longest_runs_and_the_slowest_cores_are_counted_exactly() {
        // The fastest possible machine works for a day, and then gets an ordinary request.
        let mut machine = Machine::new(1, 1000.0, None);
        machine.add(0, 1, 86_400_000_000 * PS_PER_US * 100);
        assert_eq!(run(&mut machine), [(8_640_000_000, 1)]);
        machine.add(8_640_000_000, 2, 1_000_000 * PS_PER_US);
        assert_eq!(run(&mut machine), [(8_640_001_000, 2)]);
        // Ten thousand requests at a thousandth of the speed: the core completes a thousand
        // requests per second, so all of them take ten seconds.
        let mut slow = Machine::new(1, 0.001, None);
        (0..10_000).for_each(|request| slow.add(0, request, PS_PER_US));
        assert_eq!(slow.next_end(), Some(10_000_000));
    }

    #[test]
    fn a_request_without_cost_ends_at_once() {
        let mut machine = Machine::new(1, 1.0, None);
        machine.add(3, 1, 0);
        assert_eq!(run(&mut machine), [(3, 1)]);
    }

    /// A quota of a millisecond of core time in every 25 ms.
    const QUOTA: Quota = Quota { runtime_us: 1_000, period_us: 25_000 };

    #[test]
    fn requests_pause_after_the_quota_until_the_period_ends() {
        let mut machine = Machine::new(1, 1.0, Some(QUOTA));
        assert!((machine.capacity() - 0.04).abs() < 1e-9);
        // The request uses one millisecond in each of two periods, and half a millisecond in the
        // third.
        machine.add(3 * MS, 1, 2 * COST + COST / 2);
        assert_eq!(run(&mut machine), [(50_500, 1)]);
        assert_eq!((machine.busy_us(), machine.waited_us()), (2_500.0, 45_000.0));
        // Half a millisecond of quota remains in this period, and is lost at its end.
        machine.add(60 * MS, 2, COST);
        assert_eq!(run(&mut machine), [(75_500, 2)]);
        machine.add(1_000 * MS, 3, COST);
        assert_eq!(run(&mut machine), [(1_001_000, 3)]);
    }

    #[test]
    fn two_cores_use_up_a_quota_twice_as_fast() {
        let mut machine = Machine::new(2, 1.0, Some(QUOTA));
        for request in 1..=4 {
            machine.add(0, request, COST);
        }
        // In each period, the quota permits two cores to work for half a millisecond. The four
        // requests need four times as much CPU time as one period permits.
        let done = run(&mut machine);
        assert!(done.iter().all(|(at, _)| *at == 75_500), "{done:?}");
        assert_eq!((machine.busy_us(), machine.waited_us()), (4_000.0, 75_500.0));
    }

    #[test]
    fn step_size_does_not_change_the_effect_of_a_quota() {
        let once = |step_us: u64| {
            let mut machine = Machine::new(3, 2.0, Some(Quota { runtime_us: 7_001, period_us: 10_000 }));
            let mut done = Vec::new();
            machine.add(0, 1, 300 * COST);
            machine.add(0, 2, 90 * COST);
            while machine.requests() > 0 {
                let end = machine.next_end().unwrap();
                let at = end.min(machine.at_us + step_us);
                machine.advance(at);
                while let Some(request) = machine.next_done() {
                    done.push((at, request));
                }
            }
            (done, machine.busy_us())
        };
        let whole = once(u64::MAX / 2);
        assert_eq!(once(1), whole);
        assert_eq!(once(4_999), whole);
        assert_eq!(whole.0.len(), 2);
    }

    #[test]
    fn a_quota_above_the_machine_s_cores_has_no_effect() {
        let quota = Quota { runtime_us: 90_000, period_us: 10_000 };
        for quota in [None, Some(quota)] {
            let mut machine = Machine::new(2, 1.0, quota);
            assert!((machine.capacity() - 2.0).abs() < 1e-9);
            machine.add(5, 1, 100 * COST);
            assert_eq!((run(&mut machine), machine.waited_us()), (vec![(100_005, 1)], 0.0));
        }
    }
}
