//! The relation between the kernel's count of ticks (jiffies), from which the kernel programs
//! compute the time, and `CLOCK_MONOTONIC`.
//!
//! Kernel fact: jiffies are incremented when a whole tick of `CLOCK_MONOTONIC` has passed
//! (`tick_do_update_jiffies64`), so the two clocks do not drift apart, and both stop while the host
//! is suspended. (A kernel with neither high resolution timers nor tickless idle counts timer
//! interrupts instead.) Times that are computed from jiffies may be a few ticks early.

use std::io;

use rustix::time::{ClockId, clock_getres, clock_gettime};

use super::clock::nanoseconds;
use crate::sys::{Instruction, TestRun};

/// The parameters for computing a time from a count of ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Jiffies {
    /// The length of a jiffy in nanoseconds.
    pub length_ns: u64,
    /// The time of jiffy number 0, in nanoseconds of `CLOCK_MONOTONIC`, modulo 2^64.
    pub first_ns: u64,
}

const CALL: u8 = 0x85;
const SHIFT_RIGHT: u8 = 0x77;
const EXIT: u8 = 0x95;
const BPF_FUNC_JIFFIES64: i32 = 118;

impl Jiffies {
    /// Measures the parameters.
    ///
    /// # Errors
    /// If the kernel does not permit this process to run a program, usually because of a missing
    /// privilege.
    pub fn read() -> io::Result<Self> {
        /// The number of readings. One reading during which no tick occurs is sufficient; a reading
        /// takes microseconds, and a tick is milliseconds long.
        const READINGS: usize = 16;
        // Kernel fact: the resolution of this clock is the tick.
        let length_ns = nanoseconds(clock_getres(ClockId::MonotonicCoarse));
        let (high, low) = (part(32)?, part(0)?);
        let mut readings = [(0, 0); READINGS];
        for reading in &mut readings {
            let before_ns = nanoseconds(clock_gettime(ClockId::MonotonicCoarse));
            *reading = (before_ns, joined(high.run()?, low.run()?, high.run()?));
        }
        Ok(Self { length_ns, first_ns: first_ns(length_ns, readings) })
    }
}

/// The time of jiffy number 0. Each reading consists of the coarse clock, and of the count of ticks
/// that was read after it.
///
/// Kernel fact: for each tick, the kernel first increments the count and then advances the coarse
/// clock (`tick_do_update_jiffies64`). If ticks occur during a reading, its result is therefore too
/// early, and never too late, even if the reading takes long on a busy host. The latest of several
/// results is the best.
fn first_ns<const N: usize>(length_ns: u64, readings: [(u64, u64); N]) -> u64 {
    let firsts = readings.map(|(ns, jiffies)| ns.wrapping_sub(jiffies.wrapping_mul(length_ns)));
    // Kernel fact: the count begins five minutes before 2^32, so most of these times are negative
    // numbers modulo 2^64.
    let after_some = |first: &u64| first.wrapping_sub(firsts[0]).cast_signed();
    firsts.into_iter().max_by_key(after_some).expect("there is at least one reading")
}

/// The whole count of ticks. The high half was read both before and after the low half, because it
/// may have changed between these readings.
fn joined(high_before: u32, low: u32, high_after: u32) -> u64 {
    let high = if low < 1 << 31 { high_after } else { high_before };
    u64::from(high) << 32 | u64::from(low)
}

/// A program that returns 32 bits of the count, beginning with bit number `from`.
fn part(from: i32) -> io::Result<TestRun> {
    TestRun::load(&[
        Instruction(CALL, 0, 0, BPF_FUNC_JIFFIES64),
        Instruction(SHIFT_RIGHT, 0, 0, from),
        Instruction(EXIT, 0, 0, 0),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK_NS: u64 = 4_000_000;

    /// On a constantly busy host, ticks occur during every reading.
    #[test]
    fn ticks_during_readings_cause_only_a_small_error() {
        let first = 0u64.wrapping_sub(4_294_000_000 * TICK_NS);
        let reading = |ticks_between: u64, at: u64| {
            let jiffies = 4_294_000_000 + at;
            (first.wrapping_add(jiffies * TICK_NS), jiffies + ticks_between)
        };
        assert_eq!(first_ns(TICK_NS, [reading(0, 9), reading(0, 10)]), first);
        assert_eq!(first_ns(TICK_NS, [reading(7, 5), reading(0, 20), reading(3, 30)]), first);
        assert_eq!(first_ns(TICK_NS, [reading(7, 5), reading(2, 20), reading(3, 30)]), first - 2 * TICK_NS);
    }

    #[test]
    fn the_halves_of_the_count_are_joined_consistently() {
        assert_eq!(joined(1, 5, 1), 0x1_0000_0005);
        assert_eq!(joined(0, u32::MAX, 1), 0xffff_ffff, "the low half was read before it overflowed");
        assert_eq!(joined(0, 0, 1), 0x1_0000_0000, "the low half was read after it overflowed");
    }
}
