//! The clock of the programs: `CLOCK_MONOTONIC`.

use aya_ebpf::helpers::generated as helper;
use lb_common::abi::TICK_LOG2;

use crate::maps::HAS_COARSE_CLOCK;

/// Nanoseconds, to the kernel's tick (a few milliseconds) where it has a coarse clock, which reads no hardware.
#[inline(always)]
pub fn now_ns() -> u64 {
    // SAFETY: the helpers take nothing.
    unsafe {
        if HAS_COARSE_CLOCK.load() != 0 {
            helper::bpf_ktime_get_coarse_ns()
        } else {
            helper::bpf_ktime_get_ns()
        }
    }
}

/// The tick of a time, see [`TICK_LOG2`].
#[inline(always)]
pub fn tick(ns: u64) -> u32 {
    (ns >> TICK_LOG2) as u32
}
