//! Operations on all sockets of the probe: their ids, addresses and families.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrAny};
use stage::protocol::{Family, SocketId};

use crate::{Outcome, Probe, errno};

impl Probe {
    /// Holds a socket until it is closed or the probe ends.
    pub fn register(&mut self, socket: OwnedFd) -> SocketId {
        let id = SocketId(self.next);
        self.next += 1;
        self.sockets.insert(id, socket);
        id
    }

    pub fn socket(&self, id: SocketId) -> Outcome<&OwnedFd> {
        self.sockets.get(&id).ok_or(Errno::BADF)
    }

    /// Removes a socket from the probe. Dropping the result closes it.
    pub fn take(&mut self, id: SocketId) -> Outcome<OwnedFd> {
        self.sockets.remove(&id).ok_or(Errno::BADF)
    }

    pub fn duplicate(&mut self, id: SocketId) -> Outcome<SocketId> {
        let copy = self.socket(id)?.try_clone().map_err(errno)?;
        Ok(self.register(copy))
    }
}

pub fn address_family(family: Family) -> AddressFamily {
    match family {
        Family::V4 => AddressFamily::INET,
        Family::V6 => AddressFamily::INET6,
    }
}

pub fn peer(socket: impl AsFd) -> Outcome<SocketAddr> {
    rustix::net::getpeername(socket).and_then(ip_address)
}

pub fn local_address(socket: impl AsFd) -> Outcome<SocketAddr> {
    rustix::net::getsockname(socket).and_then(|address| ip_address(Some(address)))
}

/// The address of an IP socket; an error for other kinds of sockets.
pub fn ip_address(address: Option<SocketAddrAny>) -> Outcome<SocketAddr> {
    address.and_then(|address| SocketAddr::try_from(address).ok()).ok_or(Errno::AFNOSUPPORT)
}
