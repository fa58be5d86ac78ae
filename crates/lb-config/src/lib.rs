//! Turns the configuration file into values that cannot be wrong.
//!
//! Everything that the text alone decides is decided here, and all faults are reported at once, so that nothing behind
//! it checks again; so with the text of an endpoint file ([`endpoints`]). The daemon reads both, and so does the planner, which runs
//! where there is neither kernel nor cgroup. Must not look at the host: whether a cgroup exists is for the datapath. Variables, the
//! host name and files of keys come in through [`ProcessEnvironment`].
#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lb_common::abi::{MAX_CLIENTS, MAX_SERVICES};
use lb_core::endpoint::EndpointList;
use lb_core::limits::Limits;
use lb_core::service::{Accounting, Service, Task};
use lb_document::diagnostic::{DiagnosticCollector, Diagnostics};
use lb_document::{self as document, Table};
use lb_report::keys::{Keys, ServiceKey};

pub mod keys;

pub mod reference;

mod paths;

mod limits;

mod daemon;

mod metrics;

mod admin;

mod reclaim;

mod service;

mod template;

mod source;

mod subset;

mod policy;

mod ejection;

mod load;

mod health;

mod probe;

mod reports;

mod client;

mod cgroup;

mod task;

pub mod endpoints;

pub use daemon::DaemonConfig;
pub use metrics::Metrics;
pub use paths::Paths;
pub use probe::{AGENT_PORT, ProbeConfig, ProbeKind};
pub use reports::ReportsConfig;

/// The longest configuration that is read, to bound memory and time when the wrong file is named: every service with
/// a hundred static endpoints needs less than 1 MiB.
pub const MAX_FILE_BYTES: usize = 16 << 20;

/// What the operator configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The configuration file.
    pub path: PathBuf,
    /// The client tasks, in the order of the file; at least one.
    pub clients: Vec<ClientConfig>,
    /// The addresses of all services, used by a client or not: no backend may have one.
    pub addresses: Vec<SocketAddr>,
    /// Where state is kept.
    pub paths: Paths,
    /// Sizes of every client task's maps.
    pub limits: Limits,
    /// How the daemon itself works.
    pub daemon: DaemonConfig,
    /// Where metrics are read.
    pub metrics: Metrics,
    /// The group whose members may change what the daemon does, by name or number.
    pub admins: Option<String>,
    /// How far apart two passes over the flow records are.
    pub reclaim_interval: Duration,
    /// How backends' agents are asked.
    pub reports: ReportsConfig,
}

/// One cgroup whose connects are balanced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientConfig {
    /// The job it is a task of.
    pub job: String,
    /// Unique among the clients; letters, digits, `_` and `-`.
    pub name: String,
    /// Relative to the cgroup2 mount; not below that of another client.
    pub cgroup: PathBuf,
    /// Which task of its job it is.
    pub task: Task,
    /// The services that it dials, at least one.
    pub services: Vec<ClientService>,
    /// How much is recorded of its flows.
    pub accounting: Accounting,
}

/// A service as one client task sees it, and where its endpoints come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientService {
    /// The service; its seed is that of the client's job.
    pub service: Service,
    /// Where its endpoints come from.
    pub source: EndpointSource,
    /// How its backends are probed, if they are.
    pub probe: Option<ProbeConfig>,
}

/// Where the endpoints of a service come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndpointSource {
    /// The configuration itself.
    Static(EndpointList),
    /// A file that is watched.
    File(ListFile),
}

/// An endpoint file, and what the configuration says of what is in it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ListFile {
    /// Where it is.
    pub path: PathBuf,
    /// Which port of the endpoints is meant, where they have several with names.
    pub port_name: Option<String>,
}

impl ListFile {
    /// Reads a text of this file, of the service that is dialled there; `services` are the addresses of all.
    ///
    /// # Errors
    /// All faults of the text, see [`endpoints::parse`].
    pub fn parse(
        &self,
        text: &[u8],
        service: Option<SocketAddr>,
        services: &[SocketAddr],
    ) -> Result<endpoints::Parsed, Diagnostics> {
        let Self { path, port_name } = self;
        endpoints::parse(
            text,
            &endpoints::ListContext { path, port_name: port_name.as_deref(), service, services },
        )
    }
}

/// An endpoint file that a configuration names, right or wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedFile {
    /// The name of its service, if that can be read.
    pub name: Option<String>,
    /// The address of its service, if that can be read.
    pub service: Option<SocketAddr>,
    /// The file.
    pub file: ListFile,
    /// Where the configuration names it.
    pub span: Range<usize>,
}

/// What a configuration may ask about the process that reads it.
pub trait ProcessEnvironment {
    /// The value of an environment variable, if it is set.
    fn variable(&self, name: &str) -> Option<String>;
    /// The name of the host, if the kernel tells it.
    fn host_name(&self) -> Option<String>;
    /// The keys in a file.
    ///
    /// # Errors
    /// Why there are none, in words that name the file and hold nothing of a key.
    fn service_keys(&self, path: &Path) -> Result<Keys<ServiceKey>, String>;
}

/// Reads the text of a configuration; `path` is where it stands, and what the paths in it are relative to.
///
/// # Errors
/// All faults of the text.
pub fn parse(text: &str, path: &Path, env: &dyn ProcessEnvironment) -> Result<Config, Diagnostics> {
    parse_with(text, path, env, |_, _, _| ())
}

/// As [`parse`], and shows to `look` the endpoint files that the text names, whatever else is wrong with it, and the
/// addresses of all services. What `look` reports is a fault of the configuration.
///
/// # Errors
/// All faults of the text.
pub fn parse_with(
    text: &str,
    path: &Path,
    env: &dyn ProcessEnvironment,
    look: impl FnOnce(&[NamedFile], &[SocketAddr], &mut DiagnosticCollector<'_>),
) -> Result<Config, Diagnostics> {
    let mut report = DiagnosticCollector::new(path, text);
    let root = document::read(text, &mut report);
    let root = Table::root("a configuration", &root);
    root.check_keys(&keys::names(), &mut report);
    let (config, files) = read_root(&root, path, env, &mut report);
    look(&files, &config.addresses, &mut report);
    report.finish(Some(config))
}

/// Reads `[paths]` of the text of a configuration, whatever else is wrong with it, for commands that need no more.
///
/// # Errors
/// The faults of that table. If there is none, and the text cannot be parsed, the faults of the text.
pub fn parse_paths(text: &str, path: &Path) -> Result<Paths, Diagnostics> {
    let mut syntax = DiagnosticCollector::new(path, text);
    let root = document::read(text, &mut syntax);
    let root = Table::root("a configuration", &root);
    if root.get("paths").is_none() && !syntax.is_clean() {
        return syntax.finish(None);
    }
    let mut report = DiagnosticCollector::new(path, text);
    let paths = paths::read(&root, path.parent().unwrap_or(Path::new("")), &mut report);
    report.finish(Some(paths))
}

// Returns what could be read: it is a configuration only if nothing was reported.
fn read_root(
    root: &Table<'_>,
    path: &Path,
    env: &dyn ProcessEnvironment,
    report: &mut DiagnosticCollector<'_>,
) -> (Config, Vec<NamedFile>) {
    let directory = path.parent().unwrap_or(Path::new(""));
    let services = root.tables(&keys::service::SECTION, MAX_SERVICES as usize, report);
    let clients = root.tables(&keys::client::SECTION, MAX_CLIENTS, report);
    for (key, example) in [
        ("client", "write [[client]] with a job and a cgroup"),
        ("service", "write [[service]] with a name, an address and backends"),
    ] {
        if root.get(key).is_none_or(|item| item.is_empty_list()) {
            report.add_absent(0..0, format!("no {key} is configured"), example.to_owned());
        }
    }
    let paths = paths::read(root, directory, report);
    let limits = limits::read(root, report);
    let daemon = daemon::read(root, report);
    let metrics = metrics::read(root, report);
    let admins = admin::read(root, report);
    let reclaim_interval = reclaim::read(root, report);
    let reports = reports::read(root, directory, env, report);
    let around = probe::Around { directory, env, reports: &reports };
    let services = service::read(&services, around, report);
    let clients = client::read(&clients, &services, limits, env, report);
    let addresses = services.addresses();
    let config = Config {
        path: path.to_owned(),
        clients,
        addresses,
        paths,
        limits,
        daemon,
        metrics,
        admins,
        reclaim_interval,
        reports,
    };
    (config, services.into_files())
}

#[cfg(test)]
pub mod tests;
