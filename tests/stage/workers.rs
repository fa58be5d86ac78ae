//! The processes of the stress test: the server behind its services, and the workers that dial them.

use std::process::Command;

use crate::ledger::Ledger;
use crate::stress::Service;
use crate::{Cgroup, Probe, program};

/// Starts the server behind all services, in the calling thread's network namespace, which it changes to the needs of the
/// test: clients get every port above the server's, and some networks have no way.
pub fn server() -> Probe {
    let mut command = Command::new(program("stress"));
    Probe::of(command.arg("serve"))
}

/// Starts one server more, which takes a part of the connections.
pub fn another_server() -> Probe {
    let mut command = Command::new(program("stress"));
    Probe::of(command.arg("serve-more"))
}

/// A process in a cgroup that opens many sockets.
pub struct Crowd(Probe);

impl Crowd {
    /// Starts one.
    #[track_caller]
    pub fn start(cgroup: &Cgroup, seed: u64) -> Self {
        let mut command = Command::new(program("stress"));
        command.arg("crowd").arg("--seed").arg(seed.to_string());
        cgroup.enter(&mut command);
        Self(Probe::of(&mut command))
    }

    /// Tells it to `open`, `close` or `replace` so many, and does not wait.
    #[track_caller]
    pub fn tell(&mut self, what: &str, count: u32) {
        self.0.send(&format!("{what} {count}"));
    }

    /// Waits until it has done so; returns how many are open.
    #[track_caller]
    pub fn done(&mut self) -> u64 {
        self.0.receive().parse().expect("a number of sockets")
    }

    /// Kills it, with all that is open.
    pub fn kill(self) {
        self.0.kill();
    }
}

/// A process in a cgroup that connects and closes as fast as it can.
pub struct Hammer(Probe);

impl Hammer {
    /// What it dials.
    pub fn services() -> impl Iterator<Item = Service> {
        ["crowd", "refused", "no-route"].into_iter().map(Service::of)
    }

    /// Starts one.
    #[track_caller]
    pub fn start(cgroup: &Cgroup, seed: u64) -> Self {
        let mut command = Command::new(program("stress"));
        command.arg("hammer").arg("--seed").arg(seed.to_string());
        cgroup.enter(&mut command);
        Self(Probe::of(&mut command))
    }

    /// Lets it make so many connects, and does not wait.
    #[track_caller]
    pub fn tell(&mut self, connects: u64) {
        self.0.send(&connects.to_string());
    }

    /// Waits until it has done so; returns what they must be counted as.
    #[track_caller]
    pub fn done(&mut self) -> Ledger {
        ledger(&self.0.receive())
    }
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
    /// Whether there are services for datagrams.
    pub datagrams: bool,
}

/// A worker.
pub struct Worker(Probe);

impl Worker {
    /// Starts a worker in a cgroup.
    #[track_caller]
    pub fn start(cgroup: &Cgroup, play: Play) -> Self {
        let mut command = Command::new(program("stress"));
        command.arg("play");
        for (name, value) in [
            ("--seed", play.seed),
            ("--threads", play.threads.into()),
            ("--batch", play.batch.into()),
            ("--held", play.held.into()),
        ] {
            command.arg(name).arg(value.to_string());
        }
        if play.datagrams {
            command.arg("--datagrams");
        }
        cgroup.enter(&mut command);
        Self(Probe::of(&mut command))
    }

    /// Plays until about `sockets` more flows have been chosen for. Returns what all flows so far must be counted as; only
    /// held ones are open.
    #[track_caller]
    pub fn play(&mut self, sockets: u64) -> Ledger {
        ledger(&self.0.ask(&format!("play {sockets}")))
    }

    /// Closes what is held.
    #[track_caller]
    pub fn rest(&mut self) -> Ledger {
        ledger(&self.0.ask("rest"))
    }
}

#[track_caller]
fn ledger(answer: &str) -> Ledger {
    serde_json::from_str(answer).unwrap_or_else(|error| panic!("the worker answers: {error}: {answer}"))
}
