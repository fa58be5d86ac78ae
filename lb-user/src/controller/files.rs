//! Endpoint files: when each file is checked and read, and how the decisions of the feed are
//! carried out.
//!
//! [`Feed`] decides the order. A list is read, and its assignments are computed, beside the event
//! loop; the loop applies both together (`delivery`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use lb_core::feed::{Effect as FeedEffect, Feed, Version};
use tracing::{info, warn};

use super::changes::list_changes;
use super::state_files::FilesToStore;
use super::{BackgroundWork, Controller};
use crate::assignments::{self, Assignments, AssignmentsByService, Consumer};
use crate::config::{ClientConfig, Config, EndpointSource};
use crate::source::{Contents, FileSource, NoAnswer, SourceError, Stamp, directory_of};

/// Where the endpoints of all services come from.
#[derive(Default)]
pub struct Sources {
    /// The lists in the configuration itself, by service name.
    pub statics: AssignmentsByService,
    /// The endpoint files, by service name.
    pub files: BTreeMap<String, WatchedFile>,
    /// The number of reads of files that have begun.
    pub readings: u64,
    /// Lists and other files that are stored for later starts.
    pub files_to_store: FilesToStore,
}

/// What is needed to compute the assignments of a list.
#[derive(Clone)]
pub struct ListPurpose {
    /// The client tasks that use the list.
    pub consumers: Vec<Consumer>,
    /// The earlier assignments; parts of them may still be valid.
    pub before: Option<Assignments>,
}

/// The result of the first read of a file.
pub struct FirstRead {
    /// The version that was read.
    pub version: Version<Stamp>,
    /// The content of the file.
    pub result: Result<Contents, SourceError>,
    /// The last good list that an earlier daemon stored, if the file cannot be used and there is
    /// one.
    pub instead: Option<Result<Contents, SourceError>>,
}

/// A file that a configuration names, and the result of its first read.
pub struct Reading {
    pub service: String,
    pub source: FileSource,
    pub first: FirstRead,
    /// The assignments that were in force when the read began, with those for the tasks of the new
    /// configuration added. `None` if the file can be used.
    pub in_force: Option<Assignments>,
}

/// The endpoint file of a service, and the state of its list.
pub struct WatchedFile {
    pub source: FileSource,
    pub feed: Feed<Stamp, Contents>,
    /// The notes of the last valid read: ignored parts of the file, with reasons.
    pub notes: Arc<[String]>,
}

impl WatchedFile {
    /// Stores the notes of a read, and logs the new ones.
    fn take_notes(&mut self, service: &str, notes: &Arc<[String]>) {
        let before = std::mem::replace(&mut self.notes, Arc::clone(notes));
        for note in notes.iter().filter(|note| !before.contains(note)) {
            info!(service, file = %self.source.file.path.display(), "{note}");
        }
    }

    /// Reuses results of these assignments, if their list is equal.
    pub fn take_over(&mut self, assignments: &Assignments) {
        for contents in self.feed.lists() {
            contents.assignments.take_over(assignments);
        }
    }
}

/// The endpoint files of all services that any client uses, by service name. Services with a list
/// in the configuration have no file.
pub fn sources(config: &Config) -> BTreeMap<String, FileSource> {
    let mut sources = BTreeMap::new();
    for configured in config.clients.iter().flat_map(|client| &client.services) {
        let file = match &configured.source {
            EndpointSource::File(file) => file,
            EndpointSource::Static(_) => continue,
        };
        let name = configured.service.name.clone();
        sources.entry(name).or_insert_with(|| {
            FileSource::new(&configured.service, file.clone(), &config.addresses, &config.paths.state)
        });
    }
    sources
}

impl Controller {
    /// Applies the first read of a file that a configuration names, with complete assignments. At a
    /// start this happens before anything is attached. If the file cannot be used, the list in
    /// force stays. If no list is in force, the stored last good list is used. If there is no
    /// stored list either, the kernel's state stays; if the kernel has none, because this is the
    /// first start, connects fail with the service's errno.
    ///
    /// If the service had a file before, that file's failures and times are retained.
    pub fn take_reloaded(&mut self, reading: Reading, begun: u64, before: Option<WatchedFile>, now: Instant) {
        let Reading { service, source, first: FirstRead { version, result, instead }, in_force } = reading;
        let before = before.filter(|before| before.source.service == source.service);
        let is_same_file = before.as_ref().is_some_and(|before| before.source == source);
        let result = result.map_err(SourceError::into_failure);
        let (before, notes) = before.map(|before| (before.feed, before.notes)).unzip();
        let read = result.as_ref().ok().map(|contents| Arc::clone(&contents.notes));
        let (feed, reloaded) = Feed::reload(before, is_same_file, now, begun, version, result);
        let mut file = WatchedFile { source, feed, notes: notes.unwrap_or_default() };
        if let Some(notes) = &read {
            file.take_notes(&service, notes);
        }
        self.sources.files.insert(service.clone(), file);
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
                    "the endpoint file cannot be used; using the last good list that an earlier run stored"
                );
                self.deliver(&service, contents, now);
            }
            Some(Err(error)) => {
                warn!(service, error = %crate::error::chain(&error), "the stored last good list cannot be used either");
            }
        }
    }

    pub fn files_changed(&mut self, changes: &BTreeSet<PathBuf>, now: Instant) {
        for file in self.sources.files.values_mut() {
            // Any change in the directory counts, because the file may be a link to another file in
            // this directory.
            let directory = directory_of(&file.source.file.path);
            if changes.iter().any(|path| *path == directory || path.parent() == Some(&directory)) {
                file.feed.progress.changed(now);
            }
        }
    }

    /// Requests a check of each file and a watch on its directory. Both run beside the loop,
    /// because the file system may not answer. A file is read only after a check has found a
    /// change, or because of a reload. If `watch` is off, files are read only at SIGHUP.
    pub fn look_at_files(&mut self) {
        if !self.config.daemon.watch {
            return;
        }
        for (service, file) in &mut self.sources.files {
            if file.feed.progress.begin_look() {
                self.effects.push(
                    BackgroundWork::Look { service: service.clone(), source: file.source.clone() }.into(),
                );
            }
        }
    }

    /// The directories of all endpoint files and of the configuration file.
    pub fn directories(&self) -> BTreeSet<PathBuf> {
        let files = self.sources.files.values().map(|file| &file.source.file.path);
        files.chain([&self.config.path]).map(|path| directory_of(path)).collect()
    }

    /// Handles the end of a check of a file.
    pub fn looked(
        &mut self,
        service: &str,
        source: &FileSource,
        result: Result<Option<Stamp>, NoAnswer>,
        now: Instant,
    ) {
        // A reload may have changed the source of the service's endpoints in the meantime.
        let Some(file) = self.sources.files.get_mut(service).filter(|file| file.source == *source) else {
            return;
        };
        match result {
            Ok(stamp) => {
                if file.feed.progress.looked(stamp) {
                    file.feed.progress.changed(now);
                }
            }
            Err(no_answer) => {
                let effect = file.feed.mark_hung(no_answer.to_string());
                self.carry_out(service, effect, now);
            }
        }
    }

    /// Starts to read each file that has changed and has then stopped changing.
    pub fn start_reading(&mut self, now: Instant) {
        let clients: Vec<&ClientConfig> =
            self.clients.tasks.iter().map(|client_task| &client_task.client).collect();
        for (service, file) in &mut self.sources.files {
            let Some(known) = file.feed.progress.begin(now) else { continue };
            self.sources.readings += 1;
            let begun = self.sources.readings;
            let consumers = assignments::consumers(clients.iter().copied(), service);
            // The earlier assignments are passed so that an equal list costs nothing.
            let purpose = ListPurpose {
                consumers,
                before: file.feed.newest().map(|contents| contents.assignments.clone()),
            };
            let (service, source) = (service.clone(), file.source.clone());
            self.effects.push(BackgroundWork::Read { service, source, begun, known, purpose }.into());
        }
    }

    /// Handles the end of a read. `result` is `None` if the file is still the known version.
    pub fn read(
        &mut self,
        service: &str,
        begun: u64,
        version: Version<Stamp>,
        result: Option<Result<Contents, SourceError>>,
        now: Instant,
    ) {
        let file =
            self.sources.files.get_mut(service).expect("the caller checks that the service has a file");
        if let Some(Ok(contents)) = &result {
            file.take_notes(service, &contents.notes);
        }
        let result = result.map(|result| result.map_err(SourceError::into_failure));
        let effect = file.feed.read(now, begun, version, result);
        self.carry_out(service, effect, now);
    }

    fn carry_out(&mut self, service: &str, effect: Option<FeedEffect<Contents>>, now: Instant) {
        match effect {
            None => {}
            Some(FeedEffect::Deliver(contents)) => {
                let after = contents.assignments.list();
                let endpoints = after.as_slice().len();
                let before = self.sources.files.get(service).and_then(|file| file.feed.newest());
                match before.map(|before| list_changes(before.assignments.list(), after)) {
                    Some(changes) => info!(service, endpoints, changes, "endpoint list read"),
                    None => info!(service, endpoints, "endpoint list read"),
                }
                self.deliver(service, contents, now);
            }
            Some(FeedEffect::GoodAgain) => {
                let path =
                    self.sources.files.get(service).map(|file| file.source.file.path.display().to_string());
                info!(service, path, "the endpoint file can be used again; its list is unchanged");
            }
            Some(FeedEffect::Failed(error)) => {
                warn!(service, error, "the endpoint file cannot be used; the present list stays in force");
            }
        }
    }
}

/// Completes assignments for these client tasks, reusing results of the earlier assignments if
/// their list is equal.
pub fn complete(assignments: &mut Assignments, consumers: &[Consumer], before: Option<&Assignments>) {
    if let Some(before) = before {
        assignments.follow(before);
    }
    assignments.complete(consumers);
}
