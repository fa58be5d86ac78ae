//! Finds process groups and sessions, each of which is identified by its leader.
//!
//! A leader outside of this process's PID namespace has no number in this namespace. A process has
//! such a leader if it was started in a container from outside. The kernel then returns 0, on which
//! rustix panics, so this module calls libc.

use rustix::process::Pid;

/// The leader of this process's own group, if it has a number in this PID namespace.
pub fn own_group() -> Option<Pid> {
    // SAFETY: getpgrp(2) takes no argument and returns a number.
    Pid::from_raw(unsafe { libc::getpgrp() })
}

/// The leader of a process's group, if the process exists and the leader has a number in this PID
/// namespace.
pub fn group_of(process: Pid) -> Option<Pid> {
    // SAFETY: getpgid(2) takes a number and returns a number.
    leader(unsafe { libc::getpgid(process.as_raw_nonzero().get()) })
}

/// The leader of a process's session, or of this process's own session for `None`. Returns `None`
/// in the same cases as [`group_of`].
pub fn session_of(process: Option<Pid>) -> Option<Pid> {
    let process = process.map_or(0, |process| process.as_raw_nonzero().get());
    // SAFETY: getsid(2) takes a number and returns a number.
    leader(unsafe { libc::getsid(process) })
}

fn leader(result: i32) -> Option<Pid> {
    // A negative number is an error.
    Pid::from_raw(result.max(0))
}
