//! How the flows of a row behave: how long one lives, and which part of those to a backend fails.

use std::time::Duration;

use super::TICK;

/// How the flows of a row behave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flows {
    /// How long one lives on average: open flows over connects a second. Weights act on new ones alone.
    pub life: Duration,
}

/// The shortest time over which the life of a flow is measured; otherwise over one life.
const LEAST_SECONDS: f64 = 10.0;

/// A life that is longer than a day, or that no flow has shown, counts as a day.
const MOST_SECONDS: f64 = 86_400.0;

/// What is left after one tick of what was counted: the last minute or so counts.
const LATE: f64 = 0.98;

/// The same of what tells how long flows live: the last ten seconds. Whose queue is gone shall be seen soon.
const NOW: f64 = 0.9;

/// So many flows show what part of them fails.
const ENOUGH: f64 = 20.0;

/// So many of the last seconds show how long they live: one that takes long by itself shall not count for all.
const ENOUGH_NOW: f64 = 5.0;

/// How long flows live, by how many begin and how many are open (Little's law).
#[derive(Clone, Copy, Debug, Default)]
pub struct Lives {
    begun: f64,
    open: f64,
    seconds: f64,
}

impl Lives {
    /// Takes in how many flows have begun in the last [`TICK`], and how many are open.
    pub fn tick(&mut self, begun: f64, open: f64) {
        // Both are smoothed alike, so their ratio is right from the first look on.
        let part = TICK.as_secs_f64() / LEAST_SECONDS.max(self.seconds);
        self.begun += (begun - self.begun) * part;
        self.open += (open - self.open) * part;
        self.seconds = if self.open == 0.0 { 0.0 } else { (self.open / self.begun).min(MOST_SECONDS) };
    }

    /// By that.
    pub fn flows(&self) -> Flows {
        Flows { life: Duration::from_secs_f64(self.seconds) }
    }
}

/// A service is idle after so many seconds without a flow, and no longer after so many with one: by then the daemon has seen that it is
/// used, and has its backends asked often.
const UNUSED: u32 = 15;
const USED: u32 = 5;

/// Whether a task uses a service, or that is idle.
#[derive(Clone, Copy, Debug, Default)]
pub struct Activity {
    /// Seconds with flows since it was idle, and those without since the last one with.
    used: u32,
    unused: u32,
}

impl Activity {
    /// Takes in whether any flow has begun in the last [`TICK`] or is open.
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

    /// Whether it hardly does: nobody has to be asked for reports often.
    pub const fn is_idle(self) -> bool {
        self.used < USED
    }
}

/// How long flows to one backend live, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Life {
    /// By those that were open in the last seconds.
    pub usual: f64,
    /// The same, and no more than by those that are open now: what was open for a moment says little, what is open no more nothing.
    pub now: f64,
}

/// Flows to one backend that began of late, how many failed, and how many were open.
#[derive(Clone, Copy, Debug, Default)]
pub struct OfLate {
    begun: f64,
    failed: f64,
    /// Those that began, and those that were open at each tick, of the last seconds.
    begun_now: f64,
    open_now: f64,
    /// Those that were open at the last tick.
    open: f64,
}

impl OfLate {
    /// Takes in how many have begun and failed since the last time, of which each second counts for a little less than the one after.
    pub fn add(&mut self, begun: f64, failed: f64) {
        self.begun += begun;
        self.failed += failed;
        self.begun_now += begun;
    }

    /// A [`TICK`] has passed, and so many are open.
    pub fn tick(&mut self, open: f64) {
        self.begun *= LATE;
        self.failed *= LATE;
        self.begun_now *= NOW;
        self.open_now = (self.open_now + open) * NOW;
        self.open = open;
    }

    /// The part that fails, if there are enough of them.
    pub fn errors(&self) -> Option<f64> {
        // One that began long ago may fail late.
        self.has_enough().then(|| (self.failed / self.begun).min(1.0))
    }

    /// How long one lives (Little's law), if there are enough of them.
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
    fn a_life_is_open_flows_over_those_that_begin() {
        let mut lives = Lives::default();
        assert_eq!(lives.flows().life, Duration::ZERO);
        for _ in 0..1_000 {
            lives.tick(10.0, 300.0);
        }
        assert!((lives.flows().life.as_secs_f64() - 30.0).abs() < 0.1, "{lives:?}");
        // The ratio is right at once.
        let mut lives = Lives::default();
        lives.tick(5.0, 600.0);
        assert!((lives.flows().life.as_secs_f64() - 120.0).abs() < 0.1, "{lives:?}");
    }

    #[test]
    fn a_life_that_nothing_shows_is_a_day() {
        let mut lives = Lives::default();
        lives.tick(0.0, 5.0);
        assert_eq!(lives.flows().life, Duration::from_hours(24));
        lives.tick(0.0, 0.0);
        assert!(lives.flows().life <= Duration::from_hours(24));
    }

    #[test]
    fn a_service_is_idle_that_is_hardly_used() {
        let mut activity = Activity::default();
        let mut after = |ticks: &[(u32, bool)]| {
            for (times, is_used) in ticks {
                (0..*times).for_each(|_| activity.tick(*is_used));
            }
            activity.is_idle()
        };
        assert!(after(&[]) && after(&[(4, true)]));
        assert!(!after(&[(1, true)]) && !after(&[(14, false)]), "it was used just now");
        assert!(after(&[(1, false)]) && after(&[(4, true)]));
        assert!(!after(&[(10, false), (1, true), (10, false), (1, true)]), "now and then is enough");
    }

    #[test]
    fn few_flows_show_no_errors_and_old_ones_are_forgotten() {
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
    fn a_backend_s_flows_live_as_long_as_they_are_open() {
        let mut late = OfLate::default();
        assert_eq!(late.life(), None);
        for _ in 0..300 {
            late.add(10.0, 0.0);
            late.tick(25.0);
        }
        let is = |late: &OfLate, usual: f64, now: f64| {
            let life = late.life().expect("enough begin");
            assert!((life.usual - usual).abs() < 0.15 && (life.now - now).abs() < 0.01, "{life:?}");
        };
        is(&late, 2.5, 2.5);
        // A queue that is gone is forgotten at once; one that is there for a moment is none yet.
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
        assert_eq!(late.life(), None, "too few begin now");
    }
}
