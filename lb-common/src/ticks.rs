//! Time as the programs store it: ticks of 2^20 ns (1.05 ms) in 32 bits, which wrap around after 52
//! days. The module reads no clock.

/// Binary logarithm of the nanoseconds in a tick.
pub const TICK_LOG2: u32 = 20;

/// The tick that contains a time.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "ticks wrap around")]
pub const fn tick(ns: u64) -> u32 {
    (ns >> TICK_LOG2) as u32
}

/// Whether `ticks` ticks have passed since `start_ns`. The result is false if the start is in the
/// future: after an upgrade the programs' clock may be a tick behind the clock of the previous
/// programs.
#[inline(always)]
pub const fn have_passed(ticks: u32, start_ns: u64, now_ns: u64) -> bool {
    now_ns >= start_ns.wrapping_add((ticks as u64) << TICK_LOG2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elapsed_time_neither_wraps_nor_runs_backwards() {
        const DAY_NS: u64 = 86_400_000_000_000;
        const TICK_NS: u64 = 1 << TICK_LOG2;
        let start = 5 * TICK_NS + 7;
        assert!(!have_passed(3, start, start + 3 * TICK_NS - 1));
        assert!(have_passed(3, start, start + 3 * TICK_NS));
        assert!(!have_passed(3, start, start - TICK_NS), "the clock is a tick behind");
        for days in [1, 26, 30, 52, 53, 400] {
            assert!(have_passed(3, start, start + days * DAY_NS), "{days} days");
        }
    }
}
