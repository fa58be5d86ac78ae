//! Random times, and random rates of the tasks of a job. The results are the same on every machine.
//!
//! The standard library's logarithm may differ in its last bit between platforms, and one bit can
//! change the order of events in a whole run. So this module computes the logarithm for times
//! itself, bit by bit. Other logarithms and powers come from the `libm` crate. This module must not
//! depend on the purpose of the draws.

use lb_core::subset::random::{SplitMix64, shuffle};
use serde::Deserialize;

use crate::metrics::float;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Distribution {
    /// Every time equals the mean.
    Even,
    /// Exponential: independent arrivals, and lifetimes with a remaining time that does not depend
    /// on the age.
    #[default]
    Random,
}

/// Samples a length of time with the mean `mean_us`, both in microseconds.
pub fn sample(distribution: Distribution, mean_us: u64, rng: &mut SplitMix64) -> u64 {
    match distribution {
        Distribution::Even => mean_us,
        Distribution::Random if mean_us == 0 => {
            // Draws one random number, as for any other mean, but computes no logarithm.
            rng.next_u64();
            0
        }
        Distribution::Random => {
            let product = u128::from(mean_us) * u128::from(exponential(rng));
            u64::try_from(product >> 32)
                .expect("a mean of at most 100 days, times at most 45, fits into 64 bits")
        }
    }
}

/// The natural logarithm of 2 in units of 2^-32.
const LN_2: u64 = 2_977_044_472;

/// Samples the exponential distribution with mean 1, in units of 2^-32: -ln(u) for u uniform
/// between 0 and 1. The maximum is 64 ln 2, about 44.
fn exponential(rng: &mut SplitMix64) -> u64 {
    let u = rng.next_u64() | 1;
    let below_one = (64 << 32) - log2(u);
    let product = u128::from(below_one) * u128::from(LN_2);
    u64::try_from(product >> 32).expect("a number below 64 in units of 2^-32 fits into 64 bits")
}

/// The binary logarithm of a positive number, in units of 2^-32, rounded down.
fn log2(u: u64) -> u64 {
    let whole = u64::from(u.ilog2());
    // A number from 1 to 2, in units of 2^-31.
    let mut mantissa = (u << u.leading_zeros()) >> 32;
    let mut fraction = 0;
    // Squaring a number doubles its logarithm, so the new whole part is the next bit.
    for _ in 0..32 {
        mantissa = (mantissa * mantissa) >> 31;
        let bit = mantissa >> 32;
        mantissa >>= bit;
        fraction = fraction << 1 | bit;
    }
    whole << 32 | fraction
}

/// Samples the standard normal distribution (Box and Muller).
pub fn normal(rng: &mut SplitMix64) -> f64 {
    let radius = (2.0 * float(exponential(rng)) / 4_294_967_296.0).sqrt();
    radius * libm::cos(std::f64::consts::TAU * unit(rng))
}

/// A number from 0 to below 1.
pub fn unit(rng: &mut SplitMix64) -> f64 {
    float(rng.next_u64() >> 11) / float(1 << 53)
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Skew {
    /// Lognormal rates; the number is the standard deviation of the rates divided by their mean.
    Variation(f64),
    /// The task of rank r sends in proportion to 1 / r^s.
    Zipf(f64),
}

impl Skew {
    /// Samples the rate of each task, scaled to a mean of 1.
    pub fn rates(self, tasks: u32, rng: &mut SplitMix64) -> Vec<f64> {
        let mut rates: Vec<f64> = match self {
            Self::Variation(variation) => {
                let sigma = libm::log(1.0 + variation * variation).sqrt();
                (0..tasks).map(|_| libm::exp(sigma * normal(rng))).collect()
            }
            Self::Zipf(s) => (1..=tasks).map(|rank| libm::pow(f64::from(rank), -s)).collect(),
        };
        if matches!(self, Self::Zipf(_)) {
            shuffle(&mut rates, rng);
        }
        let mean = rates.iter().sum::<f64>() / f64::from(tasks);
        rates.iter_mut().for_each(|rate| *rate /= mean);
        rates
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_logarithm_matches_the_library() {
        for u in [1, 2, 3, 10, 1 << 32, 0x1234_5678_9abc_def0, u64::MAX] {
            #[expect(clippy::cast_precision_loss, reason = "compared to eight digits")]
            let (ours, theirs) = (log2(u) as f64 / 4_294_967_296.0, (u as f64).log2());
            assert!((ours - theirs).abs() < 1e-7, "{u}: {ours} {theirs}");
        }
        assert_eq!([log2(1), log2(2), log2(1 << 63)], [0, 1 << 32, 63 << 32]);
    }

    #[test]
    fn samples_have_the_mean_and_spread_of_the_exponential_distribution() {
        let mut rng = SplitMix64::new(1);
        let lengths: Vec<u64> = (0..100_000).map(|_| sample(Distribution::Random, 1_000, &mut rng)).collect();
        #[expect(clippy::cast_precision_loss, reason = "small numbers")]
        let mean = lengths.iter().sum::<u64>() as f64 / 1e5;
        // The standard error of the mean is 3.2.
        assert!((mean - 999.5).abs() < 10.0, "{mean}");
        let above = lengths.iter().filter(|&&length| length >= 2_000).count();
        // The expected part is e^-2, which is 13,534 of the samples, with a standard error of 108.
        assert!(above.abs_diff(13_534) < 330, "{above}");
        assert_eq!(sample(Distribution::Even, 1_000, &mut rng), 1_000);
    }

    #[test]
    fn rates_have_the_configured_variation_and_a_mean_of_one() {
        let rates = Skew::Variation(0.5).rates(10_000, &mut SplitMix64::new(1));
        let spread = crate::metrics::Spread::of(&rates);
        assert!((spread.mean - 1.0).abs() < 1e-9 && (spread.rsd - 0.5).abs() < 0.03, "{spread:?}");
        let rates = Skew::Zipf(1.0).rates(3, &mut SplitMix64::new(1));
        let mut sorted = rates.clone();
        sorted.sort_by(f64::total_cmp);
        // The rates 1, 1/2 and 1/3, divided by their mean 11/18.
        for (rate, expected) in sorted.iter().zip([6.0 / 11.0, 9.0 / 11.0, 18.0 / 11.0]) {
            assert!((rate - expected).abs() < 1e-9, "{rates:?}");
        }
    }

    #[test]
    fn normal_samples_have_mean_zero_and_variance_one() {
        let mut rng = SplitMix64::new(1);
        let samples: Vec<f64> = (0..200_000).map(|_| normal(&mut rng)).collect();
        let mean = samples.iter().sum::<f64>() / 2e5;
        let variance = samples.iter().map(|sample| sample * sample).sum::<f64>() / 2e5;
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
    }
}
