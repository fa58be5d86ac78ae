//! The start time of tests.

use std::time::Instant;

/// An arbitrary start time. Only differences of times affect the results of tests.
pub fn moment() -> Instant {
    Instant::now()
}
