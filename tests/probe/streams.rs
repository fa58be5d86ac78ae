//! The probe's TCP sockets: how they dial, listen and end. A backend answers with its name on a
//! line.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::TryRecvError;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, SocketType, sockopt};
use stage::protocol::{Counts, Dialled, Family, Request, SocketId, failure};

use crate::sockets::{address_family, peer};
use crate::{Outcome, Probe};

/// The maximum number of connections that wait to be accepted.
const BACKLOG: i32 = 16;

impl Probe {
    pub fn open_stream(&mut self, family: Family) -> Outcome<SocketId> {
        let socket = socket(family, SocketFlags::CLOEXEC)?;
        Ok(self.register(socket))
    }

    pub fn dial(&mut self, address: SocketAddr) -> Outcome<Dialled> {
        let socket = self.open_stream(Family::of(address))?;
        self.redial(socket, address)
    }

    pub fn dial_mptcp(&mut self, address: SocketAddr) -> Outcome<Dialled> {
        let mptcp = Some(rustix::net::ipproto::MPTCP);
        let socket = rustix::net::socket(address_family(Family::of(address)), SocketType::STREAM, mptcp)?;
        let socket = self.register(socket);
        self.redial(socket, address)
    }

    pub fn redial(&mut self, id: SocketId, address: SocketAddr) -> Outcome<Dialled> {
        let socket = self.socket(id)?;
        rustix::net::connect(socket, &address)?;
        let name = read_name(socket)?;
        Ok(Dialled { socket: id, name, peer: peer(socket)? })
    }

    pub fn start_connect(&mut self, address: SocketAddr) -> Outcome<SocketId> {
        let socket = socket(Family::of(address), SocketFlags::NONBLOCK)?;
        start(&socket, address)?;
        Ok(self.register(socket))
    }

    /// Dials until the next request arrives.
    pub fn dial_until_stopped(&mut self, address: SocketAddr) -> Outcome<Counts> {
        let mut counts = Counts::new();
        while !self.is_stopped()? {
            *counts.entry(dial_once(address)).or_default() += 1;
        }
        Ok(counts)
    }

    /// Dials again on every socket until the next request arrives. Failed dials are ignored.
    pub fn redial_until_stopped(&mut self, address: SocketAddr) -> Outcome<()> {
        while !self.is_stopped()? {
            for socket in self.sockets.values() {
                let _ = rustix::net::connect_unspec(socket);
                let _ = rustix::net::connect(socket, &address);
            }
        }
        Ok(())
    }

    /// Whether [`Request::Stop`] has arrived. Any other request is an error, because it would be
    /// lost.
    fn is_stopped(&self) -> Outcome<bool> {
        match self.requests.try_recv() {
            Err(TryRecvError::Empty) => Ok(false),
            Ok(Ok(Request::Stop)) | Err(TryRecvError::Disconnected) => Ok(true),
            Ok(other) => {
                eprintln!("the probe runs a loop and accepts only `Stop`, but received {other:?}");
                Err(Errno::BUSY)
            }
        }
    }

    pub fn disconnect(&self, socket: SocketId) -> Outcome<()> {
        rustix::net::connect_unspec(self.socket(socket)?)
    }

    pub fn reset(&mut self, socket: SocketId) -> Outcome<()> {
        reset_at_close(self.take(socket)?)
    }

    pub fn provoke(&self, socket: SocketId) -> Outcome<()> {
        let socket = self.socket(socket)?;
        rustix::io::write(socket, b"!")?;
        rustix::io::read(socket, &mut [0; 1]).map(drop)
    }

    pub fn shut_down(&self, socket: SocketId) -> Outcome<()> {
        rustix::net::shutdown(self.socket(socket)?, Shutdown::Both)
    }

    pub fn listen(&mut self, address: SocketAddr) -> Outcome<SocketId> {
        let socket = self.open_stream(Family::of(address))?;
        self.listen_again(socket, address)?;
        Ok(socket)
    }

    pub fn listen_again(&self, socket: SocketId, address: SocketAddr) -> Outcome<()> {
        let socket = self.socket(socket)?;
        rustix::net::bind(socket, &address)?;
        rustix::net::listen(socket, BACKLOG)
    }

    pub fn accept(&mut self, listener: SocketId) -> Outcome<SocketAddr> {
        let accepted = rustix::net::accept(self.socket(listener)?)?;
        let peer = peer(&accepted);
        self.register(accepted);
        peer
    }
}

pub fn dial_many(address: SocketAddr, count: u32) -> Counts {
    let mut counts = Counts::new();
    for _ in 0..count {
        *counts.entry(dial_once(address)).or_default() += 1;
    }
    counts
}

/// Dials, reads the name, and closes with a reset, so that a thousand calls leave no port in
/// TIME_WAIT.
fn dial_once(address: SocketAddr) -> String {
    let dial = || {
        let socket = socket(Family::of(address), SocketFlags::CLOEXEC)?;
        let name = rustix::net::connect(&socket, &address).and_then(|()| read_name(&socket));
        let _ = reset_at_close(socket);
        name
    };
    dial().unwrap_or_else(|errno: Errno| failure(errno.raw_os_error()))
}

pub fn socket(family: Family, flags: SocketFlags) -> Outcome<OwnedFd> {
    rustix::net::socket_with(address_family(family), SocketType::STREAM, flags, None)
}

/// Connects a non-blocking socket.
pub fn start(socket: impl AsFd, address: SocketAddr) -> Outcome<()> {
    match rustix::net::connect(socket, &address) {
        Err(Errno::INPROGRESS) => Ok(()),
        other => other,
    }
}

fn reset_at_close(socket: OwnedFd) -> Outcome<()> {
    sockopt::set_socket_linger(socket, Some(Duration::ZERO))
}

/// Reads the name with which the backend answers.
pub fn read_name(socket: impl AsFd) -> Outcome<String> {
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
