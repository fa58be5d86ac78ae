//! Converts the clock of events to CLOCK_MONOTONIC as a number, which programs, reports and laws of
//! control use.

use std::time::{Duration, Instant};

/// One moment by both. `Instant` is the same clock.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    at: Instant,
    monotonic: Duration,
}

impl Clock {
    /// `monotonic`: the time by CLOCK_MONOTONIC at the moment `at`.
    pub const fn new(at: Instant, monotonic: Duration) -> Self {
        Self { at, monotonic }
    }

    /// The time by CLOCK_MONOTONIC at a moment that is not before the one given to [`Self::new`].
    pub fn monotonic(self, at: Instant) -> Duration {
        self.monotonic + at.saturating_duration_since(self.at)
    }
}
