//! Requests to a process that a test has started, and its answers: one line of JSON each way, over
//! the process's standard input and output. This file contains both sides of the protocol.
//!
//! This file does not depend on the requests: `protocol` defines them for probes, `workers` for the
//! workers of the stress test.

use std::fmt::Debug;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A process that answers requests. Killed on drop.
pub struct Process {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
    /// The last request, for the error message of a missing answer.
    last_request: String,
}

impl Process {
    /// Starts a command and waits until its process accepts requests.
    #[track_caller]
    pub fn start(command: &mut Command) -> Self {
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = spawned.unwrap_or_else(|error| panic!("start {command:?}: {error}"));
        let requests = child.stdin.take().expect("the process is piped");
        let answers = BufReader::new(child.stdout.take().expect("the process is piped"));
        let mut process = Self { child, requests, answers, last_request: format!("start {command:?}") };
        process.receive::<()>();
        process
    }

    #[track_caller]
    pub fn call<T: DeserializeOwned>(&mut self, request: &(impl Serialize + Debug)) -> T {
        self.send(request);
        self.receive()
    }

    /// Sends a request without waiting for its answer.
    #[track_caller]
    pub fn send(&mut self, request: &(impl Serialize + Debug)) {
        self.last_request = format!("{request:?}");
        let line = serde_json::to_string(request).expect("a request is plain data");
        writeln!(self.requests, "{line}").and_then(|()| self.requests.flush()).unwrap_or_else(|error| {
            panic!("the process ended before the request {}: {error}", self.last_request)
        });
    }

    /// Waits for an answer.
    #[track_caller]
    pub fn receive<T: DeserializeOwned>(&mut self) -> T {
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("read the answer");
        assert!(!line.is_empty(), "the process ended without an answer to the request {}", self.last_request);
        serde_json::from_str(&line).unwrap_or_else(|error| {
            panic!("request {}: cannot parse the answer {line}: {error}", self.last_request)
        })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Notifies the starter of this process that the process accepts requests.
///
/// # Errors
/// If standard output is closed.
pub fn ready() -> Result<()> {
    answer(&())
}

/// The requests to this process, until the requester closes standard input.
pub fn requests<R: DeserializeOwned>() -> impl Iterator<Item = Result<R>> {
    io::stdin().lines().map(|line| {
        let line = line.context("read a request")?;
        serde_json::from_str(&line).with_context(|| format!("request {line}"))
    })
}

/// Answers a request.
///
/// # Errors
/// If standard output is closed.
pub fn answer(answer: &impl Serialize) -> Result<()> {
    let line = serde_json::to_string(answer)?;
    let mut out = io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).context("answer")
}

/// Answers requests in sequence, until the requester closes standard input.
///
/// # Errors
/// If a request cannot be read or carried out. The error names the request.
pub fn serve<R, T>(mut carry_out: impl FnMut(&R) -> Result<T>) -> Result<()>
where
    R: DeserializeOwned + Debug,
    T: Serialize,
{
    ready()?;
    for request in requests::<R>() {
        let request = request?;
        answer(&carry_out(&request).with_context(|| format!("{request:?}"))?)?;
    }
    Ok(())
}
