//! Bounds of counts that depend on chance.

use std::ops::RangeInclusive;

/// The expected range of counts if an event has probability `share` in each of `samples`
/// independent samples: six standard deviations around the mean, by the normal approximation of the
/// binomial distribution. The probability of a count outside this range is about two in a thousand
/// million.
///
/// The samples of `p2c` are not independent and balance each other, so the counts are closer to the
/// mean.
pub fn likely(samples: u32, share: f64) -> RangeInclusive<u32> {
    const DEVIATIONS: f64 = 6.0;
    let mean = f64::from(samples) * share;
    let width = DEVIATIONS * (mean * (1.0 - share)).sqrt();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and samples")]
    let count = |count: f64| count.clamp(0.0, f64::from(samples)) as u32;
    count((mean - width).floor())..=count((mean + width).ceil())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn six_deviations_lie_around_the_mean_and_within_the_samples() {
        assert_eq!(likely(2_000, 0.5), 865..=1_135);
        assert_eq!(likely(400, 1.0 / 3.0), 76..=190);
        assert_eq!(likely(10, 0.5), 0..=10);
        assert_eq!((likely(10, 0.0), likely(10, 1.0), likely(0, 0.5)), (0..=0, 10..=10, 0..=0));
    }

    /// Sums the exact probability of all counts outside of the bounds.
    #[test]
    fn counts_outside_the_bounds_are_unlikely_by_the_exact_distribution() {
        for (samples, share) in [(60_u32, 0.5), (90, 1.0 / 3.0), (400, 1.0 / 3.0), (2_000, 0.25)] {
            let mut chance = (f64::from(samples) * f64::ln(1.0 - share)).exp();
            let mut outside = 0.0;
            for count in 0..=samples {
                if !likely(samples, share).contains(&count) {
                    outside += chance;
                }
                chance *= f64::from(samples - count) / f64::from(count + 1) * share / (1.0 - share);
            }
            assert!((1e-12..1e-8).contains(&outside), "{samples} samples of {share}: {outside:e}");
        }
    }
}
