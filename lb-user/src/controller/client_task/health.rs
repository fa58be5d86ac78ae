//! The verdicts of a client task's kernel programs on its backends: how the controller applies and
//! logs these verdicts.
//!
//! The programs eject and readmit backends without the controller. The controller reads their
//! verdicts because tables depend on them, and logs one line for each change. The controller
//! compares counters, so it also logs an ejection that begins and ends between two readings.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lb_core::balancer::{Fact, ReportIdMap};
use lb_core::endpoint::{Endpoint, EndpointList};
use lb_core::health::{BackendEvidence, Health, Who, Why};
use lb_core::ids::{BackendRef, ServiceIndex, Slot};
use lb_core::plan::BackendPlan;
use lb_core::service::Accounting;
use lb_core::slots::Identity;
use lb_kernel::{DatapathError, Features, SlotView, Tables};
use lb_view::status::UnusedEndpoints;
use tracing::{info, warn};

use super::{ClientTask, ServiceTask};
use crate::config::ProbeConfig;
use crate::controller::Network;
use crate::controller::probe_targets::{ProbeCandidate, connect_target};
use crate::counts::window::Window;
use crate::output::status;
use crate::probes::probed;

/// The maximum number of lines that one call logs per client task. One further line contains the
/// number of all other changes.
const MOST_LINES: usize = 8;

/// The ejections that were logged last, and the early trials of backends that have returned.
#[derive(Debug, Default)]
pub struct LoggedHealth {
    /// Whether the health of any backend may have changed since it was last logged.
    pub is_stale: bool,
    backends: BTreeMap<BackendRef, LoggedEjections>,
    /// The ejected backends that should get an early trial. `tried` has the time of each backend's
    /// last early trial.
    returned: BTreeSet<BackendRef>,
    tried: BTreeMap<BackendRef, Instant>,
}

/// What was logged last about a service.
#[derive(Debug, Default)]
pub struct LoggedService {
    /// For each backend: the health that was logged last, and the witness ([`Who`]) that determined
    /// it.
    health: BTreeMap<SocketAddr, (Health, Option<Who>)>,
    is_panic: bool,
}

impl LoggedService {
    /// For each service, the state that an earlier daemon has logged, according to the maps.
    pub fn adopted(slots: &[SlotView]) -> BTreeMap<ServiceIndex, Self> {
        let mut services: BTreeMap<ServiceIndex, Self> = BTreeMap::new();
        for slot in slots {
            let (health, who, _) = status::found(slot);
            services.entry(slot.service).or_default().health.insert(slot.address, (health, who));
        }
        services
    }
}

/// The shortest time between two checks of whether a service's backends serve.
const EVERY: Duration = Duration::from_millis(900);

/// For a service with too few available backends: the data that shows whether its backends still
/// accept connections.
#[derive(Debug, Default)]
pub struct Serving {
    looked_at: Option<Instant>,
    /// For each backend, the number of connections that had been established by the last check.
    established: BTreeMap<BackendRef, u64>,
    /// When any of these counts last grew.
    grown_at: Option<Instant>,
}

impl Serving {
    /// Compares the counts of these backends to the counts of the last check, unless that check was
    /// less than [`EVERY`] ago.
    fn look<'p>(
        &mut self,
        backends: impl Iterator<Item = (&'p Slot, &'p BackendPlan)>,
        tables: &Tables,
        window: &Window,
        now: Instant,
    ) {
        /// The maximum number of backends that are checked.
        const LOOKS: usize = 256;
        if self.looked_at.is_some_and(|last| now.saturating_duration_since(last) < EVERY) {
            return;
        }
        self.looked_at = Some(now);
        for (&slot, backend) in backends.take(LOOKS) {
            let Ok(counts) = tables.counts(slot) else { continue };
            let at = BackendRef { slot, generation: backend.generation };
            let new = || window.established(at).map_or(0, u64::from);
            let before = self.established.entry(at).or_insert_with(new);
            // A sample in the window contains only the low 32 bits of the count.
            let low = |count: u64| count & u64::from(u32::MAX);
            if low(std::mem::replace(before, counts.sums.established)) != low(counts.sums.established) {
                self.grown_at = Some(now);
                break;
            }
        }
    }
}

/// The numbers of a backend's ejections and readmissions when its counters were last read, and
/// whether the backend was ejected at that time.
#[derive(Clone, Copy, Debug)]
struct LoggedEjections {
    ejections: u64,
    readmissions: u64,
    is_ejected: bool,
}

/// A backend that was ejected and readmitted between two readings of its counters.
struct Line {
    service: String,
    backend: SocketAddr,
    ejections: u64,
    readmissions: u64,
}

/// The reason to log for a recovery. It depends on the witness ([`Who`]) of the earlier verdict
/// that the backend is unhealthy.
const fn recovery(before: Option<Who>) -> &'static str {
    match before {
        Some(Who::Kernel) => "readmitted",
        Some(Who::Probe) => "probes succeed",
        Some(Who::Report) => "no bad report",
        Some(Who::Source) => "list: healthy",
        Some(Who::Operator) => "undrained",
        None => "no evidence against it",
    }
}

/// Whether the programs can detect why flows fail. Without the reasons they cannot judge backends.
pub fn knows_causes(accounting: Accounting, features: Features) -> bool {
    match accounting {
        Accounting::Full => features.socket_errors,
        Accounting::Active => features.outcomes_at_release,
    }
}

impl ClientTask {
    /// Applies the verdicts of the programs, and the changes that depend only on the time. The next
    /// [`ClientTask::settle`] carries out the resulting plan.
    pub fn apply_kernel_verdicts(&mut self, now: Instant) {
        let verdicts = self.datapath.tables().kernel_verdicts(&self.datapath.applied().backends);
        self.has_verdicts = !verdicts.is_empty();
        self.publish_evidence_scope();
        let ejected = verdicts.iter().filter(|(_, verdict)| verdict.is_ejected);
        let ejected: Vec<Slot> = ejected.map(|(slot, _)| *slot).collect();
        self.datapath.renew_trials(&ejected);
        for fact in [Fact::Kernel(verdicts), Fact::Time] {
            self.take_in(fact, now);
        }
        self.look_who_serves(now);
        self.datapath.eject(&self.balancer.replaced_without_ejection());
    }

    pub(super) fn take_in(&mut self, fact: Fact, now: Instant) {
        if self.balancer.handle(now, fact).expect("only a list can be refused") {
            self.settled = None;
        }
    }

    /// Finds the services that have too few available backends but still serve. A service serves if
    /// one of its backends has established a connection within the duration of a first ejection.
    /// Call this before a service's changes are executed: without this call, a single new fact
    /// could start panic in a service that still serves. If counters cannot be read, the check is
    /// repeated about a second later.
    pub fn look_who_serves(&mut self, now: Instant) {
        let Self { services, balancer, datapath, window, .. } = self;
        let mut recent = BTreeSet::new();
        for (position, ((service, index, _), of_service)) in balancer.services().zip(services).enumerate() {
            if balancer.row(position).is_none_or(|row| !row.is_below_threshold) {
                of_service.serving = None;
                continue;
            }
            let is_well = |(_, backend): &(&Slot, &BackendPlan)| {
                let identity = Identity { service: index, address: backend.address };
                let health = balancer.standing(identity).map_or(Health::Healthy, BackendEvidence::health);
                backend.service == index && health == Health::Healthy
            };
            let backends = datapath.applied().backends.iter().filter(is_well);
            let serving = of_service.serving.get_or_insert_default();
            serving.look(backends, datapath.tables(), window, now);
            let base = service.ejection.unwrap_or_default().base;
            if serving.grown_at.is_some_and(|at| now.saturating_duration_since(at) <= base) {
                recent.insert(index);
            }
        }
        self.take_in(Fact::Serving(recent), now);
    }

    /// Applies all verdicts of one witness ([`Who`]) on the backends of the service at this
    /// position.
    pub fn apply_verdicts(
        &mut self,
        position: usize,
        who: Who,
        verdicts: BTreeMap<SocketAddr, (Health, Why)>,
        now: Instant,
    ) {
        self.take_in(Fact::Verdicts(position, who, verdicts), now);
    }

    /// Notes that the agents of these backends, of the service at this position, have restarted. If
    /// such a backend is ejected, it gets an early trial.
    pub fn note_restarts(&mut self, position: usize, has_restarted: impl Fn(SocketAddr) -> bool) {
        self.balancer.note_returns(position, has_restarted);
    }

    /// Makes the next connect the trial of an ejected backend that has returned. A backend has
    /// returned if a probe or its own report shows that it is healthy again, or if its agent has
    /// restarted. Each backend gets at most one such trial within the duration of a first ejection.
    /// Call this only when the maps match the plan, because no backend may get a trial earlier.
    pub fn try_returned(&mut self, now: Instant) {
        let backends = &self.datapath.applied().backends;
        let at = |slot: Slot| {
            let generation = backends.get(&slot)?.generation;
            Some(BackendRef { slot, generation })
        };
        self.logged.returned.extend(self.balancer.take_returned().into_iter().filter_map(at));
        let LoggedHealth { returned, tried, .. } = &mut self.logged;
        returned.retain(|known| at(known.slot) == Some(*known));
        tried.retain(|known, _| at(known.slot) == Some(*known));
        let base = |at: &BackendRef| {
            let index = backends[&at.slot].service;
            let service = self.balancer.services().find(|(_, known, _)| *known == index);
            service.and_then(|(service, ..)| service.ejection).unwrap_or_default().base
        };
        let is_due = |at: &BackendRef| {
            tried.get(at).is_none_or(|last| now.saturating_duration_since(*last) >= base(at))
        };
        let due: Vec<BackendRef> = returned.iter().copied().filter(is_due).collect();
        for at in &due {
            returned.remove(at);
            tried.insert(*at, now);
        }
        let slots: Vec<Slot> = due.iter().map(|at| at.slot).collect();
        self.datapath.try_at_once(&slots);
    }

    /// The evidence on a backend of the service at this position.
    fn standing(&self, position: usize, address: SocketAddr) -> Option<&BackendEvidence<Instant>> {
        let (_, service, _) = self.balancer.services().nth(position)?;
        self.balancer.standing(Identity { service, address })
    }

    pub fn is_down_by_report(&self, position: usize, address: SocketAddr) -> bool {
        self.standing(position, address).is_some_and(BackendEvidence::is_down_by_report)
    }

    /// Whether probes of an earlier daemon are the only evidence that the backend is healthy.
    pub fn is_taken_over_well(&self, position: usize, address: SocketAddr) -> bool {
        self.standing(position, address).is_some_and(BackendEvidence::is_taken_over_well)
    }

    /// Passes the ids of reporting backends to the services that request reports. `ids` is `None`
    /// until a backend is polled; until then, these services retain their present ids.
    pub fn take_report_ids(&mut self, ids: Option<&ReportIdMap>, now: Instant) {
        let none = ReportIdMap::default();
        for (position, configured) in self.client.services.iter().enumerate() {
            let heeds = configured.probe.as_ref().is_some_and(ProbeConfig::is_by_report);
            let Some(ids) = (if heeds { ids } else { Some(&none) }) else { continue };
            let fact = Fact::Reports(position, Arc::clone(ids));
            if self.balancer.handle(now, fact).expect("only a list can be refused") {
                self.settled = None;
            }
        }
    }

    /// The backends that the service at this position uses, and the next endpoints of its order,
    /// which may replace them.
    pub fn candidates(&self, position: usize) -> Vec<ProbeCandidate> {
        let Some((_, index, Some((_, membership)))) = self.balancer.services().nth(position) else {
            return Vec::new();
        };
        let tables = self.datapath.tables();
        let backends = self.datapath.applied().backends.iter();
        let of_service = backends.filter(|(_, backend)| backend.service == index);
        let chosen = self.window.chosen();
        let is_active = |slot: Slot, backend: &BackendPlan| {
            tables.active(slot) > 0 || chosen.contains(&BackendRef { slot, generation: backend.generation })
        };
        let active: HashSet<SocketAddr> = of_service
            .filter(|(slot, backend)| is_active(**slot, backend))
            .map(|(_, backend)| backend.address)
            .collect();
        let of_row = self.balancer.row(position).map(|row| &row.usable);
        let is_of_row = |address: &SocketAddr| of_row.is_some_and(|row| row.contains_key(address));
        let probed = probed(membership, |address| is_of_row(&address));
        // If weights follow load, the load of all members is needed, including members with few
        // connects. The samples in `window` are too far apart to detect short flows, so `is_in_use`
        // is also checked.
        let is_used = !active.is_empty() || self.is_in_use(position);
        let follows_load = self.client.services[position].service.control.law.is_some() && is_used;
        let endpoints = probed.map(|member| &member.endpoint);
        let mut candidates: Vec<ProbeCandidate> = endpoints
            .map(|Endpoint { address, agent, .. }| {
                let is_active = active.contains(address) || (follows_load && is_of_row(address));
                ProbeCandidate { address: *address, agent: *agent, is_active }
            })
            .collect();
        candidates.sort_by_key(|candidate| candidate.address);
        candidates.dedup_by_key(|candidate| candidate.address);
        candidates
    }

    /// Readmits a service's backend if it is ejected. Returns whether it was ejected; `None` if
    /// this client does not have the backend.
    pub fn readmit(&mut self, service: &str, address: SocketAddr) -> Option<bool> {
        let plan = self.datapath.applied();
        let (index, _) = plan.services.iter().find(|(_, known)| known.open && known.name == service)?;
        let is_it = |backend: &BackendPlan| backend.service == *index && backend.address == address;
        let (slot, _) = plan.backends.iter().find(|(_, backend)| is_it(backend))?;
        let slot = *slot;
        Some(self.datapath.readmit(slot))
    }

    /// Whether the maps match the plan.
    pub fn is_settled(&self) -> bool {
        self.settled.is_some()
    }

    /// Logs each backend whose health has changed since the last call: a line for each of the first
    /// `MOST_LINES` backends, and one line for all others.
    pub fn log_health(&mut self, network: &dyn Network) {
        if !std::mem::take(&mut self.logged.is_stale) {
            return;
        }
        let mut lines = 0;
        let services = self.client.services.iter().zip(self.balancer.services()).zip(&mut self.services);
        for (position, ((configured, (_, service, _)), of_service)) in services.enumerate() {
            // Until a service has a list, what was logged about its backends stays.
            let Some(row) = self.balancer.row(position) else { continue };
            let logged = std::mem::take(&mut of_service.logged.health);
            for (&address, &(_, to)) in &row.usable {
                let standing = self.balancer.standing(Identity { service, address });
                let worst = standing.and_then(BackendEvidence::worst);
                let witness = match to {
                    Health::Unproven => Some(Who::Probe),
                    _ => worst.map(|verdict| verdict.who),
                };
                of_service.logged.health.insert(address, (to, witness));
                let before = logged.get(&address).copied();
                let (from, before) = before.map_or((None, None), |(from, who)| (Some(from), who));
                if from == Some(to) || from.is_none() && to <= Health::Unproven {
                    continue;
                }
                lines += 1;
                if lines > MOST_LINES {
                    continue;
                }
                let failure = || {
                    let target = connect_target(configured.probe.as_ref()?, address)?;
                    let failure = network.findings(&target)?.failure?;
                    Some(format!("{} probe: {failure}", configured.probe.as_ref()?.name()))
                };
                let slot = || self.datapath.tables().slot(self.balancer.slot(position, address)?.slot);
                let reason = match (to, witness) {
                    (Health::Healthy, _) => Some(recovery(before).to_owned()),
                    (_, Some(Who::Probe)) if to > Health::Unproven => failure(),
                    _ => None,
                };
                let reason = reason.or_else(|| status::reason(&slot()?)).unwrap_or_default();
                let (client, service) = (&self.client.name, &configured.service.name);
                let (from_name, to_name) = (from.map_or("new", Health::name), to.name());
                let witness = witness.or(before).map_or("", Who::name);
                if Some(to) > from {
                    warn!(%client, %service, backend = %address, from = from_name, to = to_name, witness, reason, "backend health changed");
                } else {
                    info!(%client, %service, backend = %address, from = from_name, to = to_name, witness, reason, "backend health changed");
                }
            }
        }
        if lines > MOST_LINES {
            warn!(client = %self.client.name, backends = lines - MOST_LINES, "the health of more backends changed");
        }
    }

    /// Logs the backends that were ejected and readmitted since the last call, and the services in
    /// which panic began or ended.
    ///
    /// # Errors
    /// If the kernel refuses a lookup.
    pub fn log_kernel(&mut self) -> Result<(), DatapathError> {
        let lines = self.new_lines()?;
        for Line { service, backend, ejections, readmissions } in lines.iter().take(MOST_LINES) {
            let client = &self.client.name;
            warn!(%client, %service, %backend, ejections, readmissions, "the backend was ejected and readmitted");
        }
        if lines.len() > MOST_LINES {
            warn!(client = %self.client.name, backends = lines.len() - MOST_LINES, "more backends were ejected and readmitted");
        }
        let services = self.client.services.iter().zip(&mut self.services);
        for (position, (configured, ServiceTask { logged, .. })) in services.enumerate() {
            let Some(row) = self.balancer.row(position) else { continue };
            let service = &configured.service.name;
            let (available, members) = row.available;
            if row.is_panic == std::mem::replace(&mut logged.is_panic, row.is_panic) {
                continue;
            }
            if row.is_panic {
                warn!(client = %self.client.name, %service, available, members, "panic: too few backends are available, so connects may choose ejected backends unless a lame duck serves");
            } else {
                info!(client = %self.client.name, %service, available, members, "panic has ended");
            }
        }
        Ok(())
    }

    /// The time after which an unavailable member is replaced, keyed by service name.
    pub fn replace_after(&self) -> BTreeMap<String, Duration> {
        let services = self.client.services.iter().map(|configured| &configured.service);
        services.map(|service| (service.name.clone(), service.health.replace_after)).collect()
    }

    /// The names of the services for which ejection is configured but cannot happen, because the
    /// programs cannot detect why flows fail.
    pub fn without_causes(&self) -> BTreeSet<String> {
        let services = self.client.services.iter().map(|configured| &configured.service);
        let watched = services.filter(|service| service.ejection.is_some());
        let names = watched.map(|service| service.name.clone());
        if knows_causes(self.client.accounting, self.features) { BTreeSet::new() } else { names.collect() }
    }

    pub fn panics(&self) -> BTreeSet<String> {
        let services = self.balancer.services().enumerate();
        let panics =
            services.filter(|(position, _)| self.balancer.row(*position).is_some_and(|row| row.is_panic));
        panics.map(|(_, (service, ..))| service.name.clone()).collect()
    }

    /// The endpoints that no task of the job uses, keyed by service name.
    pub fn unused(&self) -> BTreeMap<String, UnusedEndpoints> {
        let unused = self.balancer.services().filter_map(|(service, _, in_use)| {
            let (_, membership) = in_use?;
            Some((service.name.clone(), membership.unused?.into()))
        });
        unused.collect()
    }

    /// The list that each service uses, keyed by service name.
    pub fn lists(&self) -> BTreeMap<String, Arc<EndpointList>> {
        let services = self.client.services.iter().enumerate();
        let lists = services.filter_map(|(position, configured)| {
            Some((configured.service.name.clone(), Arc::clone(self.balancer.list(position)?)))
        });
        lists.collect()
    }

    /// For how long each unavailable backend has been unavailable, keyed by service name and
    /// address.
    pub fn unavailable(&self, now: Instant) -> BTreeMap<(String, SocketAddr), Duration> {
        let names: BTreeMap<ServiceIndex, &str> =
            self.balancer.services().map(|(service, index, _)| (index, service.name.as_str())).collect();
        let mut unavailable = BTreeMap::new();
        for backend in self.datapath.applied().backends.values() {
            let Some(name) = names.get(&backend.service) else { continue };
            let identity = Identity { service: backend.service, address: backend.address };
            if let Some(since) = self.balancer.standing(identity).and_then(BackendEvidence::unavailable_since)
            {
                let time = now.saturating_duration_since(since);
                unavailable.insert(((*name).to_owned(), backend.address), time);
            }
        }
        unavailable
    }

    fn new_lines(&mut self) -> Result<Vec<Line>, DatapathError> {
        if !self.has_verdicts && self.logged.backends.is_empty() {
            return Ok(Vec::new());
        }
        let (tables, applied) = (self.datapath.tables(), self.datapath.applied());
        let verdicts = tables.kernel_verdicts(&applied.backends);
        let mut logged = BTreeMap::new();
        let mut lines = Vec::new();
        for (&slot, backend) in &applied.backends {
            let at = BackendRef { slot, generation: backend.generation };
            let known = self.logged.backends.get(&at).copied();
            // Counters are read only for backends that have a verdict now, or had one when the
            // verdicts were last read.
            if known.is_none() && !verdicts.contains_key(&slot) {
                continue;
            }
            let counts = tables.counts(slot)?.sums;
            let is_ejected = verdicts.get(&slot).is_some_and(|verdict| verdict.is_ejected);
            let now = LoggedEjections {
                ejections: counts.ejections,
                readmissions: counts.readmissions,
                is_ejected,
            };
            let before = known.unwrap_or(LoggedEjections {
                ejections: now.ejections.saturating_sub(u64::from(is_ejected)),
                is_ejected: false,
                ..now
            });
            // `log_health` logs a change of `is_ejected`. A backend that stays ejected after a
            // failed trial is not logged.
            let has_changed = is_ejected != before.is_ejected;
            let has_flapped = !has_changed
                && (now.readmissions != before.readmissions
                    || now.ejections != before.ejections && !before.is_ejected);
            if has_flapped {
                let service = applied.services.get(&backend.service).map(|service| service.name.clone());
                lines.push(Line {
                    service: service.unwrap_or_default(),
                    backend: backend.address,
                    ejections: now.ejections.saturating_sub(before.ejections),
                    readmissions: now.readmissions.saturating_sub(before.readmissions),
                });
            }
            // Ejections by failed trials are counted only in the line that logs the readmission.
            let ejections = if has_changed || has_flapped { now.ejections } else { before.ejections };
            // The counters of a backend that is healthy again are not read any more.
            if verdicts.contains_key(&slot) {
                logged.insert(at, LoggedEjections { ejections, ..now });
            }
        }
        self.logged.backends = logged;
        Ok(lines)
    }
}
