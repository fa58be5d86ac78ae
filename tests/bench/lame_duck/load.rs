//! The client: threads that send HTTP/1.1 requests. Some threads open a connection for each
//! request. Others reuse a connection as long as the answers allow it. No request is repeated. The
//! client ends when its standard input is closed, and then writes the result of each request.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::{ClockId, clock_gettime};
use stage::daemon::ChildGuard;

use crate::pause;
use crate::place::process::{part, start};
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
    /// File for the results of the requests
    #[arg(long)]
    out: PathBuf,
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
#[derive(Clone, Debug)]
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

/// `bench ask`.
pub fn run(options: &Options) -> Result<()> {
    const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
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
    let stdin = std::io::stdin();
    // The parent process ends this process by closing its standard input.
    while poll(&mut [PollFd::new(&stdin, PollFlags::IN)], Some(&LOOK)).unwrap_or(0) == 0 {
        println!("{}", count.load(Ordering::Relaxed));
    }
    ends.store(true, Ordering::Relaxed);
    let mut text = String::new();
    for thread in threads {
        for asked in thread.join().expect("a client thread does not panic") {
            let backend = asked.backend.map_or("-".to_owned(), |backend| backend.to_string());
            let failure = asked.failure.unwrap_or_default();
            writeln!(
                text,
                "{} {} {} {backend} {failure}",
                u8::from(asked.pooled),
                asked.began_ns,
                asked.connect_ns
            )?;
        }
    }
    Ok(std::fs::write(&options.out, text)?)
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
pub struct Load {
    child: ChildGuard,
    out: PathBuf,
    count: Arc<AtomicU64>,
}

impl Load {
    /// Starts the client in its cgroup, with this many threads of each kind.
    pub fn start(place: &Place, folder: &Path, fresh: u32, pooled: u32, pause: Duration) -> Result<Self> {
        let out = folder.join("asked");
        let mut command = part("ask")?;
        command.args([SERVICE, "--fresh", &fresh.to_string(), "--pooled", &pooled.to_string()]);
        command.args(["--pause", &pause.as_micros().to_string(), "--out"]).arg(&out);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        place.cgroups[0].enter(&mut command);
        let mut child = start(&mut command)?;
        let lines = BufReader::new(child.stdout.take().context("the stream is not piped")?).lines();
        let count = Arc::new(AtomicU64::new(0));
        let seen = Arc::clone(&count);
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                seen.store(line.parse().unwrap_or(0), Ordering::Relaxed);
            }
        });
        Ok(Self { child, out, count })
    }

    /// The number of requests that were recorded up to a tenth of a second ago.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Ends the client, and returns the results of all its requests.
    pub fn end(mut self) -> Result<Vec<Query>> {
        drop(self.child.stdin.take());
        let status = self.child.wait()?;
        ensure!(status.success(), "the client failed: {status}");
        std::fs::read_to_string(&self.out)?.lines().map(parsed).collect()
    }
}

fn parsed(line: &str) -> Result<Query> {
    let mut words = line.splitn(5, ' ');
    let mut word = || words.next().context("the line has too few words");
    Ok(Query {
        pooled: word()? == "1",
        began_ns: word()?.parse()?,
        connect_ns: word()?.parse()?,
        backend: word()?.parse().ok(),
        failure: Some(word()?.to_owned()).filter(|failure| !failure.is_empty()),
    })
}
