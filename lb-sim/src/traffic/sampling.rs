//! Random lengths of time, in whole numbers: the same on every machine.
//!
//! A logarithm of the standard library may differ in its last bit from one platform to the next, and one bit would
//! reorder a whole run. So it is computed here, bit by bit. Must not know what the times are for.

use lb_core::subset::random::SplitMix64;
use serde::Deserialize;

/// How times with a given mean are distributed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Distribution {
    /// All are the mean.
    Even,
    /// Exponential: arrivals that are independent of each other, and lives whose rest does not depend on their age.
    #[default]
    Random,
}

/// Samples a length of time with the mean `mean_us`, both in microseconds.
pub fn sample(distribution: Distribution, mean_us: u64, rng: &mut SplitMix64) -> u64 {
    match distribution {
        Distribution::Even => mean_us,
        Distribution::Random => {
            let product = u128::from(mean_us) * u128::from(exponential(rng));
            u64::try_from(product >> 32).expect("a mean of at most a hundred days, times at most 45")
        }
    }
}

/// The natural logarithm of 2 in units of 2^-32.
const LN_2: u64 = 2_977_044_472;

/// Samples the exponential distribution with mean 1, in units of 2^-32: -ln(u), u uniform between 0 and 1. At most
/// 64 ln 2, about 44.
pub(super) fn exponential(rng: &mut SplitMix64) -> u64 {
    let u = rng.next_u64() | 1;
    let below_one = (64 << 32) - log2(u);
    let product = u128::from(below_one) * u128::from(LN_2);
    u64::try_from(product >> 32).expect("less than 64 in units of 2^-32")
}

/// The binary logarithm of a positive number in units of 2^-32, rounded down.
fn log2(u: u64) -> u64 {
    let whole = u64::from(u.ilog2());
    // Between 1 and 2, in units of 2^-31.
    let mut mantissa = (u << u.leading_zeros()) >> 32;
    let mut fraction = 0;
    // Squaring doubles the logarithm: its whole part is the next bit.
    for _ in 0..32 {
        mantissa = (mantissa * mantissa) >> 31;
        let bit = mantissa >> 32;
        mantissa >>= bit;
        fraction = fraction << 1 | bit;
    }
    whole << 32 | fraction
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_logarithm_is_that_of_the_library_within_its_digits() {
        for u in [1, 2, 3, 10, 1 << 32, 0x1234_5678_9abc_def0, u64::MAX] {
            #[expect(clippy::cast_precision_loss, reason = "compared to eight digits")]
            let (ours, theirs) = (log2(u) as f64 / 4_294_967_296.0, (u as f64).log2());
            assert!((ours - theirs).abs() < 1e-7, "{u}: {ours} {theirs}");
        }
        assert_eq!([log2(1), log2(2), log2(1 << 63)], [0, 1 << 32, 63 << 32]);
    }

    #[test]
    fn random_lengths_have_the_mean_and_the_spread_of_the_exponential_distribution() {
        let mut rng = SplitMix64::new(1);
        let lengths: Vec<u64> = (0..100_000).map(|_| sample(Distribution::Random, 1_000, &mut rng)).collect();
        #[expect(clippy::cast_precision_loss, reason = "small numbers")]
        let mean = lengths.iter().sum::<u64>() as f64 / 1e5;
        // The standard error of the mean is 3.2.
        assert!((mean - 999.5).abs() < 10.0, "{mean}");
        let above = lengths.iter().filter(|&&length| length >= 2_000).count();
        // e^-2 of them, with a standard error of 108.
        assert!(above.abs_diff(13_534) < 330, "{above}");
        assert_eq!(sample(Distribution::Even, 1_000, &mut rng), 1_000);
    }
}
