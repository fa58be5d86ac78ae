//! Requests addresses of services from servers.
//!
//! An address is part of the configuration, so a new address takes effect through a reload. The
//! controller stores an address once it is in force, and a later start uses the stored address
//! until the server answers. A service without an address is part of no client, so its connects are
//! not balanced.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Instant, SystemTime};

use lb_discovery::{DiscoveryRequest, Finding, Latest};
use lb_view::fault::{Fault, FaultCode, Subject};
use tracing::{info, warn};

use super::Controller;
use crate::config::AddressLookup;
use crate::config::addresses::{self, KnownAddresses};
use crate::source::hosts::lasting;

#[derive(Default)]
pub struct Addresses {
    /// The newest address of each origin.
    pub known: KnownAddresses,
    /// The servers' last answers about addresses of services.
    answers: Vec<(DiscoveryRequest, Latest)>,
    /// Keyed by service name: the earliest expiry of the certificates for the connection to the
    /// server that sends the service's address.
    expiries: BTreeMap<String, SystemTime>,
    /// Keyed by service name: since when the server's answers have no usable address.
    without_address: BTreeMap<String, Instant>,
    /// Keyed by service name: the address in the last answer that is not used because it is an
    /// endpoint, and the service with this endpoint.
    endpoints: BTreeMap<String, (SocketAddr, String)>,
}

/// The query for a service's address.
pub fn wanted(lookup: &AddressLookup) -> DiscoveryRequest {
    DiscoveryRequest::Address(lookup.origin.clone())
}

/// The address in an answer; `None` if the answer has no address.
pub fn address(finding: &Finding) -> Option<SocketAddr> {
    match finding {
        Finding::List(list) => str::from_utf8(&list.text).ok()?.parse().ok(),
        Finding::Empty { .. } | Finding::Failed(_) => None,
    }
}

impl Addresses {
    /// The earliest expiry of the certificates for the connection to the server that sends this
    /// service's address; `None` without TLS, and before the first connection.
    pub fn expires(&self, service: &str) -> Option<SystemTime> {
        self.expiries.get(service).copied()
    }

    fn latest(&self, lookup: &AddressLookup) -> Option<&Latest> {
        let wanted = wanted(lookup);
        self.answers.iter().find(|(answered, _)| *answered == wanted).map(|(_, latest)| latest)
    }

    /// Why a service's address from its server is missing or not in use; `None` if there is no
    /// fault.
    fn trouble(&self, lookup: &AddressLookup, now: Instant) -> Option<String> {
        let AddressLookup { origin, address: in_force, taken, .. } = lookup;
        let known = self.known.get(&origin.to_string());
        let next = match in_force {
            Some(address) => format!("{address} stays the service's address"),
            None => "its connects are not balanced".to_owned(),
        };
        if let Some((address, other)) = taken {
            return Some(format!("{origin} is {address}, which is the address of service {other}; {next}"));
        }
        if let Some((address, other)) = self.endpoints.get(&lookup.service) {
            return Some(format!("{origin} is {address}, which is an endpoint of service {other}; {next}"));
        }
        if let Some(known) = known.filter(|known| Some(**known) != *in_force) {
            return Some(format!(
                "{origin} is now {known}, which takes effect at the next reload of the configuration; {next}"
            ));
        }
        let why = match self.latest(lookup).and_then(|latest| latest.finding.as_ref()) {
            Some(Finding::List(_)) => return None,
            Some(Finding::Empty { why }) => why.clone(),
            Some(Finding::Failed(failure)) => failure.to_string(),
            None if in_force.is_some() => return None,
            None => format!("{origin}: no answer yet"),
        };
        let since = lasting(self.without_address.get(&lookup.service).copied(), now);
        Some(format!("no usable address from the server{since}: {why}; {next}"))
    }
}

impl Controller {
    /// Applies the addresses in the answers of servers. A new address takes effect through a
    /// reload.
    pub fn take_addresses(&mut self, answers: &[(DiscoveryRequest, Latest)], now: Instant) {
        let mut is_new = false;
        self.addresses.answers.clear();
        self.addresses.expiries.clear();
        self.addresses.endpoints.clear();
        for lookup in &self.config.lookups {
            let wanted = wanted(lookup);
            let Some((_, latest)) = answers.iter().find(|(answered, _)| *answered == wanted) else {
                continue;
            };
            self.addresses.answers.push((wanted, latest.clone()));
            self.addresses.expiries.extend(latest.expires.map(|expires| (lookup.service.clone(), expires)));
            let Some(address) = latest.finding.as_ref().and_then(address) else {
                self.addresses.without_address.entry(lookup.service.clone()).or_insert(now);
                continue;
            };
            self.addresses.without_address.remove(&lookup.service);
            // No endpoint may have the address of a service. With such an address, the list would
            // be refused, and connects would fail.
            if lookup.address != Some(address)
                && let Some(other) = self.sources.service_with(address)
            {
                self.addresses.endpoints.insert(lookup.service.clone(), (address, other.to_owned()));
                continue;
            }
            let before = self.addresses.known.insert(lookup.origin.to_string(), address);
            if before != Some(address) {
                let service = &lookup.service;
                info!(service, %address, origin = %lookup.origin, "a server has sent the address of a service");
                is_new = true;
            }
        }
        if is_new {
            self.reload_changed(now);
        }
    }

    /// Stores the services' addresses in force for the next start of the daemon.
    pub fn store_addresses(&mut self) {
        let lookups = &self.config.lookups;
        let in_force: KnownAddresses =
            lookups.iter().filter_map(|lookup| Some((lookup.origin.to_string(), lookup.address?))).collect();
        self.addresses
            .known
            .retain(|origin, _| lookups.iter().any(|lookup| lookup.origin.to_string() == *origin));
        for lookup in lookups {
            if let Some((address, other)) = &lookup.taken {
                warn!(service = lookup.service, %address, other, "another service has this address, so connects to this service are not balanced");
            }
        }
        // An address that is not in force may be the reason why a configuration is faulty, so the
        // controller does not store it.
        if !in_force.is_empty() {
            let (path, text) = (addresses::path(&self.config.paths.state), addresses::render(&in_force));
            self.sources.files_to_store.add(path, text);
        }
    }

    /// The faults of service addresses.
    pub fn address_faults(&self, now: Instant) -> impl Iterator<Item = Fault> {
        self.config.lookups.iter().filter_map(move |lookup| {
            let subject = Subject { service: Some(lookup.service.clone()), ..Subject::host() };
            let text = self.addresses.trouble(lookup, now)?;
            Some(Fault { code: FaultCode::ServiceAddress, subject, text })
        })
    }
}
