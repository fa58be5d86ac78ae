//! Bounds of counts that chance decides.

use std::ops::RangeInclusive;

/// The counts to expect of an event that has probability `share` in each of `draws` independent draws: six standard deviations
/// around the mean, by the normal approximation of the binomial distribution. About two runs in a thousand million fall outside.
///
/// The draws of p2c even each other out, so its counts are nearer to the mean.
pub fn likely(draws: u32, share: f64) -> RangeInclusive<u32> {
    const DEVIATIONS: f64 = 6.0;
    let mean = f64::from(draws) * share;
    let width = DEVIATIONS * (mean * (1.0 - share)).sqrt();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and draws")]
    let count = |count: f64| count.clamp(0.0, f64::from(draws)) as u32;
    count((mean - width).floor())..=count((mean + width).ceil())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn six_deviations_lie_around_the_mean_and_within_the_draws() {
        assert_eq!(likely(2_000, 0.5), 865..=1_135);
        assert_eq!(likely(400, 1.0 / 3.0), 76..=190);
        assert_eq!(likely(10, 0.5), 0..=10);
        assert_eq!((likely(10, 0.0), likely(10, 1.0), likely(0, 0.5)), (0..=0, 10..=10, 0..=0));
    }

    /// Sums the exact probability of all counts outside.
    #[test]
    fn a_count_is_unlikely_exactly_where_the_approximation_says_so() {
        for (draws, share) in [(60_u32, 0.5), (90, 1.0 / 3.0), (400, 1.0 / 3.0), (2_000, 0.25)] {
            let mut chance = (f64::from(draws) * f64::ln(1.0 - share)).exp();
            let mut outside = 0.0;
            for count in 0..=draws {
                if !likely(draws, share).contains(&count) {
                    outside += chance;
                }
                chance *= f64::from(draws - count) / f64::from(count + 1) * share / (1.0 - share);
            }
            assert!((1e-12..1e-8).contains(&outside), "{draws} draws of {share}: {outside:e}");
        }
    }
}
