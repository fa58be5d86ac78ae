//! The process of an arm. It does the requested number of operations, and reports how long they
//! took.
//!
//! This module must not depend on the other arms of the comparison.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_linger, set_tcp_nodelay};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, recv, send};
use serde::{Deserialize, Serialize};
use stage::rpc;

use super::arms::Addresses;
use super::serve::BULK_BYTES;
use crate::place::process::{own_cpu_time, pin_to};
use crate::results::percentile;

/// Options of an arm's process.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Operation to repeat
    work: Work,
    /// First address to dial
    first: SocketAddr,
    /// Number of ports, which are dialled in turn
    ports: u16,
    /// Number of hosts, which are dialled in random order
    hosts: u32,
}

/// A request to the process of an arm.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// Do `count` operations; if `keep` is set, store their times. The answer has the median and
    /// the 99th percentile of the times in nanoseconds, the operations per second, and the CPU time
    /// of one operation in nanoseconds.
    Turn { count: u32, keep: bool },
    /// The answer is the median and the 99th percentile of all stored times.
    All,
}

/// An operation that is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Work {
    /// connect() is timed; the times of socket() and close() are included only in the rate
    Connect,
    /// socket(), connect() and close() of UDP, timed as one operation
    UdpCycle,
    /// connect() of one UDP socket
    UdpConnect,
    /// connect() and the first byte from the backend
    FirstByte,
    /// A request and its response over one of several reused connections
    Echo,
    /// Bulk data over a reused connection, with an acknowledgement
    Bulk,
}

impl Work {
    /// Returns the number of operations of a turn that takes about as long as `connects` connects.
    pub fn operations(self, connects: u32) -> u32 {
        match self {
            Self::Connect | Self::FirstByte | Self::Echo => connects,
            Self::UdpCycle => connects * 3,
            Self::UdpConnect => connects * 10,
            Self::Bulk => (connects / 10).max(1),
        }
    }

    /// The number of operations that are timed together. It is more than one if an operation is so
    /// short that the resolution of the clock matters, which is 10 ns on some machines.
    fn together(self) -> u32 {
        if self == Self::UdpConnect { 8 } else { 1 }
    }

    /// The name on the command line.
    pub fn argument(self) -> String {
        let value = clap::ValueEnum::to_possible_value(&self).expect("no kind of work is hidden");
        value.get_name().to_owned()
    }
}

/// The number of connections for requests and responses.
const OPEN_CONNECTIONS: usize = 8;
/// The content of a request, and of a response.
const MESSAGE: [u8; 64] = [7; 64];
/// The number of polls after which an answer is considered lost. So many polls take about ten
/// seconds.
const LOOKS: u32 = 50_000_000;

/// Runs the process of an arm, which answers [`Request`]s.
pub fn run(options: &Options) -> Result<()> {
    // The arms use one CPU, and the backends use the other.
    pin_to(0)?;
    let mut addresses = Addresses { first: options.first, ports: options.ports, hosts: options.hosts }.list();
    // The hosts are dialled in random order, because policies also choose at random. Consecutive
    // addresses would make the kernel's caches more effective.
    if options.hosts > 1 {
        addresses.sort_by_cached_key(scattered);
    }
    let mut worker = Worker {
        work: options.work,
        addresses: addresses.into_iter().cycle(),
        datagram: rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)?,
        kept: std::collections::VecDeque::new(),
        data: vec![7; BULK_BYTES],
    };
    let mut remembered = Vec::new();
    rpc::serve(|request| match *request {
        Request::All => {
            remembered.sort_unstable();
            Ok(p50_and_p99(&remembered).to_vec())
        }
        Request::Turn { count, keep } => {
            let (times, answer) = worker.turn(count)?;
            if keep {
                remembered.extend(times);
            }
            Ok(answer)
        }
    })
}

#[expect(clippy::cast_precision_loss, reason = "nanoseconds of an operation")]
fn p50_and_p99(sorted: &[u64]) -> [f64; 2] {
    [0.5, 0.99].map(|share| percentile(sorted, share) as f64)
}

struct Worker<A> {
    work: Work,
    addresses: A,
    datagram: OwnedFd,
    kept: std::collections::VecDeque<OwnedFd>,
    data: Vec<u8>,
}

impl<A: Iterator<Item = SocketAddr>> Worker<A> {
    /// Does `count` operations. Returns their times in nanoseconds, and the answer.
    fn turn(&mut self, count: u32) -> Result<(Vec<u64>, Vec<f64>)> {
        let together = self.work.together();
        let samples = count.div_ceil(together);
        let mut times = Vec::with_capacity(usize::try_from(samples)?);
        let cpu = own_cpu_time();
        let started = Instant::now();
        for _ in 0..samples {
            times.push(u64::try_from((self.once()? / together).as_nanos())?);
        }
        let seconds = started.elapsed().as_secs_f64();
        let cpu = own_cpu_time().saturating_sub(cpu);
        times.sort_unstable();
        let operations = f64::from(samples * together);
        #[expect(clippy::cast_precision_loss, reason = "nanoseconds of a turn")]
        let each = cpu.as_nanos() as f64 / operations;
        let [p50, p99] = p50_and_p99(&times);
        Ok((times, vec![p50, p99, operations / seconds, each]))
    }

    fn once(&mut self) -> Result<Duration> {
        match self.work {
            Work::Connect => self.connect(),
            Work::UdpCycle => self.udp_cycle(),
            Work::UdpConnect => self.udp_connect(),
            Work::FirstByte => self.first_byte(),
            Work::Echo => self.echo(),
            Work::Bulk => self.bulk(),
        }
    }

    fn address(&mut self) -> Result<SocketAddr> {
        self.addresses.next().context("there is no address to dial")
    }

    fn connect(&mut self) -> Result<Duration> {
        let address = self.address()?;
        let socket = stream(address)?;
        timed(|| Ok(rustix::net::connect(&socket, &address)?))
    }

    fn udp_cycle(&mut self) -> Result<Duration> {
        let address = self.address()?;
        timed(|| {
            let socket = rustix::net::socket(family(address), SocketType::DGRAM, None)?;
            Ok(rustix::net::connect(&socket, &address)?)
        })
    }

    fn udp_connect(&mut self) -> Result<Duration> {
        let Self { datagram, addresses, work, .. } = self;
        timed(|| {
            for address in addresses.take(usize::try_from(work.together())?) {
                rustix::net::connect(&*datagram, &address)?;
            }
            Ok(())
        })
    }

    fn first_byte(&mut self) -> Result<Duration> {
        let address = self.address()?;
        let socket = stream(address)?;
        timed(|| {
            rustix::net::connect(&socket, &address)?;
            receive(&socket, &mut [0])
        })
    }

    fn echo(&mut self) -> Result<Duration> {
        self.keep(OPEN_CONNECTIONS)?;
        self.kept.rotate_left(1);
        let socket = self.kept.front().context("there is no connection")?;
        let mut answer = [0; MESSAGE.len()];
        timed(|| {
            send(socket, &MESSAGE, SendFlags::NOSIGNAL)?;
            // Polls without blocking, because waking up takes longer than the operation, and takes
            // a varying time.
            for _ in 0..LOOKS {
                match recv(socket, &mut answer, RecvFlags::DONTWAIT) {
                    Ok((_, MESSAGE_BYTES)) => return Ok(()),
                    Ok((_, bytes)) => bail!("the answer has {bytes} bytes"),
                    Err(Errno::AGAIN) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            bail!("the backend does not answer")
        })
    }

    fn bulk(&mut self) -> Result<Duration> {
        self.keep(1)?;
        let socket = self.kept.front().context("there is no connection")?;
        timed(|| {
            let mut rest = self.data.as_slice();
            // The loop is bounded, because each send transfers at least one byte.
            while !rest.is_empty() {
                let sent = send(socket, rest, SendFlags::NOSIGNAL)?;
                rest = &rest[sent..];
            }
            receive(socket, &mut [0])
        })
    }

    /// Opens connections until there are `count`.
    fn keep(&mut self, count: usize) -> Result<()> {
        while self.kept.len() < count {
            let address = self.address()?;
            let socket = stream(address)?;
            rustix::net::connect(&socket, &address)?;
            set_tcp_nodelay(&socket, true)?;
            self.kept.push_back(socket);
        }
        Ok(())
    }
}

const MESSAGE_BYTES: usize = MESSAGE.len();

fn family(address: SocketAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 }
}

/// Creates a socket that resets its connection when it is closed, so that no port stays occupied.
fn stream(address: SocketAddr) -> Result<OwnedFd> {
    let socket = rustix::net::socket(family(address), SocketType::STREAM, None)?;
    set_socket_linger(&socket, Some(Duration::ZERO))?;
    Ok(socket)
}

/// Waits until at least one byte is received; fails if the connection has ended.
fn receive(socket: &OwnedFd, into: &mut [u8]) -> Result<()> {
    let (_, bytes) = recv(socket, into, RecvFlags::empty())?;
    if bytes == 0 { bail!("the connection ended") } else { Ok(()) }
}

fn timed(act: impl FnOnce() -> Result<()>) -> Result<Duration> {
    let started = Instant::now();
    act()?;
    Ok(started.elapsed())
}

/// A number for an address. Neighbouring addresses get unrelated numbers.
fn scattered(address: &SocketAddr) -> u64 {
    let mut hasher = DefaultHasher::new();
    address.hash(&mut hasher);
    hasher.finish()
}
