//! Counts the backend's connections from the kernel's lists of sockets: the connections in use, and
//! the idle connections.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use lb_core::service::Protocol;
use lb_diag::{SocketEntry, SocketLists};

/// The address and port at which the backend listens in this network namespace.
#[derive(Clone, Copy, Debug)]
pub struct BackendListener {
    pub protocol: Protocol,
    /// The address that clients use, which may not exist in this namespace, and the port at which
    /// the backend listens here.
    pub address: SocketAddr,
    /// Whether a socket at this port has exactly this address. If a socket has it, connections to
    /// other addresses do not belong to the backend.
    pub is_alone: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Connections {
    /// The number of connections in use. A connection is in use if data is in flight or waits to be
    /// read, or if data has moved recently.
    pub busy: usize,
    /// The number of open connections that have been idle for at least the given time.
    pub idle: usize,
}

impl BackendListener {
    /// Checks whether a socket listens at the port (TCP) or is bound to it (UDP). Sets `is_alone`
    /// if that socket has exactly this address.
    ///
    /// # Errors
    /// If the kernel's lists cannot be read.
    pub fn find(&mut self) -> io::Result<bool> {
        let mut addresses = Vec::new();
        let lists = SocketLists::open()?;
        match self.protocol {
            Protocol::Tcp => lists.each_tcp_at(self.address.port(), |socket| {
                addresses.extend(socket.listens.then_some(socket.local.ip()));
            })?,
            Protocol::Udp => lists.each_udp(|socket| {
                let is_here = socket.local.port() == self.address.port() && socket.peer.port() == 0;
                addresses.extend(is_here.then_some(socket.local.ip()));
            })?,
        }
        self.is_alone |= addresses.contains(&self.address.ip());
        Ok(addresses.into_iter().any(|address| self.is_ours(address)))
    }

    /// Counts the connections that clients have with the backend. A UDP backend has no connections.
    ///
    /// # Errors
    /// If the kernel's lists cannot be read.
    pub fn connections(self, idle_after: Duration) -> io::Result<Connections> {
        let mut connections = Connections::default();
        match self.protocol {
            Protocol::Udp => {}
            Protocol::Tcp => SocketLists::open()?.each_tcp_at(self.address.port(), |socket| {
                self.count(&socket, idle_after, &mut connections);
            })?,
        }
        Ok(connections)
    }

    fn count(self, socket: &SocketEntry, idle_after: Duration, connections: &mut Connections) {
        // After the application has closed a connection, the kernel ends the connection by itself,
        // even if the application no longer runs.
        if socket.listens || socket.is_closed || !self.is_ours(socket.local.ip()) {
            return;
        }
        // The kernel reports no idle time for an incomplete handshake. The handshake is counted as
        // a busy connection, because a client is about to use the connection.
        let is_idle = socket.queued == 0 && socket.idle.is_some_and(|idle| idle >= idle_after);
        if is_idle {
            connections.idle += 1;
        } else {
            connections.busy += 1;
        }
    }

    fn is_ours(self, local: IpAddr) -> bool {
        !self.is_alone || local == self.address.ip()
    }

    /// The address at which the application can be reached from this namespace: the backend's
    /// address, or loopback if that address does not exist in this namespace (for example because
    /// of address translation).
    pub fn address_here(self) -> IpAddr {
        let ip = self.address.ip();
        let is_here = std::net::UdpSocket::bind(SocketAddr::new(ip, 0)).is_ok();
        match ip {
            _ if is_here => ip,
            IpAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream, UdpSocket};

    use super::*;

    fn listener(address: SocketAddr) -> BackendListener {
        BackendListener { protocol: Protocol::Tcp, address, is_alone: false }
    }

    fn of(busy: usize, idle: usize) -> Connections {
        Connections { busy, idle }
    }

    #[test]
    fn connections_are_busy_until_they_have_been_idle_for_long_enough() {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut here = listener(socket.local_addr().unwrap());
        assert!(here.find().unwrap() && here.is_alone);
        let look = |idle_after| here.connections(idle_after).unwrap();
        assert_eq!(look(Duration::ZERO), of(0, 0));
        let client = TcpStream::connect(here.address).unwrap();
        // The application has not accepted the connection.
        assert_eq!(look(Duration::from_mins(1)), of(1, 0));
        let (accepted, _) = socket.accept().unwrap();
        assert_eq!(look(Duration::from_mins(1)), of(1, 0));
        assert_eq!(look(Duration::ZERO), of(0, 1));
        // The client sends a request, which the application has not read.
        io::Write::write_all(&mut &client, b"GET").unwrap();
        assert_eq!(look(Duration::ZERO), of(1, 0));
        io::Read::read_exact(&mut &accepted, &mut [0; 3]).unwrap();
        // The client has shut down its side, and the application may still be answering.
        client.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(look(Duration::from_mins(1)), of(1, 0));
        drop(accepted);
        assert_eq!(look(Duration::from_mins(1)), of(0, 0));
    }

    #[test]
    fn connections_of_another_address_are_not_counted() {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let mut other = listener(SocketAddr::new([127, 0, 0, 9].into(), address.port()));
        // No socket has the backend's address, so the backend may be behind address translation.
        assert!(other.find().unwrap() && !other.is_alone);
        let alone = TcpListener::bind(other.address).unwrap();
        assert!(other.find().unwrap() && other.is_alone);
        let _client = TcpStream::connect(address).unwrap();
        assert_eq!(other.connections(Duration::from_mins(1)).unwrap(), of(0, 0));
        drop(alone);
        assert!(!other.find().unwrap());
    }

    #[test]
    fn a_bound_udp_socket_serves() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let mut here = BackendListener { protocol: Protocol::Udp, address, is_alone: false };
        assert!(here.find().unwrap());
        assert_eq!(here.connections(Duration::ZERO).unwrap(), of(0, 0));
        drop(socket);
        assert!(!here.find().unwrap());
    }

    #[test]
    fn an_address_of_another_host_is_reached_by_loopback() {
        let here = |text: &str| listener(text.parse().unwrap()).address_here().to_string();
        assert_eq!(here("127.0.0.5:80"), "127.0.0.5");
        assert_eq!(here("192.0.2.1:80"), "127.0.0.1");
        assert_eq!(here("[2001:db8::1]:80"), "::1");
    }
}
