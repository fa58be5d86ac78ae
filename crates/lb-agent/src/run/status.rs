//! How a command ended, and that the run ends in the same way.

use std::process::ExitCode;

use rustix::process::{DumpableBehavior, WaitStatus};

use super::signal::Signal;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessStatus {
    /// With this exit code.
    Exited(u8),
    /// By this signal.
    Killed(Signal),
}

impl ProcessStatus {
    /// The command is not there: as shells and env(1) have it.
    pub const NOT_FOUND: Self = Self::Exited(127);
    /// The command cannot be started.
    pub const NOT_STARTED: Self = Self::Exited(126);

    /// What waitpid(2) says, of a process that has ended.
    pub(super) fn ended(status: WaitStatus) -> Option<Self> {
        let killed = status.terminating_signal().map(|number| Self::Killed(Signal::from_raw(number)));
        // The kernel keeps eight bits of an exit code.
        killed.or_else(|| u8::try_from(status.exit_status()?).ok().map(Self::Exited))
    }

    /// The exit code that shells give it: 128 and the signal's number if it was killed.
    pub fn code(self) -> u8 {
        match self {
            Self::Exited(code) => code,
            Self::Killed(signal) => u8::try_from(128 + signal.as_raw()).unwrap_or(u8::MAX),
        }
    }

    /// Ends this process as the command ended. A service manager tells a unit that was killed by the signal that it has sent
    /// from one that failed with an exit code, so a signal ends this process by the same one. Returns with the exit code if
    /// that is not possible: process 1 of a container is not killed by signals of its own.
    pub fn end(self) -> ExitCode {
        if let Self::Killed(signal) = self
            && !rustix::process::getpid().is_init()
        {
            // The command has left its core dump; this process has nothing to add.
            let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
            signal.end_this_process();
        }
        ExitCode::from(self.code())
    }
}
