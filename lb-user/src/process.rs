//! The names of processes that the kernel programs have seen, as far as these are still there.
//!
//! Numbers of processes are used again: a name is told only of a process that is old enough. And the programs have the
//! numbers of the first process namespace; in another one they would be read as other processes.

use std::fs;
use std::os::unix::fs::MetadataExt;

use rustix::time::{ClockId, Timespec, clock_gettime};

/// A process that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its name. Anybody may give himself any: what a terminal would obey is written out.
    name: String,
    /// Not before this, by `CLOCK_MONOTONIC`.
    started_ns: u64,
}

/// The process of this number, if it runs and is to be seen from here.
pub fn process(pid: u32) -> Option<Process> {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let ticks = rustix::param::clock_ticks_per_second().max(1);
    let started = u128::from(started(&stat)?) * 1_000_000_000 / u128::from(ticks);
    // Kernel fact: it counts from the boot on, suspended time included.
    let suspended = now_ns(ClockId::Boottime).saturating_sub(monotonic_ns());
    let started_ns = u64::try_from(started).ok()?.saturating_sub(suspended);
    Some(Process { name: name.trim_end_matches('\n').escape_debug().to_string(), started_ns })
}

impl Process {
    /// Its name, unless it began after `ns`.
    pub fn name_at(&self, ns: u64) -> Option<&str> {
        /// Both are told to a tick of the kernel's clock, which is 10 ms at most.
        const TICKS_NS: u64 = 20_000_000;
        (self.started_ns <= ns.saturating_add(TICKS_NS)).then_some(self.name.as_str())
    }
}

/// Whether the numbers that the kernel programs see are those of `/proc`.
pub fn numbers_are_ours() -> bool {
    /// The kernel's number of the first process namespace: `PROC_PID_INIT_INO`.
    const FIRST: u64 = 0xeffffffc;
    fs::metadata("/proc/self/ns/pid").is_ok_and(|namespace| namespace.ino() == FIRST)
}

/// `CLOCK_MONOTONIC`, as the kernel programs have it.
pub fn monotonic_ns() -> u64 {
    now_ns(ClockId::Monotonic)
}

fn now_ns(clock: ClockId) -> u64 {
    nanoseconds(clock_gettime(clock))
}

/// A time of a clock that is never negative.
pub fn nanoseconds(Timespec { tv_sec, tv_nsec }: Timespec) -> u64 {
    let (seconds, nanoseconds) = (u64::try_from(tv_sec).unwrap_or(0), u64::try_from(tv_nsec).unwrap_or(0));
    seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds)
}

/// When a process began, in clock ticks: the 22nd field. The second is its name in brackets, with anything in it.
fn started(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.split(' ').nth(22 - 3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_anything_in_it_hides_nothing() {
        let rest = "S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21";
        assert_eq!(started(&format!("7 (a) b (c) {rest}")), Some(4711));
        assert_eq!(started("7 (a"), None);
    }

    #[test]
    fn this_process_has_a_name_since_it_began() {
        let us = process(std::process::id()).unwrap();
        let now = monotonic_ns();
        assert!(us.started_ns <= now && us.name_at(now).is_some());
        assert_eq!(
            us.name_at(us.started_ns.saturating_sub(1_000_000_000)),
            None,
            "the one before had the number"
        );
        assert_eq!(process(u32::MAX), None);
    }
}
