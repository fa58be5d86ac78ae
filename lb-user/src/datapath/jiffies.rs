//! How the kernel's count of ticks, by which its programs tell the time, relates to `CLOCK_MONOTONIC`.
//!
//! Kernel fact: jiffies are counted up when a whole tick of `CLOCK_MONOTONIC` is over (`tick_do_update_jiffies64`), so the
//! two do not drift apart, and stop together while the host is suspended. (A kernel that has neither high resolution timers
//! nor idle ticks off counts timer interrupts instead.) What is reckoned here may be a tick or two early.

use std::io;

use rustix::time::{ClockId, clock_getres, clock_gettime};

use super::sys::{self, Instruction};
use crate::process::nanoseconds;

/// Time as a count of ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Jiffies {
    /// Nanoseconds of a jiffy.
    pub length_ns: u64,
    /// The time of the jiffy with the number 0, by `CLOCK_MONOTONIC` modulo 2^64.
    pub first_ns: u64,
}

const CALL: u8 = 0x85;
const SHIFT_RIGHT: u8 = 0x77;
const EXIT: u8 = 0x95;
const BPF_FUNC_JIFFIES64: i32 = 118;

impl Jiffies {
    /// Asks the kernel.
    ///
    /// # Errors
    /// If it lets us run no program: no privilege, most likely.
    pub fn read() -> io::Result<Self> {
        /// A tick takes milliseconds, and this takes microseconds, unless something else runs in between.
        const ATTEMPTS: u32 = 100;
        // Kernel fact: the resolution of this clock is the tick.
        let length_ns = nanoseconds(clock_getres(ClockId::MonotonicCoarse));
        for _ in 0..ATTEMPTS {
            // The coarse clock goes on with the tick: if it stands still, so did the count.
            let before = nanoseconds(clock_gettime(ClockId::MonotonicCoarse));
            let (high, low) = (part(32)?, part(0)?);
            if nanoseconds(clock_gettime(ClockId::MonotonicCoarse)) == before {
                let jiffies = u64::from(high) << 32 | u64::from(low);
                return Ok(Self {
                    length_ns,
                    first_ns: before.wrapping_sub(jiffies.wrapping_mul(length_ns)),
                });
            }
        }
        Err(io::Error::other("the kernel's tick does not hold still long enough to be counted"))
    }
}

/// 32 bits of the count.
fn part(from: i32) -> io::Result<u32> {
    sys::result_of(&[
        Instruction(CALL, 0, 0, BPF_FUNC_JIFFIES64),
        Instruction(SHIFT_RIGHT, 0, 0, from),
        Instruction(EXIT, 0, 0, 0),
    ])
}
