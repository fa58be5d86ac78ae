//! The delays between the attempts to query a server that fails.

use std::time::Duration;

/// The first delay after a failure. After an outage of less than a second, the fourth attempt
/// succeeds at the latest.
const FIRST: Duration = Duration::from_millis(100);

/// The longest delay, without the variation by [`JITTER`]. With the variation, a delay is at most
/// 30 s.
const LONGEST: Duration = Duration::from_secs(25);

/// Each delay varies by up to this fraction, so that many hosts do not query a returning server at
/// the same time.
const JITTER: f64 = 0.2;

/// The delays between attempts while a server does not answer: 0.1 s, then twice the previous
/// delay, up to 25 s; each varied by up to 20 %.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Retry {
    /// The number of consecutive failures.
    failures: u32,
}

impl Retry {
    /// Must be called after an answer. The next delay is then `FIRST` again.
    pub fn answered(&mut self) {
        self.failures = 0;
    }

    /// Counts a failure, and returns the delay until the next attempt. `draw` is a random number in
    /// 0..1.
    pub fn failed(&mut self, draw: f64) -> Duration {
        let delay = FIRST.saturating_mul(1 << self.failures.min(16)).min(LONGEST);
        self.failures = self.failures.saturating_add(1);
        varied(delay, JITTER, draw)
    }
}

/// Multiplies a delay by a random factor between `1 - part` and `1 + part`. `draw` is a random
/// number in 0..1.
pub fn varied(delay: Duration, part: f64, draw: f64) -> Duration {
    delay.mul_f64(1.0 + part * (2.0 * draw - 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_thirty_seconds_and_start_again_after_an_answer() {
        let mut retry = Retry::default();
        let millis = |delay: Duration| u64::try_from(delay.as_millis()).unwrap();
        let delays: Vec<u64> = (0..11).map(|_| millis(retry.failed(0.5))).collect();
        assert_eq!(delays, [100, 200, 400, 800, 1600, 3200, 6400, 12_800, 25_000, 25_000, 25_000]);
        assert_eq!((millis(retry.failed(0.0)), millis(retry.failed(1.0))), (20_000, 30_000));
        retry.answered();
        assert_eq!((millis(retry.failed(0.0)), millis(retry.failed(1.0))), (80, 240));
    }

    #[test]
    fn an_outage_of_a_second_is_over_within_two_seconds() {
        let mut retry = Retry::default();
        let attempts = (0..5).scan(Duration::ZERO, |at, _| {
            *at += retry.failed(1.0);
            Some(*at)
        });
        let first_after = attempts.into_iter().find(|at| *at >= Duration::from_secs(1)).unwrap();
        assert!(first_after < Duration::from_secs(2), "{first_after:?}");
    }
}
