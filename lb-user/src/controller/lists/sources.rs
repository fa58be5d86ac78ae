//! Endpoint lists: their sources, when each list is read, and its delivery to the clients.
//!
//! A file is read when the file has changed, a server's list when the server's answer has changed
//! (`remote`). [`Feed`] decides the order of reads, and which list is in force. Both the read of a
//! list and the computation of its assignments run outside of the event loop, which then applies
//! the results together. A delivered list becomes a fact for the balancer of each client task that
//! uses it.
//!
//! If clients change while assignments are computed, the missing assignments are computed next.
//! Until then, clients without an assignment retain their earlier lists.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use lb_core::balancer::{Fact, UnusableList};
use lb_core::feed::{Delivered, Feed, FeedAction, ListDecision, Version};
use lb_core::membership::Assignments;
use lb_discovery::{HostName, HostTable};
use lb_view::status::SourceStatus;
use tracing::{info, warn};

use super::hosts::HostNames;
use super::reads::{ListPurpose, Reading};
use super::remote::{PresentList, RemoteState, Shrink};
use crate::config::{ClientConfig, Config, EndpointSource};
use crate::controller::client_task::ClientTask;
use crate::controller::reload::changes::list_changes;
use crate::controller::stores::files::FilesToStore;
use crate::controller::{BackgroundWork, Controller};
use crate::source::assignments::{self, AssignmentsByService};
use crate::source::hosts::{lasting_in_brackets, unresolved};
use crate::source::{Contents, ListOrigin, ListSource, NoAnswer, SourceError, Stamp, directory_of};

/// The endpoint sources of all services.
#[derive(Default)]
pub struct Sources {
    /// The lists in the configuration itself, keyed by service name.
    pub statics: AssignmentsByService,
    /// The files and servers from which lists are read, keyed by service name.
    pub watched: BTreeMap<String, WatchedSource>,
    /// The host names in these lists.
    pub hosts: HostNames,
    /// The number of reads of lists that have begun.
    pub readings: u64,
    /// Lists and other files that are stored for the next start of the daemon.
    pub files_to_store: FilesToStore,
}

/// The source of a service's list, and the state of its list.
pub struct WatchedSource {
    pub source: ListSource,
    pub feed: Feed<Stamp, Contents>,
    /// The notes of the last valid read: ignored parts of the list, with reasons.
    pub notes: Arc<[String]>,
    /// The state of the server. If the list does not come from a server, only the fields about
    /// removals and reads are used.
    pub remote: RemoteState,
    /// The host names in the list.
    pub hosts: Arc<BTreeSet<HostName>>,
    /// Whether the newest list was refused because of its number of host names.
    pub lacks_hosts: bool,
    /// Whether the newest list was read with outdated addresses of host names.
    pub has_outdated_hosts: bool,
}

impl Sources {
    /// The name of a service whose newest list has an endpoint with this address.
    pub fn service_with(&self, address: SocketAddr) -> Option<&str> {
        let watched = self.watched.iter();
        let newest =
            watched.filter_map(|(service, watched)| Some((service, &watched.feed.newest()?.assignments)));
        let mut lists = newest.chain(&self.statics);
        lists.find(|(_, list)| list.list().get(address).is_some()).map(|(service, _)| service.as_str())
    }
}

impl WatchedSource {
    /// A source whose list was never read.
    fn new(source: ListSource) -> Self {
        let (feed, notes, remote, hosts, lacks_hosts, has_outdated_hosts) = Default::default();
        Self { source, feed, notes, remote, hosts, lacks_hosts, has_outdated_hosts }
    }

    /// Stores the notes of a read, and logs the new ones.
    pub fn take_notes(&mut self, service: &str, notes: &Arc<[String]>) {
        let before = std::mem::replace(&mut self.notes, Arc::clone(notes));
        for note in notes.iter().filter(|note| !before.contains(note)) {
            info!(service, source = %self.source.origin, "{note}");
        }
    }

    /// The state of the source, with the error that concerns this client.
    /// `has_adopted_table`: whether the client uses a table of an earlier daemon.
    pub fn status(
        &self,
        client: &str,
        has_adopted_table: bool,
        table: &HostTable,
        now: Instant,
        wall: SystemTime,
    ) -> SourceStatus {
        let age = |since: Instant| now.saturating_duration_since(since).as_secs();
        let since = lasting_in_brackets(self.feed.fault_since(), now);
        let error = self.feed.error_of(client).map(|error| format!("{error}{since}"));
        let error = error.or_else(|| unresolved(&self.source, &self.hosts, table, now, wall));
        let status = SourceStatus {
            file: self.source.file().map(Path::to_owned),
            good_for_s: self.feed.good_since().map(age),
            error,
            failures: self.feed.failures(),
            notes: self.notes.to_vec(),
            remote: None,
            address_certificate_expiry_s: None,
        };
        if self.source.wanted().is_none() {
            let deferred = || self.remote.shrink.as_ref().map(Shrink::describe);
            return SourceStatus { error: status.error.or_else(deferred), ..status };
        }
        let latest = &self.remote.latest;
        let present = match () {
            () if self.feed.newest().is_some() => PresentList::InForce,
            () if has_adopted_table => PresentList::OfEarlierRun,
            () => PresentList::None,
        };
        SourceStatus {
            good_for_s: self.remote.confirmed().map(age),
            error: self.remote.trouble(now, &present).or(status.error),
            failures: latest.failures.max(status.failures),
            remote: Some(self.remote.status(&self.source.origin, now)),
            ..status
        }
    }

    /// Adds the computed results of `assignments` to each list of the feed with the same endpoints.
    pub fn take_over(&mut self, assignments: &Assignments) {
        for contents in self.feed.lists() {
            contents.assignments.take_over(assignments);
        }
    }
}

/// The source of each service that any client uses, keyed by service name. Services with a list in
/// the configuration itself are not included.
pub fn sources(config: &Config) -> BTreeMap<String, ListSource> {
    let mut sources = BTreeMap::new();
    for configured in config.clients.iter().flat_map(|client| &client.services) {
        let Some(origin) = ListOrigin::of(&configured.source) else { continue };
        let name = configured.service.name.clone();
        sources.entry(name).or_insert_with(|| {
            ListSource::new(&configured.service, origin, &config.addresses, &config.paths.state)
        });
    }
    sources
}

impl Controller {
    /// Applies the first read of a list that a configuration names, with complete assignments. When
    /// the daemon starts, this happens before it attaches programs. If the list cannot be used, the
    /// list in force stays in force. If no list is in force, the stored last good list is used. If
    /// there is no stored list either, the kernel's tables remain unchanged; if the kernel has no
    /// tables because this is the first start, connects fail with the service's errno.
    ///
    /// If the service already had a file or a server, the failure count and the times of this
    /// source are retained.
    pub fn take_reloaded(
        &mut self,
        reading: Reading,
        begun: u64,
        before: Option<WatchedSource>,
        now: Instant,
    ) {
        let Reading { service, source, version, mut result, instead, in_force } = reading;
        let before = before.filter(|before| before.source.service == source.service);
        let is_same_source = before.as_ref().is_some_and(|before| before.source == source);
        let (before, watched) = match before {
            Some(mut before) if is_same_source => (Some(std::mem::take(&mut before.feed)), before),
            Some(WatchedSource { feed, notes, remote, source: other, .. }) => {
                let is_same_query = source.wanted().is_some() && other.wanted() == source.wanted();
                let remote = if is_same_query { remote.of_same_query() } else { RemoteState::default() };
                (Some(feed), WatchedSource { notes, remote, ..WatchedSource::new(source) })
            }
            None => (None, WatchedSource::new(source)),
        };
        self.sources.watched.insert(service.clone(), watched);
        let is_superseded = before.as_ref().is_some_and(|feed| is_same_source && feed.is_superseded(begun));
        if !is_superseded {
            self.note_result(&service, version, Some(&mut result), now);
        }
        let result = result.map_err(SourceError::into_failure);
        let (feed, reloaded) = Feed::reload(before, is_same_source, now, begun, version, result);
        self.sources.watched.get_mut(&service).expect("the service was just inserted").feed = feed;
        self.carry_out(&service, reloaded.effect, now);
        if let Some(mut contents) = reloaded.retained {
            if let Some(computed) = &in_force {
                contents.assignments.take_over(computed);
                // Another list may have arrived while the configuration was read. Until its
                // assignments for new clients are computed, new clients use the list that was in
                // force when the read began.
                self.deliver_assignments(&service, computed, now);
            }
            self.deliver(&service, contents, now);
        }
        match instead.filter(|_| reloaded.wants_last_good) {
            None => {}
            Some(Ok(contents)) => {
                warn!(
                    service,
                    "the endpoint list cannot be used; using the last good list that an earlier run stored"
                );
                self.deliver(&service, contents, now);
            }
            Some(Err(error)) => {
                warn!(service, error = %crate::error::chain(&error), "the stored last good list cannot be used either");
            }
        }
    }

    pub fn files_changed(&mut self, changes: &BTreeSet<PathBuf>, now: Instant) {
        for file in self.sources.watched.values_mut() {
            let Some(path) = file.source.file() else { continue };
            // Any change in the directory may concern the file, because the file may be a link to
            // another file in this directory.
            let directory = directory_of(path);
            if changes.iter().any(|path| *path == directory || path.parent() == Some(&directory)) {
                file.feed.progress.changed(now);
            }
        }
    }

    /// Requests a check of each file and a watch on its directory. Both run outside of the event
    /// loop, because the file system may not answer. A file is read only after a check has found a
    /// change, or because of a reload. If `watch` is off, files are read only at a reload by
    /// SIGHUP.
    pub fn look_at_files(&mut self) {
        if !self.config.daemon.watch {
            return;
        }
        for (service, watched) in &mut self.sources.watched {
            let Some(path) = watched.source.file().map(Path::to_owned) else { continue };
            if watched.feed.progress.begin_look() {
                let (service, source) = (service.clone(), watched.source.clone());
                self.effects.push(BackgroundWork::Look { service, source, path }.into());
            }
        }
    }

    /// The directories of all endpoint files and of the configuration file.
    pub fn directories(&self) -> BTreeSet<PathBuf> {
        let files = self.sources.watched.values().filter_map(|watched| watched.source.file());
        files.chain([&*self.config.path]).map(directory_of).collect()
    }

    /// Handles the result of a check of a file.
    pub fn looked(
        &mut self,
        service: &str,
        source: &ListSource,
        result: Result<Option<Stamp>, NoAnswer>,
        now: Instant,
    ) {
        // A reload may have changed the source of the service's endpoints since the check began.
        let Some(file) = self.sources.watched.get_mut(service).filter(|file| file.source == *source) else {
            return;
        };
        match result {
            Ok(stamp) => {
                if file.feed.progress.looked(stamp) {
                    file.feed.progress.changed(now);
                }
            }
            Err(no_answer) => {
                let effect = file.feed.mark_hung(now, no_answer.to_string());
                self.carry_out(service, effect, now);
            }
        }
    }

    /// Starts to read each list that has changed and has then stopped changing.
    pub fn start_reading(&mut self, now: Instant) {
        let clients: Vec<&ClientConfig> =
            self.clients.tasks.iter().map(|client_task| &client_task.client).collect();
        for (service, watched) in &mut self.sources.watched {
            let Some(known) = watched.feed.progress.begin(now) else { continue };
            self.sources.readings += 1;
            let begun = self.sources.readings;
            let seen = known;
            // An unchanged text must be read again if its removals may take effect now, or if its
            // host names have other addresses.
            let known = known.filter(|_| !watched.remote.take_must_read());
            let purpose = ListPurpose {
                consumers: assignments::consumers(clients.iter().copied(), service),
                // With the earlier assignments, an equal list needs no new computation.
                before: watched.feed.newest().map(|contents| contents.assignments.clone()),
                guard: watched.guard(),
                suspension: watched.remote.suspension,
                seen,
                dns: self.config.dns.clone(),
            };
            let (service, source) = (service.clone(), watched.source.clone());
            self.effects.push(BackgroundWork::Read { service, source, begun, known, purpose }.into());
        }
    }

    /// Handles the result of a read of the service's list. `result` is `None` if the version of the
    /// list was already known.
    pub fn read(
        &mut self,
        service: &str,
        begun: u64,
        version: Version<Stamp>,
        mut result: Option<Result<Contents, SourceError>>,
        now: Instant,
    ) {
        let watched = self.note_result(service, version, result.as_mut(), now);
        let result = result.map(|result| result.map_err(SourceError::into_failure));
        let effect = watched.feed.read(now, begun, version, result);
        self.carry_out(service, effect, now);
        self.retake_addresses(now);
        self.resolve_hosts(now);
    }

    /// Stores everything in the result of a read except the list itself. If all lists together have
    /// too many host names, replaces the result by a fault. If a newer read has ended, the caller
    /// must not call this.
    pub fn note_result(
        &mut self,
        service: &str,
        version: Version<Stamp>,
        mut result: Option<&mut Result<Contents, SourceError>>,
        now: Instant,
    ) -> &mut WatchedSource {
        if let Some(result) = &mut result {
            if let Some(fault) = self.host_fault(service, result) {
                **result = Err(fault);
            } else if let Ok(contents) = result {
                contents.table = Arc::default();
            }
        }
        let watched =
            self.sources.watched.get_mut(service).expect("the caller checks that the service has a source");
        if let Some(Ok(contents)) = &result {
            watched.take_notes(service, &contents.notes);
            watched.take_pending(service, contents.pending.clone(), now);
        }
        watched.note_read(version, result.map(|result| result.as_ref().err()), now);
        watched
    }

    /// Executes a decision of the service's feed.
    pub fn carry_out(&mut self, service: &str, effect: Option<FeedAction<Contents>>, now: Instant) {
        match effect {
            None => {}
            Some(FeedAction::Deliver(contents)) => {
                let after = contents.assignments.list();
                let endpoints = after.as_slice().len();
                let before = self.sources.watched.get(service).and_then(|file| file.feed.newest());
                match before.map(|before| list_changes(before.assignments.list(), after)) {
                    Some(changes) => info!(service, endpoints, changes, "endpoint list read"),
                    None => info!(service, endpoints, "endpoint list read"),
                }
                self.deliver(service, contents, now);
            }
            Some(FeedAction::GoodAgain) => {
                let source =
                    self.sources.watched.get(service).map(|watched| watched.source.origin.to_string());
                info!(service, source, "the endpoint list can be used again; it is unchanged");
            }
            Some(FeedAction::Failed(error)) => {
                warn!(service, error, "the endpoint list cannot be used; the present list stays in force");
            }
        }
    }

    /// Delivers a list to every client that uses the service. Once all of them have accepted the
    /// list, it is stored for the next start of the daemon.
    pub fn deliver(&mut self, service: &str, contents: Contents, now: Instant) {
        let mut next = Some(contents);
        // Bound: once this list is in force, at most one other list, which was refused before, is
        // delivered again.
        while let Some(contents) = next.take() {
            let delivered = self.deliver_assignments(service, &contents.assignments, now);
            let file =
                self.sources.watched.get_mut(service).expect("the caller checks that the service has a file");
            match file.feed.delivered(contents, delivered) {
                ListDecision::Compute(contents) => self.compute(service, contents),
                ListDecision::Wait => {}
                ListDecision::InForce { was_refused, refused } => {
                    if was_refused {
                        info!(service, "the endpoint list that was refused is now in force");
                    }
                    let text = file.feed.in_force().map(|contents| std::mem::take(&mut contents.text));
                    // The text is empty if the list is already stored.
                    if let Some(text) = text.filter(|text| !text.is_empty()) {
                        self.sources.files_to_store.add(file.source.last_good.clone(), text);
                    }
                    next = refused;
                }
            }
        }
    }

    /// Delivers a list to every client that uses the service and has an assignment of the list.
    pub fn deliver_assignments(
        &mut self,
        service: &str,
        assignments: &Assignments,
        now: Instant,
    ) -> Delivered {
        let mut delivered = Delivered::default();
        for client_task in &mut self.clients.tasks {
            let Some(position) = client_task.position(service) else { continue };
            // A client that still runs with an earlier configuration may use a list that is part of
            // that configuration.
            match client_task.client.services[position].source {
                EndpointSource::Named(_) | EndpointSource::File(_) | EndpointSource::Remote(_) => {}
                EndpointSource::Static(_) => continue,
            }
            match client_task.deliver(position, assignments, now) {
                Ok(is_known) => delivered.is_incomplete |= !is_known,
                Err(refused) => {
                    warn!(client = %client_task.client.name, service, error = %refused, "endpoint list refused; the earlier list stays in use");
                    delivered.refused_by.insert(client_task.client.name.clone(), refused.to_string());
                }
            }
        }
        delivered
    }

    /// Starts to compute the assignments of a list for the current clients, outside of the event
    /// loop.
    fn compute(&mut self, service: &str, contents: Contents) {
        let clients = self.clients.tasks.iter().map(|client_task| &client_task.client);
        let consumers = assignments::consumers(clients, service);
        self.effects
            .push(BackgroundWork::Compute { service: service.to_owned(), contents, consumers }.into());
    }

    /// Handles the end of a computation that `compute` started. If clients have changed again, the
    /// missing assignments are computed next.
    pub fn computed(&mut self, service: &str, contents: &Contents, now: Instant) {
        let Some(file) = self.sources.watched.get_mut(service) else { return };
        if let Some(contents) = file.feed.computed(contents) {
            self.deliver(service, contents, now);
            self.retake_addresses(now);
            self.settle(now);
        }
    }

    /// Delivers again the lists that did not fit before, now that slots are free.
    pub fn assign_again(&mut self, now: Instant) {
        let has_refused = |client_task: &&mut ClientTask| {
            client_task.services.iter().any(|service| service.refused_static.is_some())
        };
        for client_task in self.clients.tasks.iter_mut().filter(has_refused) {
            if client_task.deliver_static(&self.sources.statics, now).is_ok() {
                info!(client = %client_task.client.name, "the endpoint list that was refused is now in force");
            }
        }
        let files = self.sources.watched.iter();
        let refused = files.filter_map(|(service, file)| Some((service.clone(), file.feed.room_appeared()?)));
        for (service, contents) in refused.collect::<Vec<_>>() {
            self.deliver(&service, contents, now);
        }
    }
}

impl ClientTask {
    /// Applies the static lists of the configuration.
    ///
    /// # Errors
    /// The error of the first list that does not fit. The other lists are applied nevertheless.
    pub fn deliver_static(
        &mut self,
        by_service: &AssignmentsByService,
        now: Instant,
    ) -> Result<(), UnusableList> {
        let mut result = Ok(());
        for position in 0..self.client.services.len() {
            let configured = &self.client.services[position];
            self.services[position].refused_static = None;
            // If the client could not apply the present configuration, it still uses an earlier
            // configuration, and retains the lists in it.
            let assignments = by_service.get(&configured.service.name);
            let is_static = matches!(configured.source, EndpointSource::Static(_));
            let Some(assignments) = assignments.filter(|_| is_static) else { continue };
            if let Err(refused) = self.deliver(position, assignments, now) {
                self.services[position].refused_static = Some(refused.to_string());
                result = result.and(Err(refused));
            }
        }
        result
    }

    /// The position of the service with this name among the client's services.
    pub fn position(&self, service: &str) -> Option<usize> {
        self.client.services.iter().position(|configured| configured.service.name == service)
    }

    /// Applies a new list for the service at this position. Returns `false` if the task's
    /// assignment of the list is not computed yet.
    ///
    /// # Errors
    /// If the list does not fit. The earlier list stays in force.
    pub fn deliver(
        &mut self,
        position: usize,
        assignments: &Assignments,
        now: Instant,
    ) -> Result<bool, UnusableList> {
        let Some(assignment) =
            assignments.assignment(&self.client.services[position].service, self.client.task)
        else {
            return Ok(false);
        };
        let assignment = match &mut self.services[position].size {
            Some(followed) => followed.take(assignment),
            None => assignment,
        };
        if self.balancer.handle(now, Fact::Endpoints(position, assignment))? {
            self.settled = None;
        }
        Ok(true)
    }
}
