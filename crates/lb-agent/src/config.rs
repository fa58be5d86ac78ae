//! What `agent.toml` means: the backends of this host, and how each one's health and load are learnt.
//!
//! In reading order: the values (this file), the rows of all keys (`keys`), how a text and its key files are read (`read`,
//! `key_file`), and the page that documents them ([`reference`](mod@reference)).

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lb_document::LogFormat;
use lb_kernel::xdp::Place;
use lb_report::agent::entry::{CheckRules, Rules};
use lb_report::agent::name::Name;
use lb_report::keys::{BackendKey, Keys};

use crate::check::CheckMethod;

mod keys;

mod backend;

mod key_file;

mod read;

pub mod reference;

pub use key_file::{KeyFileError, read_key_file};
pub use keys::SECTIONS;
pub use read::{ConfigError, parse, read};

/// Where the configuration is, unless the command line says otherwise.
pub const DEFAULT_PATH: &str = "/etc/socklb/agent.toml";

/// The agent's port, for UDP and TCP.
pub const PORT: u16 = 9465;

/// What an agent is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentConfig {
    /// The file that says so, if one does.
    pub path: Option<PathBuf>,
    /// Where it listens; `None` is [`PORT`] on all addresses of both families, or of IPv4 where there is no IPv6.
    pub listen: Option<Vec<SocketAddr>>,
    /// The directory of what is kept between starts.
    pub state: PathBuf,
    /// The directory of the control socket.
    pub run: PathBuf,
    /// The group whose members may control it; `None` is the agent's own.
    pub group: Option<String>,
    /// How it logs.
    pub log_format: LogFormat,
    /// Where the kernel answers in its place, if it is to.
    pub xdp: Option<Place>,
    /// The backends.
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
    /// The keys that another configuration has otherwise and that take a restart.
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

    /// The files that it is read from.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        let keys = self.backends.iter().filter_map(|backend| backend.key_file.as_deref());
        self.path.as_deref().into_iter().chain(keys)
    }
}

/// A backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendConfig {
    /// Its name.
    pub name: Name,
    /// Its keys.
    pub keys: Keys<BackendKey>,
    /// The file that they are read from, if they are.
    pub key_file: Option<PathBuf>,
    /// How its health is learnt, if it is.
    pub check: Option<HealthCheck>,
    /// How its load is learnt.
    pub utilization: Utilization,
    /// How long a report is valid.
    pub valid_for: Duration,
    /// For how long a lame duck that falls silent stays one.
    pub hold: Duration,
}

impl BackendConfig {
    /// With what holds unless something else is written.
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

    /// How its reports are made.
    pub fn rules(&self) -> Rules {
        let check = self.check.as_ref().map(|check| CheckRules {
            rise: check.rise,
            fall: check.fall,
            stale_after: check.stale_after(),
        });
        Rules { valid_for: self.valid_for, hold: self.hold, check }
    }
}

/// A health check, and when it is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthCheck {
    /// What is done.
    pub check: CheckMethod,
    /// From the beginning of one to that of the next, about.
    pub interval: Duration,
    /// For one.
    pub timeout: Duration,
    /// Results in a row that make a backend healthy.
    pub rise: u32,
    /// Results in a row that make it unhealthy.
    pub fall: u32,
}

impl HealthCheck {
    /// With what holds unless something else is written.
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

    /// How long a result counts without another: three checks may be lost.
    pub fn stale_after(&self) -> Duration {
        3 * (self.interval + self.timeout)
    }
}

/// How a backend's utilization is learnt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Utilization {
    /// Its application says it.
    Application,
    /// The same; and what its cgroup uses is measured, for when it says nothing.
    Cgroup {
        /// Relative to the mount of the cgroups.
        cgroup: PathBuf,
        /// What it can use, in thousandths of a processor; `None` is its limit, or the host's processors.
        cores: Option<u32>,
    },
    /// It is not learnt, and an application that says it is refused.
    Off,
}
