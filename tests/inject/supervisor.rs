//! Answers the notifications of the filter: lets each call of a supervised process continue and
//! records its site, or makes one call fail with an error.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, poll};

use crate::site::{Id, Site};
use crate::stack::Stacks;
use crate::symbols::Library;

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

/// The call to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    pub site: Id,
    pub errno: i32,
    /// The number of calls from the site that succeed before the fault.
    pub skip: u32,
}

/// The record of all supervised processes.
#[derive(Default)]
pub struct Record {
    /// Number of calls, keyed by phase and site.
    pub seen: BTreeMap<(Phase, Id), u32>,
    pub sites: BTreeMap<Id, Site>,
    /// The current phase of the process.
    phase: Option<Phase>,
    armed: Option<Fault>,
}

/// The record, shared with the threads that answer.
#[derive(Clone, Default)]
pub struct Desk(Arc<Mutex<Record>>, Arc<Mutex<Library>>);

impl Desk {
    pub fn look<T>(&self, look: impl FnOnce(&mut Record) -> T) -> T {
        look(&mut self.0.lock().expect("no thread panics while it holds the lock"))
    }

    /// Sets the phase of the process from now on.
    pub fn enter(&self, phase: Phase) {
        self.look(|record| record.phase = Some(phase));
    }

    /// Makes a call fail, once.
    pub fn arm(&self, fault: Fault) {
        self.look(|record| record.armed = Some(fault));
    }

    /// Lets all calls succeed from now on; returns whether the armed call has failed.
    pub fn disarm(&self) -> bool {
        self.look(|record| record.armed.take().is_none())
    }

    /// Answers the notifications of one process until the process ends.
    pub fn supervise(&self, pid: u32, listener: OwnedFd) -> JoinHandle<()> {
        let desk = self.clone();
        std::thread::spawn(move || {
            let mut stacks = Stacks::of(pid);
            // The loop ends when the last thread of the process has ended.
            while let Some(notification) = receive(&listener) {
                let site = desk.site(&mut stacks, &notification);
                let errno = site.and_then(|site| desk.look(|record| record.judge(site)));
                answer(&listener, notification.id, errno);
            }
        })
    }

    fn site(&self, stacks: &mut Stacks, notification: &libc::seccomp_notif) -> Option<Site> {
        let library = &mut self.1.lock().expect("no thread panics while it holds the lock");
        let frames = stacks.walk(notification.pid, library)?;
        Site::of(notification.data.nr, notification.data.args[0], &frames)
    }
}

impl Record {
    /// The error for this call, if it is the call to fail.
    fn judge(&mut self, site: Site) -> Option<i32> {
        let id = site.id();
        let phase = self.phase.expect("a phase is entered before a process starts");
        *self.seen.entry((phase, id)).or_default() += 1;
        self.sites.entry(id).or_insert(site);
        let armed = self.armed.as_mut().filter(|armed| armed.site == id)?;
        if armed.skip > 0 {
            armed.skip -= 1;
            return None;
        }
        self.armed.take().map(|fault| fault.errno)
    }
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
