//! The clock of the programs: `CLOCK_MONOTONIC`, with the resolution of the kernel's tick.

use aya_ebpf::helpers::generated as helper;
use lb_common::ticks::have_passed;

use crate::globals::{FIRST_JIFFY_NS, JIFFY_NS};

/// The time in nanoseconds, with the resolution of the kernel's tick (a few milliseconds). The
/// kernel replaces the call of the helper `bpf_jiffies64` with a load of its count of ticks, so
/// reading the time requires only a load and a multiplication. Even the helper for the coarse clock
/// would be a call, which takes about twenty nanoseconds.
#[inline(always)]
pub fn now_ns() -> u64 {
    // SAFETY: the helper has no arguments.
    let jiffies = unsafe { helper::bpf_jiffies64() };
    jiffies.wrapping_mul(JIFFY_NS.load()).wrapping_add(FIRST_JIFFY_NS.load())
}

/// Whether `ticks` ticks have passed since `start_ns`.
#[inline(always)]
pub fn is_past(start_ns: u64, ticks: u32) -> bool {
    have_passed(ticks, start_ns, now_ns())
}
