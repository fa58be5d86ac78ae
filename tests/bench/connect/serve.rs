//! The backends of a benchmark: a single process with one thread, which polls or blocks.
//!
//! This module must not depend on the addresses that clients dial, or on the balancer between
//! clients and backends.

use std::collections::{BTreeMap, VecDeque};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::event::{Timespec, epoll};
use stage::rpc;

use crate::place::process::{enter, pin_to};
use crate::place::{QUEUE, bound};

/// The backends of a benchmark.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// What to do with a connection
    manner: Manner,
    /// Addresses on which to listen
    addresses: Vec<SocketAddr>,
    /// A second network namespace to listen in
    #[arg(long)]
    network: Option<PathBuf>,
    /// Poll instead of blocking
    #[arg(long)]
    poll: bool,
}

/// The action of a backend on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Manner {
    /// Accepts a connection and closes it late
    Drop,
    /// Sends one byte at once, and closes the connection late
    Greet,
    /// Sends back the received bytes
    Echo,
    /// Acknowledges every block of bytes
    Sink,
}

impl Manner {
    /// The name on the command line.
    pub fn argument(self) -> String {
        let value = clap::ValueEnum::to_possible_value(&self).expect("no manner is hidden");
        value.get_name().to_owned()
    }
}

/// The number of received bytes after which the backend sends an acknowledgement.
pub const BULK_BYTES: usize = 4 << 20;
/// The number of accepted connections that stay open. If there are more, the backend closes the
/// oldest one, which its client no longer uses.
const OPEN: usize = 64;
/// The benchmark normally kills this process. If it does not, the process ends after this time.
const AT_MOST: Duration = Duration::from_secs(3600);

/// A connection that is served, and the number of received bytes that are not acknowledged yet.
struct Served {
    stream: TcpStream,
    bytes: usize,
}

struct Server {
    manner: Manner,
    epoll: rustix::fd::OwnedFd,
    listeners: Vec<TcpListener>,
    served: BTreeMap<u64, Served>,
    next: u64,
    closing: VecDeque<TcpStream>,
    buffer: Vec<u8>,
}

/// Serves connections until the process is killed.
pub fn run(options: &Options) -> Result<()> {
    pin_to(1)?;
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let mut server = Server {
        manner: options.manner,
        epoll,
        listeners: Vec::new(),
        served: BTreeMap::new(),
        next: 0,
        closing: VecDeque::new(),
        buffer: vec![0; 256 << 10],
    };
    server.listen(&options.addresses)?;
    if let Some(network) = &options.network {
        enter(&std::fs::File::open(network)?)?;
        server.listen(&options.addresses)?;
    }
    rpc::ready()?;
    let wait = if options.poll { Duration::ZERO } else { Duration::from_secs(1) };
    let wait = Timespec { tv_sec: i64::try_from(wait.as_secs())?, tv_nsec: 0 };
    let end = Instant::now() + AT_MOST;
    let mut events = Vec::with_capacity(64);
    while Instant::now() < end {
        events.clear();
        epoll::wait(&server.epoll, rustix::buffer::spare_capacity(&mut events), Some(&wait))?;
        for event in &events {
            server.serve(event.data.u64())?;
        }
    }
    Ok(())
}

impl Server {
    fn listen(&mut self, addresses: &[SocketAddr]) -> Result<()> {
        for address in addresses {
            // The queue is long enough for whole turns of clients, even if this process gets its
            // CPU late. If the queue were full, the kernel would drop the SYN, and the client would
            // retry only a second later.
            let listener = bound(*address, QUEUE)?;
            let number = self.number();
            epoll::add(&self.epoll, &listener, number, epoll::EventFlags::IN)?;
            self.listeners.push(listener);
        }
        Ok(())
    }

    /// The number of a new descriptor. Listeners have the first numbers.
    fn number(&mut self) -> epoll::EventData {
        self.next += 1;
        epoll::EventData::new_u64(self.next - 1)
    }

    fn serve(&mut self, number: u64) -> Result<()> {
        let listener = usize::try_from(number).ok().and_then(|number| self.listeners.get(number));
        if let Some(listener) = listener {
            // The queue may be empty again: if a client resets its connection, the kernel removes
            // the connection from the queue.
            if let Ok((stream, _)) = listener.accept() {
                self.welcome(stream)?;
            }
            return Ok(());
        }
        let Some(served) = self.served.get_mut(&number) else { return Ok(()) };
        let bytes = served.stream.read(&mut self.buffer).unwrap_or(0);
        let goes_on = bytes > 0
            && match self.manner {
                Manner::Echo => served.stream.write_all(&self.buffer[..bytes]).is_ok(),
                Manner::Sink => {
                    served.bytes += bytes;
                    let whole = served.bytes >= BULK_BYTES;
                    served.bytes %= BULK_BYTES;
                    !whole || served.stream.write_all(&[1]).is_ok()
                }
                Manner::Drop | Manner::Greet => false,
            };
        if !goes_on {
            // When the connection is closed, the kernel removes it from the set of polled
            // descriptors.
            self.served.remove(&number);
        }
        Ok(())
    }

    fn welcome(&mut self, mut stream: TcpStream) -> Result<()> {
        match self.manner {
            Manner::Drop | Manner::Greet => {
                if self.manner == Manner::Greet {
                    // Sending fails if the client has reset the connection. Such a client does not
                    // need the byte.
                    let _ = stream.write_all(&[1]);
                }
                self.closing.push_back(stream);
                if self.closing.len() > OPEN {
                    self.closing.pop_front();
                }
            }
            Manner::Echo | Manner::Sink => {
                stream.set_nodelay(true)?;
                stream.set_nonblocking(true)?;
                let number = self.number();
                epoll::add(&self.epoll, &stream, number, epoll::EventFlags::IN)?;
                self.served.insert(number.u64(), Served { stream, bytes: 0 });
            }
        }
        Ok(())
    }
}
