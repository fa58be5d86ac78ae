//! The controlling terminal. The command has a process group of its own. This process makes that
//! group the foreground group of the terminal, because only the foreground group may read the
//! terminal and receives the signals of the terminal's keys.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::Command;

use rustix::process::{Pid, getpid, getppid};
use rustix::termios::{tcgetpgrp, tcsetpgrp};

use super::group::{group_of, own_group, session_of};
use super::signal::{Signal, before_exec, without_ttou};

/// A terminal that had the group of this process in its foreground when `socklb agent run` started.
#[derive(Debug)]
pub struct Terminal {
    file: File,
    own_group: Pid,
}

impl Terminal {
    /// The controlling terminal, if there is one and this process is in its foreground.
    pub fn in_foreground() -> Option<Self> {
        let flags = rustix::fs::OFlags::NOCTTY.bits().cast_signed();
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open("/dev/tty").ok()?;
        let own_group = own_group()?;
        (tcgetpgrp(&file).ok()? == own_group).then_some(Self { file, own_group })
    }

    /// Makes the group of the process that `command` starts the foreground group. The foreground
    /// changes before that process executes the command, because the command may read at once.
    ///
    /// # Errors
    /// If no descriptor is free.
    pub fn give_to_child(&self, command: &mut Command) -> io::Result<()> {
        let file = self.file.try_clone()?;
        let take = move || {
            // If another group is in the foreground by now, the command starts in the background.
            let _ = without_ttou(|| tcsetpgrp(file.as_fd(), getpid()));
            Ok(())
        };
        // SAFETY: `take` makes system calls and nothing else.
        unsafe { before_exec(command, take) };
        Ok(())
    }

    /// Makes the command's group the foreground group if this process is in the foreground, for
    /// example after a shell has continued this process (`fg`).
    pub fn give(&self, group: Pid) {
        self.hand_over(self.own_group, group);
    }

    /// Makes this process's group the foreground group if the command's group is in the foreground.
    pub fn take_back(&self, group: Pid) {
        self.hand_over(group, self.own_group);
    }

    fn hand_over(&self, from: Pid, to: Pid) {
        if tcgetpgrp(&self.file) == Ok(from) {
            let _ = without_ttou(|| tcsetpgrp(&self.file, to));
        }
    }

    /// Stops this process and the other processes of its job, as a shell expects when the command
    /// of a job was stopped. Returns `true` after the shell has continued the job. Returns `false`,
    /// and stops nothing, if no shell would continue the job.
    pub fn stop_job() -> bool {
        let has_shell = getppid().is_some_and(|parent| {
            let session = session_of(Some(parent));
            let group = group_of(parent);
            session.is_some() && session == session_of(None) && group.is_some() && group != own_group()
        });
        if has_shell {
            let _ = Signal::STOP.send_to_own_group();
        }
        has_shell
    }
}
