//! The name of a backend: its protocol, address and port as in the endpoint list. Requests identify
//! a backend by this name.

use std::fmt;
use std::net::SocketAddr;

use lb_common::abi::host::SenderName;
use lb_common::net::{Be16, socket_addr};
use lb_core::service::Protocol;

use crate::name::can_report;
use crate::wire::Datagram;

/// A backend's name. Its text form is `ADDRESS:PORT`, followed by `/udp` if its protocol is UDP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Name {
    protocol: Protocol,
    address: SocketAddr,
}

impl Name {
    /// Makes the name of a backend.
    ///
    /// # Errors
    /// If no datagram can contain the address, because it does not belong to one host or needs a
    /// scope.
    pub fn new(protocol: Protocol, address: SocketAddr) -> Result<Self, &'static str> {
        let address = SocketAddr::new(address.ip().to_canonical(), address.port());
        if !can_report(lb_core::reports::Name { protocol, address }) {
            return Err(
                "is no backend's name: a name is one host's address, not link-local, with a port of 1 or more",
            );
        }
        Ok(Self { protocol, address })
    }

    /// The name in a datagram; `None` if it is invalid.
    pub fn of(datagram: &Datagram) -> Option<Self> {
        Self::new(Protocol::of_number(datagram.protocol)?, datagram.backend()).ok()
    }

    /// Converts from the form that kernel programs use; `None` if the name is invalid.
    pub fn of_sender(name: &SenderName) -> Option<Self> {
        Self::new(Protocol::of_number(name.protocol)?, socket_addr(name.address, name.port)).ok()
    }

    /// Converts to the form that kernel programs use.
    pub fn to_sender(self) -> SenderName {
        let Self { protocol, address } = self;
        let port = Be16::from_host(address.port());
        SenderName { address: address.ip().into(), port, protocol: protocol.number(), _reserved: 0 }
    }

    /// The backend's protocol.
    pub const fn protocol(self) -> Protocol {
        self.protocol
    }

    /// The backend's address and port.
    pub const fn address(self) -> SocketAddr {
        self.address
    }

    fn order(self) -> (SocketAddr, u8) {
        (self.address, self.protocol.number())
    }
}

impl Ord for Name {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.order().cmp(&other.order())
    }
}

impl PartialOrd for Name {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.protocol {
            Protocol::Tcp => write!(f, "{}", self.address),
            Protocol::Udp => write!(f, "{}/udp", self.address),
        }
    }
}
