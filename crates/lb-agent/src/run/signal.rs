//! Numbers and names of signals, the signals that `socklb agent run` passes on, and calls that only
//! libc offers.

use std::io;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::Pid;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Signal(i32);

/// The signals that have a name, except for signals that programs do not send.
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

/// The real-time signals that a program may use.
const REAL_TIME: std::ops::RangeInclusive<i32> = 34..=64;

impl Signal {
    /// Hang-up; many programs reload on it.
    pub const HUP: Self = Self(libc::SIGHUP);
    /// Request to end, sent by a terminal.
    pub const INT: Self = Self(libc::SIGINT);
    /// Request to end at once.
    pub const KILL: Self = Self(libc::SIGKILL);
    /// Request to end.
    pub const TERM: Self = Self(libc::SIGTERM);
    /// Continue.
    pub const CONT: Self = Self(libc::SIGCONT);
    /// Stop, sent by a terminal.
    pub const TSTP: Self = Self(libc::SIGTSTP);
    /// Stop; cannot be caught.
    pub const STOP: Self = Self(libc::SIGSTOP);
    /// A signal with a meaning that depends on the application.
    pub const USR1: Self = Self(libc::SIGUSR1);

    pub fn from_raw(number: i32) -> Self {
        Self(number)
    }

    pub fn as_raw(self) -> i32 {
        self.0
    }

    /// Finds a signal by its name, with or without `SIG`.
    pub fn from_name(name: &str) -> Option<Self> {
        let name = name.strip_prefix("SIG").unwrap_or(name);
        NAMES.into_iter().find(|(known, _)| *known == name).map(|(_, number)| Self(number))
    }

    /// Whether the signal requests the end of a process, and the process may handle the request.
    pub fn is_request_to_end(self) -> bool {
        [Self::TERM, Self::INT].contains(&self)
    }

    /// Whether the signal is one of the real-time signals, which have no names.
    pub(super) fn is_real_time(self) -> bool {
        REAL_TIME.contains(&self.0)
    }

    /// The signals that this process receives to pass them on or to act on them. Excluded are:
    /// - SIGCHLD, which has its own handler;
    /// - the signals by which the kernel reports a fault of this process itself;
    /// - the signals of job control for a process that reads or writes the terminal.
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

    /// Sends the signal to a child of this process. The child must not have been reaped, so that
    /// its process ID is not reused.
    pub(super) fn send(self, to: Pid) -> io::Result<()> {
        self.send_raw(to.as_raw_nonzero().get())
    }

    /// Sends the signal to a process group that contains a child which has not been reaped.
    pub(super) fn send_to_group(self, group: Pid) -> io::Result<()> {
        self.send_raw(-group.as_raw_nonzero().get())
    }

    /// Sends the signal to this process's own group.
    pub(super) fn send_to_own_group(self) -> io::Result<()> {
        self.send_raw(0)
    }

    fn send_raw(self, to: i32) -> io::Result<()> {
        // rustix has no real-time signals.
        // SAFETY: the call takes two numbers, and rejects invalid ones.
        let result = unsafe { libc::kill(to, self.0) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Ends this process by the signal, if the signal's default action is to end a process.
    pub(super) fn end_this_process(self) {
        // SAFETY: the default disposition is valid for every signal, and calls no code of this
        // process. sigemptyset writes the set before it is read. The signal is sent only to this
        // thread.
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

/// Calls `act` with SIGTTOU blocked in this thread. If SIGTTOU were not blocked, it would stop a
/// process that sets a terminal's foreground group while the process itself is not in the
/// foreground. May be called between fork and exec.
pub(super) fn without_ttou<T>(act: impl FnOnce() -> T) -> T {
    // SAFETY: the sets are plain numbers, and the calls write them before they are read. With these
    // arguments the calls cannot fail. All of them may be made between fork and exec.
    let before = unsafe {
        let mut set = MaybeUninit::uninit();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGTTOU);
        libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), &raw mut before);
        before
    };
    let result = act();
    // SAFETY: the set was filled above. A null pointer means that the previous set is not
    // requested.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    result
}

/// Calls `act` in the process that `command` starts, just before that process executes the command.
///
/// # Safety
/// As for [`std::os::unix::process::CommandExt::pre_exec`]: `act` may make system calls, and must
/// do nothing else.
pub(super) unsafe fn before_exec(
    command: &mut std::process::Command,
    act: impl FnMut() -> io::Result<()> + Send + Sync + 'static,
) {
    // SAFETY: the caller guarantees that `act` only makes system calls.
    unsafe { std::os::unix::process::CommandExt::pre_exec(command, act) };
}

/// Whether SIGPIPE was ignored when this process was started. systemd starts services in this way
/// unless `IgnoreSIGPIPE=no` is set.
static PIPE_WAS_IGNORED: AtomicBool = AtomicBool::new(false);

/// Whether SIGPIPE was ignored is recorded before `main`, in a function that the C library calls:
/// Rust's start-up code, which runs after it, ignores SIGPIPE and does not record the earlier
/// disposition.
#[used]
// SAFETY: the section holds pointers to functions of this type, which are called once, by one
// thread.
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = {
    extern "C" fn remember() {
        // SAFETY: without a new disposition the call only writes the current one, for which all
        // zeros are a valid value.
        let disposition = unsafe {
            let mut disposition: libc::sigaction = std::mem::zeroed();
            libc::sigaction(libc::SIGPIPE, std::ptr::null(), &raw mut disposition);
            disposition.sa_sigaction
        };
        PIPE_WAS_IGNORED.store(disposition == libc::SIG_IGN, Ordering::Relaxed);
    }
    remember
};

/// Restores, in the process that `command` starts, the disposition that SIGPIPE had when this
/// process was started. The standard library would set the default disposition, with which SIGPIPE
/// ends the process.
pub(super) fn restore_sigpipe(command: &mut std::process::Command) {
    if PIPE_WAS_IGNORED.load(Ordering::Relaxed) {
        let ignore = || {
            // SAFETY: the disposition calls no code, and the call may be made between fork and
            // exec.
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
    fn signal_names_parse_with_and_without_sig() {
        assert_eq!(Signal::from_name("USR1"), Some(Signal(libc::SIGUSR1)));
        assert_eq!(Signal::from_name("SIGWINCH"), Some(Signal(libc::SIGWINCH)));
        assert_eq!(Signal::from_name("usr1"), None);
        assert_eq!(Signal::from_name("nginx -s quit"), None);
        assert_eq!(Signal(libc::SIGTERM).to_string(), "SIGTERM");
        assert_eq!(Signal(40).to_string(), "signal 40");
    }

    #[test]
    fn kill_stop_segv_and_chld_are_not_received() {
        let taken: Vec<Signal> = Signal::taken().collect();
        for absent in [Signal::KILL, Signal::STOP, Signal(libc::SIGSEGV), Signal(libc::SIGCHLD)] {
            assert!(!taken.contains(&absent), "{absent} is received");
        }
    }
}
