//! The state that only the event loop has: the state of the configuration, faults of clients, and
//! the counts of the last minute.
//!
//! The event loop passes this state as a value to another thread, and continues. The other thread
//! builds the status and the metrics from this state and the maps, because reading the maps of many
//! clients takes a second. This module reads no map and no clock.

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
use lb_view::overrides::Override;
use lb_view::status::{
    DaemonStatus, InterfaceStatus, RebalanceStatus, Reclaim, SourceStatus, UnusedEndpoints,
};

use crate::close_jobs::CloseCause;
use crate::counts::window::Lately;

/// The state of the event loop at one moment.
#[derive(Debug)]
pub struct Facts {
    pub daemon: DaemonStatus,
    /// When the daemon started.
    pub started: SystemTime,
    pub reloads: Reloads,
    pub reports: ReportCounts,
    /// The network interfaces on which the kernel should receive reports.
    pub interfaces: Vec<InterfaceStatus>,
    /// The faults that the maps do not show.
    pub faults: Vec<Fault>,
    /// The client tasks that run.
    pub clients: Vec<ClientFacts>,
    /// The names of client tasks that could not be started.
    pub unstarted: Vec<String>,
    /// Clients that are leaving.
    pub leaving: Vec<Pins>,
}

/// Counts of datagrams since the daemon first requested reports; all are zero if it has requested
/// none.
#[derive(Clone, Debug, Default)]
pub struct ReportCounts {
    pub requests: u64,
    /// Requests that could not be sent.
    pub unsent: u64,
    /// The number of received datagrams for each result: the names in [`Refusal::NAMES`], and
    /// `believed`.
    pub datagrams: Vec<(&'static str, u64)>,
    /// The number of datagrams that the kernel's receiver program has processed since the host's
    /// maps were created, for each result in [`Reception::NAMES`]. Empty if the kernel receives no
    /// reports.
    pub by_kernel: Vec<(&'static str, u64)>,
}

/// The reloads since the daemon started.
#[derive(Clone, Copy, Debug)]
pub struct Reloads {
    /// The number of configurations that were applied.
    pub taken_on: u64,
    /// The number of configurations that could not be used.
    pub refused: u64,
    pub in_force_since: SystemTime,
    /// Whether the present configuration file cannot be used.
    pub is_faulty: bool,
}

/// The state of a client task that only the event loop has.
#[derive(Debug)]
pub struct ClientFacts {
    /// The client's pins.
    pub pins: Pins,
    /// Whether an operator has removed the client's pins. The maps then cannot be opened, and
    /// [`Facts::faults`] contains a fault.
    pub is_unpinned: bool,
    /// The path of the client's configured cgroup.
    pub configured: PathBuf,
    /// The cgroup that the last check found at the configured path.
    pub cgroup: Option<PathBuf>,
    /// The cgroup to which the programs are attached: its id in the kernel, and its path. `None` if
    /// the programs are not attached.
    pub attached: Option<(u64, PathBuf)>,
    /// Whether the programs are attached to the cgroup that is now at the configured path.
    pub is_attached: bool,
    /// The results of the passes over the client's flow records.
    pub reclaim: Reclaim,
    /// The source of each service's endpoints, keyed by service name.
    pub sources: BTreeMap<String, SourceStatus>,
    /// Services for which ejection is configured but cannot happen, because the programs do not
    /// record why flows fail.
    pub without_causes: BTreeSet<String>,
    /// Services that are in panic.
    pub panics: BTreeSet<String>,
    /// The endpoints that no task of the job uses, keyed by service name. Contains only services
    /// with such endpoints.
    pub unused: BTreeMap<String, UnusedEndpoints>,
    /// The lists in use, keyed by service name.
    pub lists: BTreeMap<String, Arc<EndpointList>>,
    /// The time after which an unavailable member is replaced, keyed by service name.
    pub replace_after: BTreeMap<String, Duration>,
    /// For how long each unavailable backend has been unavailable, keyed by service name and
    /// address.
    pub unavailable: BTreeMap<(String, SocketAddr), Duration>,
    /// The results of each backend's probes and reports, keyed by service name and address.
    pub probes: BTreeMap<(String, SocketAddr), BackendHealth>,
    /// The operators' overrides that are in force for the client.
    pub overrides: Vec<Override>,
    /// The number of connections closed since the daemon started, keyed by service name and cause.
    pub closed: BTreeMap<(String, CloseCause), u64>,
    /// The state of load control and slow start, keyed by service name.
    pub loads: BTreeMap<String, ServiceLoadStatus>,
    /// The state of `rebalance`, keyed by service name.
    pub rebalances: BTreeMap<String, RebalanceStatus>,
    /// The runs of the programs of each hook; empty if the kernel has not counted them.
    pub runs: Vec<(&'static str, Runs)>,
    /// The samples of the client's counters; `None` if no daemon takes samples.
    pub lately: Option<Lately>,
}
