//! Builds the status from the maps and, if the daemon runs, from the daemon's own state.
//!
//! The pinned maps contain names, addresses, weights, tables and counts. The daemon's own state
//! includes the counts of the last minute, and the state of sources, probes and load control.
//! Without the daemon, these parts are missing.

use std::collections::{BTreeMap, HashSet};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use lb_common::abi::{EjectionPhase, EjectionRules, EjectionState, HealthReason, NO_SLOT, Outcome, Usable};
use lb_common::ejection::{self, name_of_failure};
use lb_common::ending::Ending;
use lb_common::ticks::{self, TICK_LOG2};
use lb_core::endpoint::EndpointList;
use lb_core::health::{Health, Who, list_verdict, meaning, stated_reason};
use lb_core::service::Protocol;
use lb_kernel::receiver;
use lb_kernel::xdp::Attachment;
use lb_kernel::{
    BackendSnapshot, Counts, DatapathError, Kernel, Linux, Pinned, Pins, ServiceSnapshot, SlotView, Snapshot,
    Tables,
};
use lb_view::backend::{BackendStatus, ConnectLatency, ConnectionRates, EjectionStatus};
use lb_view::fault::{self, Fault, FaultCode};
use lb_view::overrides::{Override, OverrideKind};
use lb_view::status::{
    AnomalyCounts, ClientStatus, EjectionMode, InterfaceStatus, LeavingClient, NeighbourProgram, NotChosen,
    SCHEMA, ServiceStatus, StatusDocument,
};

use super::facts::{ClientFacts, Facts};
use crate::counts::window::{Lately, Recent};
use crate::error::chain;

/// The status of a leaving client.
pub fn leaving(kernel: &dyn Kernel, pins: &Pins) -> LeavingClient {
    LeavingClient {
        client: pins.client.clone(),
        abi: pins.version,
        in_force: kernel.begins_at(pins).is_ok_and(|cgroups| !cgroups.is_empty()),
        active: kernel.open_flows(pins).ok(),
    }
}

/// The status from a running daemon: the state of its event loop, and the present content of the
/// maps. Do not call this on the event loop: it opens and reads the maps of all clients, which
/// takes a second if there are many clients.
pub fn of(kernel: &dyn Kernel, facts: Facts) -> StatusDocument {
    let Facts { daemon, mut faults, clients: all, leaving, interfaces, .. } = facts;
    let mut clients = Vec::with_capacity(all.len());
    let pins = daemon.pins.clone().unwrap_or_default();
    let pinned = Pinned::below(&pins);
    for facts in &all {
        let maps = kernel
            .tables(&facts.pins)
            .and_then(|tables| MapContents::read(&tables, facts.lately.as_ref()))
            .map_err(|error| {
                // If the client's pins were removed, `faults` already contains a fault.
                if !facts.is_unpinned {
                    faults.push(unreadable(&facts.pins.client, &error));
                }
            });
        let (cgroup_id, cgroup) = facts.attached.clone().unzip();
        let mut client = ClientStatus {
            configured_cgroup: Some(facts.configured.clone()),
            cgroup,
            cgroup_id,
            neighbours: facts.neighbours(&pinned).ok(),
            reclaim: Some(facts.reclaim),
            ..client_of(&facts.pins, maps.unwrap_or_default())
        };
        for service in &mut client.services {
            service.source = facts.sources.get(&service.name).cloned();
            if facts.without_causes.contains(&service.name) {
                service.ejection = EjectionMode::CausesUnknown;
            }
            service.load = facts.loads.get(&service.name).cloned();
            service.rebalance = facts.rebalances.get(&service.name).cloned();
            service.is_panic = facts.panics.contains(&service.name);
            service.unused = facts.unused.get(&service.name).copied();
            service.not_chosen = not_chosen(facts.lists.get(&service.name), &service.backends);
            service.replace_after_s = facts.replace_after.get(&service.name).map(Duration::as_secs_f64);
            for backend in &mut service.backends {
                let key = (service.name.clone(), backend.address);
                backend.unavailable_s = facts.unavailable.get(&key).map(Duration::as_secs_f64);
                backend.probe = facts.probes.get(&key).cloned();
                backend.weight_percent = facts.weight_percent(&service.name, backend.address);
            }
        }
        clients.push(client);
    }
    faults.extend(fault::of(&clients));
    let leaving = leaving.iter().map(|pins| self::leaving(kernel, pins)).collect();
    StatusDocument { schema: SCHEMA, daemon: Some(daemon), faults, clients, leaving, interfaces }
}

/// Adds the endpoints that each service's list excludes (down, lame duck or weight 0) to a status
/// that was built without the daemon. `list` returns the list of the service with this name, if it
/// is known.
pub fn add_not_chosen(status: &mut StatusDocument, list: impl Fn(&str) -> Option<Arc<EndpointList>>) {
    for service in status.clients.iter_mut().flat_map(|client| &mut client.services) {
        service.not_chosen = not_chosen(list(&service.name).as_ref(), &service.backends);
    }
}

/// The endpoints that the list excludes, except those that are shown as backends.
fn not_chosen(all: Option<&Arc<EndpointList>>, backends: &[BackendStatus]) -> Vec<NotChosen> {
    let shown: HashSet<SocketAddr> = backends.iter().map(|backend| backend.address).collect();
    let endpoints = all.into_iter().flat_map(|list| list.as_slice());
    let hidden = endpoints.filter(|endpoint| !shown.contains(&endpoint.address));
    let not_chosen = hidden.filter_map(|endpoint| {
        let health = list_verdict::<()>(endpoint)?.health;
        Some(NotChosen {
            address: endpoint.address,
            state: health.name().to_owned(),
            witness: Who::Source.name().to_owned(),
        })
    });
    not_chosen.collect()
}

impl ClientFacts {
    /// The percentage that operators have set for a backend's weight.
    fn weight_percent(&self, service: &str, backend: SocketAddr) -> Option<u16> {
        let of_backend = |of: &&Override| of.scope.service == service && of.scope.backend == backend;
        let percent = |of: &Override| match of.kind {
            OverrideKind::Weight { percent } => Some(percent),
            OverrideKind::Drain => None,
        };
        self.overrides.iter().filter(of_backend).find_map(percent)
    }

    /// The other programs that run for the sockets of this client.
    fn neighbours(&self, pinned: &Pinned<'_>) -> Result<Vec<NeighbourProgram>, DatapathError> {
        self.cgroup
            .as_ref()
            .map_or(Ok(Vec::new()), |cgroup| lb_kernel::neighbours(&self.pins, pinned, cgroup))
            .map(|all| all.into_iter().map(neighbour).collect())
    }
}

/// The contents of a client's maps.
#[derive(Default)]
struct MapContents {
    not_a_service: u64,
    anomalies: AnomalyCounts,
    services: Vec<ServiceStatus>,
}

impl MapContents {
    /// Reads the maps. Adds recent counts, if a daemon has sampled the counters.
    fn read(tables: &Tables, lately: Option<&Lately>) -> Result<Self, DatapathError> {
        let Snapshot { not_a_service, anomalies, services } = Snapshot::read(tables)?;
        let services: Result<_, _> =
            services.into_iter().map(|service| of_service(tables, service, lately)).collect();
        Ok(Self { not_a_service, anomalies: anomalies.into(), services: services? })
    }
}

/// The status of a client, from its maps only.
fn client_of(pins: &Pins, maps: MapContents) -> ClientStatus {
    let MapContents { not_a_service, anomalies, services } = maps;
    ClientStatus {
        name: pins.client.clone(),
        configured_cgroup: None,
        cgroup: None,
        cgroup_id: None,
        neighbours: None,
        reclaim: None,
        not_a_service,
        anomalies,
        services,
    }
}

fn of_service(
    tables: &Tables,
    service: ServiceSnapshot,
    lately: Option<&Lately>,
) -> Result<ServiceStatus, DatapathError> {
    let ServiceSnapshot { view, is_usable: _, outcomes, backends: read } = service;
    let mut backends = Vec::with_capacity(read.len());
    let mut recent = Vec::with_capacity(read.len());
    for BackendSnapshot { slot, address: _, share_wanted, counts } in &read {
        let of_late = lately.and_then(|lately| lately.recent(slot.at, &counts.sums));
        let mut shown = backend(slot, view.ejection, counts, of_late.as_ref());
        shown.share_wanted = *share_wanted;
        if !counts.add_up() && lately.is_none_or(|lately| lately.window.is_off(slot.at)) {
            shown.unaccounted = tables.imbalance(slot.at.slot)?;
        }
        backends.push(shown);
        recent.push(of_late);
    }
    let total: u64 = backends.iter().map(|backend| backend.started).sum();
    let total_recent: u64 = recent.iter().flatten().map(|recent| recent.chosen).sum();
    for (backend, recent) in backends.iter_mut().zip(&recent) {
        backend.share = share(backend.started, total);
        backend.share_60s = recent.as_ref().and_then(|recent| share(recent.chosen, total_recent));
    }
    let fallback = backends.iter().find(|backend| backend.slot == view.fallback && view.fallback != NO_SLOT);
    Ok(ServiceStatus {
        source: None,
        unused: None,
        not_chosen: Vec::new(),
        load: None,
        rebalance: None,
        name: view.name,
        address: view.address,
        protocol: view.protocol.name().to_owned(),
        open: view.open,
        table_generation: view.table.generation,
        table_entries: view.table.len(),
        is_panic: read.iter().any(|backend| backend.slot.usable == Usable::EvenEjected),
        ejection: if view.ejection.failures > 0 { EjectionMode::On } else { EjectionMode::Off },
        replace_after_s: None,
        fallback: fallback.map(|backend| backend.address),
        outcomes: Outcome::OF_A_SERVICE
            .map(|outcome| (outcome.name().to_owned(), outcomes.of(outcome)))
            .into(),
        limited_60s: lately
            .filter(|_| view.rules.active_limit != 0)
            .and_then(|lately| lately.window.limited(view.index, outcomes.limited)),
        handshake_60s: ConnectLatency::of_all(recent.iter().flatten().map(|recent| &recent.connect)),
        unanswered_after_ms: (view.protocol == Protocol::Tcp)
            .then(|| milliseconds(view.rules.unanswered_after)),
        skew: skew(&backends),
        backends,
    })
}

fn unreadable(client: &str, error: &DatapathError) -> Fault {
    Fault::of_client(FaultCode::MapsUnreadable, client, chain(error))
}

fn neighbour(other: lb_kernel::Neighbour) -> NeighbourProgram {
    let lb_kernel::Neighbour { cgroup, hook, program, name, is_socklb, runs_after_ours } = other;
    NeighbourProgram { cgroup, hook, program, name, is_socklb, runs_after_ours }
}

/// The status of a backend, from its slot in the maps and its service's rules. `recent` contains
/// the backend's recent counts, if a daemon has sampled the counters. The caller fills in the
/// shares, because they depend on the other backends.
fn backend(slot: &SlotView, rules: EjectionRules, counts: &Counts, recent: Option<&Recent>) -> BackendStatus {
    let Counts { sums, active, reclaimed } = counts;
    let (health, witness, reason) = found(slot);
    BackendStatus {
        address: slot.address,
        slot: slot.at.slot.number(),
        generation: slot.at.generation.0,
        state: health.name().to_owned(),
        witness: witness.map(|who| who.name().to_owned()),
        reason,
        membership: slot.state.name().to_owned(),
        ejection: slot.is_ejected.then(|| ejection_of(slot, rules)),
        is_withheld: slot.is_withheld,
        unavailable_s: None,
        probe: None,
        usable: slot.may_be_chosen(),
        weight: slot.weight.into(),
        weight_percent: None,
        share_wanted: 0.0,
        share_60s: None,
        share: None,
        started: sums.chosen,
        untracked: sums.untracked,
        active: *active,
        reclaimed: *reclaimed,
        connecting: sums.connecting,
        established: sums.established,
        endings: by_name(|ending| sums.endings[ending as usize]),
        unaccounted: 0,
        diverted: sums.diverted,
        diverted_60s: recent.map(|recent| recent.diverted),
        failed_60s: recent.map(Recent::failed),
        failing: Recent::is_failing_backend(slot.usable.is_usable(), recent),
        rtt: (&sums.rtt).into(),
        connect: (&sums.connect).into(),
        latency: ConnectLatency::of(&sums.connect),
        latency_60s: recent.and_then(|recent| ConnectLatency::of(&recent.connect)),
        rates_60s: recent.map(rates),
        lifetime_s: seconds(sums.lifetime_ns),
        bytes_received: sums.bytes_received,
        bytes_sent: sums.bytes_sent,
        retransmits: sums.retransmits,
        ejections: sums.ejections,
        trials: sums.trials,
        readmissions: sums.readmissions,
        withheld: sums.withheld,
    }
}

/// The health of a backend according to the maps.
pub fn health(slot: &SlotView) -> Health {
    found(slot).0
}

/// Why a backend has its health, according to the maps; `None` if it is healthy.
pub fn reason(slot: &SlotView) -> Option<String> {
    found(slot).2
}

/// The health of a backend, its source ([`Who`]), and the reason. All three come from the worst of
/// three findings: the finding of the daemon, the finding of the kernel programs, and the backend's
/// own report.
pub fn found(slot: &SlotView) -> (Health, Option<Who>, Option<String>) {
    let reason = stated_reason(slot.reason, slot.state, slot.usable);
    let (health, by) = meaning(reason);
    let text = match reason {
        HealthReason::Unstated | HealthReason::Healthy => None,
        HealthReason::Unproven => Some("no probe has finished"),
        HealthReason::ListLameDuck => Some("list: lame duck"),
        HealthReason::ProbeElsewhere => Some("probe: failed from another network namespace"),
        HealthReason::ProbeConnect => Some("probe: cannot connect"),
        HealthReason::ProbeAnswer => Some("probe: error or no answer"),
        HealthReason::ReportDown => Some("report: down"),
        HealthReason::ListDown => Some("list: down"),
        HealthReason::ListWeight => Some("list: weight 0"),
        HealthReason::Operator => Some("operator: drain"),
    };
    let who = by.map(|(who, _)| who).or((reason == HealthReason::Unproven).then_some(Who::Probe));
    let stated = (health, who, text.map(str::to_owned));
    let ejected = (slot.is_ejected || slot.is_withheld).then(|| {
        let EjectionState { run, ending, .. } = slot.ejection;
        let text = format!("{run} {} in a row", name_of_failure(ending));
        (Health::Ejected, Some(Who::Kernel), Some(text))
    });
    let is_lame = slot.lame_until_ns > lb_kernel::monotonic_ns();
    let lame = is_lame.then(|| (Health::LameDuck, Some(Who::Report), Some("report: lame duck".to_owned())));
    // If several findings are equally bad, the first of them is returned.
    let all = [Some(stated), ejected, lame].into_iter().flatten();
    all.rev().max_by_key(|(health, ..)| *health).expect("the daemon's finding is always present")
}

fn ejection_of(slot: &SlotView, rules: EjectionRules) -> EjectionStatus {
    let EjectionState { at, run, level, phase, ending } = slot.ejection;
    let now = ticks::tick(lb_kernel::monotonic_ns());
    let is_tried = EjectionPhase::from_u8(phase) == EjectionPhase::Trial;
    EjectionStatus {
        failures: run.into(),
        cause: name_of_failure(ending).to_owned(),
        times: level.into(),
        trial_in_s: (!is_tried).then(|| seconds(u64::from(ejection::left(at, rules, now)) << TICK_LOG2)),
    }
}

/// A map from the name of each ending to a value.
fn by_name<T>(of: impl Fn(Ending) -> T) -> BTreeMap<String, T> {
    Ending::ALL.into_iter().map(|ending| (ending.name().to_owned(), of(ending))).collect()
}

#[expect(clippy::cast_precision_loss, reason = "a time for people")]
fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[expect(clippy::cast_precision_loss, reason = "rates for people")]
fn rates(recent: &Recent) -> ConnectionRates {
    let rate = |count: u64| count as f64 / recent.seconds;
    let ended = |ending: Ending| recent.endings[ending as usize];
    ConnectionRates {
        over_s: recent.seconds,
        started: rate(recent.chosen),
        errors: rate(Ending::ALL.into_iter().filter(|ending| ending.is_error()).map(ended).sum()),
        endings: {
            let happened = Ending::ALL.into_iter().filter(|ending| ended(*ending) > 0);
            happened.map(|ending| (ending.name().to_owned(), rate(ended(ending)))).collect()
        },
    }
}

/// Ticks of the programs' clock in milliseconds, rounded up.
fn milliseconds(ticks: u32) -> u64 {
    (u64::from(ticks) << TICK_LOG2).div_ceil(1_000_000)
}

#[expect(
    clippy::cast_precision_loss,
    reason = "people read this share, and counts below 2^53 are converted exactly"
)]
fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// The largest ratio of actual share to wanted share. `None` if there were at most ten connects per
/// backend, because the ratio is then only noise.
fn skew(backends: &[BackendStatus]) -> Option<f64> {
    let wanted: Vec<&BackendStatus> = backends.iter().filter(|backend| backend.share_wanted > 0.0).collect();
    let connects: u64 = wanted.iter().map(|backend| backend.started).sum();
    if wanted.is_empty() || connects <= 10 * wanted.len() as u64 {
        return None;
    }
    let ratio =
        |backend: &&BackendStatus| share(backend.started, connects).unwrap_or(0.0) / backend.share_wanted;
    wanted.iter().map(ratio).max_by(f64::total_cmp)
}

/// The status of all pinned clients, without a daemon. `why` is the reason why the status does not
/// come from a daemon.
///
/// # Errors
/// If the directory of pins cannot be read, or a permission is missing. If the maps of one client
/// cannot be read for another reason, the status has a fault.
pub fn from_pins(directory: &Path, why: String) -> Result<StatusDocument, DatapathError> {
    let mut clients = Vec::new();
    let mut faults = vec![Fault::of_host(FaultCode::NoDaemon, why)];
    let mut leaving = Vec::new();
    for pins in Pins::all_versions(directory)? {
        if !pins.is_of_this_version() {
            leaving.push(self::leaving(&Linux, &pins));
            continue;
        }
        // The pins of a client may be incomplete, because a start was interrupted or is under way.
        match from_maps(&pins) {
            Ok(client) => clients.push(client),
            Err(error) if error.is_permission() => return Err(error),
            Err(error) => faults.push(unreadable(&pins.client, &error)),
        }
    }
    // Only a daemon could report why a client is detached.
    let detached = clients.iter().filter(|client| client.cgroup.is_none());
    faults.extend(detached.map(|client| {
        Fault::of_client(FaultCode::NotAttached, &client.name, "not attached to a cgroup that exists")
    }));
    faults.extend(fault::of(&clients));
    if clients.is_empty() {
        let text = format!("no client has pins below {}", directory.display());
        faults.push(Fault::of_host(FaultCode::NoClients, text));
    }
    let interfaces = pinned_interfaces(directory)?;
    Ok(StatusDocument { schema: SCHEMA, daemon: None, faults, clients, leaving, interfaces })
}

/// The interfaces on which the kernel receives reports, whichever process attached the programs.
fn pinned_interfaces(directory: &Path) -> Result<Vec<InterfaceStatus>, DatapathError> {
    let attached = receiver::attached(directory)?;
    let known = if attached.is_empty() { Vec::new() } else { lb_kernel::interfaces().unwrap_or_default() };
    let name = |index: u32| {
        let found = known.iter().find(|interface| interface.index == index);
        found.map_or_else(|| format!("interface {index}"), |interface| interface.name.clone())
    };
    let one = |attachment: Attachment| InterfaceStatus {
        name: name(attachment.interface),
        mode: attachment.mode.name().to_owned(),
        why: None,
    };
    Ok(attached.into_iter().map(one).collect())
}

fn from_maps(pins: &Pins) -> Result<ClientStatus, DatapathError> {
    let client = of_tables(pins, &Tables::open(pins, false)?)?;
    let attached = lb_kernel::balanced_cgroup(pins)?.and_then(|id| Some((id, lb_kernel::cgroup_of_id(id)?)));
    let (cgroup_id, cgroup) = attached.unzip();
    Ok(ClientStatus { cgroup, cgroup_id, ..client })
}

/// The status of a client, from its maps only.
pub fn of_tables(pins: &Pins, tables: &Tables) -> Result<ClientStatus, DatapathError> {
    Ok(client_of(pins, MapContents::read(tables, None)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_distinguish_errors_of_the_backend_from_others() {
        let mut recent = Recent { seconds: 60.0, chosen: 600, ..Recent::default() };
        recent.endings[Ending::Refused as usize] = 120;
        recent.endings[Ending::GaveUp as usize] = 60;
        let rates = rates(&recent);
        assert_eq!(
            (rates.started, rates.errors, rates.endings["refused"], rates.endings["gave-up"]),
            (10.0, 2.0, 2.0, 1.0)
        );
        assert_eq!(rates.endings.len(), 2);
    }
}
