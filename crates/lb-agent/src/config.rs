//! The content of `agent.toml`: the backends of this host, and how the agent determines the health
//! and load of each backend.
//!
//! In reading order: the values (this file), the rows of all keys (`keys`), the parsers of the text
//! and of its key files (`read`, `key_file`), and the tables for the documentation page
//! ([`reference`](mod@reference)).

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lb_document::LogFormat;
use lb_kernel::xdp::Place;
use lb_report::agent::entry::{CheckRules, Rules};
use lb_report::agent::name::Name;
use lb_report::keys::{BackendKey, Keys};

use crate::check::CheckMethod;

mod backend;
mod key_file;
mod keys;
mod read;
pub mod reference;

pub use key_file::{KeyFileError, read_key_file};
pub use keys::SECTIONS;
pub use read::{ConfigError, parse, read};

/// Path of the configuration, unless the command line names another file.
pub const DEFAULT_PATH: &str = "/etc/socklb/agent.toml";

/// The agent's port, for UDP and TCP.
pub const PORT: u16 = 9465;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentConfig {
    /// The file from which this configuration was read, if any.
    pub path: Option<PathBuf>,
    /// Addresses at which the agent listens. `None` means port [`PORT`] on all addresses of both
    /// families, or on all IPv4 addresses if there is no IPv6.
    pub listen: Option<Vec<SocketAddr>>,
    /// Directory of the state that is stored for the next start.
    pub state: PathBuf,
    /// Directory of the control socket.
    pub run: PathBuf,
    /// A group that may control the agent, in addition to the agent's own group.
    pub group: Option<String>,
    pub log_format: LogFormat,
    /// The interfaces on which the kernel answers requests in the agent's place (XDP), if any.
    pub xdp: Option<Place>,
    pub backends: Vec<BackendConfig>,
}

impl Default for AgentConfig {
    fn default() -> Self {
        let directory = |key: &keys::Path| PathBuf::from(&*key.default());
        Self {
            path: None,
            listen: None,
            state: directory(&keys::agent::STATE),
            run: directory(&keys::agent::RUN),
            group: None,
            log_format: LogFormat::Text,
            xdp: None,
            backends: Vec::new(),
        }
    }
}

impl AgentConfig {
    /// The configuration keys that need a restart and have different values in `self` and `other`.
    pub fn fixed(&self, other: &Self) -> Vec<&'static str> {
        let mut fixed = Vec::new();
        let mut differ = |key, differs: bool| fixed.extend(differs.then_some(key));
        differ("listen", self.listen != other.listen);
        differ("state", self.state != other.state);
        differ("run", self.run != other.run);
        differ("group", self.group != other.group);
        differ("log_format", self.log_format != other.log_format);
        differ("xdp", self.xdp != other.xdp);
        fixed
    }

    /// The configuration file and the key files.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        let keys = self.backends.iter().filter_map(|backend| backend.key_file.as_deref());
        self.path.as_deref().into_iter().chain(keys)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendConfig {
    pub name: Name,
    pub keys: Keys<BackendKey>,
    /// The file from which the keys were read, if any.
    pub key_file: Option<PathBuf>,
    /// The health check; `None` if the agent does not check the backend's health.
    pub check: Option<HealthCheck>,
    pub utilization: Utilization,
    /// How long a client uses a report if no newer report arrives.
    pub valid_for: Duration,
    /// How long clients still treat a lame duck as a lame duck after its reports stop.
    pub hold: Duration,
}

impl BackendConfig {
    /// A backend with the defaults of the configuration, but without a health check.
    pub fn new(name: Name, keys: Keys<BackendKey>) -> Self {
        Self {
            name,
            keys,
            key_file: None,
            check: None,
            utilization: Utilization::Application,
            valid_for: keys::backend::VALID_FOR.default(),
            hold: keys::backend::HOLD.default(),
        }
    }

    /// The rules for the backend's reports.
    pub fn rules(&self) -> Rules {
        let check = self.check.as_ref().map(|check| CheckRules {
            rise: check.rise,
            fall: check.fall,
            stale_after: check.stale_after(),
        });
        Rules { valid_for: self.valid_for, hold: self.hold, check }
    }
}

/// A health check and its schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthCheck {
    pub check: CheckMethod,
    /// Time from the start of one check to the start of the next, approximately.
    pub interval: Duration,
    /// Time limit of one check.
    pub timeout: Duration,
    /// Passed checks in a row that make a backend healthy.
    pub rise: u32,
    /// Failed checks in a row that make a backend unhealthy.
    pub fall: u32,
}

impl HealthCheck {
    /// A health check with the defaults of the configuration.
    pub fn new(check: CheckMethod) -> Self {
        use keys::backend::{FALL, INTERVAL, RISE, TIMEOUT};
        Self {
            check,
            interval: INTERVAL.default(),
            timeout: TIMEOUT.default(),
            rise: RISE.default(),
            fall: FALL.default(),
        }
    }

    /// How long a result is used if no newer result arrives: the time of three checks.
    pub fn stale_after(&self) -> Duration {
        3 * (self.interval + self.timeout)
    }
}

/// The source of a backend's utilization.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Utilization {
    /// The application reports its utilization. While it reports none, the agent measures the
    /// cgroup with which the backend's program has registered, if there is one.
    Application,
    /// The application reports its utilization. While it reports none, the agent measures this
    /// cgroup.
    Cgroup {
        /// The cgroup's path, relative to the mount of cgroups.
        cgroup: PathBuf,
        /// The processors that the cgroup can use, in thousandths. `None`: the smallest limit of
        /// the cgroup and of the cgroups above it or, without a limit, the host's processors.
        cores: Option<u32>,
    },
    /// The agent measures nothing, and refuses the application's reports.
    Off,
}
