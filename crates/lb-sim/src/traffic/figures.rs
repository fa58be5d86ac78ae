//! How even the load was and how long requests took: figures over several seeds, each with its
//! confidence interval.
//!
//! This module must not simulate anything itself.

use serde::Serialize;

use super::tally::{LoadTotal, Total};
use crate::metrics::interval::Interval;
use crate::metrics::{float, mean};

/// How even the utilization of backends was.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct UtilizationEvenness {
    /// CPU utilization of the busiest backend divided by that of the least busy one.
    pub cpu_max_over_min: Interval,
    /// CPU utilization of the busiest backend divided by the mean.
    pub cpu_max_over_mean: Interval,
    /// The mean divided by the utilization of the busiest backend: the part of the capacity that is
    /// usable before the first backend is full.
    pub raw_utilization: Interval,
}

impl UtilizationEvenness {
    /// The evenness of the utilizations of all backends, for each seed.
    fn of<'a>(seeds: impl Iterator<Item = &'a [f64]> + Clone) -> Self {
        let extreme = |cpu: &[f64], start: f64, of: fn(f64, f64) -> f64| cpu.iter().copied().fold(start, of);
        let most = move |cpu: &[f64]| extreme(cpu, 0.0, f64::max);
        let mean_of = |cpu: &[f64]| mean(cpu.iter().copied());
        Self {
            cpu_max_over_min: Interval::of(
                seeds.clone().map(|cpu| most(cpu) / extreme(cpu, f64::INFINITY, f64::min)),
            ),
            cpu_max_over_mean: Interval::of(seeds.clone().map(|cpu| most(cpu) / mean_of(cpu))),
            raw_utilization: Interval::of(seeds.map(|cpu| mean_of(cpu) / most(cpu))),
        }
    }
}

/// The duration of requests, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RequestLatency {
    /// The median.
    pub p50: Interval,
    /// The 99th percentile.
    pub p99: Interval,
    /// The 99.9th percentile.
    #[serde(rename = "p99.9")]
    pub p999: Interval,
}

/// The measurements of one run from the start of measuring, over all seeds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunFigures {
    pub run: String,
    /// How even the utilization of backends was.
    #[serde(flatten)]
    pub evenness: UtilizationEvenness,
    /// The evenness if chance alone distributed the requests, in proportion to capacity.
    pub floor: UtilizationEvenness,
    /// The part of the total capacity that would be in use at the moment when the first machine is
    /// full, if the load of all machines grew in proportion.
    pub usable: Interval,
    /// The time that cores worked, divided by the time that they were usable, over all backends.
    pub cpu_mean: Interval,
    /// The offered load: the CPU time that all arrivals need, divided by the capacity that the
    /// machines at the start have without any slowdown.
    pub offered: Interval,
    /// The duration of served requests.
    pub latency_ms: RequestLatency,
    /// The number of failed requests.
    pub errors: Interval,
    /// The part of all arrivals that failed.
    pub error_share: Interval,
    /// Connections that clients closed only because the backend had left their subset, in the whole
    /// run.
    pub moved_connections: Interval,
    /// Utilization of each backend with the first seed, in the order of indexes.
    pub cpu: Vec<f64>,
    /// The capacity of each backend's machine without any slowdown, in cores of speed 1.
    pub capacity: Vec<f64>,
}

/// [`RunFigures::usable`] for one seed. The utilization of each machine is weighted by its
/// capacity.
pub fn usable(cpu: &[f64], capacity: &[f64]) -> f64 {
    let used: f64 = cpu.iter().zip(capacity).map(|(cpu, capacity)| cpu * capacity).sum();
    used / capacity.iter().sum::<f64>() / cpu.iter().copied().fold(0.0, f64::max)
}

impl RunFigures {
    /// The figures of a run, from its results with each seed.
    ///
    /// # Panics
    /// There is no result.
    pub fn of(seeds: &[(Total, LoadTotal)]) -> Self {
        let (total, load) = seeds.first().expect("there is at least one seed");
        let loads = || seeds.iter().map(|(_, load)| load);
        let latency = |at: usize| Interval::of(loads().map(|load| float(load.latency_us[at]) / 1e3));
        let errors = |load: &LoadTotal| float(load.counts.errors.sum());
        Self {
            run: total.run.clone(),
            evenness: UtilizationEvenness::of(loads().map(|load| load.cpu.as_slice())),
            floor: UtilizationEvenness::of(loads().map(|load| load.floor.as_slice())),
            usable: Interval::of(loads().map(|load| usable(&load.cpu, &load.capacity))),
            cpu_mean: Interval::of(loads().map(|load| mean(load.cpu.iter().copied()))),
            offered: Interval::of(loads().map(|load| load.offered)),
            latency_ms: RequestLatency { p50: latency(0), p99: latency(1), p999: latency(2) },
            errors: Interval::of(loads().map(errors)),
            error_share: Interval::of(loads().map(|load| errors(load) / float(load.counts.arrivals.max(1)))),
            moved_connections: Interval::of(seeds.iter().map(|(total, _)| float(total.counts.moved))),
            cpu: load.cpu.clone(),
            capacity: load.capacity.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evenness_is_computed_for_each_seed_and_then_averaged() {
        let evenness = UtilizationEvenness::of([&[1.0, 2.0][..], &[1.0, 1.0][..]].into_iter());
        assert!((evenness.cpu_max_over_min.mean - 1.5).abs() < 1e-12);
        assert!((evenness.cpu_max_over_mean.mean - (4.0 / 3.0 + 1.0) / 2.0).abs() < 1e-12);
        assert!((evenness.raw_utilization.mean - 0.875).abs() < 1e-12);
    }

    #[test]
    fn usable_capacity_is_weighted_by_machine_capacity() {
        // The slow machine has a utilization of 0.8. The other machine is 2.5 times as fast, and
        // its utilization is 0.32.
        assert!((usable(&[0.8, 0.32], &[4.0, 10.0]) - (4.0 + 4.0) / 14.0).abs() < 1e-12);
        assert!((usable(&[0.5, 0.5], &[4.0, 10.0]) - 1.0).abs() < 1e-12);
    }
}
