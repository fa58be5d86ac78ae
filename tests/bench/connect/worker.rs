//! The processes that a benchmark starts: the workers of its arms, and its backends.

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};
use stage::Cgroup;
use stage::probe::die_with_us;

use super::arms::Addresses;
use super::serve::Manner;
use super::work::Work;

/// A process of this program. It is killed on drop.
struct Own(Child);

impl Drop for Own {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Own {
    fn start(command: &mut Command) -> Result<Self> {
        die_with_us(command);
        Ok(Self(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?))
    }
}

fn this_program() -> Result<Command> {
    Ok(Command::new(std::env::current_exe()?))
}

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
pub struct Worker {
    name: String,
    _process: Own,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Worker {
    /// Starts a worker in a cgroup, and in the network namespace `network` if it is given.
    pub fn start(
        name: &str,
        work: Work,
        cgroup: &Cgroup,
        network: Option<&Path>,
        Addresses { first, ports, hosts }: Addresses,
    ) -> Result<Self> {
        let mut command = this_program()?;
        command.arg("work").arg(cgroup.path()).arg(work.argument());
        command.args([first.to_string(), ports.to_string(), hosts.to_string()]);
        if let Some(network) = network {
            command.arg("--network").arg(network);
        }
        let mut process = Own::start(&mut command)?;
        let requests = process.0.stdin.take().context("the stream is not piped")?;
        let answers = BufReader::new(process.0.stdout.take().context("the stream is not piped")?);
        Ok(Self { name: name.to_owned(), _process: process, requests, answers })
    }

    /// Makes the worker do `count` operations. If `keep` is set, the worker stores their times.
    pub fn turn(&mut self, count: u32, keep: bool) -> Result<Turn> {
        let keep = if keep { "keep " } else { "" };
        let [p50, p99, rate, cpu] = self.ask(&format!("{keep}{count}"))?;
        Ok(Turn { p50, p99, rate, cpu })
    }

    /// The median and the 99th percentile of all stored times, in nanoseconds.
    pub fn all(&mut self) -> Result<[f64; 2]> {
        self.ask("all")
    }

    fn ask<const N: usize>(&mut self, request: &str) -> Result<[f64; N]> {
        writeln!(self.requests, "{request}")?;
        let mut answer = String::new();
        self.answers.read_line(&mut answer)?;
        let numbers: Vec<f64> = answer.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        let Ok(numbers) = numbers.try_into() else {
            bail!("arm {:?} answers {request:?} with {answer:?}", self.name);
        };
        Ok(numbers)
    }
}

/// The process of the backends.
pub struct Backends(Own);

impl Backends {
    /// Starts the backends, and waits until they listen. If a second network is given, they listen
    /// there too.
    pub fn start(
        manner: Manner,
        polls: bool,
        addresses: &[SocketAddr],
        network: Option<&Path>,
    ) -> Result<Self> {
        let mut command = this_program()?;
        command.args(["serve", &manner.argument()]).args(addresses.iter().map(ToString::to_string));
        if polls {
            command.arg("--poll");
        }
        if let Some(network) = network {
            command.arg("--network").arg(network);
        }
        let mut process = Own::start(&mut command)?;
        let mut line = String::new();
        BufReader::new(process.0.stdout.take().context("the stream is not piped")?).read_line(&mut line)?;
        if line != "ready\n" {
            bail!("the backends do not listen: {line:?}");
        }
        Ok(Self(process))
    }

    pub fn pid(&self) -> u32 {
        self.0.0.id()
    }
}

/// The CPU time of all threads of a process, in nanoseconds (the first field of their `schedstat`).
/// It is exact while the threads sleep.
pub fn cpu_time(pid: u32) -> Result<u64> {
    let mut sum = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
        sum += text.split(' ').next().context("schedstat has no first field")?.parse::<u64>()?;
    }
    Ok(sum)
}
