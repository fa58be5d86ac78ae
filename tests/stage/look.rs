//! Compares values that running programs report, such as counts in a status. A daemon, an agent or
//! the kernel may report the effect of an action a moment later, so a single read may return an old
//! value. `crate::looks` finds assertions with a single read.

use std::fmt::Debug;
use std::time::Duration;

use crate::{eventually, within};

/// A value that only the methods of this type read, possibly more than once.
#[must_use = "claim something: `becomes`, `has`, `matches`, `stays`"]
pub struct Look<F>(F);

/// A value to compare. `fact` reads the value.
pub fn look<T: Debug, F: FnMut() -> T>(fact: F) -> Look<F> {
    Look(fact)
}

impl<T: Debug, F: FnMut() -> T> Look<F> {
    /// Reads until the result is exactly `value`. A counter above `value` never returns to `value`,
    /// so the test fails.
    #[track_caller]
    pub fn becomes<V: Debug>(self, value: V) -> T
    where
        T: PartialEq<V>,
    {
        eventually(&format!("{value:?}"), self.0, |seen| *seen == value)
    }

    /// Reads until a part of the result is exactly `value`.
    #[track_caller]
    pub fn has<P: PartialEq<V>, V: Debug>(self, part: impl Fn(&T) -> P, value: V) -> T {
        eventually(&format!("{value:?}"), self.0, |seen| part(seen) == value)
    }

    /// Reads until `holds` is true for the result. `claim` describes the condition in the message
    /// of a failure.
    #[track_caller]
    pub fn matches(self, claim: &str, holds: impl Fn(&T) -> bool) -> T {
        eventually(claim, self.0, holds)
    }

    /// Fails if any result within `time` differs from `value`.
    #[track_caller]
    pub fn stays<V: Debug>(self, value: V, time: Duration)
    where
        T: PartialEq<V>,
    {
        if let Ok(other) = within(time, self.0, |seen| *seen != value) {
            panic!("{value:?} did not stay for {time:?}; seen: {other:?}");
        }
    }

    /// Reads the value once. `reason` states why the value is final at this moment.
    pub fn now(mut self, reason: &str) -> T {
        assert!(!reason.is_empty(), "a single look needs a reason");
        self.0()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A value that grows whenever it is read.
    fn growing() -> Look<impl FnMut() -> u32> {
        let mut value = 0;
        look(move || {
            value += 1;
            value
        })
    }

    #[test]
    fn a_claim_waits_and_returns_the_value_that_fulfils_it() {
        assert_eq!(growing().becomes(3), 3);
        assert_eq!(growing().has(|value| value / 2, 2), 4);
        assert_eq!(growing().matches("the value is above 4", |value| *value > 4), 5);
        assert_eq!(growing().now("each look counts"), 1);
        look(|| 7).stays(7, Duration::from_millis(20));
    }

    #[test]
    fn a_value_that_changes_does_not_stay() {
        let panic = std::panic::catch_unwind(|| growing().stays(1, Duration::from_mins(1)));
        let message = panic.unwrap_err().downcast::<String>().unwrap();
        assert_eq!(*message, "1 did not stay for 60s; seen: 2");
    }
}
