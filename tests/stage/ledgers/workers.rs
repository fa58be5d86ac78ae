//! The processes of the stress test: the server behind all services, and the workers that dial the
//! services.

use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::ledger::Ledger;
use crate::probe::die_with_us;
use crate::rpc::Process;
use crate::stress::Service;
use crate::{Cgroup, program};

/// Starts the server behind all services in the calling thread's network namespace, and prepares
/// the namespace for the test: clients may use every port above the server's, and some networks
/// have no route.
pub fn server() -> Process {
    start(stress("serve"))
}

/// Starts another server, which receives a part of the connections.
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

/// A request to a crowd; answered with the number of sockets that are open afterwards, as a `u64`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    /// Open this many sockets.
    Open(u32),
    /// Close this many randomly chosen sockets.
    Close(u32),
    /// Close a socket and open another, this many times.
    Replace(u32),
}

/// A process in a cgroup that opens many sockets.
pub struct Crowd(Process);

impl Crowd {
    #[track_caller]
    pub fn start(cgroup: &Cgroup, seed: u64) -> Self {
        let mut command = stress("crowd");
        command.arg("--seed").arg(seed.to_string());
        cgroup.enter(&mut command);
        Self(start(command))
    }

    /// Requests a change, and does not wait.
    #[track_caller]
    pub fn start_change(&mut self, change: Change) {
        self.0.send(&change);
    }

    /// Waits for the end of the change. Returns the number of open sockets.
    #[track_caller]
    pub fn done(&mut self) -> u64 {
        self.0.receive()
    }

    /// Kills the process, with all its open sockets.
    pub fn kill(self) {
        drop(self.0);
    }
}

/// A request to a hammer: the number of connects. The answer is a [`Ledger`] of these connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connects(pub u64);

/// A process in a cgroup that connects and closes as fast as it can.
pub struct Hammer(Process);

impl Hammer {
    /// The services that hammers dial.
    pub fn services() -> impl Iterator<Item = Service> {
        ["crowd", "refused", "no-route"].into_iter().map(Service::of)
    }

    #[track_caller]
    pub fn start(cgroup: &Cgroup, seed: u64) -> Self {
        let mut command = stress("hammer");
        command.arg("--seed").arg(seed.to_string());
        cgroup.enter(&mut command);
        Self(start(command))
    }

    /// Requests this many connects, and does not wait.
    #[track_caller]
    pub fn start_connects(&mut self, connects: u64) {
        self.0.send(&Connects(connects));
    }

    /// Waits until the connects are done; returns their expected counts.
    #[track_caller]
    pub fn done(&mut self) -> Ledger {
        self.0.receive()
    }
}

/// A request to a worker; answered with the [`Ledger`] of all its flows so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Task {
    /// Play scenarios until a backend was chosen for about `flows` more flows.
    Play { flows: u64 },
    /// Close the held connections.
    Rest,
}

/// The parameters of a worker.
#[derive(Clone, Copy, Debug)]
pub struct Play {
    /// The seed of all random choices, such as the order of scenarios.
    pub seed: u64,
    /// Number of threads that play scenarios at the same time.
    pub threads: u32,
    /// Number of sockets that a thread opens together, in scenarios with several sockets.
    pub batch: u32,
    /// Number of connections that remain open between rounds.
    pub held: u32,
}

pub struct Worker(Process);

impl Worker {
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

    /// Plays scenarios until a backend was chosen for about `flows` more flows. Returns the
    /// expected counts of all flows so far. Only held connections are open then.
    #[track_caller]
    pub fn play(&mut self, flows: u64) -> Ledger {
        self.0.call(&Task::Play { flows })
    }

    /// Closes the held connections.
    #[track_caller]
    pub fn rest(&mut self) -> Ledger {
        self.0.call(&Task::Rest)
    }
}
