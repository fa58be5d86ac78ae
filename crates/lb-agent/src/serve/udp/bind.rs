//! Binds the sockets that receive requests for reports, and the HTTP ports with the same numbers.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd as _, OwnedFd};

use anyhow::Result;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, ipproto, listen, socket_with, sockopt};
use tokio::net::{TcpListener, UdpSocket};

use super::{BoundSocket, BoundSockets, PacketBatch, enable_packet_info};
use crate::config::PORT;

/// Size of a socket's receive buffer in bytes, if the host allows it. A buffer of this size has
/// room for several thousand requests.
const BUFFER: usize = 4 << 20;

/// Maximum number of connections that wait to be accepted.
const BACKLOG: i32 = 128;

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
    async fn udp_and_tcp_share_a_port() {
        let (sockets, ports) = listen_at(Some(&["127.0.0.1:0".parse().unwrap()])).unwrap();
        let address = sockets.addresses().unwrap()[0];
        assert_eq!(ports[0].local_addr().unwrap(), address);
    }
}
