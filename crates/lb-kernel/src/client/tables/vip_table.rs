//! Reads and changes the VIP table of a client task: the map from service addresses to services.

use std::io;
use std::net::SocketAddr;

use lb_common::abi::{Service, VipCell, map};
use lb_common::net::{Address, Be16};
use lb_common::vip_table::{Destination, Store, VipTable, find, insert, remove};
use lb_core::ids::ServiceIndex;
use lb_core::service::Protocol;

use super::Tables;
use crate::error::DatapathError;

impl Tables {
    /// The index of the service that balances connects to `address`; `None` if there is no such
    /// service.
    pub(super) fn open_at(&self, address: SocketAddr, protocol: Protocol) -> Option<ServiceIndex> {
        let index = find(self, destination(address, protocol))?;
        u16::try_from(index).ok().map(ServiceIndex)
    }

    /// Makes the service with this index balance connects to `address`. If another service has this
    /// address, it is replaced.
    pub(super) fn direct(
        &mut self,
        address: SocketAddr,
        protocol: Protocol,
        index: ServiceIndex,
    ) -> Result<(), DatapathError> {
        let store = insert(self, destination(address, protocol), index.number()).ok_or_else(|| {
            let source = io::Error::other(format!("no free cell for {address}: too many hash collisions"));
            DatapathError::Map { path: self.pins.maps().join(map::VIP_TABLE), operation: "write", source }
        })?;
        self.store(store);
        Ok(())
    }

    /// Removes `address` from the table, so that connects to it are not balanced.
    pub(super) fn undirect(&mut self, address: SocketAddr, protocol: Protocol) {
        let stores: Vec<Store> = remove(self, destination(address, protocol)).collect();
        stores.into_iter().for_each(|store| self.store(store));
    }

    fn store(&mut self, Store { position, cell }: Store) {
        self.maps.vip_table.store64(position as usize, 0, cell.to_word());
    }
}

fn destination(address: SocketAddr, protocol: Protocol) -> Destination {
    let ip = match address {
        SocketAddr::V4(v4) => Address::from(*v4.ip()),
        SocketAddr::V6(v6) => Address::from(*v6.ip()),
    };
    Destination { address: ip, port: Be16::from_host(address.port()), protocol: protocol.number() }
}

impl VipTable for Tables {
    fn cell(&self, position: u32) -> Option<VipCell> {
        let is_inside = (position as usize) < self.maps.vip_table.length();
        is_inside.then(|| VipCell::from_word(self.maps.vip_table.load64(position as usize, 0)))
    }

    fn serves(&self, service: u32, destination: Destination) -> bool {
        if service as usize >= self.maps.services.length() {
            return false;
        }
        let Service { address, port, protocol, .. } = self.maps.services.get(service as usize);
        destination == Destination { address, port, protocol }
    }
}
