//! Statistics of one service's flows: their lifetime, and the part that fails at each backend.

use std::time::Duration;

use super::TICK;

/// Statistics of one service's flows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flows {
    /// The mean lifetime of a flow: open flows divided by connects per second. The lifetime matters
    /// because weights act only on new flows.
    pub life: Duration,
}

/// Lifetimes are averaged over this many seconds, or over one lifetime if that is longer.
const LEAST_SECONDS: f64 = 10.0;

/// A lifetime that is longer than a day, or unknown, is treated as a day.
const MOST_SECONDS: f64 = 86_400.0;

/// Each tick multiplies counts by this number, so that they cover about the last minute.
const LATE: f64 = 0.98;

/// Each tick multiplies the counts for lifetimes by this number, so that they cover about the last
/// ten seconds. So lifetimes fall soon after a queue has emptied.
const NOW: f64 = 0.9;

/// The smallest number of recent flows from which the part of failed flows is computed.
const ENOUGH: f64 = 20.0;

/// Lifetimes are computed only if at least this many flows began in about the last ten seconds, so
/// that a single long flow does not determine the result.
const ENOUGH_NOW: f64 = 5.0;

/// Measures the mean lifetime of flows from the numbers of new and open flows (Little's law).
#[derive(Clone, Copy, Debug, Default)]
pub struct Lives {
    begun: f64,
    open: f64,
    seconds: f64,
}

impl Lives {
    /// Adds the number of flows that began in the last [`TICK`], and the number of open flows.
    pub fn tick(&mut self, begun: f64, open: f64) {
        // Both numbers are smoothed alike, so their ratio is right from the first tick on.
        let part = TICK.as_secs_f64() / LEAST_SECONDS.max(self.seconds);
        self.begun += (begun - self.begun) * part;
        self.open += (open - self.open) * part;
        self.seconds = if self.open == 0.0 { 0.0 } else { (self.open / self.begun).min(MOST_SECONDS) };
    }

    /// The measured lifetime.
    pub fn flows(&self) -> Flows {
        Flows { life: Duration::from_secs_f64(self.seconds) }
    }
}

/// A service becomes idle after `UNUSED` seconds without a flow, and stops being idle after `USED`
/// different seconds with a flow. The daemon requests reports often from the first of these
/// seconds on ([`Activity::is_used`]), so reports have arrived when the service stops being idle.
const UNUSED: u32 = 15;
const USED: u32 = 5;

/// Determines whether a service is idle.
#[derive(Clone, Copy, Debug, Default)]
pub struct Activity {
    /// Seconds with flows since the service was last idle, and seconds since the last flow.
    used: u32,
    unused: u32,
}

impl Activity {
    /// Adds the last [`TICK`]. `is_used`: whether any flow began in this tick or is open.
    pub fn tick(&mut self, is_used: bool) {
        if is_used {
            (self.used, self.unused) = (self.used.saturating_add(1), 0);
        } else {
            self.unused = self.unused.saturating_add(1);
        }
        if self.unused >= UNUSED {
            self.used = 0;
        }
    }

    /// Whether the service is idle: its backends are not expected to have reported lately.
    pub const fn is_idle(self) -> bool {
        self.used < USED
    }

    /// Whether the service has had a flow within the last `UNUSED` seconds.
    pub const fn is_used(self) -> bool {
        self.used > 0
    }
}

/// The mean lifetime of flows to one backend, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Life {
    /// The lifetime from the flows that were open in about the last ten seconds.
    pub usual: f64,
    /// The smaller of `usual` and the lifetime from the flows that are open now. So a burst of open
    /// flows does not increase the result at once, but the result falls at once when flows have
    /// ended.
    pub now: f64,
}

/// Recent flows to one backend: how many began, how many failed, and how many are open.
#[derive(Clone, Copy, Debug, Default)]
pub struct OfLate {
    begun: f64,
    failed: f64,
    /// The flows that began in about the last ten seconds, and the sum of the flows that were open
    /// at each tick of that time.
    begun_now: f64,
    open_now: f64,
    /// The flows that were open at the last tick.
    open: f64,
}

impl OfLate {
    /// Adds how many flows have begun and failed since the last call. [`OfLate::tick`] reduces
    /// older counts.
    pub fn add(&mut self, begun: f64, failed: f64) {
        self.begun += begun;
        self.failed += failed;
        self.begun_now += begun;
    }

    /// Notes that a [`TICK`] has passed, and that `open` flows are open.
    pub fn tick(&mut self, open: f64) {
        self.begun *= LATE;
        self.failed *= LATE;
        self.begun_now *= NOW;
        self.open_now = (self.open_now + open) * NOW;
        self.open = open;
    }

    /// The part of the flows that failed, 0 to 1; `None` if too few began.
    pub fn errors(&self) -> Option<f64> {
        // More flows may fail than begin, because flows that began long ago may fail now.
        self.has_enough().then(|| (self.failed / self.begun).min(1.0))
    }

    /// The lifetime of flows (Little's law); `None` if too few began.
    pub fn life(&self) -> Option<Life> {
        let is_known = self.has_enough() && self.begun_now >= ENOUGH_NOW;
        let of = |open: f64| open * TICK.as_secs_f64() / self.begun_now;
        let at_last = self.open * (NOW / (1.0 - NOW));
        is_known.then(|| Life { usual: of(self.open_now), now: of(self.open_now.min(at_last)) })
    }

    fn has_enough(&self) -> bool {
        self.begun >= ENOUGH
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lifetime_is_open_flows_divided_by_new_flows_per_second() {
        let mut lives = Lives::default();
        assert_eq!(lives.flows().life, Duration::ZERO);
        for _ in 0..1_000 {
            lives.tick(10.0, 300.0);
        }
        assert!((lives.flows().life.as_secs_f64() - 30.0).abs() < 0.1, "{lives:?}");
        // One tick is enough for the right ratio.
        let mut lives = Lives::default();
        lives.tick(5.0, 600.0);
        assert!((lives.flows().life.as_secs_f64() - 120.0).abs() < 0.1, "{lives:?}");
    }

    #[test]
    fn an_unknown_lifetime_is_treated_as_a_day() {
        let mut lives = Lives::default();
        lives.tick(0.0, 5.0);
        assert_eq!(lives.flows().life, Duration::from_hours(24));
        lives.tick(0.0, 0.0);
        assert!(lives.flows().life <= Duration::from_hours(24));
    }

    #[test]
    fn a_rarely_used_service_is_idle() {
        let mut activity = Activity::default();
        let mut after = |ticks: &[(u32, bool)]| {
            for (times, is_used) in ticks {
                (0..*times).for_each(|_| activity.tick(*is_used));
            }
            activity.is_idle()
        };
        assert!(after(&[]) && after(&[(4, true)]));
        assert!(!after(&[(1, true)]) && !after(&[(14, false)]), "a service with a recent flow is not idle");
        assert!(after(&[(1, false)]) && after(&[(4, true)]));
        assert!(!after(&[(10, false), (1, true), (10, false), (1, true)]), "occasional flows are enough");
    }

    #[test]
    fn an_error_share_needs_enough_recent_flows() {
        let mut late = OfLate::default();
        late.add(19.0, 19.0);
        assert_eq!(late.errors(), None);
        late.add(1.0, 9.0);
        assert_eq!(late.errors(), Some(1.0), "more failures than flows");
        for _ in 0..60 {
            late.tick(0.0);
            late.add(10.0, 0.0);
        }
        assert!(late.errors().is_some_and(|errors| errors < 0.05), "{late:?}");
        for _ in 0..200 {
            late.tick(0.0);
        }
        assert_eq!(late.errors(), None);
    }

    #[test]
    fn the_lifetime_of_a_backend_follows_its_open_flows() {
        let mut late = OfLate::default();
        assert_eq!(late.life(), None);
        for _ in 0..300 {
            late.add(10.0, 0.0);
            late.tick(25.0);
        }
        let is = |late: &OfLate, usual: f64, now: f64| {
            let life = late.life().expect("enough flows have begun");
            assert!((life.usual - usual).abs() < 0.15 && (life.now - now).abs() < 0.01, "{life:?}");
        };
        is(&late, 2.5, 2.5);
        // `now` falls at once when the queue has emptied, and does not rise at once when a queue
        // appears.
        late.add(10.0, 0.0);
        late.tick(0.5);
        is(&late, 2.25, 0.05);
        for _ in 0..100 {
            late.add(10.0, 0.0);
            late.tick(0.5);
        }
        late.add(10.0, 0.0);
        late.tick(25.0);
        is(&late, 0.295, 0.295);
        for _ in 0..100 {
            late.add(0.1, 0.0);
            late.tick(25.0);
        }
        assert_eq!(late.life(), None, "too few flows have begun");
    }
}
