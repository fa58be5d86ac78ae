//! The demand of tasks: the CPU time of requests, and bursts in which all tasks send more.
//!
//! Logarithms and powers come from the `libm` crate, which gives the same results on every machine.
//! The four basic operations follow IEEE 754, so their results are also the same everywhere. This
//! module must not depend on the backend that serves a request.

use lb_core::subset::random::SplitMix64;

use super::machine::PS_PER_US;
use crate::metrics::float;
use crate::samples::normal;

/// How much CPU time a request takes, on a core of speed 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cost {
    /// Each request has the same cost.
    Exact {
        /// The cost in picoseconds.
        ps: u64,
    },
    /// Lognormal: many cheap requests, and a few that cost thousands of times as much.
    Lognormal {
        /// The mean of the logarithm of the cost in seconds.
        mu: f64,
        /// The standard deviation of the logarithm.
        sigma: f64,
        /// The maximum cost of a request, in picoseconds.
        cap_ps: u64,
    },
}

const PS_PER_S: f64 = 1e12;

impl Cost {
    /// A lognormal cost. `mean_us` is the mean before the cap is applied.
    pub fn lognormal(mean_us: u64, sigma: f64, cap_us: u64) -> Self {
        let mu = libm::log(float(mean_us) / 1e6) - sigma * sigma / 2.0;
        Self::Lognormal { mu, sigma, cap_ps: cap_us.saturating_mul(PS_PER_US) }
    }

    /// The cost of one request, in picoseconds.
    pub fn sample(self, rng: &mut SplitMix64) -> u64 {
        match self {
            Self::Exact { ps } => ps,
            Self::Lognormal { mu, sigma, cap_ps } => {
                let seconds = libm::exp(mu + sigma * normal(rng));
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "positive, and values beyond 64 bits are capped"
                )]
                let ps = (seconds * PS_PER_S) as u64;
                ps.clamp(1, cap_ps)
            }
        }
    }

    /// The mean cost in seconds, with the cap applied.
    pub fn mean(self) -> f64 {
        match self {
            Self::Exact { ps } => float(ps) / PS_PER_S,
            Self::Lognormal { mu, sigma, cap_ps } => {
                let cap = float(cap_ps) / PS_PER_S;
                let z = (libm::log(cap) - mu) / sigma;
                let whole = libm::exp(mu + sigma * sigma / 2.0);
                whole * below(z - sigma) + cap * below(-z)
            }
        }
    }
}

/// The standard normal distribution function: the probability of a value below `z`.
fn below(z: f64) -> f64 {
    0.5 * libm::erfc(-z / std::f64::consts::SQRT_2)
}

/// Bursts: times in which all tasks send more, at the same time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bursts {
    /// The factor by which the rate is higher in a burst.
    pub factor: f64,
    /// The time between the starts of two bursts. The first burst begins when this time has passed.
    pub every_us: u64,
    /// The length of each burst.
    pub lasts_us: u64,
}

impl Bursts {
    /// The time of an arrival that would be due `gap_us` after `now_us` at the normal rate. During
    /// a burst, the gap passes `factor` times as fast.
    pub fn due(self, now_us: u64, gap_us: u64) -> u64 {
        let (mut at, mut left) = (now_us, float(gap_us));
        // Bound: each iteration advances to the next start or end of a burst.
        loop {
            let phase = at % self.every_us;
            // The first burst begins when `every_us` has passed.
            let is_burst = at >= self.every_us && phase < self.lasts_us;
            let end = if at < self.every_us {
                self.every_us
            } else if is_burst {
                at - phase + self.lasts_us
            } else {
                at - phase + self.every_us
            };
            let factor = if is_burst { self.factor } else { 1.0 };
            let here = float(end - at) * factor;
            if left < here {
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "less than a gap"
                )]
                return at + (left / factor) as u64;
            }
            left -= here;
            at = end;
        }
    }

    /// The factor on the rate, averaged over time.
    pub fn mean_factor(self) -> f64 {
        1.0 + (self.factor - 1.0) * float(self.lasts_us) / float(self.every_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rng() -> SplitMix64 {
        SplitMix64::new(1)
    }

    #[test]
    fn costs_have_the_configured_mean_and_cap() {
        let cost = Cost::lognormal(15_000, 2.0, 10_000_000);
        // Without a cap, costs above 10 s add 0.18 ms to the mean. With the cap, they add 0.11 ms.
        assert!((cost.mean() - 0.014_92).abs() < 0.000_02, "{}", cost.mean());
        let mut rng = rng();
        let samples: Vec<f64> = (0..1_000_000).map(|_| float(cost.sample(&mut rng)) / PS_PER_S).collect();
        let mean = samples.iter().sum::<f64>() / 1e6;
        // The standard error is 0.07 ms.
        assert!((mean - cost.mean()).abs() < 0.000_3, "{mean}");
        assert!(samples.iter().all(|cost| (0.0..=10.0).contains(cost)));
        let median = crate::metrics::percentile(&samples, 50);
        assert!((median - 0.015 / libm::exp(2.0)).abs() < 0.000_05, "{median}");
        assert_eq!(Cost::Exact { ps: 5 }.sample(&mut rng), 5);
    }

    #[test]
    fn in_a_burst_time_passes_faster() {
        let bursts = Bursts { factor: 4.0, every_us: 100, lasts_us: 10 };
        assert_eq!(bursts.due(0, 50), 50, "no burst has begun");
        assert_eq!(bursts.due(100, 20), 105);
        assert_eq!(bursts.due(90, 30), 105, "10 us of the gap pass before the burst, and 20 us in the burst");
        assert_eq!(bursts.due(105, 40), 130, "20 us of the gap pass in the burst, and 20 us after the burst");
        assert_eq!(
            bursts.due(150, 90),
            210,
            "50 us of the gap pass before the burst, and 40 us in the burst"
        );
        assert!((bursts.mean_factor() - 1.3).abs() < 1e-9);
    }

    #[test]
    fn below_is_the_normal_distribution_function() {
        assert!((below(0.0) - 0.5).abs() < 1e-12 && (below(1.959_964) - 0.975).abs() < 1e-6);
    }
}
