//! The probe: opens sockets on request, one line in, one line out. Started by the tests inside a cgroup.
//!
//! Requests: `ready`, `pin CPU`, `dial ADDRESS`, `mptcp ADDRESS`, `redial SOCKET ADDRESS`, `many ADDRESS COUNT`, `start ADDRESS` (a
//! non-blocking connect that is left alone), `forever ADDRESS` and `redialling ADDRESS` (until the next line), `datagram ADDRESS`, `unspec
//! SOCKET`, `provoke SOCKET` (says something and reads the answer), `reset SOCKET`, `shut SOCKET`, `dup SOCKET`, `listen
//! ADDRESS`, `accept SOCKET`, `peer SOCKET`, `close SOCKET`, `run PROGRAM ARGUMENTS`, `adopt DESCRIPTOR`,
//! and those of `datagrams` and `odd`.

mod datagrams;

mod odd;

use std::collections::BTreeMap;
use std::io::{self, BufRead, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, channel};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

fn main() {
    let cgroup = std::env::args().nth(1).expect("usage: probe CGROUP");
    // Before the first socket: the cgroup that a socket is made in is the one that counts.
    std::fs::write(format!("{cgroup}/cgroup.procs"), std::process::id().to_string())
        .expect("enter the cgroup");
    let (sender, requests) = channel();
    std::thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    let mut probe = Probe { sockets: BTreeMap::new(), children: Vec::new(), next: 0, requests };
    while let Ok(request) = probe.requests.recv() {
        let words: Vec<&str> = request.split(' ').collect();
        let answer = probe.answer(&words);
        println!("{answer}");
        io::stdout().flush().expect("somebody listens");
    }
}

struct Probe {
    sockets: BTreeMap<u32, OwnedFd>,
    /// Children that hold what was open when they were made.
    children: Vec<std::process::Child>,
    next: u32,
    requests: Receiver<String>,
}

impl Probe {
    fn answer(&mut self, words: &[&str]) -> String {
        match words {
            ["ready"] => "ok".to_owned(),
            ["pin", cpu] => {
                let mut set = rustix::thread::CpuSet::new();
                set.set(cpu.parse().expect("a CPU"));
                rustix::thread::sched_setaffinity(None, &set).expect("a CPU that exists");
                "ok".to_owned()
            }
            ["dial", address] => {
                let address = parse(address);
                let socket = self.keep(stream(address, SocketFlags::CLOEXEC));
                self.dial(socket, address)
            }
            ["mptcp", address] => {
                let address = parse(address);
                let mptcp = rustix::net::ipproto::MPTCP;
                let socket = rustix::net::socket(family(address), SocketType::STREAM, Some(mptcp));
                let socket = self.keep(socket.expect("an MPTCP socket"));
                self.dial(socket, address)
            }
            ["redial", socket, address] => self.dial(number(socket), parse(address)),
            ["many", address, count] => many(parse(address), number(count)),
            ["forever", address] => self.forever(parse(address)),
            ["redialling", address] => self.redialling(parse(address)),
            ["start", address] => {
                let address = parse(address);
                let socket = stream(address, SocketFlags::NONBLOCK);
                let result = rustix::net::connect(&socket, &address);
                let socket = self.keep(socket);
                match result {
                    Ok(()) | Err(Errno::INPROGRESS) => format!("ok {socket}"),
                    Err(errno) => format!("err {socket} {}", errno.raw_os_error()),
                }
            }
            ["datagram", address] => datagram(parse(address)),
            ["unspec", socket] => outcome(disconnect(&self.sockets[&number(socket)])),
            ["reset", socket] => {
                let socket = self.sockets.remove(&number(socket)).expect("a socket");
                let zero = Some(std::time::Duration::ZERO);
                outcome(rustix::net::sockopt::set_socket_linger(&socket, zero))
            }
            ["provoke", socket] => {
                let socket = &self.sockets[&number(socket)];
                let said = rustix::io::write(socket, b"!");
                outcome(said.and_then(|_| rustix::io::read(socket, &mut [0; 1])).map(drop))
            }
            ["shut", socket] => {
                outcome(rustix::net::shutdown(&self.sockets[&number(socket)], rustix::net::Shutdown::Both))
            }
            ["dup", socket] => {
                let copy = self.sockets[&number(socket)].try_clone().expect("a copy");
                let copy = self.keep(copy);
                format!("ok {copy}")
            }
            ["listen", address] => {
                let address = parse(address);
                let socket = stream(address, SocketFlags::CLOEXEC);
                let listening =
                    rustix::net::bind(&socket, &address).and_then(|()| rustix::net::listen(&socket, 16));
                self.keep(socket);
                outcome(listening)
            }
            ["accept", socket] => {
                let accepted = rustix::net::accept(&self.sockets[&number(socket)]).expect("accept");
                let peer = peer(&accepted);
                self.keep(accepted);
                format!("ok {peer}")
            }
            ["close", socket] => {
                self.sockets.remove(&number(socket)).expect("a socket");
                "ok".to_owned()
            }
            // A command of the service's own, in its cgroup; answers with its exit code.
            ["run", program, arguments @ ..] => {
                let status = std::process::Command::new(program)
                    .args(arguments)
                    .stdin(std::process::Stdio::null())
                    .stdout(std::process::Stdio::null())
                    .status()
                    .expect("start the command");
                format!("ok {}", status.code().unwrap_or(-1))
            }
            // A socket that was made by somebody else.
            ["adopt", fd] => {
                // SAFETY: the descriptor was handed to this process for this.
                let socket = unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(number(fd)) };
                format!("ok {}", self.keep(socket))
            }
            ["peer", socket] => peer(&self.sockets[&number(socket)]),
            _ => datagrams::answer(self, words)
                .or_else(|| odd::answer(self, words))
                .unwrap_or_else(|| format!("unknown request: {}", words.join(" "))),
        }
    }

    fn keep(&mut self, socket: OwnedFd) -> u32 {
        let number = self.next;
        self.next += 1;
        self.sockets.insert(number, socket);
        number
    }

    fn dial(&self, number: u32, address: SocketAddr) -> String {
        let socket = &self.sockets[&number];
        match rustix::net::connect(socket, &address).and_then(|()| read_name(socket)) {
            Ok(name) => format!("ok {number} {name} {}", peer(socket)),
            Err(errno) => format!("err {number} {}", errno.raw_os_error()),
        }
    }

    /// Dials again on every socket, one after the other, until the next request comes.
    fn redialling(&mut self, address: SocketAddr) -> String {
        while self.requests.try_recv().is_err() {
            for socket in self.sockets.values() {
                let _ = disconnect(socket);
                let _ = rustix::net::connect(socket, &address);
            }
        }
        "ok".to_owned()
    }

    /// Dials until the next request comes, which it answers with the counts.
    fn forever(&mut self, address: SocketAddr) -> String {
        let mut counts = BTreeMap::new();
        while self.requests.try_recv().is_err() {
            *counts.entry(once(address)).or_insert(0u32) += 1;
        }
        format_counts(&counts)
    }
}

fn parse(address: &str) -> SocketAddr {
    address.parse().expect("an address")
}

fn number<T: std::str::FromStr<Err = std::num::ParseIntError>>(text: &str) -> T {
    text.parse().expect("a number")
}

fn stream(address: SocketAddr, flags: SocketFlags) -> OwnedFd {
    rustix::net::socket_with(family(address), SocketType::STREAM, flags, None).expect("a socket")
}

/// The family of a socket for an address.
fn family(address: SocketAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 }
}

fn peer(socket: impl AsFd) -> String {
    match rustix::net::getpeername(socket) {
        Ok(address) => {
            let address = address.and_then(|address| SocketAddr::try_from(address).ok());
            address.map_or_else(|| "none".to_owned(), |peer| peer.to_string())
        }
        Err(errno) => format!("errno-{}", errno.raw_os_error()),
    }
}

/// A name is a line.
fn read_name(socket: impl AsFd) -> Result<String, Errno> {
    let mut name = Vec::new();
    loop {
        let mut byte = [0];
        match rustix::io::read(&socket, &mut byte)? {
            0 => return Err(Errno::PIPE),
            _ if byte == *b"\n" => break,
            _ => name.push(byte[0]),
        }
    }
    Ok(String::from_utf8_lossy(&name).into_owned())
}

/// Dials once, reads the name, closes. Closes with a reset, so that a thousand calls leave no port waiting.
fn once(address: SocketAddr) -> String {
    let socket = stream(address, SocketFlags::CLOEXEC);
    let zero = Some(std::time::Duration::ZERO);
    let dialled = rustix::net::connect(&socket, &address).and_then(|()| read_name(&socket));
    let _ = rustix::net::sockopt::set_socket_linger(&socket, zero);
    dialled.unwrap_or_else(|errno| format!("errno-{}", errno.raw_os_error()))
}

fn many(address: SocketAddr, count: u32) -> String {
    let mut counts = BTreeMap::new();
    for _ in 0..count {
        *counts.entry(once(address)).or_insert(0u32) += 1;
    }
    format_counts(&counts)
}

fn format_counts(counts: &BTreeMap<String, u32>) -> String {
    counts.iter().map(|(name, count)| format!("{name}={count}")).collect::<Vec<_>>().join(" ")
}

/// Connects a datagram socket and says where it goes.
fn datagram(address: SocketAddr) -> String {
    let socket = rustix::net::socket(family(address), SocketType::DGRAM, None).expect("a socket");
    match rustix::net::connect(&socket, &address) {
        Ok(()) => format!("ok {}", peer(&socket)),
        Err(errno) => format!("err {}", errno.raw_os_error()),
    }
}

/// connect(2) to AF_UNSPEC: takes the connection of a socket away.
fn disconnect(socket: impl AsFd) -> Result<(), Errno> {
    rustix::net::connect_unspec(socket)
}

fn outcome(result: Result<(), Errno>) -> String {
    match result {
        Ok(()) => "ok".to_owned(),
        Err(errno) => format!("err {}", errno.raw_os_error()),
    }
}
