//! The processes that a benchmark starts: the workers of its arms, and its backends.

use std::fs::File;
use std::net::SocketAddr;
use std::path::Path;

use anyhow::Result;
use stage::Cgroup;
use stage::rpc::Process;

use super::arms::Addresses;
use super::serve::Manner;
use super::work::{Request, Work};
use crate::place::process::{part, place_in};

/// The measurements of one turn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Turn {
    /// The median of the operations' times, in nanoseconds.
    pub p50: f64,
    /// The 99th percentile of the operations' times, in nanoseconds.
    pub p99: f64,
    /// Operations per second.
    pub rate: f64,
    /// The CPU time of one operation, in nanoseconds.
    pub cpu: f64,
}

/// The process of an arm.
pub struct Worker(Process);

impl Worker {
    /// Starts a worker in a cgroup, and in the network namespace `network` if it is given.
    pub fn start(
        work: Work,
        cgroup: &Cgroup,
        network: Option<&File>,
        Addresses { first, ports, hosts }: Addresses,
    ) -> Result<Self> {
        let mut command = part("work")?;
        command.arg(work.argument()).args([first.to_string(), ports.to_string(), hosts.to_string()]);
        // The process enters the cgroup before it creates a socket, because a socket belongs to the
        // cgroup in which it was created.
        cgroup.enter(&mut command);
        if let Some(network) = network {
            place_in(network, &mut command);
        }
        Ok(Self(Process::start(&mut command)))
    }

    /// Makes the worker do `count` operations. If `keep` is set, the worker stores their times.
    pub fn turn(&mut self, count: u32, keep: bool) -> Turn {
        let [p50, p99, rate, cpu] = self.0.call(&Request::Turn { count, keep });
        Turn { p50, p99, rate, cpu }
    }

    /// The median and the 99th percentile of all stored times, in nanoseconds.
    pub fn all(&mut self) -> [f64; 2] {
        self.0.call(&Request::All)
    }
}

/// The process of the backends.
pub struct Backends(Process);

impl Backends {
    /// Starts the backends, and waits until they listen. If a second network is given, they listen
    /// there too.
    pub fn start(
        manner: Manner,
        polls: bool,
        addresses: &[SocketAddr],
        network: Option<&Path>,
    ) -> Result<Self> {
        let mut command = part("serve")?;
        command.arg(manner.argument()).args(addresses.iter().map(ToString::to_string));
        if polls {
            command.arg("--poll");
        }
        if let Some(network) = network {
            command.arg("--network").arg(network);
        }
        Ok(Self(Process::start(&mut command)))
    }

    pub fn pid(&self) -> u32 {
        self.0.pid()
    }
}
