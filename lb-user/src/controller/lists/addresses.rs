//! Requests addresses of services from servers.
//!
//! An address is part of the configuration, so a new address takes effect through a reload. The
//! controller stores an address once it is in force, and a later start uses the stored address
//! until the server answers. A service without an address is part of no client, so its connects are
//! not balanced.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::{Instant, SystemTime};

use lb_core::endpoint::EndpointFault;
use lb_discovery::{DiscoveryRequest, Finding, Latest};
use lb_view::fault::{Fault, FaultCode, Subject};
use tracing::{info, warn};

use super::reads::Reading;
use crate::config::addresses::{self, KnownAddresses};
use crate::config::{AddressLookup, Config};
use crate::controller::Controller;
use crate::error::chain;
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
    /// Keyed by origin: since when the server's answers have no usable address.
    without_address: BTreeMap<String, Instant>,
    /// Keyed by service name: the address in the last answer that is not used because it is an
    /// endpoint, and the service with this endpoint.
    endpoints: BTreeMap<String, (SocketAddr, String)>,
    /// Keyed by origin: an address with which the first read of a list was refused, because the
    /// list contains the address, and the service with this list.
    refused: BTreeMap<String, (SocketAddr, String)>,
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
        if let Some((address, what)) = taken {
            return Some(format!("{origin} is {address}, which is {what}; {next}"));
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
        let since = lasting(self.without_address.get(&origin.to_string()).copied(), now);
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
            let (wanted, origin) = (wanted(lookup), lookup.origin.to_string());
            let Some((_, latest)) = answers.iter().find(|(answered, _)| *answered == wanted) else {
                continue;
            };
            self.addresses.answers.push((wanted, latest.clone()));
            self.addresses.expiries.extend(latest.expires.map(|expires| (lookup.service.clone(), expires)));
            let Some(address) = latest.finding.as_ref().and_then(address) else {
                self.addresses.without_address.entry(origin).or_insert(now);
                continue;
            };
            self.addresses.without_address.remove(&origin);
            // No endpoint may have the address of a service. With such an address, the list would
            // be refused, and connects would fail.
            if lookup.address != Some(address) {
                let refused = self.addresses.refused.get(&origin).filter(|(refused, _)| *refused == address);
                let other = refused.map(|(_, other)| &**other).or_else(|| self.sources.service_with(address));
                if let Some(other) = other.map(str::to_owned) {
                    self.addresses.endpoints.insert(lookup.service.clone(), (address, other));
                    continue;
                }
            }
            self.addresses.refused.remove(&origin);
            let before = self.addresses.known.insert(origin, address);
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

    /// Applies the last answers again after a list has changed: an address that was an endpoint may
    /// not be one any more.
    pub fn retake_addresses(&mut self, now: Instant) {
        if !self.addresses.endpoints.is_empty() {
            let answers = std::mem::take(&mut self.addresses.answers);
            self.take_addresses(&answers, now);
        }
    }

    /// Whether the first read of a list with this configuration was refused because the list
    /// contains a new address of a service. The next load is then without this address. The list of
    /// a service without an address is in no earlier configuration, so only this read shows its
    /// endpoints.
    pub fn refuse_addresses(&mut self, config: &Config, read: &[Reading]) -> bool {
        let mut is_any = false;
        for lookup in &config.lookups {
            let (origin, before) = (lookup.origin.to_string(), &self.config.lookups);
            let before = before.iter().find(|before| before.origin == lookup.origin);
            let before = before.and_then(|before| before.address);
            let Some(address) = lookup.address.filter(|address| before != Some(*address)) else { continue };
            let fault = EndpointFault::IsAService { address }.to_string();
            let is_refused = |reading: &&Reading| {
                reading.result.as_ref().is_err_and(|error| chain(error).contains(&fault))
            };
            let Some(reading) = read.iter().find(is_refused) else { continue };
            let refused = (address, reading.service.clone());
            self.addresses.endpoints.insert(lookup.service.clone(), refused.clone());
            self.addresses.refused.insert(origin.clone(), refused);
            self.addresses.known.remove(&origin);
            self.addresses.known.extend(before.map(|before| (origin, before)));
            is_any = true;
        }
        is_any
    }

    /// Allows the refused addresses again, because an operator may have edited the lists.
    pub fn forget_refused_addresses(&mut self) {
        let refused = std::mem::take(&mut self.addresses.refused);
        self.addresses.known.extend(refused.into_iter().map(|(origin, (address, _))| (origin, address)));
    }

    /// Stores the services' addresses in force for the next start of the daemon.
    pub fn store_addresses(&mut self) {
        let lookups = &self.config.lookups;
        let in_force: KnownAddresses =
            lookups.iter().filter_map(|lookup| Some((lookup.origin.to_string(), lookup.address?))).collect();
        let origins: BTreeSet<String> = lookups.iter().map(|lookup| lookup.origin.to_string()).collect();
        self.addresses.known.retain(|origin, _| origins.contains(origin));
        self.addresses.without_address.retain(|origin, _| origins.contains(origin));
        self.addresses.refused.retain(|origin, _| origins.contains(origin));
        for lookup in lookups {
            if let Some((address, what)) = &lookup.taken {
                warn!(service = lookup.service, %address, "the address is {what}, so connects to this service are not balanced");
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
