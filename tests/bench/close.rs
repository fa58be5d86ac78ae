//! How much slower connects are while `socklb close` closes ten thousand flows of another service.
//!
//! In each run three arms take turns, in random order: connects while flows are open, the same
//! connects again (A/A), and connects while a part of the flows is closed. A turn takes as long as
//! the closing of this part, so that a drift of the machine's speed affects all arms. The p99 of an
//! arm is computed from all its connects in the run.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lb_view::close_result::Closed;
use rustix::fd::OwnedFd;
use stage::rpc::{self, Process};
use stage::{Cgroup, Setup, Stage};

use crate::connect::arms::Addresses;
use crate::connect::serve::Manner;
use crate::connect::work::Work;
use crate::connect::worker::{Backends, Worker};
use crate::place::process::{part, raise_descriptors};
use crate::place::{Place, bound, client, fixed, service};
use crate::results::{Finding, Median, conclude, median, show, table};

/// `bench close`
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Number of runs
    #[arg(long, default_value_t = 7)]
    runs: u32,
    /// Number of flows that are closed in each turn
    #[arg(long, default_value_t = 1_000)]
    flows: u32,
    /// Number of turns of each arm in a run
    #[arg(long, default_value_t = 10)]
    turns: u32,
    /// Flows that are closed per second
    #[arg(long, default_value_t = 1_000)]
    rate: u32,
    /// Fail if a requirement is missed
    #[arg(long)]
    check: bool,
}

/// The service of the flows that are closed, and the service's backend.
const CLOSED: &str = "10.96.0.10:80";
const CLOSED_BACKEND: &str = "127.0.0.1:8001";
/// The service that is dialled during the closings, and the service's backend.
const BESIDE: &str = "10.96.0.11:80";
const BESIDE_BACKEND: &str = "127.0.0.1:8002";

/// The number of connects of the first turn, which is not counted. The rate of this turn determines
/// the number of connects in the other turns.
const WARM: u32 = 20_000;

/// The index of the arm with closings. In the turns of the other arms, the flows stay open.
const CLOSING: usize = 2;

/// `bench close`.
pub fn run(options: &Options) -> Result<()> {
    let stage = Stage::new();
    let setup = Setup::new(&stage, "bench");
    // The listener accepts nothing, so closed connections remain in its queue.
    let queue = options.flows * (options.runs * options.turns + 1);
    std::fs::write("/proc/sys/net/core/somaxconn", queue.to_string())?;
    let _listener = bound(CLOSED_BACKEND.parse()?, i32::try_from(queue)?)?;
    let _backends = Backends::start(Manner::Drop, false, &[BESIDE_BACKEND.parse()?], None)?;
    let cgroup = Cgroup::new();
    let text = client("bench", &cgroup, "")
        + &service("closed", CLOSED, &fixed([CLOSED_BACKEND.parse()?]), "")
        + &service("beside", BESIDE, &fixed([BESIDE_BACKEND.parse()?]), "");
    let place = Place::start(&setup, vec![cgroup], &text);
    let cgroup = &place.cgroups[0];
    let mut holder = Holder::start(cgroup)?;
    let beside = Addresses::one(BESIDE.parse()?);
    let start = || Worker::start(Work::Connect, cgroup, None, beside);
    let warm = start()?.turn(WARM, false);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a number of connects")]
    let count = (warm.rate * f64::from(options.flows) / f64::from(options.rate)) as u32;
    let mut random = fastrand::Rng::with_seed(1);
    let mut runs = Vec::new();
    for _ in 0..options.runs {
        let mut workers = [start()?, start()?, start()?];
        let (mut order, mut closing) = ([0, 1, CLOSING], Duration::ZERO);
        for _ in 0..options.turns {
            random.shuffle(&mut order);
            for arm in order {
                holder.open(options.flows);
                closing += turn(arm, &setup, &mut workers[arm], count, options)?;
            }
        }
        runs.push(Run { times: workers.each_mut().map(Worker::all), closing });
    }
    println!(
        "in each run {} turns of {count} connects per arm; in each turn of one arm {} flows are closed, {} per second\n",
        options.turns, options.flows, options.rate
    );
    println!("{}", print(&runs));
    conclude(&show(&findings(&runs)), options.check)
}

/// The results of one run.
struct Run {
    /// The p50 and the p99 of each arm, in nanoseconds.
    times: [[f64; 2]; 3],
    /// How long all closings took together.
    closing: Duration,
}

/// Makes the connects of a turn. Returns how long the closing took; 0 for an arm without closings.
fn turn(
    arm: usize,
    setup: &Setup,
    worker: &mut Worker,
    count: u32,
    Options { flows, rate, .. }: &Options,
) -> Result<Duration> {
    if arm != CLOSING {
        worker.turn(count, true);
        return Ok(Duration::ZERO);
    }
    let close = || {
        let begun = Instant::now();
        let closed: Closed =
            setup.document(&["close", "closed", CLOSED_BACKEND, "--rate", &format!("{rate}/s")]);
        (closed.sum(|counts| counts.closed), begun.elapsed())
    };
    std::thread::scope(|scope| {
        let closing = scope.spawn(close);
        worker.turn(count, true);
        let (closed, took) =
            closing.join().map_err(|_| anyhow::anyhow!("the thread that closes flows has panicked"))?;
        ensure!(closed == u64::from(*flows), "{closed} of {flows} flows were closed");
        Ok(took)
    })
}

fn print(runs: &[Run]) -> String {
    let row = |run: &Run| {
        let [open, again, closing] = run.times.map(|[_, p99]| p99);
        let p99 = [open, again, closing].map(|p99| format!("{:.1}", p99 / 1e3));
        let ratios = [again, closing].map(|p99| format!("{:.3}", p99 / open));
        let took = format!("{:.1}", run.closing.as_secs_f64());
        p99.into_iter().chain(ratios).chain([took]).collect::<Vec<_>>()
    };
    let titles = ["p99, us", "A/A", "while closing", "ratio A/A", "ratio while closing", "closing, s"];
    table(&titles, &runs.iter().map(row).collect::<Vec<_>>())
}

fn findings(runs: &[Run]) -> Vec<Finding> {
    let ratio = |arm: usize, time: usize| {
        median(&runs.iter().map(|run| run.times[arm][time] / run.times[0][time]).collect::<Vec<_>>())
    };
    let shown = |of: Median| format!("{:.3} ({:.3} to {:.3})", of.value, of.low, of.high);
    let (again, closing) = (ratio(1, 1), ratio(CLOSING, 1));
    let what = "p99 while flows are closed";
    // If the noise (A/A) is more than 5 %, the ratio proves nothing.
    let is_quiet = (1.0 / 1.05..=1.05).contains(&again.value);
    vec![
        Finding::shown("p99, A/A: median of the ratios, 95 % confidence interval", shown(again)),
        if is_quiet {
            Finding::judged(what, shown(closing), "at most 1.1", closing.value <= 1.1)
        } else {
            Finding::shown(format!("{what} (not judged, because A/A is noisy)"), shown(closing))
        },
        Finding::shown("p50 while flows are closed", shown(ratio(CLOSING, 0))),
    ]
}

/// `bench hold`: opens flows to [`CLOSED`]. A request contains the number of flows that must be
/// open.
pub fn hold() -> Result<()> {
    raise_descriptors()?;
    let service: SocketAddr = CLOSED.parse()?;
    let mut held: Vec<OwnedFd> = Vec::new();
    rpc::serve(|wanted: &u32| {
        // For a closed connection, recv() returns an error or the end of the stream.
        held.retain(|socket| {
            let flags = rustix::net::RecvFlags::DONTWAIT;
            rustix::net::recv(socket, &mut [0_u8; 1], flags)
                .is_err_and(|error| error == rustix::io::Errno::AGAIN)
        });
        while held.len() < *wanted as usize {
            let socket =
                rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None)?;
            rustix::net::connect(&socket, &service).context("open a flow")?;
            held.push(socket);
        }
        Ok(())
    })
}

/// The process that holds the flows.
struct Holder(Process);

impl Holder {
    fn start(cgroup: &Cgroup) -> Result<Self> {
        let mut command = part("hold")?;
        cgroup.enter(&mut command);
        Ok(Self(Process::start(&mut command)))
    }

    /// Opens flows until `flows` flows are open.
    fn open(&mut self, flows: u32) {
        self.0.call::<()>(&flows);
    }
}
