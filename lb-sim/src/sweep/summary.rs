//! The many fleets of a sweep in few numbers: how utilization is distributed, and how it depends on clients per backend.

use serde::Serialize;

use super::Cell;
use crate::metrics::spread_of;

/// Mean, smallest and quantiles of a utilization over the fleets of a sweep.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Mean.
    pub mean: f64,
    /// Smallest.
    pub min: f64,
    /// 1st percentile: the smallest value such that this part of the fleets is not above it (nearest rank).
    pub p1: f64,
    /// 5th percentile.
    pub p5: f64,
    /// Median.
    pub p50: f64,
}

impl Summary {
    /// Of nothing, everything is 0.
    pub fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_unstable_by(f64::total_cmp);
        let nearest = |percent: usize| {
            let rank = (values.len() * percent).div_ceil(100);
            values.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
        };
        let mean = spread_of(&values).mean;
        Self { mean, min: nearest(0), p1: nearest(1), p5: nearest(5), p50: nearest(50) }
    }
}

/// The fleets with about as many clients per backend.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ratio {
    /// At least so many clients per backend.
    pub from: f64,
    /// Fewer than so many; no bound for the last.
    pub to: Option<f64>,
    /// How many fleets.
    pub cells: usize,
    /// Mean adjusted utilization; 0 of no fleets.
    pub adjusted: f64,
    /// Mean raw utilization; 0 of no fleets.
    pub raw: f64,
}

/// The fleets by clients per backend: below 1/4, 1/2, 1, 2 and 4, and the rest.
pub fn by_ratio(cells: &[Cell]) -> Vec<Ratio> {
    const BOUNDS: [f64; 6] = [0.0, 0.25, 0.5, 1.0, 2.0, 4.0];
    let ratio = |cell: &Cell| f64::from(cell.clients) / f64::from(cell.backends);
    let group = |place: usize| {
        let (from, to) = (BOUNDS[place], BOUNDS.get(place + 1).copied());
        let inside = |cell: &&Cell| ratio(cell) >= from && to.is_none_or(|to| ratio(cell) < to);
        let inside: Vec<&Cell> = cells.iter().filter(inside).collect();
        let mean = |of: fn(&Cell) -> f64| {
            let values: Vec<f64> = inside.iter().map(|cell| of(cell)).collect();
            spread_of(&values).mean
        };
        Ratio {
            from,
            to,
            cells: inside.len(),
            adjusted: mean(|cell| cell.adjusted),
            raw: mean(|cell| cell.raw),
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
    fn every_fleet_has_one_ratio() {
        let sweep = Sweep { size: 20, max: 256, seed: 0, weighted: false };
        let ratios = by_ratio(&sweep.run(Algorithm::RoundRobin, || ()));
        assert_eq!(ratios.iter().map(|ratio| ratio.cells).sum::<usize>(), 59_148);
        assert!(ratios.iter().all(|ratio| (ratio.adjusted - 1.0).abs() < 1e-12));
    }
}
