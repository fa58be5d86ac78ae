//! Process groups and sessions by their leaders. A leader has no number here if it is outside this process's PID namespace, as
//! in a container that was entered: the kernel says 0 then, for which rustix panics.

use rustix::process::Pid;

/// The leader of this process's own group, if it has a number.
pub fn own_group() -> Option<Pid> {
    // SAFETY: takes nothing and gives a number.
    Pid::from_raw(unsafe { libc::getpgrp() })
}

/// The leader of a process's group, if there is such a process and its leader has a number.
pub fn group_of(process: Pid) -> Option<Pid> {
    // SAFETY: takes a number and gives one.
    leader(unsafe { libc::getpgid(process.as_raw_nonzero().get()) })
}

/// The leader of the session of a process, or with `None` of this process's own; as for [`group_of`].
pub fn session_of(process: Option<Pid>) -> Option<Pid> {
    let process = process.map_or(0, |process| process.as_raw_nonzero().get());
    // SAFETY: takes a number and gives one.
    leader(unsafe { libc::getsid(process) })
}

fn leader(result: i32) -> Option<Pid> {
    // An error is a negative number.
    Pid::from_raw(result.max(0))
}
