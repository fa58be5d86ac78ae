//! The state that only the event loop has: the state of the configuration, faults of clients, and
//! the counts of the last minute.
//!
//! The loop passes this state on as a value and continues. A thread beside the loop combines it
//! with the maps into the status and the metrics, because reading the maps of many clients takes a
//! second. It reads no map and no clock.

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

/// The state of the event loop at one moment.
#[derive(Debug)]
pub struct Facts {
    pub daemon: DaemonStatus,
    /// When the daemon started.
    pub started: SystemTime,
    pub reloads: Reloads,
    pub reports: ReportCounts,
    /// Network interfaces on which the kernel should receive reports by itself.
    pub interfaces: Vec<InterfaceStatus>,
    /// Faults that the maps do not show.
    pub faults: Vec<Fault>,
    /// The client tasks that run.
    pub clients: Vec<ClientFacts>,
    /// Names of client tasks that could not be started.
    pub unstarted: Vec<String>,
    /// Clients that are leaving.
    pub leaving: Vec<Pins>,
}

/// Datagrams since the daemon first requested reports; all zero if it has requested none.
#[derive(Clone, Debug, Default)]
pub struct ReportCounts {
    pub requests: u64,
    /// Requests that could not be sent.
    pub unsent: u64,
    /// Received datagrams by result: each word of [`Refusal::NAMES`], and `believed`.
    pub datagrams: Vec<(&'static str, u64)>,
    /// Datagrams that the kernel received before the daemon, since the maps of the host were made:
    /// each word of [`Reception::NAMES`]. Empty if the kernel receives none.
    pub by_kernel: Vec<(&'static str, u64)>,
}

/// The configurations that were read since the daemon started.
#[derive(Clone, Copy, Debug)]
pub struct Reloads {
    /// How often a new configuration was put into force.
    pub taken_on: u64,
    /// How often a configuration was rejected.
    pub refused: u64,
    pub in_force_since: SystemTime,
    /// Whether the file cannot be used as it is now.
    pub is_faulty: bool,
}

/// The state of a client task that only the event loop has.
#[derive(Debug)]
pub struct ClientFacts {
    /// Where its maps are pinned.
    pub pins: Pins,
    /// Whether its pins were removed. Its maps then cannot be opened; [`Facts::faults`] reports
    /// this.
    pub is_unpinned: bool,
    /// The cgroup that it is configured for.
    pub configured: PathBuf,
    /// The cgroup at that path at the last check.
    pub cgroup: Option<PathBuf>,
    /// The kernel's id of that cgroup, and its path; `None` if the programs are not attached to it.
    pub attached: Option<(u64, PathBuf)>,
    /// Whether the programs are attached to the cgroup that the configured path names now.
    pub is_attached: bool,
    /// The results of the passes over its flow records.
    pub reclaim: Reclaim,
    /// Sources of endpoints by service name.
    pub sources: BTreeMap<String, SourceStatus>,
    /// Services without ejection although it is configured, because the causes of failed flows are
    /// unknown.
    pub without_causes: BTreeSet<String>,
    /// Services that are in panic.
    pub panics: BTreeSet<String>,
    /// Endpoints that no task of the job uses, by service name; only services that have some.
    pub unused: BTreeMap<String, UnusedEndpoints>,
    /// The lists in use, by service name.
    pub lists: BTreeMap<String, Arc<EndpointList>>,
    /// The time after which an unavailable member is replaced, by service name.
    pub replace_after: BTreeMap<String, Duration>,
    /// For how long backends have been unavailable, by service name and address.
    pub unavailable: BTreeMap<(String, SocketAddr), Duration>,
    /// Results of the probes and reports of its backends, by service name and address.
    pub probes: BTreeMap<(String, SocketAddr), BackendHealth>,
    /// What changes weights while lists stay the same, by service name.
    pub loads: BTreeMap<String, ServiceLoadStatus>,
    /// Runs of its programs by hook; empty if the kernel has not counted them.
    pub runs: Vec<(&'static str, Runs)>,
    /// Samples of its counters; `None` if no daemon has taken any.
    pub lately: Option<Lately>,
}
