//! The command, its descendants, and the shell commands that assist it: starts them, sends them
//! signals, and reaps them.
//!
//! This module reaps every child of this process with waitpid(2), so nothing else in the process
//! may start children. A process that the command leaves behind becomes a child of this process,
//! because this process is process 1 or a subreaper. A child's process ID is not reused until the
//! child has been reaped, so signals are sent only to children and their groups.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions, getpid, set_child_subreaper, wait};

use super::group::{group_of, own_group};
use super::signal::{Signal, restore_sigpipe};
use super::status::ProcessStatus;
use super::terminal::Terminal;

/// The purpose of a shell command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandPurpose {
    /// To check whether the application can serve.
    Check,
    /// To prewarm the application.
    Prewarm,
    /// To notify the application that it is a lame duck.
    LameDuck,
}

/// A change in the state of a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChildChange {
    /// The command has ended.
    Command(ProcessStatus),
    /// A process that the command or a shell command had left behind has ended.
    Descendant(ProcessStatus),
    /// A shell command has ended.
    Shell(CommandPurpose, ProcessStatus),
    /// The command was stopped.
    Stopped,
    /// The command continues after a stop.
    Continued,
}

/// The children of this process.
#[derive(Debug)]
pub struct Processes {
    /// The command's process ID, which is also the ID of its process group.
    command: Pid,
    has_ended: bool,
    shells: BTreeMap<i32, CommandPurpose>,
    /// Whether the last call of waitpid(2) found no child at all.
    is_childless: bool,
}

impl Processes {
    /// Starts the command in a process group of its own. If there is a terminal, makes this group
    /// the terminal's foreground group.
    ///
    /// # Errors
    /// If the command does not exist or cannot be started.
    pub fn start(command: &[OsString], terminal: Option<&Terminal>) -> io::Result<Self> {
        // Process 1 inherits orphans even without this call.
        set_child_subreaper(Some(getpid()))?;
        let mut command = prepare(command)?;
        command.process_group(0);
        if let Some(terminal) = terminal {
            terminal.give_to_child(&mut command)?;
        }
        let command = pid(command.spawn()?.id());
        Ok(Self { command, has_ended: false, shells: BTreeMap::new(), is_childless: false })
    }

    /// The command's process group.
    pub fn group(&self) -> Pid {
        self.command
    }

    /// Starts a shell command. Its variable `SOCKLB_PID` contains the application's process ID.
    ///
    /// # Errors
    /// If the shell cannot be started.
    pub fn start_shell(&mut self, purpose: CommandPurpose, line: &str) -> io::Result<()> {
        let mut command = Command::new("/bin/sh");
        // The notification socket of systemd is for the command, not for shell commands.
        command.args(["-c", line]).stdin(Stdio::null()).process_group(0).env_remove("NOTIFY_SOCKET");
        command.env("SOCKLB_PID", self.application().as_raw_nonzero().to_string());
        let id = pid(command.spawn()?.id());
        self.shells.insert(id.as_raw_nonzero().get(), purpose);
        Ok(())
    }

    /// The application's process: the command, or the first process that it has left behind.
    fn application(&self) -> Pid {
        let first = || self.left().first().copied();
        Some(self.command).filter(|_| !self.has_ended).or_else(first).unwrap_or(self.command)
    }

    /// Reaps children that have ended, and returns all changes, including stops and continuations.
    /// Call this at each SIGCHLD.
    pub fn changes(&mut self) -> Vec<ChildChange> {
        let mut changes = Vec::new();
        // Bound: each iteration handles one change of one child.
        loop {
            let options = WaitOptions::NOHANG | WaitOptions::UNTRACED | WaitOptions::CONTINUED;
            match wait(options) {
                Ok(Some((id, status))) => changes.extend(self.change(id, status)),
                Ok(None) => {
                    self.is_childless = false;
                    return changes;
                }
                Err(Errno::INTR) => {}
                // The only other error is ECHILD: there is no child.
                Err(_) => {
                    self.is_childless = true;
                    return changes;
                }
            }
        }
    }

    fn change(&mut self, id: Pid, status: rustix::process::WaitStatus) -> Option<ChildChange> {
        let is_command = id == self.command && !self.has_ended;
        let Some(ended) = ProcessStatus::ended(status) else {
            return is_command.then_some(if status.continued() {
                ChildChange::Continued
            } else {
                ChildChange::Stopped
            });
        };
        if is_command {
            self.has_ended = true;
            return Some(ChildChange::Command(ended));
        }
        let shell = self.shells.remove(&id.as_raw_nonzero().get());
        Some(shell.map_or(ChildChange::Descendant(ended), |purpose| ChildChange::Shell(purpose, ended)))
    }

    /// Whether this process had children other than shell commands when [`changes`](Self::changes)
    /// last returned.
    pub fn is_anybody_left(&self) -> bool {
        if self.is_childless {
            return false;
        }
        // If no shell command runs, no child is a shell command, but a shell command may have left
        // a child behind. If a shell command runs, the kernel's list of children decides.
        !self.has_ended || self.shells.is_empty() || !self.left().is_empty()
    }

    /// Children that are not shell commands. Empty if the kernel does not list children
    /// (`CONFIG_PROC_CHILDREN`).
    fn left(&self) -> Vec<Pid> {
        let mut left = Vec::new();
        for task in fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            let numbers = children.split_ascii_whitespace().filter_map(|number| number.parse().ok());
            left.extend(numbers.filter(|id| !self.shells.contains_key(id)).filter_map(Pid::from_raw));
        }
        left
    }

    /// Sends a signal to the command or, if the command has ended, to each process that it has left
    /// behind. SIGCONT is sent to the whole group, because a terminal stops the whole group.
    pub fn pass_on(&self, signal: Signal) {
        if !self.has_ended {
            if signal == Signal::CONT {
                return send_to_group_of(self.command, signal);
            }
            let _ = signal.send(self.command);
            return;
        }
        for id in self.left() {
            let _ = signal.send(id);
        }
    }

    /// Sends a signal to the command's process group or, if the command has ended, to the groups of
    /// the processes that it has left behind. Then continues these processes, because a stopped
    /// process handles no other signal.
    pub fn stop(&self, signal: Signal) {
        let groups = if self.has_ended { self.left() } else { vec![self.command] };
        for id in groups {
            for signal in [signal, Signal::CONT] {
                send_to_group_of(id, signal);
            }
        }
    }

    /// Kills the command's process group and the processes that it has left behind. Their children
    /// become children of this process, and the next call kills them.
    pub fn kill(&self) {
        for id in self.left().into_iter().chain((!self.has_ended).then_some(self.command)) {
            send_to_group_of(id, Signal::KILL);
        }
    }

    /// Kills the shell commands for one purpose; `None` means all shell commands.
    pub fn kill_shells(&self, purpose: Option<CommandPurpose>) {
        for (id, _) in self.shells.iter().filter(|(_, of)| purpose.is_none_or(|purpose| **of == purpose)) {
            if let Some(id) = Pid::from_raw(*id) {
                let _ = Signal::KILL.send_to_group(id);
            }
        }
    }
}

/// Sends a signal to the process group of a child, but never to this process's own group.
fn send_to_group_of(child: Pid, signal: Signal) {
    let _ = match group_of(child) {
        Some(group) if Some(group) != own_group() => signal.send_to_group(group),
        _ => signal.send(child),
    };
}

/// Prepares the command as if it had been started directly: it receives the variables and sockets
/// that systemd passes to a process that systemd starts.
fn prepare(words: &[OsString]) -> io::Result<Command> {
    let (program, arguments) =
        words.split_first().ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no command is given"))?;
    let own = getpid().as_raw_nonzero().to_string();
    let is_own = |variable: &str| std::env::var_os(variable).as_deref() == Some(OsStr::new(&own));
    let mut command = if is_own("LISTEN_PID") {
        // The sockets are for the process with the ID in LISTEN_PID. The command's ID is not known
        // before the command runs, so a shell sets the variable.
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", r#"LISTEN_PID=$$ exec "$0" "$@""#]).arg(program);
        shell
    } else {
        Command::new(program)
    };
    command.args(arguments);
    restore_sigpipe(&mut command);
    if is_own("WATCHDOG_PID") {
        // Without WATCHDOG_PID, any process that has the variable WATCHDOG_USEC may answer the
        // watchdog.
        command.env_remove("WATCHDOG_PID");
    }
    Ok(command)
}

fn pid(id: u32) -> Pid {
    i32::try_from(id).ok().and_then(Pid::from_raw).expect("a started process has a process ID")
}
