//! Reads a list of endpoints that a daemon would use, for the commands that accept a list instead
//! of numbers. The list comes from `--endpoints FILE`, or from a service of `--config FILE`.
//!
//! The daemon's own code parses the files. This module must not depend on what the commands do with
//! the list.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use lb_config::endpoints::Parsed;
use lb_config::{
    ClientConfig, ClientService, Config, EndpointSource, ListFile, ProcessEnvironment, endpoints,
};
use lb_core::endpoint::EndpointList;
use lb_core::service::{Service, Size, Subset};
use lb_core::subset::Algorithm;
use lb_report::keys::{Keys, Numbered, ServiceKey};

use super::arguments::FleetArguments;
use super::input;
use crate::listed::ListedJob;

/// The source of a list of endpoints.
#[derive(Clone, Debug, Args)]
pub struct ListArguments {
    /// Endpoint file in a format that the daemon reads (TOML, or JSON as in Prometheus), instead of
    /// --backends
    #[arg(long, value_name = "FILE", conflicts_with = "backends")]
    endpoints: Option<PathBuf>,
    /// Configuration of the daemon: its service and job determine --clients, --size, --seed and the
    /// algorithm, unless these are given
    #[arg(long, value_name = "FILE", conflicts_with_all = ["backends", "endpoints"])]
    config: Option<PathBuf>,
    /// Service of the configuration, if it has several
    #[arg(long, value_name = "NAME")]
    service: Option<String>,
    /// Client of the configuration, if several use the service
    #[arg(long, value_name = "NAME")]
    of_client: Option<String>,
}

impl ListArguments {
    /// The job and its list, once for each of `algorithms`. If `algorithms` is `None`, once with
    /// the configured algorithm. The vector is empty if the arguments name no list.
    pub fn jobs(&self, fleet: &FleetArguments, algorithms: Option<&[Algorithm]>) -> Result<Vec<ListedJob>> {
        let (service, tasks, list) = match (&self.endpoints, &self.config) {
            (Some(path), _) => {
                let file = ListFile { path: path.clone(), port_name: None, protocol: None };
                let parsed = file.parse(&read(path, endpoints::MAX_FILE_BYTES)?, None, &[])?;
                let list = without_hosts(parsed, path)?;
                let Some((clients, size)) = fleet.clients.zip(fleet.size) else {
                    bail!("--endpoints specifies only the backends: add --clients and --size");
                };
                let subset = Subset::Sized { algorithm: Algorithm::Rocksteadier, size: Size::Fixed(size) };
                let service = Service::new("service", unused_address(&list), subset, fleet.seed.unwrap_or(0));
                (service, clients, list)
            }
            (None, Some(path)) => self.of_configuration(path, fleet)?,
            (None, None) if self.service.is_some() || self.of_client.is_some() => {
                bail!("--service and --of-client select from a configuration: add --config");
            }
            (None, None) => return Ok(Vec::new()),
        };
        let own = match service.subset {
            Subset::Sized { algorithm, .. } => algorithm,
            Subset::All => Algorithm::Rocksteadier,
        };
        let algorithms = algorithms.unwrap_or(std::slice::from_ref(&own));
        let job = |&algorithm: &Algorithm| {
            let subset = match (service.subset, fleet.size) {
                (_, Some(size)) => Subset::Sized { algorithm, size: Size::Fixed(size) },
                (Subset::Sized { size, .. }, None) => Subset::Sized { algorithm, size },
                (Subset::All, None) => Subset::All,
            };
            let service = Service { subset, ..service.clone() };
            ListedJob { service, tasks, list: list.clone() }
        };
        Ok(algorithms.iter().map(job).collect())
    }

    fn of_configuration(&self, path: &Path, fleet: &FleetArguments) -> Result<(Service, u32, EndpointList)> {
        let bytes = read(path, lb_config::MAX_FILE_BYTES)?;
        let text =
            std::str::from_utf8(&bytes).with_context(|| format!("{}: not valid UTF-8", path.display()))?;
        let config = lb_config::parse(text, path, &AnyTask)?;
        let (client, service) = self.find(&config, path)?;
        let list = match &service.source {
            EndpointSource::Static(list) => list.clone(),
            EndpointSource::File(file) => {
                let bytes = read(&file.path, endpoints::MAX_FILE_BYTES)?;
                let parsed = file.parse(&bytes, Some(service.service.address), &config.addresses)?;
                let list = without_hosts(parsed, &file.path)?;
                endpoints::check_indexes(&list, service.service.subset.needs_indexes(), &file.path)?;
                list
            }
            EndpointSource::Named(_) => bail!(
                "{}: the static list of service {name} has host names, but the planner resolves none: write \
                 the addresses into a file with `socklb source dump {name}`, and use that file",
                path.display(),
                name = service.service.name
            ),
            EndpointSource::Remote(remote) => bail!(
                "{}: the list of service {name} comes from {}, but the planner queries no server: write the \
                 list into a file with `socklb source dump {name}`, and use that file",
                path.display(),
                remote.origin,
                name = service.service.name
            ),
        };
        let seed = fleet.seed.unwrap_or(service.service.seed);
        Ok((Service { seed, ..service.service.clone() }, fleet.clients.unwrap_or(client.task.count), list))
    }

    /// The one service in the configuration that matches `--service` and `--of-client`, with the
    /// client that uses it.
    fn find<'c>(&self, config: &'c Config, path: &Path) -> Result<(&'c ClientConfig, &'c ClientService)> {
        let all = config
            .clients
            .iter()
            .flat_map(|client| client.services.iter().map(move |service| (client, service)));
        let is_meant = |(client, service): &(&ClientConfig, &ClientService)| {
            self.service.as_ref().is_none_or(|name| *name == service.service.name)
                && self.of_client.as_ref().is_none_or(|name| *name == client.name)
        };
        let found: Vec<_> = all.clone().filter(is_meant).collect();
        let names = |found: &[(&ClientConfig, &ClientService)]| {
            let names =
                found.iter().map(|(client, service)| format!("{} of {}", service.service.name, client.name));
            names.collect::<Vec<_>>().join(", ")
        };
        match found[..] {
            [one] => Ok(one),
            [] => bail!(
                "{}: no client has this service; the file has {}",
                path.display(),
                names(&all.collect::<Vec<_>>())
            ),
            _ => bail!(
                "{}: several services match; select one with --service and --of-client: {}",
                path.display(),
                names(&found)
            ),
        }
    }
}

/// The environment of a host that runs no task. The planner computes every task of a job, so this
/// environment returns invented values.
struct AnyTask;

impl ProcessEnvironment for AnyTask {
    fn variable(&self, _: &str) -> Option<String> {
        Some("0".into())
    }

    fn host_name(&self) -> Option<String> {
        Some("host-0".into())
    }

    fn service_keys(&self, _: &Path) -> Result<Keys<ServiceKey>, String> {
        Ok(Keys::new(Numbered { id: 1, key: ServiceKey::from_bytes([0; 32]) }, None))
    }
}

/// Returns the list of a file, or an error if the file contains host names.
fn without_hosts(parsed: Parsed, path: &Path) -> Result<EndpointList> {
    if let Some(host) = parsed.hosts.first() {
        bail!(
            "{}: the planner does not resolve host names such as {host}: use a list with addresses, as `socklb source dump` prints it",
            path.display()
        );
    }
    Ok(parsed.list)
}

/// An address that no endpoint of the list has, in the same address family.
fn unused_address(list: &EndpointList) -> SocketAddr {
    let is_v6 = list.as_slice().first().is_some_and(|endpoint| endpoint.address.is_ipv6());
    SocketAddr::new(if is_v6 { [0; 16].into() } else { [0; 4].into() }, 0)
}

fn read(path: &Path, most: usize) -> Result<Vec<u8>> {
    let bytes = input::read(path, most).with_context(|| format!("read {}", path.display()))?;
    bytes.with_context(|| format!("{} is longer than the limit of {most} bytes", path.display()))
}
