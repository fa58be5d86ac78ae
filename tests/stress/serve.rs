//! The server behind all services: one thread, any number of connections. The client selects the
//! behavior of a connection by one byte.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use stage::filter;
use stage::rpc;
use stage::stress::{ANSWERS, DROPS, NO_HOST, NO_NETWORK, UNROUTED};

use crate::{netlink, reject};

/// Echoes the byte.
pub const ECHO: u8 = b'e';
/// Echoes the byte and closes the connection.
pub const CLOSE: u8 = b'c';
/// Resets the connection.
pub const RESET: u8 = b'r';
/// Echoes the byte. After that, the connection drops data and acknowledgements that it receives.
pub const MUTE: u8 = b'm';

/// The settings of the network namespace: ports and queues for many sockets.
const SETTINGS: [(&str, &str); 4] = [
    ("net/ipv4/ip_local_port_range", "2048 65535"),
    ("net/ipv4/tcp_max_tw_buckets", "1048576"),
    ("net/ipv4/tcp_max_syn_backlog", "65535"),
    ("net/core/somaxconn", "65535"),
];

/// The maximum length of a listener's queue.
const BACKLOG: i32 = 65535;

/// `stress serve`.
pub fn run() -> Result<()> {
    many_files()?;
    for (name, value) in SETTINGS {
        fs::write(format!("/proc/sys/{name}"), value).with_context(|| format!("set {name}"))?;
    }
    // The first of these networks has no route.
    for (backend, kind) in
        UNROUTED.iter().skip(1).zip([libc::RTN_UNREACHABLE, libc::RTN_PROHIBIT, libc::RTN_BLACKHOLE])
    {
        let SocketAddr::V4(address) = backend.parse()? else { continue };
        let [a, b, c, _] = address.ip().octets();
        netlink::refuse_network(Ipv4Addr::new(a, b, c, 0), kind)?;
    }
    let mut silent = Vec::new();
    for port in [DROPS].into_iter().chain(NO_HOST..=NO_NETWORK) {
        let listener = listen(port)?;
        filter::drop_all(&listener)?;
        silent.push(listener);
    }
    reject::start()?;
    // The socket receives datagrams until its buffer is full. No thread reads the datagrams.
    let datagrams = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)?;
    rustix::net::bind(&datagrams, &SocketAddr::from((Ipv4Addr::UNSPECIFIED, ANSWERS)))?;
    answer()
}

/// `stress serve-more`: accepts a part of the connections.
pub fn run_more() -> Result<()> {
    many_files()?;
    answer()
}

/// Answers connections on a thread, and ends with its starter.
fn answer() -> Result<()> {
    let mut server = Server::new(listen(ANSWERS)?)?;
    std::thread::Builder::new().name("serve".to_owned()).spawn(move || server.run())?;
    // The starter sends no requests, and only closes standard input at the end.
    rpc::ready()?;
    io::copy(&mut io::stdin(), &mut io::sink())?;
    Ok(())
}

/// Raises this process's limit of descriptors to the maximum.
pub fn many_files() -> Result<()> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).context("raise the limit of open files")
}

/// A listener for both families. Several processes may listen on one port, and each gets a part of
/// the connections.
fn listen(port: u16) -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::INET6, SocketType::STREAM, flags, None)?;
    sockopt::set_socket_reuseport(&socket, true)?;
    sockopt::set_ipv6_v6only(&socket, false)?;
    rustix::net::bind(&socket, &SocketAddr::from((std::net::Ipv6Addr::UNSPECIFIED, port)))?;
    rustix::net::listen(&socket, BACKLOG).with_context(|| format!("listen on port {port}"))?;
    Ok(socket)
}

struct Server {
    epoll: OwnedFd,
    listener: OwnedFd,
    /// The connections, each at the number of its descriptor.
    connections: Vec<Option<OwnedFd>>,
}

impl Server {
    fn new(listener: OwnedFd) -> Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &listener, EventData::new_u64(number(&listener) as u64), EventFlags::IN)?;
        Ok(Self { epoll, listener, connections: Vec::new() })
    }

    /// The loop ends with the process.
    fn run(&mut self) {
        let mut events: Vec<Event> = Vec::with_capacity(256);
        let listener = number(&self.listener);
        loop {
            events.clear();
            let spare = rustix::buffer::spare_capacity(&mut events);
            match epoll::wait(&self.epoll, spare, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => panic!("wait for events: {errno}"),
            }
            for event in &events {
                let at = usize::try_from(event.data.u64()).expect("the descriptor's number fits");
                if at == listener { self.accept() } else { self.serve(at) }
            }
        }
    }

    fn accept(&mut self) {
        // The bound on accepted connections lets the other sockets get their turn.
        for _ in 0..128 {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::accept_with(&self.listener, flags) {
                Ok(socket) => {
                    let at = number(&socket);
                    epoll::add(&self.epoll, &socket, EventData::new_u64(at as u64), EventFlags::IN)
                        .expect("wait for a connection");
                    if self.connections.len() <= at {
                        self.connections.resize_with(at + 1, || None);
                    }
                    self.connections[at] = Some(socket);
                }
                Err(Errno::AGAIN) => return,
                // The client has already reset the connection.
                Err(Errno::CONNABORTED | Errno::INTR) => {}
                Err(errno) => panic!("accept: {errno}"),
            }
        }
    }

    fn serve(&mut self, at: usize) {
        let Some(socket) = &self.connections[at] else { return };
        let mut words = [0; 64];
        let goes_on = match rustix::io::read(socket, &mut words) {
            Ok(0) => false,
            Ok(length) => words[..length].iter().all(|word| obey(socket, *word)),
            Err(Errno::AGAIN | Errno::INTR) => true,
            Err(_) => false,
        };
        if !goes_on {
            self.connections[at] = None;
        }
    }
}

/// Carries out a client's request. Returns whether the connection stays.
fn obey(socket: &OwnedFd, word: u8) -> bool {
    let echo = || rustix::io::write(socket, &[word]).is_ok();
    match word {
        ECHO => echo(),
        CLOSE => {
            echo();
            false
        }
        RESET => {
            let zero = Some(Duration::ZERO);
            sockopt::set_socket_linger(socket, zero).expect("set SO_LINGER");
            false
        }
        MUTE => {
            filter::drop_data(socket).expect("attach a filter");
            echo()
        }
        // Other bytes are not commands.
        _ => true,
    }
}

fn number(socket: &OwnedFd) -> usize {
    usize::try_from(socket.as_raw_fd()).expect("the descriptor's number fits")
}
