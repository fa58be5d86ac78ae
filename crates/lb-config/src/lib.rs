//! Parses and validates the configuration file.
//!
//! This crate makes every check that needs only the text, and reports all faults of the text at
//! once, so that later code need not check again. The crate checks the text of an endpoint file in
//! the same way ([`endpoints`]). The daemon uses this crate, and so does the planner, which runs
//! without a kernel or cgroups. So the crate must not inspect the host: the datapath checks that a
//! cgroup exists. Callers supply environment variables, the host name and key files through
//! [`ProcessEnvironment`].
#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use lb_common::abi::{MAX_CLIENTS, MAX_SERVICES};
use lb_core::endpoint::EndpointList;
use lb_core::limits::Limits;
use lb_core::service::{Accounting, Protocol, Service, Task};
use lb_document::diagnostic::{DiagnosticCollector, Diagnostics};
use lb_document::{self as document, Table};
use lb_report::keys::{Keys, ServiceKey};

mod client;
pub mod discovery;
pub mod endpoints;
pub mod keys;
pub mod reference;
mod service;
mod settings;

pub use discovery::{AddressLookup, ClusterIpOrigin, RemoteSource};
pub use service::probe::{AGENT_PORT, ProbeConfig, ProbeKind};
pub use settings::metrics::Metrics;
pub use settings::reports::ReportsConfig;
pub use settings::{DaemonConfig, Paths};

/// The maximum size of a configuration file in bytes. The limit bounds memory and time if the
/// operator writes the path of a wrong file. A configuration with the maximum number of services,
/// each with a hundred static endpoints, needs less than 1 MiB.
pub const MAX_FILE_BYTES: usize = 16 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub path: PathBuf,
    /// The clients in the order of the file; at least one.
    pub clients: Vec<ClientConfig>,
    /// The addresses of all services, including services that no client uses. No backend may have
    /// one of these addresses.
    pub addresses: Vec<SocketAddr>,
    /// One look-up for each `[[service]]` that gets its address from the API server of Kubernetes.
    pub lookups: Vec<AddressLookup>,
    pub paths: Paths,
    /// The sizes of each client task's maps.
    pub limits: Limits,
    pub daemon: DaemonConfig,
    pub metrics: Metrics,
    /// The name or number of the group that may control the daemon.
    pub admins: Option<String>,
    /// Time between two passes over the flow records.
    pub reclaim_interval: Duration,
    /// How the daemon requests reports from the backends' agents.
    pub reports: ReportsConfig,
    /// How the host names in lists are resolved.
    pub dns: discovery::DnsSettings,
    /// The directory of the files that Envoy reads; `None` if none are written.
    pub envoy: Option<PathBuf>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientConfig {
    pub job: String,
    /// The name of the client, which is unique among the clients. The name consists of letters,
    /// digits, `_` and `-`.
    pub name: String,
    /// The cgroup, relative to the cgroup2 mount. This cgroup is not inside another client's
    /// cgroup, and contains no other client's cgroup.
    pub cgroup: PathBuf,
    pub task: Task,
    /// The services that the client dials. Services without a known address are left out.
    pub services: Vec<ClientService>,
    pub accounting: Accounting,
}

/// A service with the settings of one client task, and the source of its endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientService {
    /// The service's seed is derived from the client's job, unless the configuration sets a seed.
    pub service: Service,
    pub source: EndpointSource,
    /// `None` if the service's backends are not probed.
    pub probe: Option<ProbeConfig>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndpointSource {
    /// The list is in the configuration itself.
    Static(EndpointList),
    /// The list is in the configuration itself, and contains host names.
    Named(NamedList),
    /// The daemon watches this file.
    File(ListFile),
    /// The daemon queries a server.
    Remote(Arc<RemoteSource>),
}

/// A list with host names from the configuration itself, stored as the text of an endpoint file in
/// JSON.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NamedList {
    pub text: Arc<str>,
}

/// An endpoint file, and the settings in the configuration that apply when it is read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ListFile {
    pub path: PathBuf,
    /// The name of the port to use if the endpoints have several named ports.
    pub port_name: Option<String>,
    /// The protocol of the service; `None` if it is not known.
    pub protocol: Option<Protocol>,
}

impl ListFile {
    /// Parses the text of this file without resolving host names. `service` is the address at which
    /// clients dial the service; `services` are the addresses of all services.
    ///
    /// # Errors
    /// All faults of the text, see [`endpoints::parse`].
    pub fn parse(
        &self,
        text: &[u8],
        service: Option<SocketAddr>,
        services: &[SocketAddr],
    ) -> Result<endpoints::Parsed, Diagnostics> {
        let Self { path, port_name, protocol } = self;
        let protocol = *protocol;
        let (port_name, hosts) = (port_name.as_deref(), &endpoints::NO_HOSTS);
        endpoints::parse(
            text,
            &endpoints::ListContext { path, port_name, protocol, service, services, hosts },
        )
    }
}

/// An endpoint file that a configuration names, even if that configuration has faults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedFile {
    /// `None` if the name of the service cannot be read.
    pub name: Option<String>,
    /// `None` if the address of the service cannot be read.
    pub service: Option<SocketAddr>,
    pub file: ListFile,
    /// The position of the file's path in the configuration.
    pub span: Range<usize>,
}

/// The facts about the running process on which a configuration depends. By default there is
/// nothing: no variable, no name and no file.
pub trait ProcessEnvironment {
    /// `None` if the environment variable is not set.
    fn variable(&self, _name: &str) -> Option<String> {
        None
    }
    /// `None` if the kernel does not report a host name.
    fn host_name(&self) -> Option<String> {
        None
    }
    /// Reads the keys in a file.
    ///
    /// # Errors
    /// A message that names the file and contains no part of a key.
    fn service_keys(&self, path: &Path) -> Result<Keys<ServiceKey>, String> {
        Err(format!("{}: there is no such file", path.display()))
    }
    /// The address that a server last sent for a service; `None` if no address is known. `state` is
    /// the directory in which a daemon stores these addresses.
    fn service_address(&self, _origin: &ClusterIpOrigin, _state: &Path) -> Option<SocketAddr> {
        None
    }
}

/// Parses the text of a configuration. `path` is the location of the file: relative paths in the
/// text are relative to its directory.
///
/// # Errors
/// All faults of the text.
pub fn parse(text: &str, path: &Path, env: &dyn ProcessEnvironment) -> Result<Config, Diagnostics> {
    parse_with(text, path, env, |_, _, _| ())
}

/// As [`parse`], but also calls `look`, even if the text has faults. `look` receives the endpoint
/// files that the text names and the addresses of all services. The faults that `look` reports
/// become faults of the configuration.
///
/// # Errors
/// All faults of the text.
pub fn parse_with(
    text: &str,
    path: &Path,
    env: &dyn ProcessEnvironment,
    look: impl FnOnce(&[NamedFile], &[SocketAddr], &DiagnosticCollector<'_>),
) -> Result<Config, Diagnostics> {
    let report = DiagnosticCollector::new(path, text);
    let root = document::read(text, &report);
    let root = Table::root("a configuration", &root, &report);
    root.check_keys(&keys::names());
    let (config, files) = read_root(&root, path, env);
    look(&files, &config.addresses, &report);
    report.finish(Some(config))
}

/// Reads only the table `[paths]`, even if the rest of the text has faults. Commands that need only
/// the directories call this function.
///
/// # Errors
/// The faults of the table `[paths]`. If the text has a syntax error and this table is not found,
/// the faults of the text.
pub fn parse_paths(text: &str, path: &Path) -> Result<Paths, Diagnostics> {
    let syntax = DiagnosticCollector::new(path, text);
    let root = document::read(text, &syntax);
    let report = DiagnosticCollector::new(path, text);
    let root = Table::root("a configuration", &root, &report);
    if root.get("paths").is_none() && !syntax.is_clean() {
        return syntax.finish(None);
    }
    let paths = settings::read_paths(&root, path.parent().unwrap_or(Path::new("")));
    report.finish(Some(paths))
}

// The returned value is a valid configuration only if `report` is empty.
fn read_root(root: &Table<'_>, path: &Path, env: &dyn ProcessEnvironment) -> (Config, Vec<NamedFile>) {
    let directory = path.parent().unwrap_or(Path::new(""));
    let services = root.tables(&keys::service::SECTION, MAX_SERVICES as usize);
    let clients = root.tables(&keys::client::SECTION, MAX_CLIENTS);
    for (key, example) in [
        ("client", "write [[client]] with a job and a cgroup"),
        ("service", "write [[service]] with a name, an address and backends"),
    ] {
        if root.get(key).is_none_or(|item| item.is_empty_list()) {
            root.report().add_absent(0..0, format!("no {key} is configured"), example.to_owned());
        }
    }
    let paths = settings::read_paths(root, directory);
    let limits = settings::read_limits(root);
    let reports = settings::reports::read(root, directory, env);
    let around = service::probe::Around { directory, env, reports: &reports };
    let servers = discovery::ServerSettings {
        dns: discovery::read_dns(root),
        consul: discovery::read_consul(root, directory),
        kubernetes: discovery::read_kubernetes(root, directory, env),
    };
    let services = service::read(&services, around, &servers, &paths.state);
    let dns = servers.dns;
    let clients = client::read(&clients, &services, limits, env);
    let addresses = services.addresses();
    let lookups = services.lookups();
    let config = Config {
        path: path.to_owned(),
        clients,
        addresses,
        lookups,
        paths,
        limits,
        daemon: settings::read_daemon(root),
        metrics: settings::metrics::read(root),
        admins: settings::read_admins(root),
        reclaim_interval: settings::read_reclaim_interval(root),
        reports,
        dns,
        envoy: settings::read_envoy(root, directory),
    };
    (config, services.into_files())
}

#[cfg(test)]
pub mod tests;
