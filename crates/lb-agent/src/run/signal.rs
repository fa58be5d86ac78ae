//! Signals by their numbers and names, those that are passed on, and what of them only libc offers.

use std::io;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::Pid;

/// A signal's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Signal(i32);

/// The signals that have a name, without what is no signal to send.
const NAMES: [(&str, i32); 22] = [
    ("HUP", libc::SIGHUP),
    ("INT", libc::SIGINT),
    ("QUIT", libc::SIGQUIT),
    ("TRAP", libc::SIGTRAP),
    ("ABRT", libc::SIGABRT),
    ("BUS", libc::SIGBUS),
    ("FPE", libc::SIGFPE),
    ("KILL", libc::SIGKILL),
    ("USR1", libc::SIGUSR1),
    ("SEGV", libc::SIGSEGV),
    ("USR2", libc::SIGUSR2),
    ("PIPE", libc::SIGPIPE),
    ("ALRM", libc::SIGALRM),
    ("TERM", libc::SIGTERM),
    ("CONT", libc::SIGCONT),
    ("STOP", libc::SIGSTOP),
    ("TSTP", libc::SIGTSTP),
    ("TTIN", libc::SIGTTIN),
    ("TTOU", libc::SIGTTOU),
    ("URG", libc::SIGURG),
    ("WINCH", libc::SIGWINCH),
    ("IO", libc::SIGIO),
];

/// Real-time signals, as far as a program may use them.
const REAL_TIME: std::ops::RangeInclusive<i32> = 34..=64;

impl Signal {
    /// Hang-up: reload, to many programs.
    pub const HUP: Self = Self(libc::SIGHUP);
    /// From a terminal: end.
    pub const INT: Self = Self(libc::SIGINT);
    /// End at once.
    pub const KILL: Self = Self(libc::SIGKILL);
    /// End.
    pub const TERM: Self = Self(libc::SIGTERM);
    /// Go on.
    pub const CONT: Self = Self(libc::SIGCONT);
    /// From a terminal: stop.
    pub const TSTP: Self = Self(libc::SIGTSTP);
    /// Stop; cannot be caught.
    pub const STOP: Self = Self(libc::SIGSTOP);
    /// For the application to define.
    pub const USR1: Self = Self(libc::SIGUSR1);

    /// Of this number.
    pub fn from_raw(number: i32) -> Self {
        Self(number)
    }

    /// Its number.
    pub fn as_raw(self) -> i32 {
        self.0
    }

    /// By its name, with or without `SIG`.
    pub fn from_name(name: &str) -> Option<Self> {
        let name = name.strip_prefix("SIG").unwrap_or(name);
        NAMES.into_iter().find(|(known, _)| *known == name).map(|(_, number)| Self(number))
    }

    /// Whether it asks a process to end, and the application may take its time.
    pub fn is_request_to_end(self) -> bool {
        [Self::TERM, Self::INT].contains(&self)
    }

    /// Whether it is one of the real-time signals, which have no names.
    pub(super) fn is_real_time(self) -> bool {
        REAL_TIME.contains(&self.0)
    }

    /// Those that this process takes, to pass them on or to act on them, with SIGCHLD not among them. Signals by which the
    /// kernel says that this process itself is at fault are not, nor those of job control that concern only whoever reads
    /// or writes the terminal.
    pub(super) fn taken() -> impl Iterator<Item = Self> {
        let named = [
            libc::SIGHUP,
            libc::SIGINT,
            libc::SIGQUIT,
            libc::SIGUSR1,
            libc::SIGUSR2,
            libc::SIGALRM,
            libc::SIGTERM,
            libc::SIGCONT,
            libc::SIGTSTP,
            libc::SIGURG,
            libc::SIGWINCH,
            libc::SIGIO,
            libc::SIGPWR,
        ];
        named.into_iter().chain(REAL_TIME).map(Self)
    }

    /// Sends it to a process that is a child of this one and has not been reaped, so that its number is nobody else's.
    pub(super) fn send(self, to: Pid) -> io::Result<()> {
        self.send_raw(to.as_raw_nonzero().get())
    }

    /// Sends it to a process group that has such a child in it.
    pub(super) fn send_to_group(self, group: Pid) -> io::Result<()> {
        self.send_raw(-group.as_raw_nonzero().get())
    }

    /// Sends it to this process's own group.
    pub(super) fn send_to_own_group(self) -> io::Result<()> {
        self.send_raw(0)
    }

    fn send_raw(self, to: i32) -> io::Result<()> {
        // rustix has no real-time signals.
        // SAFETY: takes two numbers, and refuses those that are none of its own.
        let result = unsafe { libc::kill(to, self.0) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Ends this process by the signal, if that is what it does unless it is caught.
    pub(super) fn end_this_process(self) {
        // SAFETY: the default disposition is valid for every signal; no code of this process is called by it. The set is
        // written by sigemptyset before it is read. This thread alone is sent the signal.
        unsafe {
            let mut set = MaybeUninit::uninit();
            libc::sigemptyset(set.as_mut_ptr());
            libc::sigaddset(set.as_mut_ptr(), self.0);
            libc::signal(self.0, libc::SIG_DFL);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), std::ptr::null_mut());
            libc::raise(self.0);
        }
    }
}

impl std::fmt::Display for Signal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match NAMES.into_iter().find(|(_, number)| *number == self.0) {
            Some((name, _)) => write!(f, "SIG{name}"),
            None => write!(f, "signal {}", self.0),
        }
    }
}

/// Calls `act` with SIGTTOU blocked in this thread: who is not in the foreground and sets a terminal's foreground group is
/// stopped by it otherwise. It may be called between fork and exec.
pub(super) fn without_ttou<T>(act: impl FnOnce() -> T) -> T {
    // SAFETY: sets of plain numbers, written by the calls before they are read; with these arguments they cannot fail, and
    // all of them may be called between fork and exec.
    let before = unsafe {
        let mut set = MaybeUninit::uninit();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGTTOU);
        libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), &raw mut before);
        before
    };
    let result = act();
    // SAFETY: the set was filled in above; the former one is not asked for.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    result
}

/// Has `act` called in the process that `command` starts, before it becomes the command.
///
/// # Safety
/// As of [`std::os::unix::process::CommandExt::pre_exec`]: `act` makes system calls and nothing else.
pub(super) unsafe fn before_exec(
    command: &mut std::process::Command,
    act: impl FnMut() -> io::Result<()> + Send + Sync + 'static,
) {
    // SAFETY: the caller's promise.
    unsafe { std::os::unix::process::CommandExt::pre_exec(command, act) };
}

/// Whether SIGPIPE was ignored when this process was started, as systemd has it (`IgnoreSIGPIPE=`).
static PIPE_WAS_IGNORED: AtomicBool = AtomicBool::new(false);

/// Called by the C library before `main`, because Rust's start-up, which comes next, has SIGPIPE ignored and forgets what it
/// did before.
#[used]
// SAFETY: the section holds pointers to functions of this type, which are called once, by one thread.
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = {
    extern "C" fn remember() {
        // SAFETY: with no new disposition the call only writes the present one, whose zeroed form is valid.
        let disposition = unsafe {
            let mut disposition: libc::sigaction = std::mem::zeroed();
            libc::sigaction(libc::SIGPIPE, std::ptr::null(), &raw mut disposition);
            disposition.sa_sigaction
        };
        PIPE_WAS_IGNORED.store(disposition == libc::SIG_IGN, Ordering::Relaxed);
    }
    remember
};

/// Has SIGPIPE do in the process that `command` starts what it did in this one when that was started. The standard library
/// has it end the process.
pub(super) fn keep_pipe(command: &mut std::process::Command) {
    if PIPE_WAS_IGNORED.load(Ordering::Relaxed) {
        let ignore = || {
            // SAFETY: a disposition that calls no code; the call may be made between fork and exec.
            unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
            Ok(())
        };
        // SAFETY: `ignore` makes a system call and nothing else.
        unsafe { before_exec(command, ignore) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_is_known_by_its_name_with_and_without_sig() {
        assert_eq!(Signal::from_name("USR1"), Some(Signal(libc::SIGUSR1)));
        assert_eq!(Signal::from_name("SIGWINCH"), Some(Signal(libc::SIGWINCH)));
        assert_eq!(Signal::from_name("usr1"), None);
        assert_eq!(Signal::from_name("nginx -s quit"), None);
        assert_eq!(Signal(libc::SIGTERM).to_string(), "SIGTERM");
        assert_eq!(Signal(40).to_string(), "signal 40");
    }

    #[test]
    fn what_cannot_be_caught_is_not_taken() {
        let taken: Vec<Signal> = Signal::taken().collect();
        for absent in [Signal::KILL, Signal::STOP, Signal(libc::SIGSEGV), Signal(libc::SIGCHLD)] {
            assert!(!taken.contains(&absent), "{absent}");
        }
    }
}
