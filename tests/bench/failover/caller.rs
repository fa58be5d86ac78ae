//! The process that connects, inside the client's cgroup. It makes the requested calls, and reports
//! which of them failed, and when.
//!
//! The process must not depend on the backends behind the address that it dials, or on the expected
//! results.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_linger, socket_error};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv};
use serde::{Deserialize, Serialize};
use stage::Cgroup;
use stage::rpc::{self, Process};

use crate::pause::until;
use crate::place::process::{part, raise_descriptors};

/// How long the application waits for a connection and the first byte together.
pub const PATIENCE: Duration = Duration::from_millis(300);

/// A request to a caller, which answers it with [`Made`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Calls {
    /// Connects that follow one another. Each waits for a first byte.
    InTurn {
        service: SocketAddr,
        /// The maximum number of connects.
        connects: u64,
        /// The minimum time between the starts of two connects.
        apart: Duration,
        /// How long after the start of the calls connects may begin.
        within: Duration,
    },
    /// Connects as in `InTurn`, but in several threads and without pauses.
    AtOnce {
        service: SocketAddr,
        /// The maximum number of connects.
        connects: u64,
        threads: u32,
        /// How long after the start of the calls connects may begin.
        within: Duration,
    },
    /// Connects that begin at a fixed rate, regardless of the results of earlier connects. They do
    /// not wait for a first byte.
    Paced {
        service: SocketAddr,
        connects: u64,
        /// Connects per second.
        rate: u32,
        /// The number of packets per million that are lost on their way to the client.
        lost: u32,
    },
    /// A pool of open connections. A connection that ends is replaced.
    Pool {
        service: SocketAddr,
        /// The number of open connections in the pool.
        kept: u32,
        /// How long the pool is maintained.
        within: Duration,
    },
}

/// A connect that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    /// The time from the start of the calls to the start of the connect.
    pub began: Duration,
    /// The time from the start of the calls to the failure of the connect.
    pub ended: Duration,
}

/// The results of calls.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Made {
    pub connects: u64,
    /// Failed connects, in the order of their failures.
    pub failed: Vec<Failed>,
    /// The number of failures for each error.
    pub errors: BTreeMap<String, u64>,
    /// The time that all calls took together.
    pub took: Duration,
}

pub struct Caller(Process);

impl Caller {
    pub fn start(cgroup: &Cgroup) -> Result<Self> {
        let mut command = part("call")?;
        cgroup.enter(&mut command);
        Ok(Self(Process::start(&mut command)))
    }

    /// Starts calls, but does not wait for the results.
    pub fn begin(&mut self, calls: Calls) {
        self.0.send(&calls);
    }

    /// Waits for the results.
    pub fn made(&mut self) -> Made {
        self.0.receive()
    }
}

/// `bench call`.
pub fn run() -> Result<()> {
    raise_descriptors()?;
    rpc::serve(|calls| match *calls {
        Calls::InTurn { service, connects, apart, within } => in_turn(service, connects, apart, within),
        Calls::AtOnce { service, connects, threads, within } => at_once(service, connects, threads, within),
        Calls::Paced { service, connects, rate, lost } => paced(service, connects, rate, lost),
        Calls::Pool { service, kept, within } => pool(service, kept, within),
    })
}

impl Made {
    fn count(&mut self, began: Duration, ended: Duration, outcome: Result<(), Errno>) {
        self.connects += 1;
        if let Err(errno) = outcome {
            self.failed.push(Failed { began, ended });
            *self.errors.entry(format!("{errno:?}")).or_insert(0) += 1;
        }
    }

    fn add(&mut self, other: Self) {
        self.connects += other.connects;
        self.failed.extend(other.failed);
        for (error, count) in other.errors {
            *self.errors.entry(error).or_insert(0) += count;
        }
    }
}

fn in_turn(service: SocketAddr, connects: u64, apart: Duration, within: Duration) -> Result<Made> {
    let (mut made, started, mut due) = (Made::default(), Instant::now(), Duration::ZERO);
    while made.connects < connects && started.elapsed() < within {
        until(started + due);
        let began = started.elapsed();
        let outcome = call(service)?;
        let ended = started.elapsed();
        made.count(began, ended, outcome);
        // A slow call delays all later calls, because later calls do not catch up.
        due = (due + apart).max(ended);
    }
    made.took = started.elapsed();
    Ok(made)
}

fn at_once(service: SocketAddr, connects: u64, threads: u32, within: Duration) -> Result<Made> {
    let (left, started) = (AtomicU64::new(connects), Instant::now());
    let work = || -> Result<Made> {
        let mut made = Made::default();
        let take_one = || left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        while started.elapsed() < within && take_one().is_ok() {
            let began = started.elapsed();
            let outcome = call(service)?;
            made.count(began, started.elapsed(), outcome);
        }
        Ok(made)
    };
    let mut made = Made::default();
    std::thread::scope(|scope| -> Result<()> {
        let start = |_| std::thread::Builder::new().stack_size(64 << 10).spawn_scoped(scope, work);
        let workers = (0..threads).map(start).collect::<std::io::Result<Vec<_>>>()?;
        for worker in workers {
            made.add(worker.join().expect("the thread does not panic")?);
        }
        Ok(())
    })?;
    made.failed.sort_by_key(|failed| failed.ended);
    made.took = started.elapsed();
    Ok(made)
}

/// A connect that has not been answered yet.
struct Pending {
    socket: OwnedFd,
    began: Duration,
}

/// If a connect begins later than planned by more than this time, all later connects are delayed
/// too.
const CATCH_UP: Duration = Duration::from_millis(3);

/// Makes connects in the order in which they are due. If this process had no CPU when connects were
/// due, all later connects are due later too. Otherwise the delayed connects would begin together
/// and reach their timeouts together, which would cause a burst of failures without any fault of
/// the network.
fn paced(service: SocketAddr, connects: u64, rate: u32, lost: u32) -> Result<Made> {
    let (mut made, started, mut begun) = (Made::default(), Instant::now(), 0);
    let mut late = Duration::ZERO;
    let mut pending: VecDeque<Pending> = VecDeque::new();
    while begun < connects || !pending.is_empty() {
        let next = (begun < connects).then(|| late + Duration::from_secs(begun) / rate);
        let over = pending.front().map(|pending| pending.began + PATIENCE);
        let begins = next.is_some_and(|next| over.is_none_or(|over| next < over));
        let due = if begins { next } else { over }.context("nothing is due")?;
        until(started + due);
        if begins {
            let behind = started.elapsed().saturating_sub(due);
            late += if behind > CATCH_UP { behind } else { Duration::ZERO };
            begun += 1;
            let socket = socket()?;
            if lost > 0 {
                stage::filter::drop_some(&socket, lost).context("lose packets")?;
            }
            let began = started.elapsed();
            match begin(&socket, service).and_then(|()| answer(&socket, Duration::ZERO)) {
                Err(Errno::TIMEDOUT) => pending.push_back(Pending { socket, began }),
                outcome => {
                    made.count(began, started.elapsed(), outcome);
                    leave(&socket, outcome);
                }
            }
        } else if let Some(Pending { socket, began }) = pending.pop_front() {
            let outcome = answer(&socket, Duration::ZERO);
            leave(&socket, outcome);
            drop(socket);
            made.count(began, started.elapsed(), outcome);
        }
    }
    made.took = started.elapsed();
    Ok(made)
}

fn pool(service: SocketAddr, kept: u32, within: Duration) -> Result<Made> {
    let (mut made, started) = (Made::default(), Instant::now());
    let mut open: Vec<OwnedFd> = Vec::new();
    while started.elapsed() < within {
        // At most two connections are opened at a time, so that not all begin at the same moment.
        let missing = (usize::try_from(kept)? - open.len()).min(2);
        for _ in 0..missing {
            let (socket, began) = (socket()?, started.elapsed());
            let outcome = begin(&socket, service).and_then(|()| answer(&socket, PATIENCE));
            made.count(began, started.elapsed(), outcome);
            open.extend(outcome.is_ok().then_some(socket));
        }
        let mut polled: Vec<PollFd<'_>> =
            open.iter().map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
        poll(&mut polled, Some(&timespec(Duration::from_millis(10))))?;
        let ended: Vec<bool> = polled.iter().map(|polled| !polled.revents().is_empty()).collect();
        let mut ended = ended.into_iter();
        open.retain(|_| !ended.next().unwrap_or(false));
    }
    made.took = started.elapsed();
    Ok(made)
}

/// Makes one connect and waits for the first byte of the backend. The outer result contains errors
/// of this machine.
fn call(service: SocketAddr) -> Result<Result<(), Errno>> {
    let socket = socket()?;
    let deadline = Instant::now() + PATIENCE;
    let outcome = begin(&socket, service)
        .and_then(|()| answer(&socket, PATIENCE))
        .and_then(|()| first_byte(&socket, deadline.saturating_duration_since(Instant::now())));
    leave(&socket, outcome);
    Ok(outcome)
}

fn socket() -> Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?)
}

fn begin(socket: &OwnedFd, service: SocketAddr) -> Result<(), Errno> {
    match rustix::net::connect(socket, &service) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Returns whether the connection is established within `patience`. Reads the socket's error, which
/// clears it, as runtimes do.
fn answer(socket: &OwnedFd, patience: Duration) -> Result<(), Errno> {
    wait(socket, PollFlags::OUT, patience)?;
    socket_error(socket)?
}

fn first_byte(socket: &OwnedFd, patience: Duration) -> Result<(), Errno> {
    wait(socket, PollFlags::IN, patience)?;
    match recv(socket, &mut [0; 1], RecvFlags::empty())? {
        (_, 0) => Err(Errno::PIPE),
        _ => Ok(()),
    }
}

fn wait(socket: &OwnedFd, what: PollFlags, patience: Duration) -> Result<(), Errno> {
    match poll(&mut [PollFd::new(socket, what)], Some(&timespec(patience)))? {
        0 => Err(Errno::TIMEDOUT),
        _ => Ok(()),
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec::try_from(time).expect("the time fits into a timespec")
}

/// Prepares the closing of the socket: an established connection ends with a reset, so that no port
/// stays occupied. Any other connection is closed in the way in which applications close it.
fn leave(socket: &OwnedFd, outcome: Result<(), Errno>) {
    if outcome.is_ok() {
        let _ = set_socket_linger(socket, Some(Duration::ZERO));
    }
}
