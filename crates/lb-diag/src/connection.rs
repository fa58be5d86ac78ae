//! One connection, identified so precisely that a request to destroy it cannot destroy another
//! socket.

use std::net::IpAddr;
use std::num::NonZeroU16;

use netlink_packet_sock_diag::IPPROTO_UDP;
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetRequest, SocketId, StateFlags};

/// The cookie with which a request selects a socket by its addresses alone (`INET_DIAG_NOCOOKIE`).
const ANY_COOKIE: [u8; 8] = [u8::MAX; 8];

/// A connected TCP or UDP socket: both addresses and ports, and its cookie.
///
/// The kernel also destroys an unconnected UDP socket if a request has its cookie and no peer. So
/// there is no value of this type without a peer's address, a peer's port and a cookie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// `AF_INET` or `AF_INET6`, as in the list. A v4-mapped socket has `AF_INET6` and mapped
    /// addresses; the kernel finds it in no other form.
    family: u8,
    /// `IPPROTO_TCP` or `IPPROTO_UDP`.
    protocol: u8,
    local: IpAddr,
    local_port: u16,
    peer: IpAddr,
    peer_port: NonZeroU16,
    /// The interface to which the socket is bound, or 0. The kernel also compares this number.
    interface: u32,
    cookie: [u8; 8],
}

impl Connection {
    /// The connection of a socket in a list; `None` if the socket has no peer.
    pub(crate) fn of(family: u8, protocol: u8, id: &SocketId) -> Option<Self> {
        let is_named = !id.destination_address.to_canonical().is_unspecified() && id.cookie != ANY_COOKIE;
        Some(Self {
            family,
            protocol,
            local: id.source_address,
            local_port: id.source_port,
            peer: id.destination_address,
            peer_port: NonZeroU16::new(id.destination_port).filter(|_| is_named)?,
            interface: id.interface_id,
            cookie: id.cookie,
        })
    }

    pub const fn is_udp(&self) -> bool {
        self.protocol == IPPROTO_UDP
    }

    pub(crate) const fn protocol(&self) -> u8 {
        self.protocol
    }

    /// The request that identifies this socket and no other.
    pub(crate) fn request(&self, extensions: ExtensionFlags) -> InetRequest {
        InetRequest {
            family: self.family,
            protocol: self.protocol,
            extensions,
            states: StateFlags::from_bits_retain(u32::MAX),
            socket_id: SocketId {
                source_port: self.local_port,
                destination_port: self.peer_port.get(),
                source_address: self.local,
                destination_address: self.peer,
                interface_id: self.interface,
                cookie: self.cookie,
            },
        }
    }
}

#[cfg(test)]
impl Connection {
    /// The same addresses with the cookie of another socket.
    pub(crate) fn with_cookie_of(self, other: &Self) -> Self {
        Self { cookie: other.cookie, ..self }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use netlink_packet_core::Emitable;
    use netlink_packet_sock_diag::{AF_INET, AF_INET6, IPPROTO_TCP};

    use super::*;

    fn id(peer: IpAddr, port: u16, cookie: [u8; 8]) -> SocketId {
        let source_address = match peer {
            IpAddr::V4(_) => Ipv4Addr::new(10, 0, 0, 1).into(),
            IpAddr::V6(_) => Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped().into(),
        };
        SocketId {
            source_port: 0x1234,
            destination_port: port,
            source_address,
            destination_address: peer,
            interface_id: 3,
            cookie,
        }
    }

    #[test]
    fn a_socket_without_a_peer_or_a_cookie_is_no_connection() {
        let (backend, cookie) = (Ipv4Addr::new(10, 0, 0, 2), [7; 8]);
        let of = |peer: IpAddr, port, cookie| Connection::of(AF_INET, IPPROTO_UDP, &id(peer, port, cookie));
        assert!(of(backend.into(), 80, cookie).is_some_and(|connection| connection.is_udp()));
        assert_eq!(of(backend.into(), 0, cookie), None);
        assert_eq!(of(backend.into(), 80, ANY_COOKIE), None);
        for peer in [
            Ipv4Addr::UNSPECIFIED.into(),
            Ipv6Addr::UNSPECIFIED.into(),
            Ipv4Addr::UNSPECIFIED.to_ipv6_mapped().into(),
        ] {
            assert_eq!(of(peer, 80, cookie), None, "{peer}");
        }
    }

    /// The layout of `struct inet_diag_req_v2`: the head, both ports and addresses in network byte
    /// order, the interface, and the cookie with its low word first.
    #[test]
    fn a_request_has_both_addresses_both_ports_and_the_cookie() {
        let cookie = (7u64 << 32 | 5).to_ne_bytes();
        for (family, peer) in [
            (AF_INET, Ipv4Addr::new(10, 0, 0, 2).into()),
            (AF_INET6, Ipv4Addr::new(10, 0, 0, 2).to_ipv6_mapped().into()),
        ] {
            let connection = Connection::of(family, IPPROTO_TCP, &id(peer, 80, cookie))
                .expect("the connection has a peer");
            let request = connection.request(ExtensionFlags::empty());
            let mut bytes = vec![0; request.buffer_len()];
            request.emit(&mut bytes);
            let address = |last: u8| {
                let v4 = Ipv4Addr::new(10, 0, 0, last);
                let mut bytes = [0; 16];
                match family {
                    AF_INET => bytes[..4].copy_from_slice(&v4.octets()),
                    _ => bytes = v4.to_ipv6_mapped().octets(),
                }
                bytes
            };
            let expected = [
                &[family, IPPROTO_TCP, 0, 0, 0xff, 0xff, 0xff, 0xff, 0x12, 0x34, 0, 80][..],
                &address(1),
                &address(2),
                &3u32.to_ne_bytes(),
                &5u32.to_ne_bytes(),
                &7u32.to_ne_bytes(),
            ]
            .concat();
            assert_eq!((bytes.len(), bytes), (56, expected));
        }
    }
}
