//! Handles changes of child processes.

use super::{RunDriver, RunEvent};
use crate::run::lifecycle::{Input, Left};
use crate::run::processes::{ChildChange, CommandPurpose};
use crate::run::readiness_check::PAUSE;
use crate::run::signal::Signal;
use crate::run::status::ProcessStatus;
use crate::run::terminal::Terminal;

impl RunDriver {
    pub(super) fn reap(&mut self) {
        let mut changes = self.processes.changes();
        // `left` describes the processes that remain after all of these changes. The end of the
        // command is handled first, because a process that ended at the same time was not left
        // behind by the command.
        changes.sort_by_key(|change| !matches!(change, ChildChange::Command(_)));
        let has_ended = changes
            .iter()
            .any(|change| matches!(change, ChildChange::Command(_) | ChildChange::Descendant(_)));
        let is_shell = |change: &ChildChange| matches!(change, ChildChange::Shell(..));
        // After the end of a shell command, the kernel's list may show that no other process is
        // left.
        let is_needed = has_ended || self.lifecycle.has_lost_command() && changes.iter().any(is_shell);
        let left = if is_needed { self.left() } else { Left::Serving };
        for change in changes {
            match change {
                ChildChange::Command(status) => self.input(Input::Ended { is_command: true, status, left }),
                ChildChange::Descendant(status) => self.descendant_ended(status, left),
                ChildChange::Shell(purpose, status) => {
                    self.shell_ended(purpose, status);
                    if left == Left::NoProcess && !has_ended {
                        self.descendant_ended(status, left);
                    }
                }
                ChildChange::Stopped => self.stopped(),
                ChildChange::Continued => self.input(Input::Continued),
            }
        }
    }

    fn descendant_ended(&mut self, status: ProcessStatus, left: Left) {
        self.input(Input::Ended { is_command: false, status, left });
    }

    fn left(&mut self) -> Left {
        match self.processes.is_anybody_left() {
            false => Left::NoProcess,
            // If the sockets cannot be read, the application is assumed to serve, because an
            // application that serves must not be stopped.
            true if self.listener.find().unwrap_or(true) => Left::Serving,
            true => Left::Others,
        }
    }

    fn shell_ended(&mut self, purpose: CommandPurpose, status: ProcessStatus) {
        let is_well = status == ProcessStatus::Exited(0);
        match purpose {
            CommandPurpose::Check if is_well => self.ready(),
            CommandPurpose::Check => self.send_after(PAUSE, RunEvent::Check),
            CommandPurpose::Prewarm => {
                if !is_well {
                    tracing::warn!(?status, "the prewarm command failed; retrying");
                }
                self.input(Input::Prewarmed(is_well));
            }
            CommandPurpose::LameDuck if is_well => {}
            CommandPurpose::LameDuck => {
                tracing::warn!(
                    ?status,
                    "cannot notify the application that it is a lame duck: the command in --on-lame-duck \
                     failed"
                );
            }
        }
    }

    fn stopped(&mut self) {
        self.input(Input::Stopped);
        let Some(terminal) = &self.terminal else { return };
        let group = self.processes.group();
        terminal.take_back(group);
        if !Terminal::stop_job() {
            // No shell would continue the job, so this process did not stop, and the command must
            // continue. The kernel acts in the same way: it does not stop an orphaned process
            // group.
            terminal.give(group);
            self.processes.pass_on(Signal::CONT);
        }
    }
}
