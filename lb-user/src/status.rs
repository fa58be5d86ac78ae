//! What the balancer is doing, as one value: made from the maps alone, completed by the daemon if it runs.
//!
//! Names, addresses, weights, tables and counts all lie in the pinned maps, so a dead daemon hides nothing but what was
//! counted in the last minute and the health of the sources.

mod backend;

mod faults;

pub use backend::{Backend, LONGEST_US, Latency, Rates, Times};

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use lb_common::abi::{self, NO_SLOT, Outcomes};
use lb_common::ticks::TICK_LOG2;
use lb_core::service::Protocol;
use lb_kernel::{DatapathError, Features, Neighbour, Pinned, Pins, Tables};
use serde::{Deserialize, Serialize};

use crate::facts::{ClientFacts, Facts};
use crate::readout::{self, BackendReadout, Readout, ServiceReadout};
use crate::window::Lately;

/// Version of the JSON form.
pub const SCHEMA: u32 = 2;

/// Everything.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The daemon, if it runs.
    pub daemon: Option<Daemon>,
    /// What an operator should look at; empty if all is well.
    pub degraded: Vec<String>,
    /// Client tasks by name.
    pub clients: Vec<Client>,
    /// Clients that were removed, or taken over by this version from another, and have flows left.
    pub leaving: Vec<Leaving>,
}

/// A client on its way out, or one of another version of socklb: its maps cannot be read here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leaving {
    /// Its name.
    pub client: String,
    /// The version of the kernel ABI that its maps are of.
    pub abi: u32,
    /// Whether flows still begin there: the version that made it is in force.
    pub in_force: bool,
    /// Flows that are still open; `None` if they cannot be counted.
    pub open_flows: Option<u64>,
}

/// What is left of a client that leaves.
pub fn leaving(pins: &Pins) -> Leaving {
    Leaving {
        client: pins.client.clone(),
        abi: pins.version,
        in_force: lb_kernel::begins_at(pins).is_ok_and(|cgroups| !cgroups.is_empty()),
        open_flows: lb_kernel::open_flows(pins).ok(),
    }
}

impl Leaving {
    /// How it is, for people: what follows its name.
    pub fn describe(&self) -> String {
        let open = self.open_flows.map_or_else(|| "?".to_owned(), |open| open.to_string());
        let what = if self.in_force { "is in force" } else { "is leaving" };
        format!("{what}: {open} open flows")
    }
}

/// The running daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Daemon {
    /// Process id.
    pub pid: u32,
    /// Version of the program.
    pub version: String,
    /// The configuration file.
    pub config: PathBuf,
    /// Where its pins are; `None` from a daemon that does not tell.
    #[serde(default)]
    pub pins: Option<PathBuf>,
    /// Optional abilities of the kernel.
    pub features: Features,
}

/// One client task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Client {
    /// Name.
    pub name: String,
    /// The cgroup that it is configured for; only from the daemon.
    pub configured_cgroup: Option<PathBuf>,
    /// The cgroup that its programs are attached to, if they are and it exists.
    pub cgroup: Option<PathBuf>,
    /// The kernel's id of that cgroup: another one each time the cgroup is made.
    pub cgroup_id: Option<u64>,
    /// Programs of others that run for the same sockets, in the order in which they run; only from the daemon.
    pub neighbours: Option<Vec<Neighbour>>,
    /// Flow records that were compared with the kernel's lists of sockets; only from the daemon.
    pub repair: Option<ReclaimCounts>,
    /// Connects of the cgroup to addresses that are no service.
    pub not_a_service: u64,
    /// What should not happen.
    pub anomalies: Anomalies,
    /// Services in the order of their indexes.
    pub services: Vec<Service>,
}

/// What became of open flows whose sockets are in no list of the kernel, as the last pass over the records found it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReclaimCounts {
    /// Passes over the records since the daemon started, of which there is none while no flow is open.
    pub passes: u64,
    /// Removed since the daemon started: they were over, and no program had seen it.
    pub removed: u64,
    /// In doubt: removed by the next pass if that finds the same.
    pub suspected: u64,
    /// Kept: a process holds the socket, which is not connected.
    pub kept_open: u64,
    /// Kept: in network namespaces that the daemon could not look into, and not known to be held by a process.
    pub kept_elsewhere: u64,
}

/// What should not happen, counted since the client's maps were made so that it is seen if it does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Anomalies {
    /// Sockets that closed as a flow's and had no record.
    pub close_without_record: u64,
    /// Flows that were established before a SYN was seen.
    pub established_out_of_turn: u64,
    /// Records that two calls ended at the same moment.
    pub ended_twice: u64,
    /// Sockets that were closed in a phase in which their end should have been seen.
    pub release_out_of_turn: u64,
}

impl From<abi::Anomalies> for Anomalies {
    fn from(anomalies: abi::Anomalies) -> Self {
        let abi::Anomalies {
            close_without_record,
            established_out_of_turn,
            ended_twice,
            release_out_of_turn,
        } = anomalies;
        Self { close_without_record, established_out_of_turn, ended_twice, release_out_of_turn }
    }
}

/// One service of a client task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Service {
    /// Name.
    pub name: String,
    /// The address that processes dial.
    pub address: SocketAddr,
    /// The protocol.
    pub protocol: String,
    /// Whether connects are balanced; a removed service only waits for its last flow to end.
    pub open: bool,
    /// Publications of its table so far, modulo 65,536.
    pub table_generation: u16,
    /// Entries of its table.
    pub table_entries: u32,
    /// The backend that is taken when every pick is unusable.
    pub fallback: Option<SocketAddr>,
    /// How connects ended.
    pub outcomes: OutcomeCounts,
    /// Connects of the last minute that were refused because all backends were at their limit; only from the daemon, and of
    /// a service that refuses them.
    #[serde(default)]
    pub limited_60s: Option<u64>,
    /// How long handshakes with its backends took in the last minute; only from the daemon, and of a service over TCP.
    #[serde(default)]
    pub handshake_60s: Option<Latency>,
    /// After how many milliseconds an answer to a SYN is due, to a tick of 1.05 ms; `None` of a service over UDP.
    #[serde(default)]
    pub unanswered_after_ms: Option<u64>,
    /// Largest share had over share wanted, minus one is the skew; only above ten connects per backend.
    pub skew: Option<f64>,
    /// Where its endpoints come from; only from the daemon.
    pub source: Option<Source>,
    /// Backends by slot.
    pub backends: Vec<Backend>,
}

#[cfg(test)]
impl Service {
    /// One over TCP that is open and of which nothing is known but its backends.
    pub fn with_backends(backends: Vec<Backend>) -> Self {
        Self {
            name: "users".to_owned(),
            address: "10.96.0.10:80".parse().expect("an address"),
            protocol: "tcp".to_owned(),
            open: true,
            table_generation: 1,
            table_entries: 1024,
            fallback: None,
            outcomes: OutcomeCounts::default(),
            limited_60s: None,
            handshake_60s: None,
            unanswered_after_ms: None,
            skew: None,
            source: None,
            backends,
        }
    }
}

/// How connects to a service ended: each counts once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutcomeCounts {
    /// To the backend the schedule named.
    pub forwarded: u64,
    /// To the fallback.
    pub fallback: u64,
    /// To the least loaded backend, because all were at their limit.
    pub overflowed: u64,
    /// To where the flow of the datagram goes already.
    pub reused: u64,
    /// To a backend, not counted as active.
    pub untracked: u64,
    /// Refused with the service's errno: no backend was usable.
    pub refused: u64,
    /// Refused with the service's errno: all backends were at their limit.
    pub limited: u64,
    /// Let through unchanged because the maps contradicted each other.
    pub passed: u64,
}

impl From<Outcomes> for OutcomeCounts {
    fn from(outcomes: Outcomes) -> Self {
        let Outcomes {
            forwarded,
            fallback,
            overflowed,
            reused,
            untracked,
            refused,
            limited,
            passed,
            not_a_service: _,
        } = outcomes;
        Self { forwarded, fallback, overflowed, reused, untracked, refused, limited, passed }
    }
}

/// A source of endpoints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Source {
    /// The file, or `None` for a static list.
    pub file: Option<PathBuf>,
    /// Seconds since the file was last read and found good; `None` if it never was.
    pub good_for_s: Option<u64>,
    /// Why it could not be used when it was last read.
    pub error: Option<String>,
    /// How often it could not be used since the daemon started.
    pub failures: u64,
}

/// The status as the daemon has it: what its loop told, and what the maps hold now. Opens and reads the maps of all
/// clients, which takes a second where there are many: not for the event loop.
pub fn of(facts: Facts) -> Status {
    let Facts { daemon, mut degraded, clients: all, leaving, .. } = facts;
    let mut clients = Vec::with_capacity(all.len());
    let pins = daemon.pins.clone().unwrap_or_default();
    let pinned = Pinned::below(&pins);
    for facts in &all {
        let maps = Tables::open(&facts.pins, false)
            .and_then(|tables| Maps::read(&tables, facts.lately.as_ref()))
            .map_err(|error| {
                // That its pins were removed is said already.
                if !facts.is_unpinned {
                    degraded.push(format!("client {}: {}", facts.pins.client, crate::error::chain(&error)));
                }
            });
        let (cgroup_id, cgroup) = facts.attached.clone().unzip();
        let mut client = Client {
            configured_cgroup: Some(facts.configured.clone()),
            cgroup,
            cgroup_id,
            neighbours: facts.neighbours(&pinned).ok(),
            repair: Some(facts.repair),
            ..Client::of(&facts.pins, maps.unwrap_or_default())
        };
        for service in &mut client.services {
            service.source = facts.sources.get(&service.name).cloned();
        }
        clients.push(client);
    }
    degraded.extend(faults::of(&clients));
    let leaving = leaving.iter().map(self::leaving).collect();
    Status { schema: SCHEMA, daemon: Some(daemon), degraded, clients, leaving }
}

impl ClientFacts {
    /// Programs of others that run for the same sockets.
    fn neighbours(&self, pinned: &Pinned<'_>) -> Result<Vec<Neighbour>, DatapathError> {
        self.cgroup
            .as_ref()
            .map_or(Ok(Vec::new()), |cgroup| lb_kernel::neighbours(&self.pins, pinned, cgroup))
    }
}

/// What the maps of a client tell.
#[derive(Default)]
struct Maps {
    not_a_service: u64,
    anomalies: Anomalies,
    services: Vec<Service>,
}

impl Maps {
    /// Reads them; with what was counted of late, if somebody has watched.
    fn read(tables: &Tables, lately: Option<&Lately>) -> Result<Self, DatapathError> {
        let Readout { not_a_service, anomalies, services } = readout::read(tables, lately)?;
        let services: Result<_, _> =
            services.into_iter().map(|service| of_service(tables, service, lately)).collect();
        Ok(Self { not_a_service, anomalies: anomalies.into(), services: services? })
    }
}

impl Client {
    /// A client of which nothing but this is known.
    fn of(pins: &Pins, maps: Maps) -> Self {
        let Maps { not_a_service, anomalies, services } = maps;
        Self {
            name: pins.client.clone(),
            configured_cgroup: None,
            cgroup: None,
            cgroup_id: None,
            neighbours: None,
            repair: None,
            not_a_service,
            anomalies,
            services,
        }
    }
}

fn of_service(
    tables: &Tables,
    service: ServiceReadout,
    lately: Option<&Lately>,
) -> Result<Service, DatapathError> {
    let ServiceReadout { view, is_usable: _, outcomes, limited, backends: read } = service;
    let mut backends = Vec::with_capacity(read.len());
    let mut recent = Vec::with_capacity(read.len());
    for BackendReadout { slot, address: _, share_wanted, counts, recent: of_late } in &read {
        let backend_ref = (slot.slot, slot.generation);
        let mut backend = Backend::of(slot, counts, of_late.as_ref());
        backend.share_wanted = *share_wanted;
        if !counts.add_up() && lately.is_none_or(|lately| lately.window.is_off(backend_ref)) {
            backend.unaccounted = tables.imbalance(slot.slot)?;
        }
        backends.push(backend);
        recent.push(of_late.as_ref().map(|of_late| of_late.chosen));
    }
    let total: u64 = backends.iter().map(|backend| backend.chosen).sum();
    let total_recent: u64 = recent.iter().flatten().sum();
    for (backend, recent) in backends.iter_mut().zip(recent) {
        backend.share = share(backend.chosen, total);
        backend.share_60s = recent.and_then(|recent| share(recent, total_recent));
    }
    let fallback = backends.iter().find(|backend| backend.slot == view.fallback && view.fallback != NO_SLOT);
    Ok(Service {
        source: None,
        name: view.name,
        address: view.address,
        protocol: view.protocol.name().to_owned(),
        open: view.open,
        table_generation: view.table.generation,
        table_entries: view.table.len(),
        fallback: fallback.map(|backend| backend.address),
        outcomes: outcomes.into(),
        limited_60s: limited,
        handshake_60s: Latency::of_all(read.iter().filter_map(|read| Some(&read.recent.as_ref()?.connect))),
        unanswered_after_ms: (view.protocol == Protocol::Tcp)
            .then(|| milliseconds(view.rules.unanswered_after)),
        skew: skew(&backends),
        backends,
    })
}

/// Ticks of the programs' clock in milliseconds, rounded up.
fn milliseconds(ticks: u32) -> u64 {
    (u64::from(ticks) << TICK_LOG2).div_ceil(1_000_000)
}

#[expect(clippy::cast_precision_loss, reason = "a share for people; counts below 2^53 are exact")]
fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// Largest share had over share wanted, once there are ten connects per backend: below that it is noise.
fn skew(backends: &[Backend]) -> Option<f64> {
    let wanted: Vec<&Backend> = backends.iter().filter(|backend| backend.share_wanted > 0.0).collect();
    let connects: u64 = wanted.iter().map(|backend| backend.chosen).sum();
    if wanted.is_empty() || connects <= 10 * wanted.len() as u64 {
        return None;
    }
    let ratio = |backend: &&Backend| share(backend.chosen, connects).unwrap_or(0.0) / backend.share_wanted;
    wanted.iter().map(ratio).max_by(f64::total_cmp)
}

/// The status of everything that is pinned, without a daemon; `why` it does not come from one.
///
/// # Errors
/// If the pins cannot be read.
pub fn from_pins(directory: &Path, why: String) -> Result<Status, DatapathError> {
    let mut clients = Vec::new();
    let mut degraded = vec![why];
    let mut leaving = Vec::new();
    for pins in Pins::all_versions(directory)? {
        if !pins.is_of_this_version() {
            leaving.push(self::leaving(&pins));
            continue;
        }
        // One client's pins may be incomplete: a start that was cut off, or one that is under way.
        match from_maps(&pins) {
            Ok(client) => clients.push(client),
            Err(error) if error.is_permission() => return Err(error),
            Err(error) => degraded.push(format!("client {}: {}", pins.client, crate::error::chain(&error))),
        }
    }
    // A daemon that runs knows why.
    let detached = clients.iter().filter(|client| client.cgroup.is_none());
    degraded.extend(
        detached.map(|client| format!("client {}: not attached to a cgroup that exists", client.name)),
    );
    degraded.extend(faults::of(&clients));
    if clients.is_empty() {
        degraded.push(format!("no client has pins below {}", directory.display()));
    }
    Ok(Status { schema: SCHEMA, daemon: None, degraded, clients, leaving })
}

fn from_maps(pins: &Pins) -> Result<Client, DatapathError> {
    let maps = Maps::read(&Tables::open(pins, false)?, None)?;
    let attached = lb_kernel::attachment(pins)?.and_then(|id| Some((id, lb_kernel::cgroup_of_id(id)?)));
    let (cgroup_id, cgroup) = attached.unzip();
    Ok(Client { cgroup, cgroup_id, ..Client::of(pins, maps) })
}
