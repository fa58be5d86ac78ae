//! A client that sends requests at its own rate, regardless of their results. It opens a connection
//! for each request, or reuses a connection for a while. No request is repeated. The client reports
//! the results when it receives a request for them.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use stage::Cgroup;
use stage::rpc::{self, Process};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, sleep_until};

use crate::place::process::{part, pin_to, raise_descriptors};

/// `bench send`
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Services to dial, in turn
    services: Vec<SocketAddr>,
    /// Connections per second
    #[arg(long)]
    rate: f64,
    /// Lifetime of a connection in milliseconds; 0: each connection has one request
    #[arg(long, default_value_t = 0)]
    life: u64,
    /// Pause of a reused connection after each request, in milliseconds
    #[arg(long, default_value_t = 0)]
    pause: u64,
    /// Seed for the times of connects
    #[arg(long)]
    seed: u64,
    /// Processor to run on
    #[arg(long)]
    cpu: usize,
}

/// The results of requests.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Sent {
    pub sent: u64,
    pub answered: u64,
    pub failed: u64,
    /// The error of the request that has failed last.
    pub why: Option<String>,
}

#[derive(Default)]
struct Counts {
    sent: AtomicU64,
    answered: AtomicU64,
    failed: AtomicU64,
    why: Mutex<Option<String>>,
}

impl Counts {
    fn fail(&self, why: &anyhow::Error) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        *self.why.lock().unwrap_or_else(PoisonError::into_inner) = Some(format!("{why:#}"));
    }

    fn told(&self) -> Sent {
        let number = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Sent {
            answered: number(&self.answered),
            failed: number(&self.failed),
            // `sent` is read after the other counts, so that it is never less than their sum.
            sent: number(&self.sent),
            why: self.why.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }
}

/// `bench send`.
pub fn run(options: &Options) -> Result<()> {
    raise_descriptors()?;
    // With one processor, a service's table has one cursor, as in the planner.
    pin_to(options.cpu)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let counts = Arc::new(Counts::default());
    let (its, theirs) = (options.clone(), Arc::clone(&counts));
    std::thread::spawn(move || runtime.block_on(send(its, theirs)));
    rpc::serve(|(): &()| Ok(counts.told()))
}

/// Sends until the process ends.
async fn send(options: Options, counts: Arc<Counts>) {
    let mut random = fastrand::Rng::with_seed(options.seed);
    let (life, pause) = (Duration::from_millis(options.life), Duration::from_millis(options.pause));
    let mut services = options.services.iter().copied().cycle();
    let mut next = || services.next().expect("a sender has at least one service");
    // At the start, as many connections are open as arrive in one lifetime. They have different
    // ages, so that they do not all send at the same time.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a number of connections")]
    let open = (options.rate * life.as_secs_f64()) as u32;
    for number in 0..open {
        let left = life * number / open;
        let first = pause.mul_f64(random.f64());
        let (service, counts) = (next(), Arc::clone(&counts));
        tokio::spawn(async move {
            sleep(first).await;
            keep(service, left, pause, &counts).await;
        });
    }
    let mut due = Instant::now();
    loop {
        due += Duration::from_secs_f64(-(1.0 - random.f64()).ln() / options.rate);
        sleep_until(due).await;
        let (service, counts) = (next(), Arc::clone(&counts));
        tokio::spawn(async move { keep(service, life, pause, &counts).await });
    }
}

/// Uses a connection until its lifetime has ended.
async fn keep(service: SocketAddr, life: Duration, pause: Duration, counts: &Counts) {
    let until = Instant::now() + life;
    let mut stream = None;
    loop {
        counts.sent.fetch_add(1, Ordering::Relaxed);
        match ask(service, &mut stream).await {
            Ok(()) => counts.answered.fetch_add(1, Ordering::Relaxed),
            Err(error) => return counts.fail(&error),
        };
        if Instant::now() >= until {
            return;
        }
        sleep(pause).await;
        if Instant::now() >= until {
            return;
        }
    }
}

/// Sends one request over the existing connection, or over a new connection if there is none. Waits
/// as long as the kernel does, because a backend with a full queue is slow, but has not failed.
async fn ask(service: SocketAddr, kept: &mut Option<TcpStream>) -> Result<()> {
    let stream = match kept {
        Some(stream) => stream,
        None => kept.insert(TcpStream::connect(service).await.context("connect")?),
    };
    stream.set_nodelay(true)?;
    stream.write_all(b"?").await.context("send")?;
    stream.read_exact(&mut [0]).await.context("wait for the answer")?;
    Ok(())
}

/// A running client.
pub struct Sender(Process);

impl Sender {
    /// Starts a client in a cgroup.
    pub fn start(cgroup: &Cgroup, services: &[SocketAddr], pace: &Pace, number: usize) -> Result<Self> {
        let mut command = part("send")?;
        command.args(services.iter().map(ToString::to_string));
        command.args(["--rate", &pace.connections.to_string(), "--seed", &number.to_string()]);
        command.args(["--life", &pace.life.as_millis().to_string()]);
        command.args(["--pause", &pace.pause.as_millis().to_string()]);
        let processors = std::thread::available_parallelism()?.get();
        command.args(["--cpu", &(number % processors).to_string()]);
        cgroup.enter(&mut command);
        Ok(Self(Process::start(&mut command)))
    }

    /// Returns the results of the requests that the client has made so far.
    pub fn sent(&mut self) -> Sent {
        self.0.call(&())
    }
}

/// How a client sends.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Connections per second.
    pub connections: f64,
    /// How long each connection is reused; zero if each connection has one request.
    pub life: Duration,
    /// How long the client pauses after each request on a connection.
    pub pause: Duration,
}
