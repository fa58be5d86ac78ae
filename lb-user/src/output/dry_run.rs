//! Computes, for `check` and `explain`, the decisions of a daemon that starts now, with the present
//! files and without pinned maps.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use lb_core::balancer::{Adopted, Balancer, Fact, UnusableList};
use lb_core::endpoint::EndpointList;
use lb_core::membership::Assignments;
use lb_core::service::Service;
use thiserror::Error;

use crate::config::{ClientConfig, Config, EndpointSource};
use crate::error::CommandFailure;
use crate::source::assignments::{self, AssignmentsByService};
use crate::source::{ListOrigin, ListSource, complete_assignments};

/// The sources of all lists. A list in the configuration itself has a source only if it contains
/// host names. Services with the same address and source share one entry.
pub fn list_sources(config: &Config) -> Vec<ListSource> {
    let services: Vec<_> = config.clients.iter().flat_map(|client| &client.services).collect();
    let mut sources: Vec<ListSource> = Vec::new();
    for configured in services {
        let Some(origin) = ListOrigin::of(&configured.source) else { continue };
        let service = &configured.service;
        if !sources.iter().any(|source| source.service == service.address && source.origin == origin) {
            sources.push(ListSource::new(service, origin, &config.addresses, &config.paths.state));
        }
    }
    sources
}

/// The lists of all services that these clients dial, with the clients' assignments.
pub fn assignments(
    clients: &[ClientConfig],
    sources: &[ListSource],
) -> Result<AssignmentsByService, CommandFailure> {
    let mut by_service = assignments::statics(clients, &AssignmentsByService::new());
    for configured in clients.iter().flat_map(|client| &client.services) {
        let Some(origin) = ListOrigin::of(&configured.source) else { continue };
        let Service { name, address, .. } = &configured.service;
        if !by_service.contains_key(name) {
            let mut sources = sources.iter();
            let source = sources.find(|source| source.origin == origin && source.service == *address);
            let source = source.context("a list has no source")?;
            // A command does not query servers. Instead of a server's answer, it uses the list that
            // the daemon stored last.
            let mut assignments = match source.read(None).transpose()? {
                Some(read) if read.hosts.is_empty() => read.assignments,
                Some(read) => stored(source).unwrap_or(read.assignments),
                None => stored(source).unwrap_or_else(|| Assignments::new(EndpointList::default())),
            };
            complete_assignments(&mut assignments, &assignments::consumers(clients, name));
            by_service.insert(name.clone(), assignments);
        }
    }
    Ok(by_service)
}

/// The list that the daemon stored last for this source; `None` if no list is stored, or if this
/// user may not read it.
pub fn stored(source: &ListSource) -> Option<Assignments> {
    Some(source.stored().ok()?.assignments)
}

/// The lists that a daemon with this configuration used last, keyed by service name. For a service
/// with an endpoint file, the map contains the stored last good list; if no list is stored, it
/// contains the list in the file. Lists that cannot be read are skipped.
pub fn stored_lists(config: &Config) -> BTreeMap<String, Arc<EndpointList>> {
    let mut lists = BTreeMap::new();
    for configured in config.clients.iter().flat_map(|client| &client.services) {
        let service = &configured.service;
        if lists.contains_key(&service.name) {
            continue;
        }
        let list = match &configured.source {
            EndpointSource::Static(list) => Some(Arc::new(list.clone())),
            EndpointSource::Named(_) | EndpointSource::File(_) | EndpointSource::Remote(_) => {
                let origin =
                    ListOrigin::of(&configured.source).expect("the list is not in the configuration");
                let source = ListSource::new(service, origin, &config.addresses, &config.paths.state);
                let contents = source.stored().ok().or_else(|| source.read(None)?.ok());
                contents.map(|contents| contents.assignments.list().clone())
            }
        };
        lists.extend(list.map(|list| (service.name.clone(), list)));
    }
    lists
}

/// A list that does not fit the limits of a client task.
#[derive(Debug, Error)]
#[error("client {client}, service {service}")]
pub struct DoesNotFit {
    client: String,
    pub service: String,
    pub address: SocketAddr,
    /// The limit that the list exceeds.
    #[source]
    pub refused: UnusableList,
}

/// The balancer of a client. The balancer's time does not advance.
pub fn balancer(
    config: &Config,
    client: &ClientConfig,
    by_service: &AssignmentsByService,
) -> Result<Balancer<Duration>, CommandFailure> {
    let limits = config.limits;
    let services = client.services.iter().map(|service| service.service.clone()).collect();
    let mut balancer = Balancer::new(services, limits, Adopted::default(), Duration::ZERO)?;
    for (position, configured) in client.services.iter().enumerate() {
        let assignments = by_service.get(&configured.service.name).context("a service has no list")?;
        let assignment = assignments.assignment(&configured.service, client.task);
        let assignment = assignment.context("the assignment of a client was not computed")?;
        let delivered = balancer.handle(Duration::ZERO, Fact::Endpoints(position, assignment));
        delivered.map_err(|refused| DoesNotFit {
            client: client.name.clone(),
            service: configured.service.name.clone(),
            address: configured.service.address,
            refused,
        })?;
    }
    Ok(balancer)
}
