//! The clock of events as the kernel tells it: programs and reports have CLOCK_MONOTONIC as a number, and so do laws of control.

use std::time::{Duration, Instant};

/// One moment by both. `Instant` is the same clock.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    at: Instant,
    monotonic: Duration,
}

impl Clock {
    /// Of a moment, and what CLOCK_MONOTONIC said then.
    pub const fn new(at: Instant, monotonic: Duration) -> Self {
        Self { at, monotonic }
    }

    /// What CLOCK_MONOTONIC says at a moment that is not before that.
    pub fn monotonic(self, at: Instant) -> Duration {
        self.monotonic + at.saturating_duration_since(self.at)
    }
}
