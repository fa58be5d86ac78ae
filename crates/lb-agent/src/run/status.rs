//! How a command ended, and how this process ends in the same way.

use std::process::ExitCode;

use rustix::process::{DumpableBehavior, WaitStatus};

use super::signal::Signal;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessStatus {
    /// The process ended with this exit code.
    Exited(u8),
    /// This signal ended the process.
    Killed(Signal),
}

impl ProcessStatus {
    /// The command does not exist. Shells and env(1) use the same code.
    pub const NOT_FOUND: Self = Self::Exited(127);
    /// The command cannot be started.
    pub const NOT_STARTED: Self = Self::Exited(126);

    /// Converts a status of waitpid(2); `None` if the process has not ended.
    pub(super) fn ended(status: WaitStatus) -> Option<Self> {
        let killed = status.terminating_signal().map(|number| Self::Killed(Signal::from_raw(number)));
        // The kernel retains only eight bits of an exit code.
        killed.or_else(|| u8::try_from(status.exit_status()?).ok().map(Self::Exited))
    }

    /// The exit code that shells report: 128 plus the signal's number if the process was killed.
    pub fn code(self) -> u8 {
        match self {
            Self::Exited(code) => code,
            Self::Killed(signal) => u8::try_from(128 + signal.as_raw()).unwrap_or(u8::MAX),
        }
    }

    /// Ends this process in the same way as the command. If a signal has ended the command, this
    /// process ends by the same signal, because a service manager treats a unit that the manager's
    /// signal has killed as stopped, but a unit with a nonzero exit code as failed.
    ///
    /// Process 1 of a container is not killed by its own signals. In such a process, this function
    /// returns the exit code.
    pub fn end(self) -> ExitCode {
        if let Self::Killed(signal) = self
            && !rustix::process::getpid().is_init()
        {
            // The kernel has already dumped the core of the command. A core dump of this process
            // has no use.
            let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
            signal.end_this_process();
        }
        ExitCode::from(self.code())
    }
}
