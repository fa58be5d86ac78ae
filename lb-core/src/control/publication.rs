//! When other factors are worth a new table: where somebody's share has moved by enough to be seen in it.

use super::SeenRow;
use super::factor::Factors;

/// The part of a share that it has to move by.
const PART: f64 = 0.02;

/// Whether a share has moved by 2 % of itself or by one entry of a table, whichever is more.
pub fn is_worth_a_table(row: &SeenRow, before: &Factors, after: &Factors, entries: u32) -> bool {
    let shares = |factors: &Factors| -> Vec<f64> {
        #[expect(clippy::cast_precision_loss, reason = "shares need no more than 53 bits")]
        let weights = row.iter().map(|(address, seen)| factors.of(*address).times(seen.weight) as f64);
        let weights: Vec<f64> = weights.collect();
        let sum: f64 = weights.iter().sum();
        weights.iter().map(|weight| weight / sum).collect()
    };
    let entry = 1.0 / f64::from(entries.max(1));
    let has_moved = |(before, after): (f64, f64)| (after - before).abs() >= f64::max(PART * before, entry);
    shares(before).into_iter().zip(shares(after)).any(has_moved)
}
