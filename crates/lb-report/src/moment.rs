//! When tests begin.

use std::time::Instant;

/// Some moment, from which a test counts: only differences of times decide anything.
pub fn moment() -> Instant {
    Instant::now()
}
