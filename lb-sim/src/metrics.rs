//! What subsets are worth: how even the load is, how much they have in common, and what a change costs.
//!
//! Definitions as in `docs/subsetting.md`. Pure functions of subsets and counts.

use std::collections::HashSet;

/// Smallest, mean and largest of some numbers, and their relative standard deviation (of the population).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Smallest.
    pub min: f64,
    /// Mean.
    pub mean: f64,
    /// Largest.
    pub max: f64,
    /// Standard deviation over mean; 0 if the mean is 0.
    pub rsd: f64,
}

/// Of nothing, everything is 0.
pub fn spread_of(values: &[f64]) -> Spread {
    if values.is_empty() {
        return Spread { min: 0.0, mean: 0.0, max: 0.0, rsd: 0.0 };
    }
    #[expect(clippy::cast_precision_loss, reason = "far fewer than 2^53 values")]
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count;
    Spread {
        min: values.iter().copied().fold(f64::INFINITY, f64::min),
        mean,
        max: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        rsd: if mean > 0.0 { variance.sqrt() / mean } else { 0.0 },
    }
}

/// Raw utilization of loads, which may be counts of connections: mean over largest. The part of the capacity that can be
/// used before the first backend is full.
pub fn raw_utilization(loads: &[f64]) -> f64 {
    let spread = spread_of(loads);
    if spread.max > 0.0 { spread.mean / spread.max } else { 0.0 }
}

/// Adjusted utilization (ACM Queue 2022): the best that whole connections allow, ceil(M K / N), over the largest count.
pub fn adjusted_utilization(connections: &[u32], clients: u32, wanted: u32) -> f64 {
    let largest = connections.iter().copied().max().unwrap_or(0);
    if largest == 0 {
        return 0.0;
    }
    let all = u64::from(clients) * u64::from(wanted);
    #[expect(clippy::cast_precision_loss, reason = "at most 65,536 clients")]
    let best = all.div_ceil(connections.len() as u64) as f64;
    best / f64::from(largest)
}

/// The part of an old subset that a new one has not.
pub fn dropped(old: &[u32], new: &[u32]) -> f64 {
    if old.is_empty() {
        return 0.0;
    }
    let new: HashSet<u32> = new.iter().copied().collect();
    let gone = old.iter().filter(|backend| !new.contains(backend)).count();
    #[expect(clippy::cast_precision_loss, reason = "at most 65,536 backends")]
    let share = gone as f64 / old.len() as f64;
    share
}
