//! A backend. Each request is one byte, takes some CPU time, and is answered with one byte. The
//! backend reports its requests per second to its agent.
//!
//! It processes one request after the other. This is sufficient, because the benchmark measures a
//! backend's use of its quota, not the speed of its answers.

use std::cell::RefCell;
use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::LocalSet;

use crate::pause;
use crate::place::process::{own_cpu_time, raise_descriptors};

/// `bench serve-load`
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Address on which to listen
    listen: SocketAddr,
    /// Mean CPU time of a request, in microseconds
    #[arg(long, default_value_t = 0)]
    cost: u32,
    /// Standard deviation of the logarithm of the cost; 0: all requests cost the same
    #[arg(long, default_value_t = 0.0)]
    sigma: f64,
    /// Socket of the backend's agent
    #[arg(long)]
    agent: Option<PathBuf>,
}

/// The time between two reports of the backend to its agent, and the time over which the reported
/// rates are measured. The agent itself measures at the same interval.
const REPORTS: Duration = Duration::from_secs(2);
/// How long the agent uses a report of the backend.
const HOLDS: Duration = Duration::from_secs(10);

/// `bench serve-load`.
pub fn run(options: &Options) -> Result<()> {
    // Many connections wait here until their requests are processed.
    raise_descriptors()?;
    // The runtime checks for new connections after each request.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().event_interval(1).build()?;
    runtime.block_on(LocalSet::new().run_until(serve(options)))
}

async fn serve(options: &Options) -> Result<()> {
    let work = Rc::new(RefCell::new(Work::new(options)));
    let listener = TcpListener::bind(options.listen).await?;
    if let Some(agent) = options.agent.clone() {
        // Reports are sent by a separate thread, because many requests may be queued before a
        // report.
        let (listen, served) = (options.listen, Arc::clone(&work.borrow().served));
        std::thread::spawn(move || report_use(&agent, listen, &served));
    }
    loop {
        let (stream, _) = listener.accept().await?;
        tokio::task::spawn_local(answer(stream, Rc::clone(&work)));
    }
}

/// Answers requests until the client closes the connection.
async fn answer(mut stream: TcpStream, work: Rc<RefCell<Work>>) {
    let _ = stream.set_nodelay(true);
    let mut request = [0];
    while stream.read_exact(&mut request).await.is_ok() {
        work.borrow_mut().request();
        if stream.write_all(&request).await.is_err() {
            return;
        }
    }
}

/// The cost of requests, and the CPU time that requests have used.
struct Work {
    random: fastrand::Rng,
    mean: f64,
    sigma: f64,
    /// The CPU time of this process that is attributed to requests.
    charged: Duration,
    served: Arc<AtomicU64>,
}

impl Work {
    fn new(options: &Options) -> Self {
        Self {
            random: fastrand::Rng::new(),
            mean: f64::from(options.cost) / 1e6,
            sigma: options.sigma,
            charged: Duration::ZERO,
            served: Arc::default(),
        }
    }

    /// Uses the CPU time of a request. The time since the last request, for accepting and reading,
    /// is included. So the kernel charges the cgroup exactly the request's cost.
    fn request(&mut self) {
        let cost = lognormal(self.mean, self.sigma, &mut self.random);
        let until = self.charged + Duration::from_secs_f64(cost);
        while own_cpu_time() < until {
            std::hint::spin_loop();
        }
        self.charged = own_cpu_time();
        self.served.fetch_add(1, Ordering::Relaxed);
    }
}

/// Draws a lognormal number with this mean, by the method of Box and Muller.
fn lognormal(mean: f64, sigma: f64, random: &mut fastrand::Rng) -> f64 {
    let (radius, angle) = ((-2.0 * (1.0 - random.f64()).ln()).sqrt(), std::f64::consts::TAU * random.f64());
    mean * (sigma * radius * angle.cos() - sigma * sigma / 2.0).exp()
}

/// Reports to the agent until the process ends. If a report fails, it is not repeated, because the
/// next one replaces it.
fn report_use(agent: &Path, backend: SocketAddr, served: &AtomicU64) {
    let (mut before, mut since) = (0, Instant::now());
    loop {
        pause::until(since + REPORTS);
        let (served, now) = (served.load(Ordering::Relaxed), Instant::now());
        let window = now - since;
        let qps = (served - before) as f64 / window.as_secs_f64();
        (before, since) = (served, now);
        let query = format!(
            "backend={backend}&qps={qps:.3}&eps=0&window_ms={}&valid_for_ms={}",
            window.as_millis(),
            HOLDS.as_millis()
        );
        if let Err(error) = post(agent, &query) {
            eprintln!("{backend}: cannot report to the agent: {error}");
        }
    }
}

/// Sends a report in the same way as `socklb agent report`.
fn post(agent: &Path, query: &str) -> Result<()> {
    let mut stream = UnixStream::connect(agent)?;
    stream.set_read_timeout(Some(REPORTS))?;
    let request = format!(
        "POST /v1/report?{query} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    ensure!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_have_their_mean() {
        let mut random = fastrand::Rng::with_seed(1);
        assert_eq!(lognormal(0.5, 0.0, &mut random), 0.5);
        let mean = (0..100_000).map(|_| lognormal(2.0, 1.0, &mut random)).sum::<f64>() / 1e5;
        assert!((mean - 2.0).abs() < 0.05, "{mean}");
    }
}
