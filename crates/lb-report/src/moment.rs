//! The start time of tests.

use std::time::Instant;

/// An arbitrary moment from which a test counts; only differences of times affect results.
pub fn moment() -> Instant {
    Instant::now()
}
