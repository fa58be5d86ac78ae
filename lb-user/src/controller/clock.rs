//! Converts times of events (`Instant`) to times of CLOCK_MONOTONIC (`Duration`), which programs,
//! reports and control laws use.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// One moment as an `Instant` and as a time of CLOCK_MONOTONIC. `Instant` uses this clock, too.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    at: Instant,
    monotonic: Duration,
}

impl Clock {
    /// `monotonic` is the CLOCK_MONOTONIC time at the moment `at`.
    pub const fn new(at: Instant, monotonic: Duration) -> Self {
        Self { at, monotonic }
    }

    /// The CLOCK_MONOTONIC time at the moment `at`, which must not be before the moment given to
    /// [`Self::new`].
    pub fn monotonic(self, at: Instant) -> Duration {
        self.monotonic + at.saturating_duration_since(self.at)
    }
}

/// A time in seconds since 1970; 0 for an earlier time.
pub fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
