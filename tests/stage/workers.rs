//! The processes of the stress test: the server behind its services, and the workers that dial them.

use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::ledger::Ledger;
use crate::probe::die_with_us;
use crate::rpc::Process;
use crate::stress::Service;
use crate::{Cgroup, program};

/// Starts the server behind all services, in the calling thread's network namespace, which it changes to the needs of the
/// test: clients get every port above the server's, and some networks have no way.
pub fn server() -> Process {
    start(stress("serve"))
}

/// Starts one server more, which takes a part of the connections.
pub fn another_server() -> Process {
    start(stress("serve-more"))
}

/// A command of the program `stress`.
fn stress(name: &str) -> Command {
    let mut command = Command::new(program("stress"));
    command.arg(name);
    command
}

#[track_caller]
fn start(mut command: Command) -> Process {
    die_with_us(&mut command);
    Process::start(&mut command)
}

/// What a crowd is asked; answered with the number of sockets that are open then, as a `u64`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    /// Open so many.
    Open(u32),
    /// Close so many, which ones by chance.
    Close(u32),
    /// Close one and open another, so often.
    Replace(u32),
}

/// A process in a cgroup that opens many sockets.
pub struct Crowd(Process);

impl Crowd {
    /// Starts one.
    #[track_caller]
    pub fn start(cgroup: &Cgroup, seed: u64) -> Self {
        let mut command = stress("crowd");
        command.arg("--seed").arg(seed.to_string());
        cgroup.enter(&mut command);
        Self(start(command))
    }

    /// Asks for a change, and does not wait.
    #[track_caller]
    pub fn tell(&mut self, change: Change) {
        self.0.send(&change);
    }

    /// Waits until it has done so; returns how many are open.
    #[track_caller]
    pub fn done(&mut self) -> u64 {
        self.0.receive()
    }

    /// Kills it, with all that is open.
    pub fn kill(self) {
        drop(self.0);
    }
}

/// What a hammer is asked; answered with a [`Ledger`] of these connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connects(pub u64);

/// A process in a cgroup that connects and closes as fast as it can.
pub struct Hammer(Process);

impl Hammer {
    /// What it dials.
    pub fn services() -> impl Iterator<Item = Service> {
        ["crowd", "refused", "no-route"].into_iter().map(Service::of)
    }

    /// Starts one.
    #[track_caller]
    pub fn start(cgroup: &Cgroup, seed: u64) -> Self {
        let mut command = stress("hammer");
        command.arg("--seed").arg(seed.to_string());
        cgroup.enter(&mut command);
        Self(start(command))
    }

    /// Lets it make so many connects, and does not wait.
    #[track_caller]
    pub fn tell(&mut self, connects: u64) {
        self.0.send(&Connects(connects));
    }

    /// Waits until it has done so; returns what they must be counted as.
    #[track_caller]
    pub fn done(&mut self) -> Ledger {
        self.0.receive()
    }
}

/// What a worker is asked; answered with the [`Ledger`] of all its flows so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Task {
    /// Play until about so many more flows have been chosen for.
    Play {
        /// So many.
        flows: u64,
    },
    /// Close what is held.
    Rest,
}

/// How a worker plays.
#[derive(Clone, Copy, Debug)]
pub struct Play {
    /// Decides what is played in which order, and what is not decided by the kernel.
    pub seed: u64,
    /// At a time.
    pub threads: u32,
    /// Sockets that a thread opens at once where a scenario opens several.
    pub batch: u32,
    /// Connections that stay open between rounds.
    pub held: u32,
}

/// A worker.
pub struct Worker(Process);

impl Worker {
    /// Starts a worker in a cgroup.
    #[track_caller]
    pub fn start(cgroup: &Cgroup, play: Play) -> Self {
        let mut command = stress("play");
        for (name, value) in [
            ("--seed", play.seed),
            ("--threads", play.threads.into()),
            ("--batch", play.batch.into()),
            ("--held", play.held.into()),
        ] {
            command.arg(name).arg(value.to_string());
        }
        cgroup.enter(&mut command);
        Self(start(command))
    }

    /// Plays until about `flows` more flows have been chosen for. Returns what all flows so far must be counted as; only
    /// held ones are open.
    #[track_caller]
    pub fn play(&mut self, flows: u64) -> Ledger {
        self.0.ask(&Task::Play { flows })
    }

    /// Closes what is held.
    #[track_caller]
    pub fn rest(&mut self) -> Ledger {
        self.0.ask(&Task::Rest)
    }
}
