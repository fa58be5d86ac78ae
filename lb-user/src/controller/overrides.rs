//! The operators' overrides: which backends are drained, and which weights are multiplied, on this
//! host.
//!
//! An override is in force from the turn of the loop in which it is requested. The controller also
//! stores the override, so that it is in force after a restart. Then the controller answers the
//! operator. If the override cannot be stored, it is in force until this process ends, and the
//! answer contains the reason.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lb_common::abi::HealthReason;
use lb_core::control::factor::{Factor, Factors};
use lb_core::endpoint::{Endpoint, EndpointList};
use lb_core::ids::ServiceIndex;
use lb_core::service::ignores_weights;
use lb_http::peer::PeerCredentials;
use lb_kernel::{Pins, Tables};
use lb_view::explanation::OperatorWeight;
use lb_view::overrides::{
    ClientEffect, Overridden, Override, OverrideKind, OverrideScope, OverrideStatus, OverridesDocument,
    SCHEMA,
};
use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use super::Controller;
use super::client_task::{ClientTask, effects};
use super::clients::leaving::Leaving;
use super::clock::unix_seconds;
use super::stores::files::{OverridesRead, StoredFile, StoredRead};
use crate::api::{OverrideAction, OverrideRequest, Reply};
use crate::config::ClientConfig;

/// The maximum number of overrides of a host. Overrides are for single backends; whole racks are
/// removed by a change of the list.
const MAX_OVERRIDES: usize = 4_096;

/// The longest time until an operator receives an answer, even if the file system does not answer.
const TO_ANSWER: Duration = Duration::from_secs(5);

/// The maximum number of backends in an error message.
const MOST_NAMED: usize = 8;

/// The content of the file.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct StoredOverrides {
    /// The version of the format.
    schema: u32,
    pub overrides: Vec<Override>,
}

/// The version of the format of the file.
const FILE_SCHEMA: u32 = 1;

/// The reason of a drain that is known only from the kernel's tables.
pub const FROM_TABLES: &str = "from the kernel's tables: the file of overrides could not be parsed";

/// What to log for each drain that the kernel's tables contain if there is no file.
const FILE_IS_MISSING: &str = "a drain ends: the kernel's tables contain it, but the file of operators' overrides is missing; \
                               changed weights, if there were any, have ended, too; repeat what is still wanted";

impl StoredFile for StoredOverrides {
    const MAX_BYTES: u64 = 8 << 20;
    const SCHEMA: u32 = FILE_SCHEMA;
    const REPLACES_ASIDE: bool = false;
    const WHAT: &'static str = "operators' overrides";
    const LOST: &'static str = "the file of operators' overrides cannot be parsed; it was renamed; drains in the kernel's tables stay \
                                in force, changed weights do not";
    const UNREAD: &'static str = "cannot read the operators' overrides; drained backends stay drained; \
                                  retrying; the file is not overwritten";
    const READ: &'static str = "the operators' overrides were read";

    fn path(state: &Path) -> PathBuf {
        state.join("overrides").join("overrides.json")
    }
}

/// An override that is in force.
struct InForce {
    of: Override,
    /// When the override ends; `None` if it does not end by itself. The time is by CLOCK_BOOTTIME,
    /// which continues while the host is suspended, and does not follow changes of the wall clock.
    ends: Option<Duration>,
}

/// A scope, and the kind of override: `true` for a weight, `false` for a drain. A backend can have
/// both.
type Key = (OverrideScope, bool);

/// An answer that waits until a change is stored and in the maps.
struct Pending {
    /// The number of the change that must be stored.
    version: u64,
    since: Instant,
    named: Vec<SocketAddr>,
    overridden: Overridden,
    answer: Reply<Overridden>,
}

#[derive(Default)]
pub struct Overrides {
    in_force: BTreeMap<Key, InForce>,
    /// The number of changes so far. `stored`: the number of the last change that is stored.
    version: u64,
    stored: u64,
    /// The number of the last change in the attempt to store that is under way.
    storing: Option<u64>,
    pending: Vec<Pending>,
    /// Why the file could not be read; `None` once a read has succeeded.
    unread: Option<String>,
    /// The files that were set aside because they could not be parsed, until an operator removes
    /// them.
    aside: Vec<PathBuf>,
    /// Whether there was neither a file nor one that was set aside, so that drains in the kernel's
    /// tables end.
    is_missing: bool,
    /// The clients whose tables were searched for such drains. Later their tables contain this
    /// daemon's drains.
    searched: BTreeSet<String>,
    /// Whether no daemon has stored the overrides since their file was set aside. Until then the
    /// drains are only in the kernel's tables.
    is_adopting: bool,
    /// The drains that an earlier daemon has left in the tables, by client and service; empty if
    /// the file could be read at the start. Later the tables contain this daemon's drains.
    earlier: EarlierDrains,
}

/// A client, and a service of it.
type ClientAndService = (String, String);

/// The drained backends in the tables of each client and service.
pub type EarlierDrains = BTreeMap<ClientAndService, BTreeSet<SocketAddr>>;

impl Overrides {
    /// The overrides of a service of a client that are in force. If a weight is set both for the
    /// client and for all clients, the client's weight is in force.
    fn of<'o>(&'o self, client: &'o str, service: &'o str) -> impl Iterator<Item = &'o Override> {
        let concerned = self
            .of_service(service)
            .filter(move |of| of.scope.client.as_deref().is_none_or(|only| only == client));
        concerned.filter(move |of| of.kind.why_invalid().is_none() && !self.is_hidden(of, client))
    }

    /// Whether this override is for all clients, and this client has its own of the same kind that
    /// can be applied.
    fn is_hidden(&self, of: &Override, client: &str) -> bool {
        let own = OverrideScope { client: Some(client.to_owned()), ..of.scope.clone() };
        let own = self.in_force.get(&(own, is_weight(of.kind)));
        of.scope.client.is_none() && own.is_some_and(|own| own.of.kind.why_invalid().is_none())
    }

    fn of_service<'o>(&'o self, service: &'o str) -> impl Iterator<Item = &'o Override> {
        let backend = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
        let first = OverrideScope { service: service.to_owned(), backend, client: None };
        let from_here = self.in_force.range((first, false)..).map(|(_, one)| &one.of);
        from_here.take_while(move |of| of.scope.service == service)
    }

    /// Whether any override is for this backend of a service.
    pub fn has(&self, service: &str, backend: SocketAddr) -> bool {
        self.of_service(service).any(|of| of.scope.backend == backend)
    }

    fn drained(&self, client: &str, service: &str) -> BTreeSet<SocketAddr> {
        let drains = self.of(client, service).filter(|of| of.kind == OverrideKind::Drain);
        drains.map(|of| of.scope.backend).collect()
    }

    fn weights(&self, client: &str, service: &str) -> Factors {
        let weight = |of: &Override| match of.kind {
            OverrideKind::Weight { percent } => {
                Some((of.scope.backend, Factor::of(f64::from(percent) / 100.0)))
            }
            OverrideKind::Drain => None,
        };
        self.of(client, service).filter_map(weight).collect()
    }

    fn insert(&mut self, of: Override, boot: Duration, wall: u64) {
        let ends = of.until.map(|until| boot + Duration::from_secs(until.saturating_sub(wall)));
        self.in_force.insert((of.scope.clone(), is_weight(of.kind)), InForce { of, ends });
    }

    /// Applies the result of reading the file. Overrides that were set in the meantime have
    /// precedence. An override that cannot be applied has no effect, but stays stored until an
    /// operator replaces or ends it.
    fn take(&mut self, read: OverridesRead, path: &Path, boot: Duration, wall: u64) {
        self.aside = read.aside;
        let Some(stored) = read.file.content(&mut self.unread) else { return };
        for of in stored.overrides {
            if let Some(why) = of.kind.why_invalid() {
                let OverrideScope { service, backend, client } = &of.scope;
                let (file, client) = (path.display(), client.as_deref().unwrap_or("all"));
                warn!(%file, client, service, %backend, kind = %of.kind.in_words(), why, "a stored override has no effect; the others stay in force; replace or end it with `socklb weight`");
            }
            if !self.in_force.contains_key(&(of.scope.clone(), is_weight(of.kind))) {
                self.insert(of, boot, wall);
            }
        }
    }

    /// Logs which drains in the tables of this client end because their file is missing.
    fn warn_of_lost_drains(&mut self, client_task: &ClientTask) {
        let client = client_task.client.name.as_str();
        if !self.is_missing || !self.searched.insert(client.to_owned()) {
            return;
        }
        for service in client_task.client.services.iter().map(|one| one.service.name.as_str()) {
            let Some(position) = client_task.position(service) else { continue };
            for backend in &client_task.drained(position) - &self.drained(client, service) {
                warn!(client, service, %backend, "{FILE_IS_MISSING}");
            }
        }
    }

    /// Makes overrides of the drains of an earlier daemon that are only in the tables.
    fn adopt(&mut self, boot: Duration, wall: u64) {
        let unknown = |((client, service), drained): (&ClientAndService, &BTreeSet<SocketAddr>)| {
            ((client.clone(), service.clone()), drained - &self.drained(client, service))
        };
        let unknown: EarlierDrains = self.earlier.iter().map(unknown).collect();
        for of in drains_of_tables(&unknown, FROM_TABLES, wall) {
            let OverrideScope { service, backend, client } = &of.scope;
            let client = client.as_deref().unwrap_or("all");
            info!(client, service, %backend, "a drain is known only from the kernel's tables; it stays in force");
            self.insert(of, boot, wall);
        }
    }

    /// The files that were set aside because they could not be parsed.
    pub fn aside(&self) -> &[PathBuf] {
        &self.aside
    }

    /// Notes which files are still set aside.
    pub fn note_aside(&mut self, aside: Vec<PathBuf>) {
        if aside.is_empty() {
            info!("the files of operators' overrides that could not be parsed were removed");
        }
        self.aside = aside;
    }

    /// What an operator must know while files are set aside.
    pub fn lost(&self) -> Option<String> {
        lost_overrides(&self.aside, !self.is_adopting)
    }

    /// Applies the overrides of a service to a client task.
    fn apply(&mut self, client_task: &mut ClientTask, service: &str, now: Instant) {
        let Some(position) = client_task.position(service) else { return };
        let client = &client_task.client.name;
        let (mut drained, weights) = (self.drained(client, service), self.weights(client, service));
        if self.unread.is_some() {
            // The client task has adopted the drains of an earlier daemon from the maps. Drains
            // that this daemon has added to them may have ended.
            let earlier = self.earlier.entry((client.clone(), service.to_owned()));
            drained.extend(&*earlier.or_insert_with(|| client_task.drained(position)));
        }
        client_task.set_overrides(position, &drained, weights, now);
    }

    /// Whether the file could not be read yet.
    pub const fn is_unread(&self) -> bool {
        self.unread.is_some()
    }

    /// Call this when an attempt to store the file begins.
    pub fn start_storing(&mut self) {
        self.storing = Some(self.version);
    }

    /// Call this when the attempt to store the file has ended.
    pub fn end_storing(&mut self, is_stored: bool) {
        if let Some(version) = self.storing.take()
            && is_stored
        {
            self.stored = version;
            self.is_adopting = false;
        }
    }

    fn is_tried(&self, version: u64) -> bool {
        self.stored >= version || self.unread.is_some()
    }
}

const fn is_weight(kind: OverrideKind) -> bool {
    matches!(kind, OverrideKind::Weight { .. })
}

/// The drains in the kernel's tables as overrides, without their ends, which are not known. A drain
/// that all clients with the service have becomes one override.
pub fn drains_of_tables(drained: &EarlierDrains, reason: &str, now: u64) -> Vec<Override> {
    let mut by_service: BTreeMap<&str, Vec<(&str, &BTreeSet<SocketAddr>)>> = BTreeMap::new();
    for ((client, service), drained) in drained {
        by_service.entry(service).or_default().push((client, drained));
    }
    let mut drains = Vec::new();
    for (service, clients) in by_service {
        let all = clients.iter().map(|(_, drained)| (*drained).clone());
        let common = all.reduce(|one, other| &one & &other).unwrap_or_default();
        let single = clients.into_iter().map(|(client, drained)| (Some(client), drained - &common));
        let single: Vec<_> = single.collect();
        for (client, backends) in [(None, common)].into_iter().chain(single) {
            drains.extend(backends.into_iter().map(|backend| Override {
                scope: OverrideScope {
                    service: service.to_owned(),
                    backend,
                    client: client.map(str::to_owned),
                },
                kind: OverrideKind::Drain,
                reason: Some(reason.to_owned()),
                user: 0,
                process: 0,
                since: now,
                until: None,
            }));
        }
    }
    drains
}

/// What an operator must know while files of overrides are set aside. `is_adopted`: whether a
/// daemon has stored the drains that the kernel's tables contained.
pub fn lost_overrides(aside: &[PathBuf], is_adopted: bool) -> Option<String> {
    let files: Vec<_> = aside.iter().map(|file| file.display().to_string()).collect();
    let (last, others) = files.split_last()?;
    let (them, files) = match others {
        [] => ("it", last.clone()),
        _ => ("them", format!("{} and {last}", others.join(", "))),
    };
    let remove = if is_adopted { "then remove" } else { "and, after the daemon has stored them, remove" };
    Some(format!(
        "stored overrides could not be parsed and are now in {files}: the drains that the kernel's tables \
         contained stay in force (none after a reboot of the host), but their ends and changed weights \
         are lost; compare with `socklb overrides`, repeat what is missing, {remove} {them}"
    ))
}

/// Why changes are not stored, and what this means for an override and for the end of one.
fn not_stored(error: &str) -> String {
    format!(
        "cannot store the overrides ({error}): they are in force; changes that are not stored are lost when the daemon \
         restarts, because it returns to what was stored last; the daemon retries"
    )
}

/// The backends that operators have drained according to these tables; `None` if the tables do not
/// contain the service.
fn drained_in(tables: &Tables, service: &str) -> Option<BTreeSet<SocketAddr>> {
    let index = tables.services().into_iter().find(|view| view.open && view.name == service)?.index;
    let of_service = tables.slots().into_iter().filter(|slot| slot.service == index);
    let drained = of_service.filter(|slot| slot.reason == HealthReason::Operator);
    Some(drained.map(|slot| slot.address).collect())
}

impl Controller {
    /// Drains backends, multiplies their weights, or ends drains and weights.
    /// [`Self::answer_overrides`] sends the answer.
    pub fn override_backends(
        &mut self,
        service: String,
        request: &OverrideRequest,
        who: &PeerCredentials,
        answer: Reply<Overridden>,
        now: Instant,
    ) {
        let (user, process) = (who.user, who.process);
        let mut overridden = Overridden {
            schema: SCHEMA,
            service,
            client: request.client.clone(),
            refused: None,
            is_dry_run: request.dry_run,
            changed: Vec::new(),
            overrides: Vec::new(),
            not_kept: None,
        };
        let wanted = match self.wanted(&overridden.service, request, who) {
            Ok(wanted) => wanted,
            Err(why) => {
                info!(service = ?overridden.service, action = request.action.name(), user, process, why, "refused an override");
                overridden.refused = Some(why);
                answer.send(overridden);
                return;
            }
        };
        overridden.changed = wanted.changes.iter().map(|(key, _)| key.0.backend).collect();
        overridden.changed.dedup();
        if request.dry_run {
            overridden.overrides = self.override_statuses(&overridden.service, Some(&wanted.named));
            answer.send(overridden);
            return;
        }
        for ((scope, is_weight), new) in wanted.changes {
            let OverrideScope { service, backend, client } = &scope;
            let client = client.as_deref().unwrap_or("all");
            let (reason, until) = (&request.reason, new.as_ref().and_then(|new| new.until));
            info!(%service, %backend, client, action = request.action.name(), percent = request.percent, reason, until, user, process, "an operator overrides a backend");
            match new {
                Some(new) => self.overrides.insert(new, self.boot, unix_seconds(self.wall)),
                None => drop(self.overrides.in_force.remove(&(scope, is_weight))),
            }
        }
        if !overridden.changed.is_empty() {
            self.overrides_changed(&BTreeSet::from([overridden.service.clone()]), now);
        }
        let version = self.overrides.version;
        self.overrides.pending.push(Pending { version, since: now, named: wanted.named, overridden, answer });
    }

    /// Ends the overrides that have reached the end of their time.
    pub fn lapse_overrides(&mut self, now: Instant) {
        let boot = self.boot;
        let mut over = BTreeSet::new();
        self.overrides.in_force.retain(|(OverrideScope { service, backend, client }, _), one| {
            let is_over = one.ends.is_some_and(|ends| ends <= boot);
            if is_over {
                let client = client.as_deref().unwrap_or("all");
                info!(%service, %backend, client, kind = %one.of.kind.in_words(), "the time of an operator's override is over");
                over.insert(service.clone());
            }
            !is_over
        });
        if !over.is_empty() {
            self.overrides_changed(&over, now);
        }
    }

    /// Applies and stores the changed overrides of these services.
    fn overrides_changed(&mut self, services: &BTreeSet<String>, now: Instant) {
        let Self { clients, overrides, .. } = self;
        for client_task in &mut clients.tasks {
            for service in services {
                overrides.apply(client_task, service, now);
            }
        }
        self.settle(now);
        self.store_overrides();
    }

    fn store_overrides(&mut self) {
        self.overrides.version += 1;
        if self.overrides.unread.is_some() {
            return;
        }
        let overrides = self.overrides.in_force.values().map(|one| one.of.clone()).collect();
        if let Ok(text) = serde_json::to_vec(&StoredOverrides { schema: FILE_SCHEMA, overrides }) {
            let path = StoredOverrides::path(&self.config.paths.state);
            self.sources.files_to_store.add(path, text.into());
            self.sources.files_to_store.hurry();
        }
    }

    /// Applies the result of reading the file. If the file was set aside, and no daemon has stored
    /// it since, the drains in the tables of these clients become overrides. A daemon that is
    /// killed before it stores them leaves the same state, so the next one repeats this.
    pub fn take_overrides(&mut self, mut read: OverridesRead, clients: &[ClientConfig]) {
        let (boot, wall) = (self.boot, unix_seconds(self.wall));
        let is_absent = matches!(read.file, StoredRead::Nothing);
        self.overrides.is_adopting = match read.file {
            StoredRead::Read(_) => false,
            StoredRead::Nothing => self.overrides.is_adopting || !read.aside.is_empty(),
            StoredRead::Unread(_) => self.overrides.is_adopting,
        };
        self.overrides.is_missing = is_absent && !self.overrides.is_adopting;
        if is_absent
            && self.overrides.is_adopting
            && let Err(why) = self.find_earlier_drains(clients)
        {
            read.file = StoredRead::Unread(why);
        }
        let path = StoredOverrides::path(&self.config.paths.state);
        self.overrides.take(read, &path, boot, wall);
        if self.overrides.is_adopting && !self.overrides.is_unread() {
            self.overrides.adopt(boot, wall);
            self.store_overrides();
        }
    }

    /// Adds to `earlier` the drains of clients that have not run in this daemon. Their tables are
    /// read from the pins, because a client may be unable to start.
    fn find_earlier_drains(&mut self, clients: &[ClientConfig]) -> Result<(), String> {
        let earlier = &mut self.overrides.earlier;
        for client in clients {
            let key = |service: &str| (client.name.clone(), service.to_owned());
            let services = client.services.iter().map(|configured| configured.service.name.as_str());
            let unknown: Vec<&str> =
                services.filter(|service| !earlier.contains_key(&key(service))).collect();
            if unknown.is_empty() {
                continue;
            }
            let tables =
                match self.environment.kernel.tables(&Pins::of(&self.config.paths.pins, &client.name)) {
                    Ok(tables) => tables,
                    Err(error) if error.is_missing() => continue,
                    Err(error) => {
                        let error = crate::error::chain(&error);
                        return Err(format!("cannot read the tables of client {}: {error}", client.name));
                    }
                };
            let drained =
                unknown.into_iter().map(|service| Some((key(service), drained_in(&tables, service)?)));
            earlier.extend(drained.flatten());
        }
        Ok(())
    }

    /// Handles the end of another attempt to read the file.
    pub fn apply_stored_overrides(&mut self, read: OverridesRead, now: Instant) {
        let clients = self.config.clients.clone();
        self.take_overrides(read, &clients);
        if !self.overrides.is_unread() {
            let Self { clients, overrides, .. } = self;
            clients.tasks.iter().for_each(|task| overrides.warn_of_lost_drains(task));
            let services = self.clients.tasks.iter().flat_map(|task| &task.client.services);
            let services = services.map(|configured| configured.service.name.clone()).collect();
            self.overrides_changed(&services, now);
        }
    }

    /// Applies the overrides to a client task that is new or was reconfigured.
    pub fn apply_overrides(&mut self, client: &str, now: Instant) {
        let Self { clients, overrides, .. } = self;
        let Some(client_task) = clients.task_mut(client) else { return };
        let services = client_task.client.services.iter();
        let services: Vec<String> = services.map(|configured| configured.service.name.clone()).collect();
        overrides.warn_of_lost_drains(client_task);
        for service in &services {
            overrides.apply(client_task, service, now);
        }
    }

    /// Answers each operator once the change is in the maps and was stored or could not be stored,
    /// at the latest after `TO_ANSWER`.
    pub fn answer_overrides(&mut self, now: Instant) {
        if self.overrides.pending.is_empty() {
            return;
        }
        let state = StoredOverrides::path(&self.config.paths.state);
        let has_failed = self.sources.files_to_store.error_of(&state).is_some();
        for mut waiting in std::mem::take(&mut self.overrides.pending) {
            let service = &waiting.overridden.service;
            let mut concerned = self.clients.tasks.iter().filter(|task| task.position(service).is_some());
            let is_settled = concerned.all(ClientTask::is_settled);
            let is_stored = self.overrides.stored >= waiting.version && !self.overrides.is_unread();
            let is_tried = self.overrides.is_tried(waiting.version) || has_failed;
            let is_late = now.saturating_duration_since(waiting.since) >= TO_ANSWER;
            if !(is_settled && is_tried || is_late) {
                self.overrides.pending.push(waiting);
                continue;
            }
            let why = || {
                let hangs = || not_stored(&format!("{} does not answer", state.display()));
                self.why_not_kept().unwrap_or_else(hangs)
            };
            let overrides = self.override_statuses(service, Some(&waiting.named));
            (waiting.overridden.overrides, waiting.overridden.not_kept) = (overrides, (!is_stored).then(why));
            waiting.answer.send(waiting.overridden);
        }
    }

    /// Why the overrides could not be read or stored; `None` if they were, or if this is not known
    /// yet.
    fn why_not_kept(&self) -> Option<String> {
        match &self.overrides.unread {
            Some(why) => Some(format!(
                "the file of overrides cannot be read ({why}): drains in the kernel's maps stay in force, changed \
                 weights do not, and the daemon stores no override until a retry succeeds"
            )),
            None => {
                let path = StoredOverrides::path(&self.config.paths.state);
                self.sources.files_to_store.error_of(&path).map(not_stored)
            }
        }
    }

    /// All overrides and their effects.
    pub fn overrides_document(&self) -> OverridesDocument {
        let services: BTreeSet<&str> =
            self.overrides.in_force.keys().map(|(scope, _)| scope.service.as_str()).collect();
        let overrides = services.iter().flat_map(|service| self.override_statuses(service, None)).collect();
        let not_kept = self.why_not_kept();
        OverridesDocument { schema: SCHEMA, overrides, not_kept, lost: self.overrides.lost() }
    }

    /// The overrides that are in force for a client task.
    pub fn overrides_of(&self, client_task: &ClientTask) -> Vec<Override> {
        let client = client_task.client.name.as_str();
        let services = client_task.client.services.iter().map(|configured| configured.service.name.as_str());
        services.flat_map(|service| self.overrides.of(client, service).cloned()).collect()
    }

    /// The weights that operators have set for backends of a service of a client task.
    pub fn operator_weights(&self, client: &str, service: &str) -> Vec<OperatorWeight> {
        let weight = |of: &Override| match of.kind {
            OverrideKind::Weight { percent } => Some(OperatorWeight { address: of.scope.backend, percent }),
            OverrideKind::Drain => None,
        };
        self.overrides.of(client, service).filter_map(weight).collect()
    }

    fn override_statuses(&self, service: &str, only: Option<&[SocketAddr]>) -> Vec<OverrideStatus> {
        let list = self.list_of(service);
        let all = self.overrides.of_service(service);
        let wanted: Vec<&Override> =
            all.filter(|of| only.is_none_or(|only| only.contains(&of.scope.backend))).collect();
        let backends: BTreeSet<SocketAddr> = wanted.iter().map(|of| of.scope.backend).collect();
        let tasks = self.clients.tasks.iter();
        let mut effects: Vec<_> = tasks.map(|task| task.effects(service, &backends)).collect();
        let leaving = self.clients.leaving.iter().filter(|leaving| leaving.pins.is_of_this_version());
        effects.extend(leaving.map(|leaving| self.effects_on_leaving(leaving, service, &backends)));
        let status = |of: &&Override| {
            let backend = of.scope.backend;
            // A weight for all clients has no effect on a client with its own weight.
            let has_own =
                |effect: &&ClientEffect| is_weight(of.kind) && self.overrides.is_hidden(of, &effect.client);
            let all = effects.iter().filter_map(|effects| effects.get(&backend));
            let concerned = all.filter(|effect| match &of.scope.client {
                Some(only) => *only == effect.client,
                None => !has_own(effect),
            });
            let is_configured = self.config.clients.iter().any(|client| {
                of.scope.client.as_ref().is_none_or(|only| *only == client.name)
                    && client.services.iter().any(|configured| configured.service.name == service)
            });
            let is_listed = is_configured && list.as_ref().is_none_or(|list| list.get(backend).is_some());
            OverrideStatus {
                of: (*of).clone(),
                is_configured,
                is_listed,
                clients: concerned.cloned().collect(),
            }
        };
        wanted.iter().map(status).collect()
    }

    /// The effects on a leaving client, in the form of [`ClientTask::effects`]; empty if the
    /// client's maps cannot be read. The attempts to remove the client log this error.
    fn effects_on_leaving(
        &self,
        leaving: &Leaving,
        service: &str,
        backends: &BTreeSet<SocketAddr>,
    ) -> BTreeMap<SocketAddr, ClientEffect> {
        let Ok(tables) = self.environment.kernel.tables(&leaving.pins) else { return BTreeMap::new() };
        let services = tables.services().into_iter().filter(|view| view.name == service);
        let indexes: BTreeSet<ServiceIndex> = services.map(|view| view.index).collect();
        let slots = tables.slots().into_iter();
        let named = slots.filter(|view| indexes.contains(&view.service) && backends.contains(&view.address));
        let named = named.map(|view| (view.at.slot, view.address)).collect();
        effects(&leaving.pins.client, !leaving.begins_flows(), &tables, &named)
    }

    /// The list of a service that was delivered last; `None` if there is none.
    pub fn list_of(&self, service: &str) -> Option<Arc<EndpointList>> {
        let assignments = match self.sources.watched.get(service) {
            Some(watched) => &watched.feed.newest()?.assignments,
            None => self.sources.statics.get(service)?,
        };
        Some(assignments.list().clone())
    }
}

/// The changes that a request makes.
struct OverrideChanges {
    named: Vec<SocketAddr>,
    /// The new override of each key; `None` removes it.
    changes: Vec<(Key, Option<Override>)>,
}

impl Controller {
    /// The changes that a request makes, or why it is refused. Changes nothing.
    fn wanted(
        &self,
        service: &str,
        request: &OverrideRequest,
        who: &PeerCredentials,
    ) -> Result<OverrideChanges, String> {
        let client = request.client.as_deref();
        let ends_it = request.action == OverrideAction::Undrain || request.percent == Some(100);
        let has_service = |task: &&ClientTask| task.position(service).is_some();
        let tasks: Vec<&ClientTask> = self.clients.tasks.iter().filter(has_service).collect();
        // A misspelt name must not look like the end of an override, so a name that neither the
        // lists nor the overrides contain is refused.
        let nothing_to_end = |why| if ends_it { format!("there is no override to end: {why}") } else { why };
        // An override can be ended even if its service is no longer configured.
        let is_overridden = self.overrides.of_service(service).next().is_some();
        if tasks.is_empty() && !(ends_it && is_overridden) {
            self.check_service(service).map_err(nothing_to_end)?;
        }
        let has_own =
            |client| self.overrides.of_service(service).any(|of| of.scope.client.as_deref() == client);
        if let Some(client) = client
            && !(ends_it && has_own(Some(client)))
            && !tasks.iter().any(|task| task.client.name == client)
        {
            let names: Vec<&str> = tasks.iter().map(|task| task.client.name.as_str()).collect();
            return Err(format!(
                "client {client} has no service {service} here; clients with this service: {}",
                names.join(", ")
            ));
        }
        let mut named: Vec<SocketAddr> = Vec::new();
        for word in request.backends.split(',') {
            named.push(self.backend_of(service, word, Some(request.action)).map_err(nothing_to_end)?);
        }
        named.sort_unstable();
        named.dedup();
        let is_weight = request.action == OverrideAction::Weight;
        if is_weight && !ends_it {
            let mut services = tasks.iter().flat_map(|task| &task.client.services);
            let policy = services.find(|configured| configured.service.name == service);
            let policy = policy.map(|configured| configured.service.policy);
            if let Some((policy, why)) = policy.and_then(|policy| Some((policy, ignores_weights(policy)?))) {
                return Err(format!("the policy of service {service}, {}, {why}", policy.name()));
            }
        }
        if self.overrides.unread.is_some() && ends_it {
            let why = self.overrides.unread.as_deref().unwrap_or_default();
            return Err(format!(
                "the overrides of an earlier daemon cannot be read yet, so no override can be ended: {why}"
            ));
        }
        let scope = |backend: SocketAddr, client: Option<&str>| OverrideScope {
            service: service.to_owned(),
            backend,
            client: client.map(str::to_owned),
        };
        let mut changes = Vec::new();
        for backend in &named {
            let key: Key = (scope(*backend, client), is_weight);
            if ends_it {
                let all: Key = (scope(*backend, None), is_weight);
                let in_force = &self.overrides.in_force;
                if client.is_some() && in_force.contains_key(&all) && !in_force.contains_key(&key) {
                    return Err(format!(
                        "{backend} {} for all clients, which cannot be ended for client {} alone: leave --client \
                         out to end it for all",
                        if is_weight { "has another weight" } else { "is drained" },
                        client.unwrap_or_default()
                    ));
                }
                // Without a client, the overrides for single clients end as well.
                let known = self.overrides.in_force.keys().filter(|(known, known_is_weight)| {
                    *known_is_weight == is_weight
                        && known.service == service
                        && known.backend == *backend
                        && (client.is_none() || known.client.as_deref() == client)
                });
                changes.extend(known.map(|known| (known.clone(), None)));
                continue;
            }
            let wall = unix_seconds(self.wall);
            let kind = match request.percent {
                Some(percent) => OverrideKind::Weight { percent },
                None => OverrideKind::Drain,
            };
            let known = self.overrides.in_force.get(&key).map(|known| &known.of);
            // Values that the request omits do not change. So an operator may repeat a drain only
            // to wait for its effect, or change only the percentage of a weight.
            let until = match request.for_s {
                Some(time) => Some(wall + time),
                None => known.and_then(|known| known.until),
            };
            let reason = request.reason.clone().or_else(|| known.and_then(|known| known.reason.clone()));
            let same = known.filter(|known| known.kind == kind);
            if same.is_some_and(|known| (known.until, &known.reason) == (until, &reason)) {
                continue;
            }
            let (user, process) = (who.user, who.process);
            let new = Override { scope: key.0.clone(), kind, reason, user, process, since: wall, until };
            changes.push((key, Some(new)));
        }
        let new =
            changes.iter().filter(|(key, new)| new.is_some() && !self.overrides.in_force.contains_key(key));
        let new = new.count();
        // The tables of many clients may contain more drains, so a request that adds none is
        // permitted.
        if new > 0 && self.overrides.in_force.len() + new > MAX_OVERRIDES {
            return Err(format!(
                "a host has at most {MAX_OVERRIDES} overrides: end some first (`socklb overrides`)"
            ));
        }
        if request.action == OverrideAction::Drain && !request.force {
            let drained: BTreeSet<SocketAddr> = named.iter().copied().collect();
            let tasks = tasks.iter().filter(|task| client.is_none_or(|only| only == task.client.name));
            let left_without: Vec<&str> = tasks
                .filter(|task| task.would_be_left_without(service, &drained))
                .map(|task| task.client.name.as_str())
                .collect();
            if !left_without.is_empty() {
                return Err(format!(
                    "no available backend of {service} would be left for {}: use --force to drain nevertheless",
                    left_without.join(", ")
                ));
            }
        }
        Ok(OverrideChanges { named, changes })
    }

    /// The backend with the address or index that an operator has written for an action.
    ///
    /// # Errors
    /// If no backend of the list has it, or several have this IP address.
    pub fn backend_of(
        &self,
        service: &str,
        word: &str,
        action: Option<OverrideAction>,
    ) -> Result<SocketAddr, String> {
        let list = self.list_of(service);
        let endpoints: &[Endpoint] = list.as_ref().map_or(&[], |list| list.as_slice());
        let matching: Vec<&Endpoint> = if let Ok(address) = word.parse::<SocketAddr>() {
            // An override can be ended even if the backend has left the list.
            let ends_it = action != Some(OverrideAction::Drain);
            if ends_it && self.overrides.has(service, address) {
                return Ok(address);
            }
            endpoints.iter().filter(|endpoint| endpoint.address == address).collect()
        } else if let Ok(index) = word.parse::<u32>() {
            endpoints.iter().filter(|endpoint| endpoint.index == index).collect()
        } else {
            let ip = word.parse::<IpAddr>().ok();
            endpoints.iter().filter(|endpoint| Some(endpoint.address.ip()) == ip).collect()
        };
        let shown = |endpoints: &[&Endpoint]| {
            let names = endpoints.iter().take(MOST_NAMED);
            let names: Vec<String> =
                names.map(|endpoint| format!("{} (index {})", endpoint.address, endpoint.index)).collect();
            let rest = endpoints.len().saturating_sub(MOST_NAMED);
            let and = if rest > 0 { format!(" and {rest} more") } else { String::new() };
            format!("{}{and}", names.join(", "))
        };
        match &matching[..] {
            [one] => Ok(one.address),
            [] if endpoints.is_empty() => {
                Err(format!("service {service} has no backend {word}: its list is empty or unknown"))
            }
            [] => {
                let all: Vec<&Endpoint> = endpoints.iter().collect();
                Err(format!("service {service} has no backend {word}: it has {}", shown(&all)))
            }
            several => Err(format!("{word} is ambiguous: service {service} has {}", shown(several))),
        }
    }
}
