//! The kernel's clocks in nanoseconds, including the clock of the kernel programs.

use rustix::time::{ClockId, Timespec, clock_gettime};

/// `CLOCK_MONOTONIC`, the clock of the kernel programs.
pub fn monotonic_ns() -> u64 {
    now_ns(ClockId::Monotonic)
}

/// The time of a clock in nanoseconds. A negative time is treated as 0.
pub fn now_ns(clock: ClockId) -> u64 {
    nanoseconds(clock_gettime(clock))
}

/// Converts a time to nanoseconds. A negative time is treated as 0.
pub fn nanoseconds(Timespec { tv_sec, tv_nsec }: Timespec) -> u64 {
    let (seconds, nanoseconds) = (u64::try_from(tv_sec).unwrap_or(0), u64::try_from(tv_nsec).unwrap_or(0));
    seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds)
}
