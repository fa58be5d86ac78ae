//! The quality of subsets: how even the load is, how much subsets have in common, and the cost of a
//! change.
//!
//! `docs/reference/subsets.md` has the definitions. All functions are pure.

use std::collections::HashSet;

use lb_core::weights::Graph;
use serde::Serialize;
// The daemon uses the same function when it chooses automatic sizes.
pub use lb_core::weights::raw_utilization;

pub mod churn;
pub mod interval;
pub mod overlap;

/// The minimum, mean, maximum and relative standard deviation of some numbers. The standard
/// deviation is that of the whole population, not an estimate from a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    pub min: f64,
    pub mean: f64,
    pub max: f64,
    /// The standard deviation divided by the mean; 0 if the mean is 0.
    pub rsd: f64,
}

impl Spread {
    /// If there are no values, every field is 0.
    pub fn of(values: &[f64]) -> Self {
        if values.is_empty() {
            return Self::default();
        }
        let mean = mean(values.iter().copied());
        let variance = self::mean(values.iter().map(|value| (value - mean).powi(2)));
        Self {
            min: values.iter().copied().fold(f64::INFINITY, f64::min),
            mean,
            max: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            rsd: if mean > 0.0 { variance.sqrt() / mean } else { 0.0 },
        }
    }

    pub fn of_counts(counts: &[u32]) -> Self {
        Self::of(&counts.iter().copied().map(f64::from).collect::<Vec<f64>>())
    }
}

/// Converts a count to a floating-point number, exact to 16 digits.
#[expect(clippy::cast_precision_loss, reason = "figures have fewer digits")]
pub const fn float(count: u64) -> f64 {
    count as f64
}

/// The mean; 0 if there are no values.
pub fn mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let (count, sum) = values.into_iter().fold((0_u32, 0.0), |(count, sum), value| (count + 1, sum + value));
    sum / f64::from(count.max(1))
}

/// The percentile by the nearest-rank method: the smallest value such that at least `percent`
/// percent of the values are not larger. Returns 0 if there are no values.
pub fn percentile(values: &[f64], percent: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

/// Adjusted utilization (ACM Queue 2022): the smallest possible maximum of connections of a
/// backend, which is ceil(M K / N), divided by the actual maximum.
pub fn adjusted_utilization(connections: &[u32]) -> f64 {
    let largest = connections.iter().copied().max().unwrap_or(0);
    if largest == 0 {
        return 0.0;
    }
    let all: u64 = connections.iter().map(|&count| u64::from(count)).sum();
    #[expect(clippy::cast_precision_loss, reason = "at most 2^25 connections")]
    let best = all.div_ceil(connections.len() as u64) as f64;
    best / f64::from(largest)
}

/// The part of an old subset that the new subset does not contain.
pub fn dropped(old: &[u32], new: &[u32]) -> f64 {
    if old.is_empty() {
        return 0.0;
    }
    let new: HashSet<u32> = new.iter().copied().collect();
    let gone = old.iter().filter(|backend| !new.contains(backend)).count();
    part(gone, old.len())
}

/// The largest part of a subset that lies within `block` consecutive indexes. If a rolling restart
/// takes the backends down in the order of their indexes, `block` at a time, a client loses at most
/// this part at once. A block does not continue from the last index to the first.
pub fn block_share(subset: &[u32], block: u32) -> f64 {
    let mut sorted = subset.to_vec();
    sorted.sort_unstable();
    let mut first = 0;
    let mut most = 0;
    for (last, &backend) in sorted.iter().enumerate() {
        // Moves `first` forward to the start of the block that ends at this backend.
        while backend - sorted[first] >= block.max(1) {
            first += 1;
        }
        most = most.max(last + 1 - first);
    }
    part(most, sorted.len())
}

/// [`block_share`] of every client's subset: the part that the client loses at the worst moment of
/// a rolling restart. The maximum is the part of the worst affected client.
pub fn block_shares(graph: &Graph, block: u32) -> Spread {
    Spread::of(&graph.rows().map(|subset| block_share(subset, block)).collect::<Vec<f64>>())
}

/// `of` as a fraction of `all`; 0 if `all` is 0.
fn part(of: usize, all: usize) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "at most 65,536 backends")]
    let part = of as f64 / all.max(1) as f64;
    part
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_loads_are_fully_used() {
        let third = 1.0 / 3.0;
        assert_eq!(raw_utilization(&[third; 7]), 1.0);
        assert_eq!(raw_utilization(&[0.0; 7]), 0.0);
        assert_eq!(raw_utilization(&[]), 0.0);
    }

    #[test]
    fn a_spread_has_the_deviation_of_a_population() {
        let spread = Spread { min: 2.0, mean: 5.0, max: 9.0, rsd: 0.4 };
        assert_eq!(Spread::of_counts(&[2, 4, 4, 4, 5, 5, 7, 9]), spread);
        assert_eq!(Spread::of(&[]), Spread::default());
    }

    #[test]
    fn a_percentile_is_one_of_the_values() {
        let values = [4.0, 1.0, 3.0, 2.0];
        assert_eq!(
            [0, 25, 26, 50, 100].map(|percent| percentile(&values, percent)),
            [1.0, 1.0, 2.0, 2.0, 4.0]
        );
        assert_eq!(percentile(&[], 50), 0.0);
    }

    #[test]
    fn a_block_takes_consecutive_indexes_without_wrapping() {
        assert_eq!(block_share(&[9, 0, 4, 5], 2), 0.5);
        assert_eq!(block_share(&[9, 0, 4, 5], 1), 0.25);
        assert_eq!(block_share(&[9, 0, 4, 5], 6), 0.75);
        assert_eq!(block_share(&[9, 0, 4, 5], 10), 1.0);
        assert_eq!(block_share(&[], 10), 0.0);
    }

    #[test]
    fn dropped_members_are_a_part_of_the_old_subset() {
        assert_eq!(dropped(&[1, 2, 3, 4], &[4, 5, 3]), 0.5);
        assert_eq!(dropped(&[], &[1]), 0.0);
    }
}
