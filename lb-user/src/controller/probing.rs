//! Which backends are probed for the clients that there are, and what they hear of it.
//!
//! Probes go to the members of each client task and to those that would stand in next, one for each backend, however many client
//! tasks want to know. All come from the daemon's network namespace. Reports come in by a thread of their own, probes by connection
//! by tasks; both only wake the loop when something has changed, and then it takes in how everybody is.

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
use super::leaving::Leaving;
use super::network::ReportListener;
use super::register::Register;
use super::{Controller, Network, ReceiveAt};
use crate::config::{ClientConfig, ProbeConfig, ProbeKind, ReportsConfig};
use crate::error::chain;
use crate::facts::ReportCounts;
use crate::probes::ConnectTarget;

/// The state of probing.
pub struct Probing {
    /// Whom the services of all client tasks wanted probed when this was last carried out: the same again costs nothing.
    wanted: Vec<Wanted>,
    /// How often that was another one.
    aimed: u64,
    network: Box<dyn Network>,
    /// Why no report is received.
    unheard: Option<String>,
    /// The agents that are polled.
    polled: Vec<Target>,
    /// The targets of probes by connection, each with a service that wants it.
    connected: BTreeMap<ConnectTarget, String>,
    /// Once somebody is to be asked.
    register: Option<Register>,
    /// Why there is none.
    error: Option<String>,
    /// Why the register does not have all that are asked.
    unregistered: Option<String>,
    /// The ids that rows of backends are to have; `None` before anybody was to be asked, and rows keep those that they have.
    ids: Option<ReportIdMap>,
    /// Derived keys, which take microseconds each, of all that are to be asked.
    keys: BTreeMap<Name, (Keys<ServiceKey>, Keys<BackendKey>)>,
    disagreements: Disagreements,
    /// Whether interfaces are named and nothing that is asked for comes there.
    has_no_use: bool,
}

/// Backends of which services, or their lists, say different things.
#[derive(Default)]
struct Disagreements {
    /// Two keys. Nobody can tell whose word counts, so nobody is asked: each key's holder could speak for the other's backend.
    keys: BTreeSet<Name>,
    /// Two agents. The first is asked; without the key nothing is believed of it, so a wrong one can but be silent.
    agents: BTreeSet<Name>,
}

/// Who is to be asked for reports.
type Targets = BTreeMap<Name, Target>;

impl Probing {
    /// Of nobody yet.
    pub fn new(network: Box<dyn Network>) -> Self {
        Self {
            wanted: Vec::new(),
            aimed: 0,
            network,
            unheard: None,
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

    /// What has come and gone of reports.
    pub fn counts(&self) -> ReportCounts {
        let counts = self.listener().map(|listener| listener.of(|_, counts, _| counts.clone()));
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

    /// What is wrong with it.
    pub fn faults(&self) -> Vec<Fault> {
        let errors = [self.unheard.as_deref(), self.error.as_deref(), self.unregistered.as_deref()];
        let errors = errors.into_iter().flatten();
        let mut faults: Vec<Fault> = errors.map(|error| Fault::of_host(FaultCode::Probes, error)).collect();
        let uncovered = self.register.as_ref().map_or(0, Register::uncovered);
        if uncovered > 0 {
            let text = format!(
                "no place in the kernel for the reports of {}: connects do not heed these",
                counted(uncovered, "backend")
            );
            faults.push(Fault::of_host(FaultCode::Probes, text));
        }
        faults.extend(self.disagreements.faults());
        let contested = self.listener().map(|listener| listener.of(|senders, _, now| senders.contested(now)));
        faults.extend(contested_fault(&contested.into_iter().flatten().collect()));
        let has_no_use = self
            .has_no_use
            .then(|| "`xdp` of [reports] has no effect: no service asks agents from the host".to_owned());
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

    /// Opens the register and begins to listen, if an agent is to be polled and that has not been done.
    fn open(&mut self, targets: &Targets, address: SocketAddr, kernel: &dyn Kernel, pins: &Path) {
        if targets.is_empty() {
            self.error = None;
            return;
        }
        let register = match self.register.take().map_or_else(|| Register::open(kernel, pins), Ok) {
            Ok(register) => self.register.insert(register),
            Err(error) => {
                let text = format!("reports cannot be kept in the kernel: {}", chain(&error));
                return warn_of_news(&mut self.error, Some(text));
            }
        };
        self.error = None;
        if self.network.listener().is_some() {
            return;
        }
        match self.network.listen(address, register.stores()) {
            Ok(()) => {
                if let Some(listener) = self.network.listener() {
                    info!(address = %listener.address(), "asking agents for reports");
                }
                self.unheard = None;
            }
            Err(error) => {
                let text = format!(
                    "reports cannot be received at {address} ([reports] listen): {error}; tried again every second"
                );
                warn_of_news(&mut self.unheard, Some(text));
            }
        }
    }

    /// Probes by connection whom they want probed so, and returns who is to be asked for reports.
    fn aim(&mut self, wanted: Vec<Wanted>) -> Targets {
        let mut targets = Targets::new();
        let mut names = BTreeSet::new();
        let mut connected = BTreeMap::new();
        let mut disagreements = Disagreements::default();
        for Wanted { service, protocol, probe, candidates } in &wanted {
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
                    // While keys are replaced, one service may have one that the other has not.
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
            // A client that came later may not have had all keys of the first.
            target.keys.clone_from(&self.keys[name].1);
        }
        self.keys.retain(|name, _| names.contains(name));
        for name in disagreements.keys.difference(&self.disagreements.keys) {
            warn!(backend = %name.address, "services give it different keys: it is not asked for reports");
        }
        for name in disagreements.agents.difference(&self.disagreements.agents) {
            warn!(backend = %name.address, "services, or their lists, name different agents of it: the first is asked");
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

    /// Asks these backends and nobody else. Returns those whose entries are to go once no row has their id any more.
    fn ask(&mut self, mut targets: Targets, now: Instant) -> Vec<Name> {
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
        let asked = targets.keys().copied().collect();
        let (ids, gone) = register.renew(&asked, now);
        self.ids = Some(ids);
        if targets.is_empty() {
            // Nobody misses them.
            self.unheard = None;
        }
        let targets: Vec<Target> = targets.into_values().collect();
        if let Some(listener) = self.network.listener()
            && targets != self.polled
        {
            listener.poll(targets.clone(), &|name| register.adopted(name));
            self.polled = targets;
        }
        gone
    }

    /// Has the kernel take reports in where the configuration says so. `may_ask`: whether a service asks for reports.
    fn receive(&mut self, reports: &ReportsConfig, may_ask: bool) {
        self.has_no_use = !reports.xdp.is_empty() && !may_ask;
        if reports.xdp.is_empty() || !may_ask {
            return self.network.receive(None);
        }
        // Until the daemon can hear, what one before it has attached is all that does.
        let Some((listener, register)) = self.network.listener().zip(self.register.as_ref()) else { return };
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

    /// What probes and receives.
    pub fn network(&self) -> &dyn Network {
        &*self.network
    }

    /// The listener that receives reports, if there is one.
    pub fn listener(&self) -> Option<&dyn ReportListener> {
        self.network.listener()
    }

    /// Whether no report of a backend has come since it is polled.
    fn has_no_report(&self, name: Name) -> bool {
        self.listener().is_none_or(|listener| {
            listener
                .of(|senders, _, _| senders.get(name).is_none_or(|(_, reported)| reported.report().is_none()))
        })
    }

    /// How many datagrams the kernel has taken in, by what became of them; `None` where it takes none in.
    fn receptions(&self) -> Option<[u64; RECEPTIONS]> {
        let register = self.register.as_ref().filter(|_| !self.network.interfaces().is_empty())?;
        register.maps().receptions().ok()
    }

    /// Whether all is done that these want, and nothing is to be tried again.
    fn has_done(&self, wanted: &[Wanted]) -> bool {
        let is_open = self.error.is_none() && self.unheard.is_none();
        let nobody_leaves = self.register.as_ref().is_none_or(Register::is_steady);
        is_open && nobody_leaves && self.unregistered.is_none() && self.wanted == wanted
    }

    /// Whether ids wait for readers.
    pub fn wants_wait(&self) -> bool {
        self.register.as_ref().is_some_and(Register::wants_wait)
    }

    /// A wait for readers begins.
    pub fn before_wait(&mut self) {
        self.register.iter_mut().for_each(Register::before_wait);
    }

    /// The wait has ended.
    pub fn after_wait(&mut self) {
        self.register.iter_mut().for_each(Register::after_wait);
    }
}

/// Says in the log what is wrong if it was not so before.
fn warn_of_news(known: &mut Option<String>, error: Option<String>) {
    if let Some(error) = error.as_ref().filter(|error| known.as_ref() != Some(error)) {
        warn!("{error}");
    }
    *known = error;
}

/// Whom a service of a client task wants probed, and how.
#[derive(PartialEq, Eq)]
struct Wanted {
    service: String,
    protocol: Protocol,
    probe: ProbeConfig,
    candidates: Vec<ProbeCandidate>,
}

/// A backend that a service of a client task may use.
#[derive(PartialEq, Eq)]
pub struct ProbeCandidate {
    /// Where it listens.
    pub address: SocketAddr,
    /// Where its agent does, if the list says so.
    pub agent: Option<SocketAddr>,
    /// Whether the client task has an open flow to it, or has chosen it lately.
    pub is_active: bool,
}

/// How a service probes one of its backends by connection.
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

/// The name by which a service asks one of its backends.
pub fn name_of(protocol: Protocol, address: SocketAddr) -> Name {
    Name { protocol, address }.on_wire()
}

/// The first of these, and how many more there are; `None` if there are none.
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
                "services give {names} different keys: nobody is asked for its reports, for the holder of each key could speak \
                 for it. Give these services one key, or take it out of the list that it does not belong to"
            )
        });
        let agents = first_of(&self.agents).map(|names| {
            format!(
                "services, or their lists, name different agents of {names}: the first is asked. Give all the same `agent` and `port`"
            )
        });
        keys.into_iter().chain(agents).map(|text| Fault::of_host(FaultCode::Probes, text))
    }
}

/// What is wrong where two agents answer for a backend, if they do for one.
fn contested_fault(contested: &BTreeSet<Name>) -> Option<Fault> {
    let text = format!(
        "two agents answer for {}: each takes back what the other has said, and the one that answers last is believed. \
         Stop one of them, or give each backend its own address, port and key",
        first_of(contested)?
    );
    Some(Fault::of_host(FaultCode::Probes, text))
}

impl Controller {
    /// Probes whom the clients use now, and gives these clients what is known already.
    pub fn probe_again(&mut self, now: Instant) {
        self.aim(now);
        self.hear_probes(now);
    }

    /// Probes whom the clients use now.
    fn aim(&mut self, now: Instant) {
        let wanted: Vec<Wanted> = self.clients.tasks.iter().flat_map(wanted_by).collect();
        let gone = if self.probing.has_done(&wanted) {
            Vec::new()
        } else {
            let targets = self.probing.aim(wanted);
            let address = self.config.reports.listen.unwrap_or(ReportsConfig::ANY);
            let kernel = &*self.environment.kernel;
            self.probing.open(&targets, address, kernel, &self.config.paths.pins);
            self.probing.ask(targets, now)
        };
        let may_ask = self.config.clients.iter().any(asks);
        self.probing.receive(&self.config.reports, may_ask);
        // Also where nothing is new: a client task that was loaded anew has to be told.
        self.give_ids(now);
        self.let_go(gone);
    }

    /// Gives the client tasks the ids of those that report.
    fn give_ids(&mut self, now: Instant) {
        for client_task in &mut self.clients.tasks {
            client_task.take_report_ids(self.probing.ids.as_ref(), now);
        }
        self.settle_if_needed(now);
    }

    /// Removes from the register whom no row names any more.
    fn let_go(&mut self, gone: Vec<Name>) {
        // A client that does not run may still have rows with these ids, and so may one that leaves and has not been let go yet.
        let has_rows = !self.clients.unstarted.is_empty()
            || self.clients.leaving.iter().any(Leaving::begins_flows)
            || self.clients.tasks.iter().any(|client_task| !client_task.is_settled());
        if let Some(register) = &mut self.probing.register
            && !has_rows
            && let Err(error) = register.remove(gone)
        {
            warn!(error = %chain(&error), "cannot remove backends from the register");
        }
    }

    /// Takes in how everybody is, as probes and reports have it.
    pub fn hear_probes(&mut self, now: Instant) {
        let listener = self.probing.listener();
        let sick = listener.map(ReportListener::sick).unwrap_or_default();
        let restarted = listener.map(ReportListener::take_restarted).unwrap_or_default();
        // Read before the results: what changes in between is taken in once more.
        let version = (self.probing.aimed, self.probing.network.version());
        let is_news = self.clients.tasks.iter().any(|task| task.probes_heard != Some(version));
        let results = if is_news { self.probing.network.results() } else { BTreeMap::new() };
        let probing = &self.probing;
        for client_task in &mut self.clients.tasks {
            let has_heard = client_task.probes_heard.replace(version) == Some(version);
            for position in 0..client_task.client.services.len() {
                let configured = &client_task.client.services[position];
                let Some(probe) = &configured.probe else { continue };
                // Nothing new is said: of thousands of backends that would take milliseconds, every second.
                if has_heard && !probe.is_by_report() {
                    continue;
                }
                let protocol = configured.service.protocol;
                match &probe.kind {
                    ProbeKind::Report { .. } => {
                        let of = |address| {
                            let name = name_of(protocol, address);
                            let health = *sick.get(&name)?;
                            // What the kernel keeps of an earlier daemon's reports does not tell one that is down from a lame duck.
                            let is_adopted = client_task.is_down_by_report(position, address)
                                && probing.has_no_report(name);
                            Some((if is_adopted { Health::Refusing } else { health }, Why::Report))
                        };
                        let said = if sick.is_empty() {
                            BTreeMap::new()
                        } else {
                            said_of(client_task, position, of)
                        };
                        client_task.hear(position, Who::Report, said, now);
                        if !restarted.is_empty() {
                            let has_restarted = |address| restarted.contains(&name_of(protocol, address));
                            client_task.note_restarts(position, has_restarted);
                        }
                    }
                    ProbeKind::Connect { .. } => {
                        let said = |address| {
                            let found = *results.get(&connect_target(probe, address)?)?;
                            // A backend that an earlier daemon found well stays so if one probe is lost.
                            let is_news =
                                !found.is_unconfirmed || !client_task.is_taken_over_well(position, address);
                            is_news.then_some((found.health, found.why))
                        };
                        let found = said_of(client_task, position, said);
                        client_task.apply_findings(position, found, now);
                    }
                }
            }
            client_task.look_who_serves(now);
        }
        self.settle_if_needed(now);
        self.try_returned(now);
    }

    /// Has backends that are well again tried by the next connect. Clients whose maps do not follow their plan yet come later.
    pub fn try_returned(&mut self, now: Instant) {
        for client_task in &mut self.clients.tasks {
            if !self.clients.to_settle.contains(&client_task.client.name) {
                client_task.judge_guesses();
                client_task.try_returned(now);
            }
        }
    }
}

/// The backends that a client task wants probed.
fn wanted_by(client_task: &ClientTask) -> impl Iterator<Item = Wanted> {
    let services = client_task.client.services.iter().enumerate();
    services.filter_map(|(position, configured)| {
        let probe = configured.probe.clone()?;
        let candidates = client_task.candidates(position);
        let service = configured.service.name.clone();
        Some(Wanted { service, protocol: configured.service.protocol, probe, candidates })
    })
}

/// Whether a client has a service that asks for reports.
fn asks(client: &ClientConfig) -> bool {
    let mut probes = client.services.iter().filter_map(|configured| configured.probe.as_ref());
    probes.any(ProbeConfig::is_by_report)
}

fn said_of(
    client_task: &ClientTask,
    position: usize,
    said: impl Fn(SocketAddr) -> Option<(Health, Why)>,
) -> BTreeMap<SocketAddr, (Health, Why)> {
    let candidates = client_task.candidates(position).into_iter();
    candidates.filter_map(|candidate| Some((candidate.address, said(candidate.address)?))).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lb_report::keys::Numbered;

    use super::super::scripts::WireEnd;
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A service of a client task that asks agents under the keys of these numbers, of backends of 10.0.0.1 by port.
    fn wanted(keys: &[u16], candidates: &[(u16, bool)]) -> Wanted {
        let numbered = |id: u16| Numbered { id, key: ServiceKey::from_bytes([id.to_be_bytes()[1]; 32]) };
        let keys = Keys::new(numbered(keys[0]), keys.get(1).copied().map(numbered));
        let kind = ProbeKind::Report { keys, idle_interval: 15 * SECOND };
        let probe = ProbeConfig { kind, port: Some(9465), interval: 2 * SECOND };
        let candidates = candidates.iter().map(|(port, is_active)| ProbeCandidate {
            address: ([10, 0, 0, 1], *port).into(),
            agent: None,
            is_active: *is_active,
        });
        Wanted {
            service: "users".to_owned(),
            protocol: Protocol::Tcp,
            probe,
            candidates: candidates.collect(),
        }
    }

    /// Who is asked: the port, under which keys, and how often.
    fn aimed(probing: &mut Probing, wanted: Vec<Wanted>) -> Vec<(u16, Vec<u16>, Duration)> {
        let targets = probing.aim(wanted);
        let asked = targets.into_values().map(|target| {
            let keys = target.keys.all().iter().map(|key| key.id).collect();
            (target.name.address.port(), keys, target.interval)
        });
        asked.collect()
    }

    #[test]
    fn a_backend_is_asked_once_and_often_if_one_of_its_clients_uses_it() {
        let mut probing = Probing::new(Box::new(WireEnd::default()));
        let idle = wanted(&[1], &[(80, false), (81, false)]);
        let active = wanted(&[1], &[(81, true), (82, true)]);
        let expected = [(80, vec![1], 15 * SECOND), (81, vec![1], 2 * SECOND), (82, vec![1], 2 * SECOND)];
        assert_eq!(aimed(&mut probing, vec![idle, active]), expected);
        assert_eq!(probing.disagreements.faults().count(), 0);
    }

    #[test]
    fn keys_that_are_replaced_in_one_file_after_the_other_leave_no_gap() {
        let mut probing = Probing::new(Box::new(WireEnd::default()));
        // What both services have, by the steps of a replacement.
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
            faults.len() == 1 && faults[0].starts_with("services give 10.0.0.1:80 different keys"),
            "{faults:?}"
        );
    }

    #[test]
    fn a_backend_for_which_two_agents_answer_is_named() {
        let name = |port| name_of(Protocol::Tcp, ([10, 0, 0, 1], port).into());
        assert_eq!(contested_fault(&BTreeSet::new()), None);
        let one = contested_fault(&[name(80)].into()).unwrap().text;
        assert!(one.starts_with("two agents answer for 10.0.0.1:80: each takes back"), "{one}");
        let three = contested_fault(&[80, 81, 82].map(name).into()).unwrap().text;
        assert!(three.starts_with("two agents answer for 10.0.0.1:80 and 2 more: "), "{three}");
    }
}
