//! Medians and their confidence intervals. They are computed from order statistics, which need no
//! assumption about the distribution of times.

/// A median with its confidence interval.
#[derive(Clone, Copy, Debug)]
pub struct Median {
    pub value: f64,
    /// The lower end of the 95 % confidence interval of the median, by order statistics.
    pub low: f64,
    /// The upper end of the interval.
    pub high: f64,
}

/// The median of `values`.
///
/// # Panics
/// There are no values.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "counts of rounds are small and positive"
)]
pub fn median(values: &[f64]) -> Median {
    assert!(!values.is_empty(), "no values");
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len() as f64;
    // The median lies between these ranks with a probability of 95 %. The distribution is binomial;
    // this is its normal approximation.
    let half = 0.98 * n.sqrt();
    let at = |rank: f64| sorted[(rank.max(0.0) as usize).min(sorted.len() - 1)];
    Median { value: sorted[sorted.len() / 2], low: at(n / 2.0 - half), high: at(n / 2.0 + half) }
}

/// The value below which `share` of the sorted values lie.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "an index into a slice"
)]
pub fn percentile(sorted: &[u64], share: f64) -> u64 {
    sorted[((sorted.len() as f64 * share) as usize).min(sorted.len() - 1)]
}
