//! The client: threads that send HTTP/1.1 requests. Some threads open a connection for each
//! request. Others reuse a connection as long as the answers allow it. No request is repeated.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use stage::rpc::{self, Process};

use crate::pause;
use crate::place::process::part;
use crate::place::{Place, SERVICE};

/// `bench ask`
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Service to dial
    service: SocketAddr,
    /// Threads that open a connection for each request
    #[arg(long)]
    fresh: u32,
    /// Threads that reuse their connection
    #[arg(long)]
    pooled: u32,
    /// Pause of a thread after each request, in microseconds
    #[arg(long)]
    pause: u64,
}

/// How long a client waits for an answer. It is longer than the time of a connect with three lost
/// SYNs.
const PATIENCE: Duration = Duration::from_secs(10);

/// The time of CLOCK_MONOTONIC, which is the same in all processes.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::try_from(now).map_or(0, |now| u64::try_from(now.as_nanos()).unwrap_or(u64::MAX))
}

/// The result of a request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Query {
    /// Whether the request used a reused connection.
    pub pooled: bool,
    /// When the connect for the request began. On a reused connection: when the request began.
    pub began_ns: u64,
    /// How long the connect took; 0 on a reused connection.
    pub connect_ns: u64,
    /// The backend that answered; `None` if there was no answer.
    pub backend: Option<SocketAddr>,
    /// The reason why there was no answer.
    pub failure: Option<String>,
}

/// `bench ask`. If a request of the parent process is `true`, the client ends, and the answer has
/// the results of all requests. Each answer also has the number of requests.
pub fn run(options: &Options) -> Result<()> {
    let (ends, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut threads = Vec::new();
    for number in 0..options.fresh + options.pooled {
        let (ends, count) = (Arc::clone(&ends), Arc::clone(&count));
        let (service, time) = (options.service, Duration::from_micros(options.pause));
        let pooled = number >= options.fresh;
        threads.push(std::thread::spawn(move || {
            let mut all = Vec::new();
            let mut kept = None;
            while !ends.load(Ordering::Relaxed) {
                all.push(ask(service, pooled, &mut kept));
                count.fetch_add(1, Ordering::Relaxed);
                pause::pause(time);
            }
            all
        }));
    }
    rpc::serve(|is_last: &bool| {
        let mut asked = Vec::new();
        if *is_last {
            ends.store(true, Ordering::Relaxed);
            for thread in threads.drain(..) {
                asked.extend(thread.join().expect("a client thread does not panic"));
            }
        }
        Ok((count.load(Ordering::Relaxed), asked))
    })
}

fn ask(service: SocketAddr, pooled: bool, kept: &mut Option<TcpStream>) -> Query {
    let began_ns = now_ns();
    let mut asked = Query { pooled, began_ns, connect_ns: 0, backend: None, failure: None };
    let stream = kept.take().map_or_else(
        || {
            let stream = TcpStream::connect_timeout(&service, PATIENCE);
            asked.connect_ns = now_ns() - began_ns;
            stream
        },
        Ok,
    );
    let answered = stream.map_err(|error| format!("connect: {error}")).and_then(|mut stream| {
        let answer = answer(&mut stream, !pooled).map_err(|error| format!("request: {error}"));
        answer.map(|(backend, closes)| (backend, (!closes).then_some(stream)))
    });
    match answered {
        Ok((backend, stream)) => (asked.backend, *kept) = (Some(backend), stream),
        Err(failure) => asked.failure = Some(failure),
    }
    asked
}

/// Sends one request and reads its answer. Returns the backend, and whether the connection ends
/// after this answer.
fn answer(stream: &mut TcpStream, is_last: bool) -> Result<(SocketAddr, bool)> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    let connection = if is_last { "Connection: close\r\n" } else { "" };
    stream.write_all(format!("GET / HTTP/1.1\r\nHost: users\r\n{connection}\r\n").as_bytes())?;
    let mut bytes = Vec::new();
    let mut some = [0; 1024];
    // Reads until head and body have arrived.
    loop {
        let length = stream.read(&mut some)?;
        ensure!(length > 0, "the connection ended after {} bytes", bytes.len());
        bytes.extend_from_slice(&some[..length]);
        let text = str::from_utf8(&bytes)?;
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        ensure!(head.starts_with("HTTP/1.1 200 "), "{head}");
        let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: "));
        if body.len() >= length.context("the answer has no length")?.parse()? {
            return Ok((body.parse()?, head.contains("Connection: close")));
        }
    }
}

/// A running client.
pub struct Load(Process);

impl Load {
    /// Starts the client in the cgroup of a place's first client, with this many threads of each
    /// kind.
    pub fn start(place: &Place, fresh: u32, pooled: u32, pause: Duration) -> Result<Self> {
        let mut command = part("ask")?;
        command.args([SERVICE, "--fresh", &fresh.to_string(), "--pooled", &pooled.to_string()]);
        command.args(["--pause", &pause.as_micros().to_string()]);
        place.cgroups[0].enter(&mut command);
        Ok(Self(Process::start(&mut command)))
    }

    /// The number of requests so far.
    pub fn count(&mut self) -> u64 {
        self.0.call::<(u64, Vec<Query>)>(&false).0
    }

    /// Ends the client, and returns the results of all its requests.
    pub fn end(mut self) -> Vec<Query> {
        self.0.call::<(u64, Vec<Query>)>(&true).1
    }
}
