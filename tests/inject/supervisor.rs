//! Answers the notifications of the filter: lets each call of a supervised process continue and
//! records it, or makes one call fail with an error.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, poll};

use crate::cases::{Case, Kind};
use crate::filter;

/// The phase of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Starting.
    Start,
    /// Running.
    Run,
    /// Stopping after a request.
    Stop,
}

/// The record of all supervised processes.
#[derive(Default)]
pub struct Record {
    /// Number of calls, keyed by kind.
    pub seen: BTreeMap<Kind, u32>,
    /// The current phase of the process.
    phase: Option<Phase>,
    /// The call to fail. Its `skip` decreases with each call that succeeds.
    armed: Option<Case>,
    /// Whether the call that was armed last has failed.
    has_fired: bool,
}

/// The record, shared with the threads that answer.
#[derive(Clone, Default)]
pub struct Desk(Arc<Mutex<Record>>);

impl Desk {
    pub fn look<T>(&self, look: impl FnOnce(&mut Record) -> T) -> T {
        look(&mut self.0.lock().expect("no thread panics while it holds the lock"))
    }

    /// Sets the phase of the process from now on.
    pub fn enter(&self, phase: Phase) {
        self.look(|record| record.phase = Some(phase));
    }

    /// Makes a call fail, once.
    pub fn arm(&self, case: Case) {
        self.look(|record| (record.armed, record.has_fired) = (Some(case), false));
    }

    /// Lets all calls succeed from now on; returns whether the armed call has failed.
    pub fn disarm(&self) -> bool {
        self.look(|record| {
            record.armed = None;
            record.has_fired
        })
    }

    /// Answers the notifications of one process until the process ends.
    pub fn supervise(&self, pid: u32, listener: OwnedFd) -> JoinHandle<()> {
        let desk = self.clone();
        std::thread::spawn(move || {
            let mut has_begun = false;
            // The loop ends when the last thread of the process has ended.
            while let Some(notification) = receive(&listener) {
                has_begun = has_begun || is_program(pid, notification.data.instruction_pointer);
                let errno = if has_begun { desk.judge(&notification) } else { None };
                answer(&listener, notification.id, errno);
            }
        })
    }

    /// The error for this call, if it is the call to fail.
    fn judge(&self, notification: &libc::seccomp_notif) -> Option<i32> {
        // The thread may have been killed after its notification.
        let thread = fs::read_to_string(format!("/proc/{}/comm", notification.pid)).ok()?;
        let call = filter::call(notification.data.nr, notification.data.args[0]);
        self.look(|record| record.judge(thread.trim_end().replace('/', "_"), call))
    }
}

impl Record {
    fn judge(&mut self, thread: String, call: String) -> Option<i32> {
        let phase = self.phase.expect("a phase is entered before a process starts");
        let kind = Kind { phase, thread, call };
        let armed = self.armed.take_if(|armed| {
            let is_next = armed.kind == kind && armed.skip == 0;
            armed.skip -= u32::from(armed.kind == kind && !is_next);
            is_next
        });
        *self.seen.entry(kind).or_default() += 1;
        self.has_fired |= armed.is_some();
        armed.map(|armed| armed.errno)
    }
}

/// Whether the code at an address of a process is not that of the dynamic loader. The loader exits
/// by its own rules when one of its calls fails.
fn is_program(pid: u32, address: u64) -> bool {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    !maps.lines().any(|line| {
        let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
        let number = |text| u64::from_str_radix(text, 16).unwrap_or(0);
        line.contains("/ld-linux")
            && range.is_some_and(|(begin, end)| (number(begin)..number(end)).contains(&address))
    })
}

/// `SECCOMP_IOCTL_NOTIF_RECV` and `SECCOMP_IOCTL_NOTIF_SEND`, `linux/seccomp.h`.
const RECEIVE: libc::c_ulong = 0xc050_2100;
const SEND: libc::c_ulong = 0xc018_2101;
/// `SECCOMP_USER_NOTIF_FLAG_CONTINUE`
const CONTINUE: u32 = 1;

/// The next call that waits for an answer; `None` after the process has ended.
fn receive(listener: &OwnedFd) -> Option<libc::seccomp_notif> {
    loop {
        let mut descriptors = [PollFd::new(listener, PollFlags::IN)];
        match poll(&mut descriptors, None) {
            Err(rustix::io::Errno::INTR) => continue,
            result => result.expect("wait for the process"),
        };
        let events = descriptors[0].revents();
        if !events.contains(PollFlags::IN) {
            return None;
        }
        // SAFETY: a structure of plain numbers.
        let mut notification: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the structure is the kernel's own and lives through the call.
        let result = unsafe { libc::ioctl(listener.as_fd().as_raw_fd(), RECEIVE, &raw mut notification) };
        // The thread may have been killed after its notification.
        if result == 0 {
            return Some(notification);
        }
    }
}

/// Makes a call continue, or fail. It is not an error if the thread was killed after its
/// notification.
fn answer(listener: &OwnedFd, id: u64, errno: Option<i32>) {
    let mut response = libc::seccomp_notif_resp {
        id,
        val: 0,
        error: errno.map_or(0, |errno| -errno),
        flags: if errno.is_none() { CONTINUE } else { 0 },
    };
    // SAFETY: the structure is the kernel's own and lives through the call.
    unsafe { libc::ioctl(listener.as_fd().as_raw_fd(), SEND, &raw mut response) };
}
