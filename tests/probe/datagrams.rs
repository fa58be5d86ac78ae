//! The probe's UDP sockets: connected sockets, and sockets that name the destination with each
//! datagram.

use std::io::IoSliceMut;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Barrier;
use std::time::Duration;

use rustix::net::sockopt::Timeout;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendFlags, SocketType, sockopt};
use stage::protocol::{Family, Received, SocketId};

use crate::sockets::{address_family, ip_address, peer};
use crate::{Outcome, Probe};

/// The time limit for an answer. It is longer than any answer takes, even in a guest, so that a
/// missing answer is an error and not a hang.
const PATIENCE: Duration = Duration::from_secs(10);

impl Probe {
    pub fn open_datagram(&mut self, family: Family) -> Outcome<SocketId> {
        let socket = open(family)?;
        Ok(self.register(socket))
    }

    pub fn connect_datagram(&self, socket: SocketId, address: SocketAddr) -> Outcome<SocketAddr> {
        let socket = self.socket(socket)?;
        rustix::net::connect(socket, &address)?;
        peer(socket)
    }

    pub fn send_datagram(&self, socket: SocketId, address: SocketAddr) -> Outcome<()> {
        send(self.socket(socket)?, address)
    }

    pub fn send_connected(&self, socket: SocketId) -> Outcome<()> {
        rustix::net::send(self.socket(socket)?, b"?", SendFlags::empty()).map(drop)
    }

    pub fn receive_datagram(&self, socket: SocketId) -> Outcome<Received> {
        let mut buffer = [0; 64];
        let mut control = RecvAncillaryBuffer::default();
        let parts = &mut [IoSliceMut::new(&mut buffer)];
        let received = rustix::net::recvmsg(self.socket(socket)?, parts, &mut control, RecvFlags::empty())?;
        let source = ip_address(received.address)?;
        Ok(Received { name: String::from_utf8_lossy(&buffer[..received.bytes]).into_owned(), source })
    }
}

fn open(family: Family) -> Outcome<OwnedFd> {
    let socket = rustix::net::socket(address_family(family), SocketType::DGRAM, None)?;
    sockopt::set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
    Ok(socket)
}

fn send(socket: impl AsFd, address: SocketAddr) -> Outcome<()> {
    rustix::net::sendto(socket, b"?", SendFlags::empty(), &address).map(drop)
}

/// Each round opens a new socket, and two threads start at the same moment to send to each address.
pub fn race(rounds: u32, addresses: &[SocketAddr]) -> Outcome<()> {
    let family = addresses.first().map_or(Family::V4, |address| Family::of(*address));
    for _ in 0..rounds {
        let socket = open(family)?;
        let start = Barrier::new(2);
        let send_to_each = || {
            start.wait();
            addresses.iter().try_for_each(|address| send(&socket, *address))
        };
        std::thread::scope(|scope| {
            let other = scope.spawn(send_to_each);
            send_to_each().and(other.join().expect("sending does not panic"))
        })?;
    }
    Ok(())
}
