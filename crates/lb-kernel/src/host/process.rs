//! The names of processes whose PIDs the kernel programs have recorded, if the processes are still
//! running.
//!
//! PIDs are reused, so a name is returned only if the process began before the programs recorded
//! its PID. The recorded PIDs are those of the initial PID namespace; in another namespace the same
//! PIDs belong to other processes.

use std::fs;
use std::os::unix::fs::MetadataExt;

use rustix::time::ClockId;

use crate::sys::clock::{monotonic_ns, now_ns};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// The process's name, as [`name`] returns it.
    name: String,
    /// The earliest time at which the process may have begun, in nanoseconds of `CLOCK_MONOTONIC`.
    started_ns: u64,
}

/// The process with this PID, if it runs and is visible to this process.
pub fn process(pid: u32) -> Option<Process> {
    Some(Process { name: name(pid)?, started_ns: monotonic_of_start(start_of(pid)?) })
}

/// The earliest time at which a process may have begun, in nanoseconds of `CLOCK_MONOTONIC`.
/// `start`: the start of the process in clock ticks since the boot.
pub fn monotonic_of_start(start: u64) -> u64 {
    let ticks = rustix::param::clock_ticks_per_second().max(1);
    let started = u128::from(start) * 1_000_000_000 / u128::from(ticks);
    // Kernel fact: the ticks are counted from the boot and include suspended time.
    let suspended = now_ns(ClockId::Boottime).saturating_sub(monotonic_ns());
    u64::try_from(started).unwrap_or(u64::MAX).saturating_sub(suspended)
}

/// The name of the process that has this PID now, if there is one. A name may contain any bytes, so
/// control characters of terminals and line breaks are escaped.
pub fn name(pid: u32) -> Option<String> {
    Some(printable(&fs::read(format!("/proc/{pid}/comm")).ok()?))
}

fn printable(comm: &[u8]) -> String {
    // The kernel appends a line break to the name; earlier line breaks are part of the name.
    String::from_utf8_lossy(comm.strip_suffix(b"\n").unwrap_or(comm)).escape_debug().to_string()
}

impl Process {
    /// The process's name, unless the process began after `ns`, in nanoseconds of
    /// `CLOCK_MONOTONIC`.
    pub fn name_at(&self, ns: u64) -> Option<&str> {
        /// The sum of the errors of the start time and of `ns`: each time is exact to one tick of
        /// the kernel's clock, and a tick is at most 10 ms long.
        const TICKS_NS: u64 = 20_000_000;
        (self.started_ns <= ns.saturating_add(TICKS_NS)).then_some(self.name.as_str())
    }
}

/// Whether the PIDs in `/proc` are those that the kernel programs record. This is the case if this
/// process is in the initial PID namespace.
pub fn numbers_are_ours() -> bool {
    /// The inode of the initial PID namespace: `PROC_PID_INIT_INO`.
    const FIRST: u64 = 0xeffffffc;
    fs::metadata("/proc/self/ns/pid").is_ok_and(|namespace| namespace.ino() == FIRST)
}

/// When the process with this PID began, in clock ticks since the boot; `None` if there is no such
/// process.
pub(crate) fn start_of(pid: u32) -> Option<u64> {
    started(&String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/stat")).ok()?))
}

/// When a process began, in clock ticks: the 22nd field of its `stat` file. The second field is the
/// process's name in brackets, which may contain any characters.
fn started(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.split(' ').nth(22 - 3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_characters_in_a_name_leave_the_start_readable() {
        let rest = "S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21";
        assert_eq!(started(&format!("7 (a) b (c) {rest}")), Some(4711));
        assert_eq!(started("7 (a"), None);
    }

    #[test]
    fn control_characters_in_names_are_escaped() {
        assert_eq!(printable(b"web server\n"), "web server");
        assert_eq!(printable(b"\x1b[2Jx\nok  y\n"), "\\u{1b}[2Jx\\nok  y");
        assert_eq!(printable(b"a\xffb\n"), "a\u{fffd}b");
        assert_eq!(printable("ä\u{202e}\n".as_bytes()), "ä\\u{202e}");
    }

    #[test]
    fn a_process_has_its_name_only_since_it_began() {
        let us = process(std::process::id()).unwrap();
        let now = monotonic_ns();
        assert!(us.started_ns <= now && us.name_at(now).is_some());
        assert_eq!(
            us.name_at(us.started_ns.saturating_sub(1_000_000_000)),
            None,
            "an earlier process had the PID"
        );
        assert_eq!(process(u32::MAX), None);
    }
}
