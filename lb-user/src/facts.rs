//! What only the event loop knows: the state of the configuration, what is wrong with clients, what was counted of
//! late.
//!
//! The loop gives it away as a value of its own and goes on; status and metrics are made of it and of the maps, by a
//! thread beside the loop, because the maps of many clients take a second to read. It reads no map and no clock.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use lb_core::endpoint::EndpointList;
use lb_kernel::{Pins, Runs};
#[cfg(doc)]
use lb_report::client::senders::Refusal;
#[cfg(doc)]
use lb_report::receive::Reception;
use lb_view::backend::BackendHealth;
use lb_view::fault::Fault;
use lb_view::load::ServiceLoadStatus;
use lb_view::status::{DaemonStatus, InterfaceStatus, Reclaim, SourceStatus, UnusedEndpoints};

use crate::window::Lately;

/// What the event loop knew at one moment.
#[derive(Debug)]
pub struct Facts {
    /// The process.
    pub daemon: DaemonStatus,
    /// When it started.
    pub started: SystemTime,
    /// The configurations that were read.
    pub reloads: Reloads,
    /// What has come and gone of reports.
    pub reports: ReportCounts,
    /// Network interfaces on which the kernel is to take reports in by itself.
    pub interfaces: Vec<InterfaceStatus>,
    /// What is wrong that the maps do not show.
    pub faults: Vec<Fault>,
    /// Client tasks that run.
    pub clients: Vec<ClientFacts>,
    /// Names of client tasks that could not be started.
    pub unstarted: Vec<String>,
    /// Clients on their way out.
    pub leaving: Vec<Pins>,
}

/// Datagrams since the daemon began to ask for reports; all zero if it has not.
#[derive(Clone, Debug, Default)]
pub struct ReportCounts {
    /// Requests that were sent.
    pub requests: u64,
    /// Requests that could not be sent.
    pub unsent: u64,
    /// What came, by what became of it; each word of [`Refusal::NAMES`], and `believed`.
    pub datagrams: Vec<(&'static str, u64)>,
    /// What the kernel took in before the daemon, since the maps of the host were made; each word of [`Reception::NAMES`], or none where
    /// it takes nothing in.
    pub by_kernel: Vec<(&'static str, u64)>,
}

/// The configurations that were read since the daemon started.
#[derive(Clone, Copy, Debug)]
pub struct Reloads {
    /// How often a configuration was taken on while running.
    pub taken_on: u64,
    /// How often one could not be used.
    pub refused: u64,
    /// Since when the configuration in force is.
    pub in_force_since: SystemTime,
    /// Whether the file cannot be used as it is now.
    pub is_faulty: bool,
}

/// What only the event loop knows of a client task.
#[derive(Debug)]
pub struct ClientFacts {
    /// Where its maps are.
    pub pins: Pins,
    /// Whether its pins were removed. Its maps cannot be opened then; [`Facts::faults`] says so.
    pub is_unpinned: bool,
    /// The cgroup that it is configured for.
    pub configured: PathBuf,
    /// The cgroup at that path when it was last looked at.
    pub cgroup: Option<PathBuf>,
    /// The kernel's id of that cgroup, and its path, if the programs are attached to it.
    pub attached: Option<(u64, PathBuf)>,
    /// Whether the programs are attached to the cgroup that the configured path names now.
    pub is_attached: bool,
    /// What became of its flow records.
    pub reclaim: Reclaim,
    /// Sources of endpoints by service name.
    pub sources: BTreeMap<String, SourceStatus>,
    /// Services of which no backend is ejected although that is configured, because it is not known why flows fail.
    pub without_causes: BTreeSet<String>,
    /// Services that are in panic.
    pub panics: BTreeSet<String>,
    /// Endpoints that no task of the job uses, by service name; of services that have such.
    pub unused: BTreeMap<String, UnusedEndpoints>,
    /// The lists in use, by service name.
    pub lists: BTreeMap<String, Arc<EndpointList>>,
    /// After how long a member that is unavailable is replaced, by service name.
    pub replace_after: BTreeMap<String, Duration>,
    /// For how long backends have not been available, by service name and address.
    pub unavailable: BTreeMap<(String, SocketAddr), Duration>,
    /// What probes and reports say of its backends, by service name and address.
    pub probes: BTreeMap<(String, SocketAddr), BackendHealth>,
    /// What changes weights while lists stay, by service name.
    pub loads: BTreeMap<String, ServiceLoadStatus>,
    /// Runs of its programs by hook, where the kernel has counted them.
    pub runs: Vec<(&'static str, Runs)>,
    /// Samples of its counters; `None` only where no daemon has taken any.
    pub lately: Option<Lately>,
}
