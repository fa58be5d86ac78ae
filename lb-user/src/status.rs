//! What the balancer is doing, as one value: made from the maps alone, completed by the daemon if it runs.
//!
//! Names, addresses, weights, tables and counts all lie in the pinned maps, so a dead daemon hides nothing but what was
//! counted in the last minute and the health of the sources.

mod backend;

pub use backend::{Backend, LONGEST_US, Latency, Rates, Times};

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Instant;

use lb_common::abi::{self, NO_SLOT, Outcomes};
use serde::{Deserialize, Serialize};

use crate::datapath::{
    self, Cgroup, DatapathError, Features, Neighbour, Pins, ServiceView, SlotView, Tables,
};
use crate::window::Window;

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

/// A client on its way out: no flow begins there any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leaving {
    /// Its name.
    pub client: String,
    /// The version of the kernel ABI that its maps are of.
    pub abi: u32,
    /// Flows that are still open; `None` if they cannot be counted.
    pub open_flows: Option<u64>,
}

/// What is left of a client that leaves.
pub fn leaving(pins: &Pins) -> Leaving {
    Leaving { client: pins.client.clone(), abi: pins.version, open_flows: datapath::open_flows(pins).ok() }
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
    /// Connect programs of others that run for the same sockets, in the order in which they run; only from the daemon.
    pub neighbours: Option<Vec<Neighbour>>,
    /// Flow records that were compared with the kernel's lists of sockets; only from the daemon.
    pub repair: Option<Repair>,
    /// Connects of the cgroup to addresses that are no service.
    pub not_a_service: u64,
    /// What should not happen.
    pub anomalies: Anomalies,
    /// Services in the order of their places.
    pub services: Vec<Service>,
}

/// What became of flow records whose sockets are in no list of the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Repair {
    /// Removed since the daemon started: their connections are over.
    pub removed: u64,
    /// Kept, because no list has ever shown their sockets.
    pub kept_never_listed: u64,
    /// Kept, because they are in network namespaces that the daemon could not look into.
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
    /// Largest share had over share wanted, minus one is the skew; only above ten connects per backend.
    pub skew: Option<f64>,
    /// Where its endpoints come from; only from the daemon.
    pub source: Option<Source>,
    /// Backends by slot.
    pub backends: Vec<Backend>,
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

/// What only the daemon knows of a client.
pub struct Overlay<'a> {
    /// What was counted of late.
    pub window: &'a Window,
    /// Now.
    pub now: Instant,
    /// Sources by service name.
    pub sources: BTreeMap<String, Source>,
    /// The cgroup that the client is configured for.
    pub configured: Option<PathBuf>,
    /// The cgroup that the programs are attached to.
    pub attached: Option<&'a Cgroup>,
    /// Connect programs of others, if the kernel tells.
    pub neighbours: Option<Vec<Neighbour>>,
    /// What became of flow records.
    pub repair: Repair,
}

/// A client's status.
///
/// # Errors
/// If a map cannot be read.
pub fn of_client(
    pins: &Pins,
    tables: &Tables,
    overlay: Option<&Overlay<'_>>,
) -> Result<Client, DatapathError> {
    let slots = tables.slots();
    let mut services = Vec::new();
    for view in tables.services() {
        let slots: Vec<SlotView> = slots.iter().filter(|slot| slot.service == view.place).copied().collect();
        services.push(of_service(tables, view, &slots, overlay)?);
    }
    let attached = match overlay {
        Some(overlay) => overlay.attached.map(|cgroup| (cgroup.id, cgroup.path.clone())),
        None => datapath::attachment(pins)?.and_then(|id| Some((id, datapath::cgroup_of_id(id)?))),
    };
    let (cgroup_id, cgroup) = attached.unzip();
    Ok(Client {
        name: pins.client.clone(),
        configured_cgroup: overlay.and_then(|overlay| overlay.configured.clone()),
        cgroup,
        cgroup_id,
        neighbours: overlay.and_then(|overlay| overlay.neighbours.clone()),
        repair: overlay.map(|overlay| overlay.repair),
        not_a_service: tables.passed_by()?,
        anomalies: tables.anomalies()?.into(),
        services,
    })
}

fn of_service(
    tables: &Tables,
    view: ServiceView,
    slots: &[SlotView],
    overlay: Option<&Overlay<'_>>,
) -> Result<Service, DatapathError> {
    let mut entries: BTreeMap<u32, u32> = BTreeMap::new();
    for slot in tables.schedule(view.table) {
        *entries.entry(u32::from(slot)).or_default() += 1;
    }
    let numbers: Vec<u32> = slots.iter().map(|slot| slot.slot).collect();
    let mut backends = Vec::with_capacity(slots.len());
    let mut recent = Vec::with_capacity(slots.len());
    let mut unequal = Vec::new();
    tables.visit_counts(&numbers, |_, counts| {
        let slot = &slots[backends.len()];
        let place = (slot.slot, slot.generation);
        let lately = overlay.and_then(|overlay| overlay.window.recent(overlay.now, place, &counts.sums));
        if !counts.add_up() && overlay.is_none_or(|overlay| overlay.window.is_off(place)) {
            unequal.push(backends.len());
        }
        let mut backend = Backend::of(slot, &counts, lately.as_ref());
        let entries = entries.get(&slot.slot).copied().unwrap_or(0);
        backend.share_wanted = share(entries.into(), view.table.len().into()).unwrap_or(0.0);
        backends.push(backend);
        recent.push(lately.map(|lately| lately.chosen));
    })?;
    for at in unequal {
        let backend: &mut Backend = &mut backends[at];
        backend.unaccounted = tables.imbalance(backend.slot)?;
    }
    let total: u64 = backends.iter().map(|backend| backend.chosen).sum();
    let total_recent: u64 = recent.iter().flatten().sum();
    for (backend, recent) in backends.iter_mut().zip(recent) {
        backend.share = share(backend.chosen, total);
        backend.share_60s = recent.and_then(|recent| share(recent, total_recent));
    }
    let fallback = slots.iter().find(|slot| slot.slot == view.fallback && view.fallback != NO_SLOT);
    Ok(Service {
        source: overlay.and_then(|overlay| overlay.sources.get(&view.name).cloned()),
        name: view.name,
        address: view.address,
        protocol: view.protocol.name().to_owned(),
        open: view.open,
        table_generation: view.table.generation,
        table_entries: view.table.len(),
        fallback: fallback.map(|slot| slot.address),
        outcomes: tables.outcomes(view.place)?.into(),
        skew: skew(&backends),
        backends,
    })
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
        match Tables::open(&pins, false).and_then(|tables| of_client(&pins, &tables, None)) {
            Ok(client) => clients.push(client),
            Err(error) if error.is_permission() => return Err(error),
            Err(error) => degraded.push(format!("client {}: {}", pins.client, crate::chain(&error))),
        }
    }
    // A daemon that runs knows why.
    let detached = clients.iter().filter(|client| client.cgroup.is_none());
    degraded.extend(
        detached.map(|client| format!("client {}: not attached to a cgroup that exists", client.name)),
    );
    degraded.extend(faults(&clients));
    if clients.is_empty() {
        degraded.push(format!("no client has pins below {}", directory.display()));
    }
    Ok(Status { schema: SCHEMA, daemon: None, degraded, clients, leaving })
}

/// What is wrong, as far as the clients' status shows it.
pub fn faults(clients: &[Client]) -> Vec<String> {
    let mut faults = Vec::new();
    for client in clients {
        let name = &client.name;
        for service in client.services.iter().filter(|service| service.open) {
            let at = format!("client {name}, service {}", service.name);
            if service.fallback.is_none() {
                faults.push(format!("{at}: no usable backend, connects are refused"));
            }
            let diverted: u64 = service.backends.iter().filter_map(|backend| backend.diverted_60s).sum();
            if diverted > 0 {
                faults.push(format!(
                    "{at}: {diverted} flows of the last minute went to another address than their backend's: another \
                     program rewrites after ours, see `socklb doctor`"
                ));
            }
            let off = service.backends.iter().filter(|backend| backend.unaccounted != 0);
            faults.extend(off.map(|backend| {
                format!(
                    "{at}: the counts of {} do not add up: {} flows too {}",
                    backend.address,
                    backend.unaccounted.unsigned_abs(),
                    if backend.unaccounted > 0 { "few ended or open" } else { "many ended or open" }
                )
            }));
            if let Some(Source { error: Some(error), .. }) = &service.source {
                faults.push(format!("{at}: {error}"));
            }
        }
    }
    faults
}
