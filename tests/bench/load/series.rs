//! A series of readings of the CPU time that backends have used, and how even the utilization of
//! backends is.

use std::time::{Duration, Instant};

use stage::quota::Used;

/// One reading of all backends.
#[derive(Clone, Debug)]
pub struct Reading {
    pub at: Instant,
    /// For each backend, the CPU time that was used until the reading.
    pub used: Vec<Used>,
}

/// Readings that were made while quotas did not change.
#[derive(Clone, Debug)]
pub struct Series {
    /// The quota of each backend, as a share of a processor.
    cores: Vec<f64>,
    readings: Vec<Reading>,
}

impl Series {
    /// Creates a series that begins with this reading.
    pub fn new(percent: &[u32], first: Reading) -> Self {
        Self {
            cores: percent.iter().map(|percent| f64::from(*percent) / 100.0).collect(),
            readings: vec![first],
        }
    }

    /// Adds a reading.
    pub fn push(&mut self, reading: Reading) {
        self.readings.push(reading);
    }

    /// For each backend, the part of its quota that was used between the first reading and the
    /// last.
    pub fn utilization(&self) -> Vec<f64> {
        self.between(0, self.readings.len() - 1)
    }

    /// For each backend, the part of its quota that was used in the last `time` of the series.
    pub fn lately(&self, time: Duration) -> Vec<f64> {
        let last = self.readings.len() - 1;
        self.between(self.window(last, time).unwrap_or(0), last)
    }

    /// For each backend, the part of the time in which its quota was used up.
    pub fn throttled(&self) -> Vec<f64> {
        let (first, last) = (&self.readings[0], &self.readings[self.readings.len() - 1]);
        let time = (last.at - first.at).as_secs_f64();
        let both = first.used.iter().zip(&last.used);
        both.map(|(first, last)| (last.throttled - first.throttled).as_secs_f64() / time).collect()
    }

    /// The time from the first reading to the end of the first window of this length in which the
    /// utilization of the busiest backend is at most `at_most` times the mean.
    pub fn even_after(&self, window: Duration, at_most: f64) -> Option<Duration> {
        let is_even = |last: &usize| {
            let first = self.window(*last, window);
            first.is_some_and(|first| busiest_over_mean(&self.between(first, *last)) <= at_most)
        };
        let last = (1..self.readings.len()).find(is_even)?;
        Some(self.readings[last].at - self.readings[0].at)
    }

    /// The latest reading that is at least `time` before the reading with the number `last`.
    fn window(&self, last: usize, time: Duration) -> Option<usize> {
        (0..last).rev().find(|first| self.readings[last].at - self.readings[*first].at >= time)
    }

    fn between(&self, first: usize, last: usize) -> Vec<f64> {
        let (first, last) = (&self.readings[first], &self.readings[last]);
        let time = (last.at - first.at).as_secs_f64();
        let used =
            first.used.iter().zip(&last.used).map(|(first, last)| (last.used - first.used).as_secs_f64());
        used.zip(&self.cores).map(|(used, cores)| used / (time * cores)).collect()
    }
}

/// The utilization of the busiest backend divided by the mean of all.
pub fn busiest_over_mean(utilization: &[f64]) -> f64 {
    utilization.iter().copied().fold(0.0, f64::max) / mean(utilization)
}

pub fn mean(numbers: &[f64]) -> f64 {
    numbers.iter().sum::<f64>() / numbers.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A series of two backends with quotas of 10 and 20 percent. `used` is the CPU time that each
    /// of them uses in each second, in milliseconds.
    fn series(used: &[(u64, u64)]) -> Series {
        let start = Instant::now();
        let used_ms = |ms| Used { used: Duration::from_millis(ms), throttled: Duration::from_millis(2 * ms) };
        let reading = |seconds, a, b| Reading {
            at: start + Duration::from_secs(seconds),
            used: vec![used_ms(a), used_ms(b)],
        };
        let mut series = Series::new(&[10, 20], reading(0, 0, 0));
        let (mut all_a, mut all_b) = (0, 0);
        for (number, (a, b)) in (1..).zip(used) {
            (all_a, all_b) = (all_a + a, all_b + b);
            series.push(reading(number, all_a, all_b));
        }
        series
    }

    #[test]
    fn utilization_is_used_over_usable_cpu_time() {
        let series = series(&[(50, 50), (50, 150)]);
        let percent =
            |shares: Vec<f64>| shares.iter().map(|share| (share * 100.0).round()).collect::<Vec<_>>();
        assert_eq!(percent(series.utilization()), [50.0, 50.0]);
        assert_eq!(percent(series.lately(Duration::from_secs(1))), [50.0, 75.0]);
        assert_eq!(percent(series.throttled()), [10.0, 20.0]);
        assert_eq!(busiest_over_mean(&[0.5, 0.75, 0.25]), 1.5);
    }

    #[test]
    fn load_is_even_from_the_end_of_the_first_even_window() {
        let series = series(&[(100, 50), (80, 100), (60, 120), (60, 120), (60, 120)]);
        let after = |seconds, at_most| series.even_after(Duration::from_secs(seconds), at_most);
        assert_eq!(after(1, 1.01), Some(Duration::from_secs(3)));
        assert_eq!(after(2, 1.01), Some(Duration::from_secs(4)));
        assert_eq!(after(4, 1.01), None);
        assert_eq!(after(6, 2.0), None);
        assert_eq!(after(1, 2.0), Some(Duration::from_secs(1)));
    }
}
