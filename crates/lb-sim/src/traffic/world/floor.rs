//! The unevenness that comes from chance alone: the same arrivals with the same costs, each at a
//! backend that is drawn in proportion to capacity.
//!
//! If a policy sends independent arrivals to backends in proportion to capacity, its loads can be
//! more even than this floor only by chance. Reports print the floor beside the results of
//! policies, so that readers do not mistake noise for a fault. This module must not depend on the
//! policies.

use lb_core::subset::random::{SplitMix64, mix64};

use crate::metrics::float;
use crate::samples::unit;

/// The same arrivals and costs, distributed by chance.
#[derive(Debug)]
pub(super) struct Floor {
    rng: SplitMix64,
    weights: Urn,
    capacities: Urn,
    /// The number of arrivals at each backend. [`Self::loads`] divides it by the weight.
    arrivals: Vec<u64>,
    /// The CPU time of the arrivals at each backend, in seconds of a core of speed 1.
    cpu: Vec<f64>,
}

/// Draws an index of `parts`. The probability of each index is proportional to its part.
#[derive(Debug)]
struct Urn {
    parts: Vec<f64>,
    /// For each index, the sum of its part and of all earlier parts.
    sums: Vec<f64>,
}

impl Urn {
    fn new(parts: &[f64]) -> Self {
        let mut sum = 0.0;
        let sums = parts.iter().map(|part| {
            sum += part;
            sum
        });
        Self { sums: sums.collect(), parts: parts.to_vec() }
    }

    fn draw(&self, rng: &mut SplitMix64) -> usize {
        let all = self.sums.last().copied().unwrap_or(0.0);
        let at = unit(rng) * all;
        self.sums.partition_point(|sum| *sum <= at).min(self.sums.len() - 1)
    }
}

impl Floor {
    pub fn new(weights: &[f64], capacities: &[f64], seed: u64) -> Self {
        Self {
            rng: SplitMix64::new(mix64(&[seed, 8])),
            weights: Urn::new(weights),
            capacities: Urn::new(capacities),
            arrivals: vec![0; weights.len()],
            cpu: vec![0.0; weights.len()],
        }
    }

    /// Draws a backend for an arrival with this cost, in picoseconds of CPU time. The cost is added
    /// to the backend only if `is_measured` is set.
    pub fn arrive(&mut self, is_measured: bool, cost_ps: u64) {
        let at = self.weights.draw(&mut self.rng);
        self.arrivals[at] += 1;
        if cost_ps > 0 {
            let at = self.capacities.draw(&mut self.rng);
            if is_measured {
                self.cpu[at] += float(cost_ps) / 1e12;
            }
        }
    }

    /// The number of arrivals divided by the weight, for each backend for which `is_meant` is true.
    pub fn loads(&self, is_meant: impl Fn(usize) -> bool) -> Vec<f64> {
        let loads = self.arrivals.iter().zip(&self.weights.parts);
        let loads = loads.map(|(arrivals, weight)| float(*arrivals) / weight);
        loads.enumerate().filter(|(index, _)| is_meant(*index)).map(|(_, load)| load).collect()
    }

    /// The CPU time of all costs, divided by the total capacity. The result divided by the measured
    /// seconds is the part of the capacity that the costs need.
    pub fn offered_load(&self) -> f64 {
        self.cpu.iter().sum::<f64>() / self.capacities.parts.iter().sum::<f64>()
    }

    /// The CPU time divided by the capacity, for each backend for which `is_meant` is true.
    pub fn utilizations(&self, is_meant: impl Fn(usize) -> bool) -> Vec<f64> {
        let utilizations = self.cpu.iter().zip(&self.capacities.parts).map(|(cpu, capacity)| cpu / capacity);
        utilizations.enumerate().filter(|(index, _)| is_meant(*index)).map(|(_, part)| part).collect()
    }
}
