//! Turns the configuration file into values that cannot be wrong.
//!
//! Everything that the text alone decides is decided here, and all faults are reported at once, so that nothing behind
//! it checks again. Must not look at the host: whether a cgroup exists is for the datapath, what an endpoint file says
//! for its source. Variables and the host name come in through [`Environment`].

use std::fs::File;
use std::io::{self, Read as _};
use std::net::SocketAddr;
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lb_common::abi::{MAX_CLIENTS, MAX_SERVICES};
use lb_core::endpoint::EndpointList;
use lb_core::service::{Service, Task};
use thiserror::Error;

use crate::diagnostic::{Faults, Report, utf8};
use crate::document::{self, Table};

pub mod keys;

pub mod reference;

mod paths;

mod limits;

mod metrics;

mod reclaim;

mod service;

mod template;

mod source;

mod subset;

mod policy;

mod client;

mod cgroup;

mod task;

pub use limits::Limits;
pub use metrics::Metrics;
pub use paths::{Paths, detach_command, pins_option};

/// The longest configuration that is read, to bound memory and time when the wrong file is named: every service with
/// a hundred static endpoints needs less than 1 MiB.
pub const MAX_FILE_BYTES: u64 = 16 << 20;

/// Where the configuration is, unless `--config` says otherwise.
pub const DEFAULT_PATH: &str = "/etc/socklb/socklb.toml";

/// What the operator configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The file that says so.
    pub path: PathBuf,
    /// The client tasks, in the order of the file; at least one.
    pub clients: Vec<Client>,
    /// The addresses of all services, used by a client or not: no backend may have one.
    pub addresses: Vec<SocketAddr>,
    /// Where state is kept.
    pub paths: Paths,
    /// Sizes of every client task's maps.
    pub limits: Limits,
    /// Where counters are told.
    pub metrics: Metrics,
    /// How far apart two passes over the flow records are.
    pub reclaim_interval: Duration,
}

/// One cgroup whose connects are balanced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
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
    /// What is known of its flows.
    pub accounting: Accounting,
}

/// What is known of a client's flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accounting {
    /// Those that are open, by the cheapest hooks. Why one failed is not known.
    Active,
    /// Also how they went and why they ended.
    Full,
}

impl Accounting {
    /// Both of them, in the order in which the documentation has them.
    pub const ALL: [Self; 2] = [Self::Full, Self::Active];

    /// The word for it in configurations and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Full => "full",
        }
    }
}

/// A service as one client task sees it, and where its endpoints come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientService {
    /// The service; its seed is that of the client's job.
    pub service: Service,
    /// Where its endpoints come from.
    pub source: Source,
}

/// Where the endpoints of a service come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The configuration itself.
    Static(EndpointList),
    /// A file that is watched.
    File(PathBuf),
}

/// An endpoint file that a configuration names, right or wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedFile {
    /// The address of its service, if that can be read.
    pub service: Option<SocketAddr>,
    /// The file.
    pub path: PathBuf,
    /// Where the configuration names it.
    pub span: Range<usize>,
}

/// What a configuration may ask about the process that reads it.
pub trait Environment {
    /// The value of an environment variable, if it is set.
    fn variable(&self, name: &str) -> Option<String>;
    /// The name of the host, if the kernel tells it.
    fn host_name(&self) -> Option<String>;
}

/// This process on this host.
pub struct Host;

impl Environment for Host {
    fn variable(&self, name: &str) -> Option<String> {
        // `var_os` panics on no name but these.
        let is_name = !name.is_empty() && !name.contains(['=', '\0']);
        is_name.then(|| std::env::var_os(name)).flatten().map(|value| value.to_string_lossy().into_owned())
    }

    fn host_name(&self) -> Option<String> {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
        Some(name.trim_end().to_owned())
    }
}

/// Why there is no configuration.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Nobody has written one yet.
    #[error(
        "there is no configuration at {DEFAULT_PATH}, and --config names no other: the package has an example, \
         /usr/share/doc/socklb/examples/socklb.toml, which is packaging/examples/socklb.toml in the repository"
    )]
    None,
    /// The file is too long to be a configuration.
    #[error("read {}: longer than {MAX_FILE_BYTES} bytes, which no configuration is", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
    },
    /// The file was read and is wrong.
    #[error(transparent)]
    Faulty(#[from] Faults),
}

/// Reads the configuration file at `path`.
///
/// # Errors
/// The file cannot be read, or all its faults.
pub fn read(path: &Path, env: &dyn Environment) -> Result<Config, ConfigError> {
    read_with(path, env, |_, _, _| ())
}

/// Reads `[paths]` of the configuration file at `path`, whatever else is wrong with it: who looks what is wrong needs no more.
///
/// # Errors
/// The file cannot be read, or the faults of that table. If there is none, and the text cannot be parsed, the faults of the
/// text.
pub fn read_paths(path: &Path) -> Result<Paths, ConfigError> {
    let bytes = read_file(path)?;
    let text = utf8(&bytes, path)?;
    let mut syntax = Report::new(path, text);
    let root = document::read(text, &mut syntax);
    let root = Table::root("a configuration", &keys::names(), &root, &mut syntax);
    if root.get("paths").is_none() && !syntax.is_clean() {
        return Ok(syntax.finish(None)?);
    }
    let mut report = Report::new(path, text);
    let paths = paths::read(&root, path.parent().unwrap_or(Path::new("")), &mut report);
    Ok(report.finish(Some(paths))?)
}

/// As [`read`], and shows the endpoint files that the text names, whatever else is wrong with it, and the addresses of
/// all services to `look`. What that reports is a fault of the configuration.
///
/// # Errors
/// The file cannot be read, or all its faults.
pub fn read_with(
    path: &Path,
    env: &dyn Environment,
    look: impl FnOnce(&[NamedFile], &[SocketAddr], &mut Report<'_>),
) -> Result<Config, ConfigError> {
    let bytes = read_file(path)?;
    Ok(parse_with(utf8(&bytes, path)?, path, env, look)?)
}

fn read_file(path: &Path) -> Result<Vec<u8>, ConfigError> {
    let cannot = |source| ConfigError::Read { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    // A pipe would keep us waiting for a writer.
    let file = match File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound && path == Path::new(DEFAULT_PATH) => {
            return Err(ConfigError::None);
        }
        Err(error) => return Err(cannot(error)),
    };
    if !file.metadata().map_err(cannot)?.is_file() {
        return Err(cannot(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")));
    }
    let length = file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(cannot)?;
    if length as u64 > MAX_FILE_BYTES {
        return Err(ConfigError::TooLong { path: path.to_owned() });
    }
    Ok(bytes)
}

/// Reads the text of a configuration; `path` is where it stands, and what the paths in it are relative to.
///
/// # Errors
/// All faults of the text.
pub fn parse(text: &str, path: &Path, env: &dyn Environment) -> Result<Config, Faults> {
    parse_with(text, path, env, |_, _, _| ())
}

fn parse_with(
    text: &str,
    path: &Path,
    env: &dyn Environment,
    look: impl FnOnce(&[NamedFile], &[SocketAddr], &mut Report<'_>),
) -> Result<Config, Faults> {
    let mut report = Report::new(path, text);
    let root = document::read(text, &mut report);
    let root = Table::root("a configuration", &keys::names(), &root, &mut report);
    let (config, files) = read_root(&root, path, env, &mut report);
    look(&files, &config.addresses, &mut report);
    report.finish(Some(config))
}

// Returns what could be read: it is a configuration only if nothing was reported.
fn read_root(
    root: &Table<'_>,
    path: &Path,
    env: &dyn Environment,
    report: &mut Report<'_>,
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
    let metrics = metrics::read(root, report);
    let reclaim_interval = reclaim::read(root, report);
    let services = service::read(&services, directory, report);
    let clients = client::read(&clients, &services, limits, env, report);
    let addresses = services.addresses();
    let config =
        Config { path: path.to_owned(), clients, addresses, paths, limits, metrics, reclaim_interval };
    (config, services.into_files())
}

#[cfg(test)]
pub mod tests;
