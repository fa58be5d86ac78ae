//! The pauses before retries of a failed action: one second, then twice as long after each failure,
//! up to a minute.
//!
//! A lasting fault, such as a lack of descriptors or a missing privilege, must neither fill the log
//! nor load the kernel. After the end of the fault, the action must succeed without an operator.
//! This module reads no clock.

use std::ops::Add;
use std::time::{Duration, Instant};

/// The pause after the first failure.
const SHORTEST: Duration = Duration::from_secs(1);
/// The longest pause, and therefore the longest time from the end of a fault to the retry that
/// succeeds.
const LONGEST: Duration = Duration::from_secs(60);

/// An action that is retried until it succeeds. `T` is a point in time on any clock.
#[derive(Debug)]
pub struct Backoff<T = Instant> {
    /// The time of the next attempt, and the pause before it; `None` after a success.
    next: Option<(T, Duration)>,
    /// The last error; `None` after a success.
    reported: Option<String>,
}

impl<T> Default for Backoff<T> {
    fn default() -> Self {
        Self { next: None, reported: None }
    }
}

impl<T: Copy + Ord + Add<Duration, Output = T>> Backoff<T> {
    /// Whether the action may be retried now.
    pub fn is_due(&self, now: T) -> bool {
        self.next.is_none_or(|(due, _)| due <= now)
    }

    /// Records that the action succeeded.
    pub fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// Allows an immediate retry, because something has changed.
    pub fn retry_now(&mut self) {
        self.next = None;
    }

    /// The error of the last attempt; `None` if it succeeded.
    pub fn error(&self) -> Option<&str> {
        self.reported.as_deref()
    }

    /// Records a failure. Returns whether the caller should report it: `false` if the last error
    /// had the same text.
    pub fn failed(&mut self, now: T, error: &str) -> bool {
        let pause = self.next.map_or(SHORTEST, |(_, pause)| (2 * pause).min(LONGEST));
        self.next = Some((now + pause, pause));
        let is_new = self.reported.as_deref() != Some(error);
        self.reported = Some(error.to_owned());
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn pauses_grow_to_a_minute_and_end_with_a_success() {
        let mut backoff = Backoff::<Duration>::default();
        let (mut now, mut pauses) = (at(100), Vec::new());
        for _ in 0..8 {
            backoff.failed(now, "no descriptor is free");
            let pause = (1..).find(|pause| backoff.is_due(now + at(*pause))).unwrap();
            pauses.push(pause);
            now += at(pause);
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        backoff.succeeded();
        assert!(backoff.is_due(at(0)));
        backoff.failed(at(0), "no descriptor is free");
        assert!(!backoff.is_due(at(0)) && backoff.is_due(at(1)));
    }

    #[test]
    fn an_error_is_reported_again_only_after_another_error_or_a_success() {
        let mut backoff = Backoff::<Duration>::default();
        let errors = ["first", "first", "second", "second", "first"];
        assert_eq!(errors.map(|error| backoff.failed(at(0), error)), [true, false, true, false, true]);
        backoff.succeeded();
        assert!(backoff.failed(at(0), "first"));
        backoff.retry_now();
        assert!(backoff.is_due(at(0)) && !backoff.failed(at(0), "first"));
    }
}
