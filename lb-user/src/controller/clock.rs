//! Converts times of events (`Instant`) to CLOCK_MONOTONIC as a number. Programs, reports and
//! control laws use that number.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// One moment as an `Instant` and as a number. `Instant` is CLOCK_MONOTONIC, too.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    at: Instant,
    monotonic: Duration,
}

impl Clock {
    /// `monotonic` is the time by CLOCK_MONOTONIC at the moment `at`.
    pub const fn new(at: Instant, monotonic: Duration) -> Self {
        Self { at, monotonic }
    }

    /// The time by CLOCK_MONOTONIC at the moment `at`, which must not be before the moment given to
    /// [`Self::new`].
    pub fn monotonic(self, at: Instant) -> Duration {
        self.monotonic + at.saturating_duration_since(self.at)
    }
}

/// A time in seconds since 1970; 0 for an earlier time.
pub fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
