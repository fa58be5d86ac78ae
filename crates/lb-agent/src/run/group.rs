//! Process groups and sessions, by their leaders.
//!
//! A leader outside of this process's PID namespace has no number here. This happens if the process
//! was started in a container from outside. The kernel then returns 0, for which rustix panics.

use rustix::process::Pid;

/// The leader of this process's own group, if it has a number here.
pub fn own_group() -> Option<Pid> {
    // SAFETY: takes no argument and returns a number.
    Pid::from_raw(unsafe { libc::getpgrp() })
}

/// The leader of a process's group, if the process exists and the leader has a number here.
pub fn group_of(process: Pid) -> Option<Pid> {
    // SAFETY: takes a number and returns one.
    leader(unsafe { libc::getpgid(process.as_raw_nonzero().get()) })
}

/// The leader of a process's session, or of this process's own session for `None`. Returns `None`
/// in the same cases as [`group_of`].
pub fn session_of(process: Option<Pid>) -> Option<Pid> {
    let process = process.map_or(0, |process| process.as_raw_nonzero().get());
    // SAFETY: takes a number and returns one.
    leader(unsafe { libc::getsid(process) })
}

fn leader(result: i32) -> Option<Pid> {
    // An error is a negative number.
    Pid::from_raw(result.max(0))
}
