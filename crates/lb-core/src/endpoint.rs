//! The list that a source reports for one service: complete, checked, and therefore always valid.
//!
//! The constructor checks the list, so that all other code may rely on unique indexes and addresses
//! and on one address family. A fault contains the position of its endpoint in the list, because
//! only the code that reads the file can convert a position to a line.

use std::collections::HashMap;
use std::net::SocketAddr;

use lb_common::abi::MAX_BACKENDS;
use thiserror::Error;

pub mod address_indexes;

use address_indexes::MAX_WITHOUT_INDEXES;

/// The largest endpoint index plus one. Larger indexes make every order of indexes longer.
pub const MAX_INDEXES: u32 = 65_536;

named! {
    /// An endpoint's state according to its source, from the best to the worst.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum EndpointState {
        /// Accepts connections.
        Healthy = "healthy",
        /// Serves, but requests no new connections.
        LameDuck = "lame-duck",
        /// An external checker, such as Consul's, reports that the endpoint fails. A down endpoint
        /// receives connections only while no healthy endpoint and no lame duck has a positive
        /// weight.
        Down = "down",
    }
}

/// One endpoint as its source reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The address where the endpoint listens.
    pub address: SocketAddr,
    /// The endpoint's number among the service's endpoints. Stable numbers make subsets stable.
    pub index: u32,
    /// The endpoint's capacity relative to the other endpoints. An endpoint with 0 gets no new
    /// connections.
    pub weight: u16,
    /// The endpoint's state according to the source.
    pub state: EndpointState,
    /// The endpoint's location, if the source reports one.
    pub zone: Option<String>,
    /// The address of the endpoint's agent, if it differs from the target of the service's probes.
    pub agent: Option<SocketAddr>,
}

impl Endpoint {
    /// Whether this endpoint should get new connections according to the source.
    pub fn is_wanted(&self) -> bool {
        self.weight > 0 && self.state == EndpointState::Healthy
    }
}

/// A complete, checked list of a service's endpoints, in the order of their indexes. The list may
/// be empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointList {
    endpoints: Vec<Endpoint>,
    /// Whether the indexes are hashes of the addresses.
    has_address_indexes: bool,
    /// Positions in `endpoints`, sorted by address.
    by_address: Vec<u32>,
}

/// The differences between two lists, compared by address, in the order of the indexes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Difference<'a> {
    /// Endpoints that are only in the new list.
    pub added: Vec<&'a Endpoint>,
    /// Endpoints that are only in the old list.
    pub removed: Vec<&'a Endpoint>,
    /// Endpoints that are in both lists and have changed: each as in the old list and as in the new
    /// one.
    pub changed: Vec<(&'a Endpoint, &'a Endpoint)>,
}

/// A fault of one endpoint of a list.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum EndpointFault {
    /// Two endpoints share an address.
    #[error("endpoint {} of the list already has address {address}", first + 1)]
    DuplicateAddress {
        /// The address.
        address: SocketAddr,
        /// Position of the first endpoint with this address.
        first: usize,
    },
    /// Two endpoints share an index.
    #[error("endpoint {} of the list already has index {index}", first + 1)]
    DuplicateIndex {
        /// The index.
        index: u32,
        /// Position of the first endpoint with this index.
        first: usize,
    },
    /// An index is out of range.
    #[error("index {index} is not below {MAX_INDEXES}")]
    IndexTooLarge {
        /// The index.
        index: u32,
    },
    /// The endpoint's address family differs from that of its service.
    #[error(
        "{address} is not of the family of its service {service}: connect() cannot change the family of a socket"
    )]
    OtherFamily {
        /// The endpoint's address.
        address: SocketAddr,
        /// The service's address.
        service: SocketAddr,
    },
    /// The endpoint has the address of a service.
    #[error("{address} is the address of a service: connections to this endpoint would be balanced again")]
    IsAService {
        /// The address.
        address: SocketAddr,
    },
    /// Connections to the endpoint are impossible.
    #[error("{address} cannot be connected to: {why}")]
    Unreachable {
        /// The address.
        address: SocketAddr,
        /// The reason.
        why: &'static str,
    },
    /// The list has more endpoints than a service can have.
    #[error("a service has at most {MAX_BACKENDS} endpoints, this is number {}", position + 1)]
    TooMany {
        /// Position of the first endpoint above the limit.
        position: usize,
    },
    /// The list has no indexes, and more endpoints than a list without indexes can have.
    #[error(
        "a list without indexes has at most {MAX_WITHOUT_INDEXES} endpoints, this is number {}: give every endpoint an index",
        position + 1
    )]
    TooManyWithoutIndexes {
        /// Position of the first endpoint above the limit.
        position: usize,
    },
}

impl EndpointList {
    /// Checks a list for the service at `service`; `services` are the addresses of all services of
    /// the configuration.
    ///
    /// # Errors
    /// If any endpoint is faulty. The error contains all faults, each with the position of its
    /// endpoint in `endpoints`.
    pub fn new(
        mut endpoints: Vec<Endpoint>,
        service: SocketAddr,
        services: &[SocketAddr],
    ) -> Result<Self, Vec<(usize, EndpointFault)>> {
        let mut faults = Vec::new();
        let mut addresses = HashMap::new();
        let mut indexes = HashMap::new();
        for (position, endpoint) in endpoints.iter().enumerate() {
            if position >= MAX_BACKENDS as usize {
                faults.push((position, EndpointFault::TooMany { position }));
                break;
            }
            let address = endpoint.address;
            let index = endpoint.index;
            if let Some(first) = addresses.insert(address, position) {
                addresses.insert(address, first);
                faults.push((position, EndpointFault::DuplicateAddress { address, first }));
            }
            if let Some(first) = indexes.insert(index, position) {
                indexes.insert(index, first);
                faults.push((position, EndpointFault::DuplicateIndex { index, first }));
            }
            if index >= MAX_INDEXES {
                faults.push((position, EndpointFault::IndexTooLarge { index }));
            }
            if let Some(fault) = address_fault(address, service, services) {
                faults.push((position, fault));
            }
        }
        if !faults.is_empty() {
            return Err(faults);
        }
        endpoints.sort_by_key(|endpoint| endpoint.index);
        let mut by_address: Vec<u32> = (0..).take(endpoints.len()).collect();
        by_address.sort_unstable_by_key(|position| endpoints[*position as usize].address);
        Ok(Self { endpoints, has_address_indexes: false, by_address })
    }

    /// Like [`Self::new`], for a source without indexes: each endpoint gets its index from
    /// [`address_indexes::indexes`].
    ///
    /// # Errors
    /// Like [`Self::new`], and if the list is too long for a list without indexes.
    pub fn without_indexes(
        mut endpoints: Vec<Endpoint>,
        service: SocketAddr,
        services: &[SocketAddr],
    ) -> Result<Self, Vec<(usize, EndpointFault)>> {
        let position = MAX_WITHOUT_INDEXES as usize;
        if endpoints.len() > position {
            return Err(vec![(position, EndpointFault::TooManyWithoutIndexes { position })]);
        }
        let addresses: Vec<SocketAddr> = endpoints.iter().map(|endpoint| endpoint.address).collect();
        for (endpoint, index) in endpoints.iter_mut().zip(address_indexes::indexes(&addresses)) {
            endpoint.index = index;
        }
        Ok(Self { has_address_indexes: !addresses.is_empty(), ..Self::new(endpoints, service, services)? })
    }

    /// One list of this list's endpoints and `others`, which were checked in another list of the
    /// same service. `None` if the result is not a valid list: an index or an address appears
    /// twice, or there are too many endpoints.
    pub fn joined<'a>(&self, others: impl IntoIterator<Item = &'a Endpoint>) -> Option<Self> {
        let endpoints: Vec<Endpoint> =
            self.endpoints.iter().cloned().chain(others.into_iter().cloned()).collect();
        let service = endpoints.first()?.address;
        let make = if self.has_address_indexes { Self::without_indexes } else { Self::new };
        make(endpoints, service, &[]).ok()
    }

    /// Whether the source has no indexes, so that the indexes are hashes of the addresses.
    pub const fn has_address_indexes(&self) -> bool {
        self.has_address_indexes
    }

    /// The endpoints, ascending by index.
    pub fn as_slice(&self) -> &[Endpoint] {
        &self.endpoints
    }

    /// The endpoint with this address.
    pub fn get(&self, address: SocketAddr) -> Option<&Endpoint> {
        let of = |position: &u32| &self.endpoints[*position as usize];
        let found = self.by_address.binary_search_by_key(&address, |position| of(position).address);
        found.ok().map(|at| of(&self.by_address[at]))
    }

    /// The differences between this list and `after`.
    pub fn difference<'a>(&'a self, after: &'a Self) -> Difference<'a> {
        let removed = self.endpoints.iter().filter(|endpoint| after.get(endpoint.address).is_none());
        let mut difference = Difference { removed: removed.collect(), ..Difference::default() };
        for endpoint in &after.endpoints {
            match self.get(endpoint.address) {
                None => difference.added.push(endpoint),
                Some(before) if before != endpoint => difference.changed.push((before, endpoint)),
                Some(_) => {}
            }
        }
        difference
    }

    /// The number of endpoints.
    ///
    /// # Panics
    /// Never: a list has at most [`MAX_BACKENDS`] endpoints.
    pub fn count(&self) -> u32 {
        u32::try_from(self.endpoints.len()).expect("a list has at most MAX_BACKENDS endpoints")
    }

    /// The number N of the subset algorithms: the highest index plus one. An index without an
    /// endpoint is a hole.
    pub fn index_space(&self) -> u32 {
        self.endpoints.last().map_or(0, |endpoint| endpoint.index + 1)
    }
}

fn address_fault(address: SocketAddr, service: SocketAddr, services: &[SocketAddr]) -> Option<EndpointFault> {
    let unreachable = |why| Some(EndpointFault::Unreachable { address, why });
    if address.is_ipv4() != service.is_ipv4() {
        return Some(EndpointFault::OtherFamily { address, service });
    }
    if services.contains(&address) {
        return Some(EndpointFault::IsAService { address });
    }
    if address.port() == 0 {
        return unreachable("port 0");
    }
    if address.ip().is_unspecified() {
        return unreachable("the unspecified address");
    }
    if address.ip().is_multicast() {
        return unreachable("a multicast address");
    }
    if matches!(address, SocketAddr::V4(v4) if v4.ip().is_broadcast()) {
        return unreachable("the broadcast address");
    }
    if let SocketAddr::V6(v6) = address {
        if v6.ip().to_ipv4_mapped().is_some() {
            return unreachable("a v4-mapped address: write it as IPv4");
        }
        if v6.scope_id() != 0 {
            return unreachable("an address with a zone index is valid on one host only");
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(address: &str, index: u32) -> Endpoint {
        Endpoint {
            address: address.parse().unwrap(),
            index,
            weight: 1,
            state: EndpointState::Healthy,
            zone: None,
            agent: None,
        }
    }

    #[track_caller]
    fn check(endpoints: Vec<Endpoint>, expected: &[(usize, &str)]) {
        let service = "10.96.0.10:80".parse().unwrap();
        let faults = match EndpointList::new(endpoints, service, &[service]) {
            Ok(_) => Vec::new(),
            Err(faults) => faults,
        };
        let faults: Vec<_> = faults.iter().map(|(position, fault)| (*position, fault.to_string())).collect();
        let faults: Vec<_> = faults.iter().map(|(position, fault)| (*position, fault.as_str())).collect();
        assert_eq!(faults, expected);
    }

    #[test]
    fn every_fault_is_reported_with_its_position() {
        check(vec![], &[]);
        check(vec![endpoint("10.0.0.1:80", 0), endpoint("10.0.0.1:81", 1)], &[]);
        check(
            vec![endpoint("10.0.0.1:80", 3), endpoint("10.0.0.1:80", 3)],
            &[
                (1, "endpoint 1 of the list already has address 10.0.0.1:80"),
                (1, "endpoint 1 of the list already has index 3"),
            ],
        );
        check(
            vec![endpoint("[::1]:80", 0)],
            &[(
                0,
                "[::1]:80 is not of the family of its service 10.96.0.10:80: connect() cannot change the family of a \
                 socket",
            )],
        );
        check(
            vec![endpoint("10.96.0.10:80", 0)],
            &[(
                0,
                "10.96.0.10:80 is the address of a service: connections to this endpoint would be balanced again",
            )],
        );
        check(
            vec![endpoint("255.255.255.255:80", 0)],
            &[(0, "255.255.255.255:80 cannot be connected to: the broadcast address")],
        );
        check(
            vec![endpoint("0.0.0.0:80", 0), endpoint("10.0.0.1:0", 65_536), endpoint("224.0.0.1:80", 1)],
            &[
                (0, "0.0.0.0:80 cannot be connected to: the unspecified address"),
                (1, "index 65536 is not below 65536"),
                (1, "10.0.0.1:0 cannot be connected to: port 0"),
                (2, "224.0.0.1:80 cannot be connected to: a multicast address"),
            ],
        );
    }

    #[test]
    fn a_list_above_the_limit_is_refused() {
        let list = |count: u32| -> Vec<Endpoint> {
            (0..count)
                .map(|i| {
                    let ip = std::net::Ipv4Addr::from_bits(0x0a00_0001 + i);
                    Endpoint { address: (ip, 80).into(), ..endpoint("10.0.0.1:80", i) }
                })
                .collect()
        };
        check(list(MAX_BACKENDS), &[]);
        check(
            list(MAX_BACKENDS + 1),
            &[(16_384, "a service has at most 16384 endpoints, this is number 16385")],
        );
    }

    #[test]
    fn a_list_is_sorted_by_index_and_may_have_holes() {
        let service = "10.96.0.10:80".parse().unwrap();
        let endpoints = vec![endpoint("10.0.0.1:80", 7), endpoint("10.0.0.2:80", 2)];
        let list = EndpointList::new(endpoints, service, &[service]).unwrap();
        assert_eq!(list.as_slice().iter().map(|endpoint| endpoint.index).collect::<Vec<_>>(), [2, 7]);
        assert_eq!(list.index_space(), 8);
    }
}
