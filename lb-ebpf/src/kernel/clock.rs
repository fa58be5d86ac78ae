//! The clock of the programs: `CLOCK_MONOTONIC`, to the kernel's tick.

use aya_ebpf::helpers::generated as helper;
use lb_common::ticks::have_passed;

use crate::globals::{FIRST_JIFFY_NS, JIFFY_NS};

/// Nanoseconds, to the kernel's tick (a few milliseconds). The kernel puts its count of ticks in place of this helper:
/// a load and a multiplication, where even the coarse clock is a call of some twenty nanoseconds.
#[inline(always)]
pub fn now_ns() -> u64 {
    // SAFETY: the helper takes nothing.
    let jiffies = unsafe { helper::bpf_jiffies64() };
    jiffies.wrapping_mul(JIFFY_NS.load()).wrapping_add(FIRST_JIFFY_NS.load())
}

/// Whether so many ticks have passed since a time.
#[inline(always)]
pub fn is_past(start_ns: u64, ticks: u32) -> bool {
    have_passed(ticks, start_ns, now_ns())
}
