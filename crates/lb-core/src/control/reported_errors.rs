//! Converts the errors that a backend reports into recent errors of this client task's flows to the
//! backend. `p2c` and `least-loaded` treat recent errors as open flows. Without these errors, a
//! backend that answers every request with an error at once would have few open flows, appear idle,
//! and receive all connects ("Site Reliability Engineering", chapter 20).
//!
//! If the task starts R flows per second to the backend, and the backend reports a share S of
//! errors, R x S recent errors are added per second. Recent errors halve after each half-life H
//! (`error_decay`), so on average they add as much load as R x S x H / ln 2 open flows.

use super::ReceivedReport;

/// The reported errors of one backend.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReportedErrors {
    /// The number of flows started to the backend until the last tick, modulo 2^32; `None` before
    /// the first tick.
    chosen: Option<u32>,
    /// The fraction of an error that has not been added yet.
    rest: f64,
}

impl ReportedErrors {
    /// The share of the flows to a backend that are treated as errors, at most 1; `None` if its
    /// report contains no errors, or is not recent.
    pub fn share(report: &ReceivedReport, now: std::time::Duration) -> Option<f64> {
        let share = report.load.error_share().filter(|_| report.is_recent(now))?;
        (share > 0.0).then(|| share.min(1.0))
    }

    /// The number of recent errors to add. `chosen`: the number of flows started to the backend
    /// until now, modulo 2^32. `share`: see [`ReportedErrors::share`].
    pub fn tick(&mut self, chosen: u32, share: f64) -> u32 {
        let flows = self.chosen.replace(chosen).map_or(0, |before| chosen.wrapping_sub(before));
        // The number is limited to a million: no other backend has as many open flows, so a larger
        // number would change no choice.
        self.rest += f64::from(flows.min(1 << 20)) * share;
        let whole = self.rest.floor();
        self.rest -= whole;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 2^20 + 1")]
        let whole = whole as u32;
        whole
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lb_common::abi::RecentErrors;
    use lb_common::load::{HalfLife, decayed, with_more};

    use super::*;
    use crate::reports::ReportedLoad;

    fn report(qps: Option<u32>, eps: Option<u32>) -> ReceivedReport {
        let load = ReportedLoad { qps, eps, window: Duration::from_secs(1), ..ReportedLoad::default() };
        ReceivedReport { load, at: Duration::from_secs(10), interval: Duration::from_secs(1) }
    }

    #[test]
    fn the_share_is_errors_per_request_of_a_recent_report() {
        let share = |qps, eps, now| ReportedErrors::share(&report(qps, eps), Duration::from_secs(now));
        assert_eq!(share(Some(4_000), Some(1_000), 10), Some(0.25));
        assert_eq!(share(Some(1_000), Some(3_000), 10), Some(1.0), "the backend counts only served requests");
        assert_eq!(share(Some(0), Some(1), 10), Some(1.0));
        for (qps, eps) in [(Some(1_000), Some(0)), (None, Some(1)), (Some(1), None), (Some(0), Some(0))] {
            assert_eq!(share(qps, eps, 10), None, "qps {qps:?}, eps {eps:?}");
        }
        assert_eq!(share(Some(1_000), Some(1_000), 60), None, "an old report has no share of errors");
    }

    #[test]
    fn flows_before_the_first_tick_are_not_counted_and_fractions_add_up() {
        let mut errors = ReportedErrors::default();
        let ticks = [(100, 0.3), (101, 0.3), (102, 0.3), (103, 0.3), (104, 0.3), (114, 0.3)];
        assert_eq!(ticks.map(|(chosen, share)| errors.tick(chosen, share)), [0, 0, 0, 0, 1, 3]);
        assert_eq!(errors.tick(u32::MAX, 1.0), 1 << 20, "the number of errors is limited");
    }

    #[test]
    fn recent_errors_settle_at_rate_times_half_life_over_ln_2() {
        for (rate, share, half_life) in [(50, 1.0, 5_u32), (100, 0.2, 5), (7, 0.5, 20)] {
            let ticks_of = |second: u32| second * 1_000;
            let half_life_ticks = HalfLife::new(ticks_of(half_life));
            let (mut reported, mut word, mut chosen, mut sum) =
                (ReportedErrors::default(), RecentErrors { count: 0, since: 0 }, 0, 0);
            let (first, last) = (20 * half_life, 40 * half_life);
            for second in 0..last {
                chosen += rate;
                word = with_more(word, reported.tick(chosen, share), ticks_of(second), half_life_ticks);
                let weighs = decayed(word, ticks_of(second), half_life_ticks);
                sum += if second >= first { weighs } else { 0 };
            }
            let mean = f64::from(sum) / f64::from(last - first);
            let expected = f64::from(rate) * share * f64::from(half_life) / std::f64::consts::LN_2;
            // Errors halve in steps, so the mean is 1.5 x rate x half-life instead of 1.44.
            assert!((mean / expected - 1.0).abs() < 0.15, "mean {mean}, expected {expected}");
        }
    }
}
