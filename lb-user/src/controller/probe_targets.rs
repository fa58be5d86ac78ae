//! Decides which backends are probed or polled for the current clients, and passes the results to
//! the clients.
//!
//! The daemon probes the members of each client task, and the endpoints that are next to replace
//! members. It probes each backend once, even if several client tasks need the result. All probes
//! are sent from the daemon's network namespace. A thread receives reports, and asynchronous tasks
//! make connect probes. When a result has changed, the thread or the task wakes the event loop,
//! which then reads the health of all backends.

mod views;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use lb_common::abi::host::NO_REPORT;
use lb_common::abi::host::RECEPTIONS;
use lb_core::balancer::ReportIdMap;
use lb_core::health::{Health, Who, Why};
use lb_core::reports::Name;
use lb_core::service::Protocol;
use lb_kernel::Kernel;
use lb_kernel::xdp::Place;
use lb_report::client::senders::{Refusal, Target};
use lb_report::keys::{BackendKey, Keys, ServiceKey};
use lb_report::name::can_report;
use lb_report::receive::Reception;
use lb_view::fault::{Fault, FaultCode};
use lb_view::text::counted;
use tracing::{info, warn};

use super::client_task::ClientTask;
use super::clients::leaving::Leaving;
use super::register::Register;
use super::{Controller, Network, ReceiveAt};
use crate::config::{ClientConfig, ProbeConfig, ProbeKind, ReportsConfig};
use crate::error::chain;
use crate::output::facts::ReportCounts;
use crate::probes::ConnectTarget;
use crate::reports::ReportExchanger;

/// The state of probing.
pub struct Probing {
    /// The probes that client tasks needed when the targets were last set. If client tasks need the
    /// same probes again, the targets are not set again.
    wanted: Vec<ServiceProbes>,
    /// How often the targets were set.
    aimed: u64,
    network: Box<dyn Network>,
    /// Polls agents and receives their reports; `None` until a backend is to be polled.
    listener: Option<ReportExchanger>,
    /// Why no reports can be received; `None` if reports can be received.
    receive_error: Option<String>,
    /// The agents that are polled.
    polled: Vec<Target>,
    /// The targets of connect probes, each with a service that uses it.
    connected: BTreeMap<ConnectTarget, String>,
    /// The register of reporting backends; `None` until a service polls a backend.
    register: Option<Register>,
    /// Why there is no register, if it could not be opened.
    error: Option<String>,
    /// Why some polled backends are missing from the register.
    unregistered: Option<String>,
    /// The report ids to write into the client tasks' maps `backends`. `None` until a backend is
    /// polled; until then, these maps retain their present ids.
    ids: Option<ReportIdMap>,
    /// The derived keys of all backends that are to be polled. They are stored because the
    /// derivation of a key takes microseconds.
    keys: BTreeMap<Name, (Keys<ServiceKey>, Keys<BackendKey>)>,
    disagreements: Disagreements,
    /// Whether the configuration names interfaces (`xdp`), but no service requests reports.
    has_no_use: bool,
}

/// Backends for which services, or their lists, contradict each other.
#[derive(Default)]
struct Disagreements {
    /// Backends for which two services have no key in common. The daemon cannot determine which key
    /// is right, so it does not poll these backends: a process with the wrong key could send
    /// reports for them.
    keys: BTreeSet<Name>,
    /// Backends for which lists or services have two agents. The daemon polls the first agent. A
    /// wrong agent does not have the key, so its reports are not accepted.
    agents: BTreeSet<Name>,
}

/// The backends that are to be polled for reports.
type Targets = BTreeMap<Name, Target>;

impl Probing {
    pub fn new(network: Box<dyn Network>) -> Self {
        Self {
            wanted: Vec::new(),
            aimed: 0,
            network,
            listener: None,
            receive_error: None,
            polled: Vec::new(),
            connected: BTreeMap::new(),
            register: None,
            error: None,
            unregistered: None,
            ids: None,
            keys: BTreeMap::new(),
            disagreements: Disagreements::default(),
            has_no_use: false,
        }
    }

    /// The numbers of requests and of received datagrams, for each outcome.
    pub fn counts(&self) -> ReportCounts {
        let counts = self.listener().map(|listener| listener.look(|_, counts, _| counts.clone()));
        let counts = counts.unwrap_or_default();
        let of = |name: &str| {
            let refused = counts.refused.iter().filter(|(refusal, _)| refusal.name() == name);
            refused.map(|(_, count)| count).sum()
        };
        let refused = Refusal::NAMES.map(|name| (name, of(name)));
        let datagrams = [("believed", counts.believed)].into_iter().chain(refused).collect();
        let by_kernel = Reception::NAMES.into_iter().zip(self.receptions().into_iter().flatten()).collect();
        ReportCounts { requests: counts.requests, unsent: counts.unsent, datagrams, by_kernel }
    }

    pub fn faults(&self) -> Vec<Fault> {
        let errors = [self.receive_error.as_deref(), self.error.as_deref(), self.unregistered.as_deref()];
        let errors = errors.into_iter().flatten();
        let mut faults: Vec<Fault> = errors.map(|error| Fault::of_host(FaultCode::Probes, error)).collect();
        let uncovered = self.register.as_ref().map_or(0, Register::uncovered);
        if uncovered > 0 {
            let text = format!(
                "no report id is free for the reports of {}: connects ignore these reports",
                counted(uncovered, "backend")
            );
            faults.push(Fault::of_host(FaultCode::Probes, text));
        }
        faults.extend(self.disagreements.faults());
        let contested =
            self.listener().map(|listener| listener.look(|senders, _, now| senders.contested(now)));
        faults.extend(contested_fault(&contested.into_iter().flatten().collect()));
        let has_no_use =
            self.has_no_use.then(|| "`xdp` in [reports] has no effect: no service polls agents".to_owned());
        let interfaces = has_no_use.into_iter().chain(self.network.interface_faults());
        faults.extend(interfaces.map(|text| Fault::of_host(FaultCode::Probes, text)));
        faults
    }

    fn backend_keys(&mut self, name: Name, keys: &Keys<ServiceKey>) -> Keys<BackendKey> {
        match self.keys.entry(name) {
            Entry::Occupied(known) if known.get().0 == *keys => known.get().1.clone(),
            entry => {
                let derived = keys.of_backend(name.protocol, name.address);
                entry.insert_entry((keys.clone(), derived.clone()));
                derived
            }
        }
    }

    /// If an agent is to be polled, opens the register and starts the listener, unless both are
    /// already open.
    fn open(&mut self, targets: &Targets, address: SocketAddr, kernel: &dyn Kernel, pins: &Path) {
        if targets.is_empty() {
            self.error = None;
            return;
        }
        let register = match self.register.take().map_or_else(|| Register::open(kernel, pins), Ok) {
            Ok(register) => self.register.insert(register),
            Err(error) => {
                let text = format!("reports cannot be stored in the kernel: {}", chain(&error));
                return warn_of_news(&mut self.error, Some(text));
            }
        };
        self.error = None;
        if self.listener.is_some() {
            return;
        }
        match self.network.listen(address, register.store()) {
            Ok(listener) => {
                info!(address = %listener.address(), "polling agents for reports");
                self.listener = Some(listener);
                self.receive_error = None;
            }
            Err(error) => {
                let text = format!(
                    "reports cannot be received at {address} ([reports] listen): {error}; retrying every second"
                );
                warn_of_news(&mut self.receive_error, Some(text));
            }
        }
    }

    /// Sets the targets of connect probes, and returns the backends that are to be polled for
    /// reports.
    fn set_targets(&mut self, wanted: Vec<ServiceProbes>) -> Targets {
        let mut targets = Targets::new();
        let mut names = BTreeSet::new();
        let mut connected = BTreeMap::new();
        let mut disagreements = Disagreements::default();
        for ServiceProbes { service, protocol, probe, candidates } in &wanted {
            for candidate in candidates {
                let ProbeKind::Report { keys, idle_interval } = &probe.kind else {
                    if let Some(target) = connect_target(probe, candidate.address) {
                        connected.entry(target).or_insert_with(|| service.clone());
                    }
                    continue;
                };
                let name = name_of(*protocol, candidate.address);
                if !can_report(name) {
                    continue;
                }
                let is_first = names.insert(name);
                let keys = match self.keys.get(&name).filter(|_| !is_first) {
                    // While keys are replaced, one service may have a key that another service does
                    // not have yet.
                    Some((of, _)) => of.common(keys),
                    None => Some(keys.clone()),
                };
                let Some(keys) = keys else {
                    disagreements.keys.insert(name);
                    continue;
                };
                let keys = self.backend_keys(name, &keys);
                let interval = if candidate.is_active { probe.interval } else { *idle_interval };
                let agent = candidate.agent.unwrap_or(probe.at(candidate.address));
                let new = || Target { name, agent, keys: keys.clone(), interval, id: NO_REPORT };
                let known = targets.entry(name).or_insert_with(new);
                known.interval = known.interval.min(interval);
                if known.agent != agent {
                    disagreements.agents.insert(name);
                }
            }
        }
        targets.retain(|name, _| !disagreements.keys.contains(name));
        for (name, target) in &mut targets {
            // A later service may lack some keys of the first service; only the common keys are
            // used.
            target.keys.clone_from(&self.keys[name].1);
        }
        self.keys.retain(|name, _| names.contains(name));
        for name in disagreements.keys.difference(&self.disagreements.keys) {
            warn!(backend = %name.address, "services have different keys for this backend, so the daemon \
                                            does not poll it for reports");
        }
        for name in disagreements.agents.difference(&self.disagreements.agents) {
            warn!(backend = %name.address, "services or their lists have different agents for this backend; \
                                            the daemon polls the first agent");
        }
        self.disagreements = disagreements;
        if connected != self.connected {
            self.network.probe(&connected);
            self.connected = connected;
        }
        self.wanted = wanted;
        self.aimed += 1;
        targets
    }

    /// Polls only these backends from now on. Returns the backends to remove from the register once
    /// no map `backends` contains their id any more.
    fn set_poll_targets(&mut self, mut targets: Targets, now: Instant) -> Vec<Name> {
        let Some(register) = &mut self.register else { return Vec::new() };
        let mut unregistered = None;
        for target in targets.values_mut() {
            match register.hold(target.name, &target.keys) {
                Ok(id) => target.id = id,
                Err(error) => {
                    let why = format!(
                        "{} cannot be registered in the kernel: {}",
                        target.name.address,
                        chain(&error)
                    );
                    unregistered.get_or_insert(why);
                }
            }
        }
        warn_of_news(&mut self.unregistered, unregistered);
        let target_names = targets.keys().copied().collect();
        let (ids, gone) = register.renew(&target_names, now);
        self.ids = Some(ids);
        if targets.is_empty() {
            // Nothing is polled, so no report is missing.
            self.receive_error = None;
        }
        let targets: Vec<Target> = targets.into_values().collect();
        if let Some(listener) = &self.listener
            && targets != self.polled
        {
            listener.set_targets(targets.clone(), |name| register.adopted(name));
            self.polled = targets;
        }
        gone
    }

    /// Makes the kernel receive reports on the interfaces that the configuration names. `may_poll`
    /// is `true` if any service requests reports.
    fn receive(&mut self, reports: &ReportsConfig, may_poll: bool) {
        self.has_no_use = !reports.xdp.is_empty() && !may_poll;
        if reports.xdp.is_empty() || !may_poll {
            return self.network.receive(None);
        }
        // Until the daemon listens, only programs that an earlier daemon attached receive reports.
        let Some((listener, register)) = self.listener.as_ref().zip(self.register.as_ref()) else { return };
        let at = ReceiveAt {
            maps: Arc::clone(register.maps()),
            address: listener.address(),
            place: Place {
                interfaces: reports.xdp.clone(),
                allows_generic: reports.xdp_generic,
                generic_key: "xdp_generic",
            },
            passes_unbelieved: register.uncovered() > 0 || self.unregistered.is_some(),
        };
        self.network.receive(Some(at));
    }

    pub fn network(&self) -> &dyn Network {
        &*self.network
    }

    pub fn listener(&self) -> Option<&ReportExchanger> {
        self.listener.as_ref()
    }

    /// Whether no report of the backend has arrived since its polling began.
    fn has_no_report(&self, name: Name) -> bool {
        self.listener().is_none_or(|listener| {
            listener.look(|senders, _, _| {
                senders.get(name).is_none_or(|(_, reported)| reported.report().is_none())
            })
        })
    }

    /// How many datagrams the kernel's receiver program has received, for each outcome; `None` if
    /// the program is not attached or the counts cannot be read.
    fn receptions(&self) -> Option<[u64; RECEPTIONS]> {
        let register = self.register.as_ref().filter(|_| !self.network.interfaces().is_empty())?;
        register.maps().receptions().ok()
    }

    /// Whether these probes and polls are set up completely, so that there is nothing to retry.
    fn has_done(&self, wanted: &[ServiceProbes]) -> bool {
        let is_open = self.error.is_none() && self.receive_error.is_none();
        let is_steady = self.register.as_ref().is_none_or(Register::is_steady);
        is_open && is_steady && self.unregistered.is_none() && self.wanted == wanted
    }

    /// Whether a report id waits for the end of running programs.
    pub fn wants_wait(&self) -> bool {
        self.register.as_ref().is_some_and(Register::wants_wait)
    }

    /// Call this before a wait for readers starts.
    pub fn before_wait(&mut self) {
        self.register.iter_mut().for_each(Register::before_wait);
    }

    /// Call this when the wait for readers that followed [`Self::before_wait`] has ended.
    pub fn after_wait(&mut self) {
        self.register.iter_mut().for_each(Register::after_wait);
    }
}

/// Logs the error if it differs from the known one.
fn warn_of_news(known: &mut Option<String>, error: Option<String>) {
    if let Some(error) = error.as_ref().filter(|error| known.as_ref() != Some(error)) {
        warn!("{error}");
    }
    *known = error;
}

/// The backends that the daemon probes for a service of a client task, and how it probes them.
#[derive(PartialEq, Eq)]
struct ServiceProbes {
    service: String,
    protocol: Protocol,
    probe: ProbeConfig,
    candidates: Vec<ProbeCandidate>,
}

/// A backend that a service of a client task may use.
#[derive(PartialEq, Eq)]
pub struct ProbeCandidate {
    pub address: SocketAddr,
    /// The address of the backend's agent, if the list contains it.
    pub agent: Option<SocketAddr>,
    /// Whether the client task has an open flow to the backend or chose it recently. If weights
    /// follow load, one active backend makes all backends of this service active for the client
    /// task.
    pub is_active: bool,
}

/// The connect probe of a service for one of its backends; `None` if the service uses reports.
pub fn connect_target(probe: &ProbeConfig, address: SocketAddr) -> Option<ConnectTarget> {
    let ProbeKind::Connect { path, timeout, rise, fall } = &probe.kind else { return None };
    Some(ConnectTarget {
        at: probe.at(address),
        path: path.clone(),
        interval: probe.interval,
        timeout: *timeout,
        rise: *rise,
        fall: *fall,
    })
}

/// The name under which a service requests the reports of one of its backends.
pub fn name_of(protocol: Protocol, address: SocketAddr) -> Name {
    Name { protocol, address }.on_wire()
}

/// The first of these names, and the number of the others; `None` if there are no names.
fn first_of(names: &BTreeSet<Name>) -> Option<String> {
    let others = match names.len() {
        0 | 1 => String::new(),
        count => format!(" and {} more", count - 1),
    };
    Some(format!("{}{others}", names.first()?.address))
}

impl Disagreements {
    fn faults(&self) -> impl Iterator<Item = Fault> {
        let keys = first_of(&self.keys).map(|names| {
            format!(
                "services have different keys for {names}: the daemon does not poll such a backend, because \
                 the holder of either key could report for it. Give these services the same key, or remove \
                 the backend from the wrong list"
            )
        });
        let agents = first_of(&self.agents).map(|names| {
            format!(
                "services or their lists have different agents for {names}: the daemon polls the first \
                 agent. Set the same `agent` and `port` for all"
            )
        });
        keys.into_iter().chain(agents).map(|text| Fault::of_host(FaultCode::Probes, text))
    }
}

/// The fault of backends for which two agents answer, if there are any.
fn contested_fault(contested: &BTreeSet<Name>) -> Option<Fault> {
    let text = format!(
        "two agents answer for {}: each contradicts the other, and the last answer takes effect. \
         Stop one of them, or give each backend its own address, port and key",
        first_of(contested)?
    );
    Some(Fault::of_host(FaultCode::Probes, text))
}

impl Controller {
    /// Probes the backends that clients use now, and applies the results that are already known.
    pub fn probe_again(&mut self, now: Instant) {
        self.update_targets(now);
        self.apply_probes(now);
    }

    /// Probes the backends that clients use now.
    fn update_targets(&mut self, now: Instant) {
        let wanted: Vec<ServiceProbes> = self.clients.tasks.iter().flat_map(wanted_by).collect();
        let gone = if self.probing.has_done(&wanted) {
            Vec::new()
        } else {
            let targets = self.probing.set_targets(wanted);
            let address = self.config.reports.listen.unwrap_or(ReportsConfig::ANY);
            let kernel = &*self.environment.kernel;
            self.probing.open(&targets, address, kernel, &self.config.paths.pins);
            self.probing.set_poll_targets(targets, now)
        };
        let may_poll = self.config.clients.iter().any(polls);
        self.probing.receive(&self.config.reports, may_poll);
        // This is needed even if the targets are unchanged, because a client task that was
        // reconfigured needs its ids again.
        self.assign_ids(now);
        self.remove_from_register(gone);
    }

    /// Passes the ids of reporting backends to the client tasks.
    fn assign_ids(&mut self, now: Instant) {
        for client_task in &mut self.clients.tasks {
            client_task.take_report_ids(self.probing.ids.as_ref(), now);
        }
        self.settle_if_needed(now);
    }

    /// Removes these backends from the register, if no map `backends` can contain their ids.
    fn remove_from_register(&mut self, gone: Vec<Name>) {
        // These ids may still be in the map of a client that is not running, and in the map of a
        // leaving client that still begins flows.
        let has_rows = !self.clients.unstarted.is_empty()
            || self.clients.leaving.iter().any(Leaving::begins_flows)
            || self.clients.tasks.iter().any(|client_task| !client_task.is_settled());
        if let Some(register) = &mut self.probing.register
            && !has_rows
            && let Err(error) = register.remove(gone)
        {
            warn!(error = %chain(&error), "cannot remove backends from the register of reporting backends; retrying");
        }
    }

    /// Applies the health of all backends according to probes and reports.
    pub fn apply_probes(&mut self, now: Instant) {
        let listener = self.probing.listener();
        let sick = listener.map(ReportExchanger::sick).unwrap_or_default();
        let restarted = listener.map(ReportExchanger::take_restarted).unwrap_or_default();
        // The version is read before the results, so that results that change in between are
        // applied again.
        let version = (self.probing.aimed, self.probing.network.version());
        let is_news = self.clients.tasks.iter().any(|task| task.applied_probes != Some(version));
        let results = if is_news { self.probing.network.results() } else { BTreeMap::new() };
        let probing = &self.probing;
        for client_task in &mut self.clients.tasks {
            let is_applied = client_task.applied_probes.replace(version) == Some(version);
            for position in 0..client_task.client.services.len() {
                let configured = &client_task.client.services[position];
                let Some(probe) = &configured.probe else { continue };
                // This task already has these results. Applying the results of thousands of
                // backends again would take milliseconds every second.
                if is_applied && !probe.is_by_report() {
                    continue;
                }
                let protocol = configured.service.protocol;
                match &probe.kind {
                    ProbeKind::Report { .. } => {
                        let of = |address| {
                            let name = name_of(protocol, address);
                            let health = *sick.get(&name)?;
                            // After a restart of the daemon, the data in the kernel does not
                            // distinguish a backend that is down from a lame duck.
                            let is_adopted = client_task.is_down_by_report(position, address)
                                && probing.has_no_report(name);
                            Some((if is_adopted { Health::Refusing } else { health }, Why::Report))
                        };
                        let verdicts = if sick.is_empty() {
                            BTreeMap::new()
                        } else {
                            verdicts_of(client_task, position, of)
                        };
                        client_task.apply_verdicts(position, Who::Report, verdicts, now);
                        if !restarted.is_empty() {
                            let has_restarted = |address| restarted.contains(&name_of(protocol, address));
                            client_task.note_restarts(position, has_restarted);
                        }
                    }
                    ProbeKind::Connect { .. } => {
                        let verdicts = |address| {
                            let found = *results.get(&connect_target(probe, address)?)?;
                            // If an earlier daemon found the backend healthy, one lost probe does
                            // not change its health.
                            let is_news =
                                !found.is_unconfirmed || !client_task.is_taken_over_well(position, address);
                            is_news.then_some((found.health, found.why))
                        };
                        let found = verdicts_of(client_task, position, verdicts);
                        client_task.apply_findings(position, found, now);
                    }
                }
            }
            client_task.look_who_serves(now);
        }
        self.settle_if_needed(now);
        self.try_returned(now);
    }

    /// For each ejected backend that is healthy again, makes the next connect its trial. If the
    /// maps of a client do not match the client's plan yet, its backends get their trials later.
    pub fn try_returned(&mut self, now: Instant) {
        for client_task in &mut self.clients.tasks {
            if !self.clients.to_settle.contains(&client_task.client.name) {
                client_task.judge_guesses();
                client_task.try_returned(now);
            }
        }
    }
}

fn wanted_by(client_task: &ClientTask) -> impl Iterator<Item = ServiceProbes> {
    let services = client_task.client.services.iter().enumerate();
    services.filter_map(|(position, configured)| {
        let probe = configured.probe.clone()?;
        let candidates = client_task.candidates(position);
        let service = configured.service.name.clone();
        Some(ServiceProbes { service, protocol: configured.service.protocol, probe, candidates })
    })
}

/// Whether any service of the client requests reports.
fn polls(client: &ClientConfig) -> bool {
    let mut probes = client.services.iter().filter_map(|configured| configured.probe.as_ref());
    probes.any(ProbeConfig::is_by_report)
}

fn verdicts_of(
    client_task: &ClientTask,
    position: usize,
    verdicts: impl Fn(SocketAddr) -> Option<(Health, Why)>,
) -> BTreeMap<SocketAddr, (Health, Why)> {
    let candidates = client_task.candidates(position).into_iter();
    candidates.filter_map(|candidate| Some((candidate.address, verdicts(candidate.address)?))).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lb_report::keys::Numbered;

    use super::super::scripts::Wire;
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A service that requests reports with keys of these ids. Each candidate is given as the port
    /// of a backend at 10.0.0.1, and whether the backend is active.
    fn wanted(keys: &[u16], candidates: &[(u16, bool)]) -> ServiceProbes {
        let numbered = |id: u16| Numbered { id, key: ServiceKey::from_bytes([id.to_be_bytes()[1]; 32]) };
        let keys = Keys::new(numbered(keys[0]), keys.get(1).copied().map(numbered));
        let kind = ProbeKind::Report { keys, idle_interval: 15 * SECOND };
        let probe = ProbeConfig { kind, port: Some(9465), interval: 2 * SECOND };
        let candidates = candidates.iter().map(|(port, is_active)| ProbeCandidate {
            address: ([10, 0, 0, 1], *port).into(),
            agent: None,
            is_active: *is_active,
        });
        ServiceProbes {
            service: "users".to_owned(),
            protocol: Protocol::Tcp,
            probe,
            candidates: candidates.collect(),
        }
    }

    /// The polled backends: port, key ids and interval.
    fn aimed(probing: &mut Probing, wanted: Vec<ServiceProbes>) -> Vec<(u16, Vec<u16>, Duration)> {
        let targets = probing.set_targets(wanted);
        let target_names = targets.into_values().map(|target| {
            let keys = target.keys.all().iter().map(|key| key.id).collect();
            (target.name.address.port(), keys, target.interval)
        });
        target_names.collect()
    }

    #[test]
    fn a_backend_of_several_clients_is_polled_once_at_the_shortest_interval() {
        let mut probing = Probing::new(Box::new(Wire::default()));
        let idle = wanted(&[1], &[(80, false), (81, false)]);
        let active = wanted(&[1], &[(81, true), (82, true)]);
        let expected = [(80, vec![1], 15 * SECOND), (81, vec![1], 2 * SECOND), (82, vec![1], 2 * SECOND)];
        assert_eq!(aimed(&mut probing, vec![idle, active]), expected);
        assert_eq!(probing.disagreements.faults().count(), 0);
    }

    #[test]
    fn a_backend_is_always_polled_while_its_key_is_replaced_file_by_file() {
        let mut probing = Probing::new(Box::new(Wire::default()));
        // The keys of the two services at each step of a replacement, and the keys that both have.
        for (first, second, expected) in [
            (&[1][..], &[1][..], &[1][..]),
            (&[2, 1], &[1], &[1]),
            (&[2, 1], &[2, 1], &[2, 1]),
            (&[2], &[2, 1], &[2]),
            (&[2], &[2], &[2]),
        ] {
            for (first, second) in [(first, second), (second, first)] {
                let both = vec![wanted(first, &[(80, true)]), wanted(second, &[(80, true)])];
                assert_eq!(aimed(&mut probing, both), [(80, expected.to_vec(), 2 * SECOND)]);
                assert_eq!(probing.disagreements.faults().count(), 0);
            }
        }
        let both = vec![wanted(&[1], &[(80, true)]), wanted(&[2], &[(80, true), (81, true)])];
        assert_eq!(aimed(&mut probing, both), [(81, vec![2], 2 * SECOND)]);
        let faults: Vec<String> = probing.disagreements.faults().map(|fault| fault.text).collect();
        assert!(
            faults.len() == 1 && faults[0].starts_with("services have different keys for 10.0.0.1:80"),
            "{faults:?}"
        );
    }

    #[test]
    fn a_backend_with_two_agents_is_named() {
        let name = |port| name_of(Protocol::Tcp, ([10, 0, 0, 1], port).into());
        assert_eq!(contested_fault(&BTreeSet::new()), None);
        let one = contested_fault(&[name(80)].into()).unwrap().text;
        assert!(one.starts_with("two agents answer for 10.0.0.1:80: each contradicts"), "{one}");
        let three = contested_fault(&[80, 81, 82].map(name).into()).unwrap().text;
        assert!(three.starts_with("two agents answer for 10.0.0.1:80 and 2 more: "), "{three}");
    }
}
