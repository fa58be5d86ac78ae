//! Summarizes the fleets of a sweep in few numbers: the distribution of utilization, and how it
//! depends on the number of clients per backend.

use serde::Serialize;

use super::Cell;
use crate::metrics::{mean, percentile};

/// Mean, smallest value and percentiles of a utilization over the fleets of a sweep.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    pub mean: f64,
    pub min: f64,
    /// 1st percentile.
    pub p1: f64,
    /// 5th percentile.
    pub p5: f64,
    /// Median.
    pub p50: f64,
}

impl Summary {
    /// If there are no values, every field is 0.
    pub fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_unstable_by(f64::total_cmp);
        let [min, p1, p5, p50] = [0, 1, 5, 50].map(|percent| percentile(&values, percent));
        Self { mean: mean(values), min, p1, p5, p50 }
    }
}

/// The fleets with a similar number of clients per backend.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RatioGroup {
    /// The lowest number of clients per backend, inclusive.
    pub from: f64,
    /// The highest number of clients per backend, exclusive; `None` for the last group.
    pub to: Option<f64>,
    /// The number of fleets.
    pub cells: usize,
    /// Mean adjusted utilization; 0 without fleets.
    pub adjusted: f64,
    /// Mean raw utilization; 0 without fleets.
    pub raw: f64,
}

/// Groups the fleets by clients per backend: below 1/4, 1/2, 1, 2 and 4, and the rest.
pub fn by_ratio(cells: &[Cell]) -> Vec<RatioGroup> {
    const BOUNDS: [f64; 6] = [0.0, 0.25, 0.5, 1.0, 2.0, 4.0];
    let group = |index: usize| {
        let (from, to) = (BOUNDS[index], BOUNDS.get(index + 1).copied());
        let inside = |cell: &&Cell| cell.ratio() >= from && to.is_none_or(|to| cell.ratio() < to);
        let inside: Vec<&Cell> = cells.iter().filter(inside).collect();
        RatioGroup {
            from,
            to,
            cells: inside.len(),
            adjusted: mean(inside.iter().map(|cell| cell.adjusted)),
            raw: mean(inside.iter().map(|cell| cell.raw)),
        }
    };
    (0..BOUNDS.len()).map(group).collect()
}

#[cfg(test)]
mod tests {
    use lb_core::subset::Algorithm;

    use super::*;
    use crate::sweep::Sweep;

    #[test]
    fn a_percentile_is_a_value_of_the_list() {
        let summary = Summary { mean: 50.5, min: 1.0, p1: 1.0, p5: 5.0, p50: 50.0 };
        assert_eq!(Summary::of((1..=100).rev().map(f64::from)), summary);
        assert_eq!(
            Summary::of([3.0].into_iter()),
            Summary { mean: 3.0, min: 3.0, p1: 3.0, p5: 3.0, p50: 3.0 }
        );
    }

    #[test]
    fn every_fleet_is_in_one_ratio_group() {
        let sweep = Sweep { size: 20, max: 256, seed: 0, weighted: false };
        let ratios = by_ratio(&sweep.run(Algorithm::RoundRobin, || ()));
        assert_eq!(ratios.iter().map(|ratio| ratio.cells).sum::<usize>(), 59_148);
        assert!(ratios.iter().all(|ratio| (ratio.adjusted - 1.0).abs() < 1e-12));
    }
}
