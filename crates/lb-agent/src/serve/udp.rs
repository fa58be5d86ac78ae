//! The sockets that receive requests for reports, and the HTTP ports with the same numbers.

use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd as _, OwnedFd};
use std::task::{Context as Waker, Poll};

use anyhow::Result;
use lb_report::agent::{Requester, Via};
use lb_report::wire::Datagram;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, ipproto, listen, socket_with, sockopt};
use tokio::io::Interest;
use tokio::net::{TcpListener, UdpSocket};
use tracing::info;

use crate::config::PORT;

mod packets;

use packets::{PacketBatch, enable_packet_info, send};

/// Size of a socket's receive buffer in bytes, if the host allows it. A buffer of this size has
/// room for several thousand requests.
const BUFFER: usize = 4 << 20;

/// Maximum number of connections that wait to be accepted.
const BACKLOG: i32 = 128;

pub struct BoundSockets {
    sockets: Vec<BoundSocket>,
    batch: PacketBatch,
    /// The number of the socket to check first. The number changes, so that no socket is preferred.
    next: usize,
    /// Packets that the kernel refused to send.
    pub unsent: u64,
}

struct BoundSocket {
    socket: UdpSocket,
    is_v6: bool,
    /// Whether the socket is bound to all addresses of this host.
    is_wildcard: bool,
}

/// Binds the sockets and the ports. If there are no addresses (`None`), binds to all addresses of
/// both families.
///
/// # Errors
/// If an address does not belong to this host, or its port is in use.
pub fn listen_at(addresses: Option<&[SocketAddr]>) -> Result<(BoundSockets, Vec<TcpListener>)> {
    let bound = match addresses {
        Some(addresses) => bind_all(addresses)?,
        None => {
            let all = |ip: IpAddr| [SocketAddr::new(ip, PORT)];
            match bind_all(&all(Ipv6Addr::UNSPECIFIED.into())) {
                Err(error) if is_without_ipv6(&error) => bind_all(&all(Ipv4Addr::UNSPECIFIED.into()))?,
                bound => bound?,
            }
        }
    };
    let (sockets, ports) = bound.into_iter().unzip();
    Ok((BoundSockets { sockets, batch: PacketBatch::new(), next: 0, unsent: 0 }, ports))
}

fn is_without_ipv6(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
    matches!(error, Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL))
}

fn bind_all(addresses: &[SocketAddr]) -> Result<Vec<(BoundSocket, TcpListener)>> {
    addresses.iter().map(|address| bind_both(*address, addresses)).collect()
}

/// Binds the UDP socket and the TCP port of an address. If the kernel chooses the port, the port
/// must be free for UDP and for TCP.
fn bind_both(address: SocketAddr, all: &[SocketAddr]) -> Result<(BoundSocket, TcpListener)> {
    const ATTEMPTS: usize = 16;
    let is_taken = |error: &io::Error| error.kind() == io::ErrorKind::AddrInUse;
    let is_split = all.iter().any(|other| other.is_ipv4() && other.port() == address.port());
    let hint = "another agent or program uses the port: stop it, or name another port with `listen`";
    let failed = |error: io::Error, what: &str, at: SocketAddr| {
        let text = if is_taken(&error) {
            format!("listen at {at} ({what}): {hint}")
        } else {
            format!("listen at {at} ({what})")
        };
        anyhow::Error::new(error).context(text)
    };
    for attempt in 1.. {
        let udp =
            bound(address, SocketType::DGRAM, is_split).map_err(|error| failed(error, "UDP", address))?;
        let socket = BoundSocket::new(udp, address).map_err(|error| failed(error, "UDP", address))?;
        let at = SocketAddr::new(address.ip(), socket.socket.local_addr()?.port());
        match bound(at, SocketType::STREAM, is_split).and_then(port) {
            Ok(port) => return Ok((socket, port)),
            Err(error) if address.port() == 0 && is_taken(&error) && attempt < ATTEMPTS => {}
            Err(error) => return Err(failed(error, "TCP", at)),
        }
    }
    unreachable!("the last attempt returns")
}

fn bound(address: SocketAddr, kind: SocketType, is_split: bool) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let protocol = if kind == SocketType::DGRAM { ipproto::UDP } else { ipproto::TCP };
    let socket = socket_with(family, kind, flags, Some(protocol))?;
    if address.is_ipv6() {
        // The option is set explicitly, so that the host's default has no effect.
        sockopt::set_ipv6_v6only(&socket, is_split || !address.ip().is_unspecified())?;
    }
    if kind == SocketType::STREAM {
        // Without this option, connections of an earlier agent that are already closed would block
        // the port.
        sockopt::set_socket_reuseaddr(&socket, true)?;
    }
    bind(&socket, &address)?;
    Ok(socket)
}

fn port(socket: OwnedFd) -> io::Result<TcpListener> {
    listen(&socket, BACKLOG)?;
    TcpListener::from_std(socket.into())
}

impl BoundSocket {
    fn new(socket: OwnedFd, address: SocketAddr) -> io::Result<Self> {
        let is_wildcard = address.ip().is_unspecified();
        if is_wildcard {
            enable_packet_info(socket.as_fd(), address.is_ipv6())?;
        }
        // The host may limit the buffer to a smaller size.
        let _ = sockopt::set_socket_recv_buffer_size(&socket, BUFFER);
        let socket = UdpSocket::from_std(socket.into())?;
        Ok(Self { socket, is_v6: address.is_ipv6(), is_wildcard })
    }
}

impl BoundSockets {
    /// The addresses at which the sockets listen.
    ///
    /// # Errors
    /// If the kernel does not report the addresses.
    pub fn addresses(&self) -> io::Result<Vec<SocketAddr>> {
        self.sockets.iter().map(|socket| socket.socket.local_addr()).collect()
    }

    /// The socket for an answer to a client that has sent its request to this address of the host:
    /// the socket that is bound to only this address, else the socket that is bound to all
    /// addresses.
    pub fn via(&self, local: IpAddr) -> Option<Via> {
        let address = |socket: &BoundSocket| socket.socket.local_addr().ok().map(|at| at.ip());
        let find = |is_it: &dyn Fn(&BoundSocket) -> bool| self.sockets.iter().position(is_it);
        if let Some(socket) = find(&|socket| address(socket) == Some(local)) {
            return Some(Via { socket, local: None });
        }
        let all_of_family = find(&|socket| socket.is_wildcard && socket.is_v6 == local.is_ipv6());
        let socket = all_of_family.or_else(|| find(&|socket| socket.is_wildcard))?;
        Some(Via { socket, local: Some(local) })
    }

    /// Waits until a socket has packets, and returns its number. The future may be dropped at any
    /// time.
    pub async fn readable(&mut self) -> io::Result<usize> {
        poll_fn(|waker| self.poll_readable(waker)).await
    }

    fn poll_readable(&mut self, waker: &mut Waker<'_>) -> Poll<io::Result<usize>> {
        let count = self.sockets.len();
        for offset in 0..count {
            let number = (self.next + offset) % count;
            match self.sockets[number].socket.poll_recv_ready(waker) {
                Poll::Ready(Ok(())) => {
                    self.next = number + 1;
                    return Poll::Ready(Ok(number));
                }
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => {}
            }
        }
        Poll::Pending
    }

    /// Receives at most one batch of packets from a socket, and sends the result of `answer` for
    /// each of them.
    pub fn answer(&mut self, number: usize, mut answer: impl FnMut(&[u8], Requester) -> Option<Datagram>) {
        let BoundSocket { socket, is_wildcard, is_v6 } = &self.sockets[number];
        let (batch, fd) = (&mut self.batch, socket.as_fd());
        let received = socket.try_io(Interest::READABLE, || {
            for packet in batch.receive(fd)? {
                let local = packet.to.filter(|_| *is_wildcard);
                let address = match packet.from {
                    // The address includes the link of a link-local address.
                    SocketAddr::V6(from) if from.ip().to_ipv4_mapped().is_none() => packet.from,
                    from => SocketAddr::new(from.ip().to_canonical(), from.port()),
                };
                let requester = Requester { address, via: Via { socket: number, local } };
                let Some(datagram) = answer(packet.bytes, requester) else { continue };
                let to = of_family(address, *is_v6);
                self.unsent += u64::from(send(fd, datagram.bytes(), to, local).is_err());
            }
            Ok(())
        });
        // This call also returns an ICMP error that an answer has caused. The error concerns only
        // the client that should have received the answer.
        if let Err(error) = received
            && error.kind() != io::ErrorKind::WouldBlock
        {
            info!(%error, "cannot receive a packet");
        }
    }

    /// Sends a datagram to a subscriber, from the socket and the address at which its request
    /// arrived.
    pub fn send(&mut self, to: Requester, datagram: &Datagram) {
        let Some(socket) = self.sockets.get(to.via.socket) else { return };
        let address = of_family(to.address, socket.is_v6);
        let sent = send(socket.socket.as_fd(), datagram.bytes(), address, to.via.local);
        self.unsent += u64::from(sent.is_err());
    }
}

/// The form of an address that a socket of this family accepts.
fn of_family(address: SocketAddr, is_v6: bool) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(v4) if is_v6 => SocketAddr::new(v4.to_ipv6_mapped().into(), address.port()),
        IpAddr::V4(_) | IpAddr::V6(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_port_in_use_is_reported_with_a_remedy() {
        let taken = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let at = taken.local_addr().unwrap();
        let error = listen_at(Some(&[at])).err().unwrap();
        let expected = format!(
            "listen at {at} (UDP): another agent or program uses the port: stop it, or name another port with `listen`"
        );
        assert_eq!(error.to_string(), expected);
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let error = listen_at(Some(&[taken.local_addr().unwrap()])).err().unwrap();
        assert!(error.to_string().contains("(TCP): another agent or program"), "{error}");
    }

    #[tokio::test]
    async fn answers_are_sent_from_the_socket_of_the_request() {
        let at = |addresses: &[&str]| {
            let addresses: Vec<SocketAddr> = addresses.iter().map(|text| text.parse().unwrap()).collect();
            listen_at(Some(&addresses)).unwrap().0
        };
        let local: IpAddr = "127.0.0.2".parse().unwrap();
        let via = |socket, local| Some(Via { socket, local });
        let alone = at(&["127.0.0.1:0", "127.0.0.2:0"]);
        assert_eq!((alone.via(local), alone.via("127.0.0.3".parse().unwrap())), (via(1, None), None));
        assert_eq!(at(&["127.0.0.1:0", "0.0.0.0:0"]).via(local), via(1, Some(local)));
        if let Ok((both, _)) = listen_at(Some(&["[::]:0".parse().unwrap()])) {
            assert_eq!(both.via(local), via(0, Some(local)));
        }
    }

    #[tokio::test]
    async fn udp_and_tcp_share_a_port() {
        let (sockets, ports) = listen_at(Some(&["127.0.0.1:0".parse().unwrap()])).unwrap();
        let address = sockets.addresses().unwrap()[0];
        assert_eq!(ports[0].local_addr().unwrap(), address);
    }
}
