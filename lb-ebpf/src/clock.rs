//! The clock of the programs: `CLOCK_MONOTONIC`, to the kernel's tick.

use aya_ebpf::helpers::generated as helper;
use lb_common::abi::TICK_LOG2;

use crate::maps::{FIRST_JIFFY_NS, JIFFY_NS};

/// Nanoseconds, to the kernel's tick (a few milliseconds). The kernel puts its count of ticks in place of this helper: a
/// load and a multiplication, where even the coarse clock is a call of some twenty nanoseconds.
#[inline(always)]
pub fn now_ns() -> u64 {
    // SAFETY: the helper takes nothing.
    let jiffies = unsafe { helper::bpf_jiffies64() };
    jiffies.wrapping_mul(JIFFY_NS.load()).wrapping_add(FIRST_JIFFY_NS.load())
}

/// The tick of a time, see [`TICK_LOG2`].
#[inline(always)]
pub fn tick(ns: u64) -> u32 {
    (ns >> TICK_LOG2) as u32
}
