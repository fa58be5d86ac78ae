//! Endpoint files: when each is checked and read, and how the controller carries out the feed's
//! decisions.
//!
//! [`Feed`] decides what happens in which order. Reading a list, and computing what each client
//! task uses of it, happen beside the loop; the loop applies both results together (`delivery`).

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
    /// Lists that the configuration holds.
    pub statics: AssignmentsByService,
    /// By service name.
    pub files: BTreeMap<String, WatchedFile>,
    /// How many readings of files have begun.
    pub readings: u64,
    /// Lists and other files that are stored for later starts.
    pub files_to_store: FilesToStore,
}

/// What a list is completed for, and with.
#[derive(Clone)]
pub struct ListPurpose {
    /// The tasks that use it.
    pub consumers: Vec<Consumer>,
    /// The assignments before; much of them may still hold.
    pub before: Option<Assignments>,
}

/// The result of reading a file for the first time.
pub struct FirstRead {
    /// The version that was read.
    pub version: Version<Stamp>,
    /// The content of the file itself.
    pub result: Result<Contents, SourceError>,
    /// The last good list of an earlier run, if the file cannot be used and there is one.
    pub instead: Option<Result<Contents, SourceError>>,
}

/// A file that a configuration names, as it was read.
pub struct Reading {
    pub service: String,
    pub source: FileSource,
    pub first: FirstRead,
    /// The assignments in force when the reading began, completed for the tasks of the new
    /// configuration; only if the file cannot be used.
    pub in_force: Option<Assignments>,
}

/// A file with the endpoints of a service, and the state of its list.
pub struct WatchedFile {
    pub source: FileSource,
    pub feed: Feed<Stamp, Contents>,
    /// What is ignored in the file, and why, as of the last valid reading.
    pub notes: Arc<[String]>,
}

impl WatchedFile {
    /// Stores the notes of a reading, and logs the new ones.
    fn take_notes(&mut self, service: &str, notes: &Arc<[String]>) {
        let before = std::mem::replace(&mut self.notes, Arc::clone(notes));
        for note in notes.iter().filter(|note| !before.contains(note)) {
            info!(service, file = %self.source.file.path.display(), "{note}");
        }
    }

    /// Takes over what is already computed in the assignments of an equal list.
    pub fn take_over(&mut self, assignments: &Assignments) {
        for contents in self.feed.lists() {
            contents.assignments.take_over(assignments);
        }
    }
}

/// The files of all services that any client uses, by service; services with a list in the
/// configuration have none.
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
    /// Applies the reading of a file that a configuration names, with its assignments complete; at
    /// a start, before anything is attached. If the file cannot be used, the list in force stays,
    /// or the last good list replaces it. If there is neither, the state of the kernel stays; on a
    /// first start connects then get the service's errno.
    ///
    /// If the service had a file before, the failures and times of that file are retained.
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
        if let Some(mut contents) = reloaded.kept {
            if let Some(computed) = &in_force {
                contents.assignments.take_over(computed);
                // Another list may have arrived while the configuration was read. New clients begin
                // with the one before, rather than with none.
                self.deliver_assignments(&service, computed, now);
            }
            self.deliver(&service, contents, now);
        }
        match instead.filter(|_| reloaded.wants_last_good) {
            None => {}
            Some(Ok(contents)) => {
                warn!(service, "using the last good endpoint list of an earlier run");
                self.deliver(&service, contents, now);
            }
            Some(Err(error)) => {
                warn!(service, error = %crate::error::chain(&error), "the last good list cannot be used either");
            }
        }
    }

    pub fn files_changed(&mut self, changes: &BTreeSet<PathBuf>, now: Instant) {
        for file in self.sources.files.values_mut() {
            // Any change in the directory counts, because the file may be a link to another name
            // there.
            let directory = directory_of(&file.source.file.path);
            if changes.iter().any(|path| *path == directory || path.parent() == Some(&directory)) {
                file.feed.progress.changed(now);
            }
        }
    }

    /// Requests a check of every file and a watch on its directory, beside the loop, because either
    /// may not answer. A file is read only after a check or a reload has found a change, so files
    /// that are not watched are read only at SIGHUP.
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

    /// A check of a file has ended.
    pub fn looked(
        &mut self,
        service: &str,
        source: &FileSource,
        result: Result<Option<Stamp>, NoAnswer>,
        now: Instant,
    ) {
        // A reload may have changed where the service's endpoints come from.
        let Some(file) = self.sources.files.get_mut(service).filter(|file| file.source == *source) else {
            return;
        };
        match result {
            Ok(stamp) => {
                if file.feed.progress.looked(stamp) {
                    file.feed.progress.changed(now);
                }
            }
            Err(silent) => {
                let effect = file.feed.fell_silent(silent.to_string());
                self.carry_out(service, effect, now);
            }
        }
    }

    /// Starts reading every file that has settled.
    pub fn start_reading(&mut self, now: Instant) {
        let clients: Vec<&ClientConfig> =
            self.clients.tasks.iter().map(|client_task| &client_task.client).collect();
        for (service, file) in &mut self.sources.files {
            let Some(known) = file.feed.progress.begin(now) else { continue };
            self.sources.readings += 1;
            let begun = self.sources.readings;
            let consumers = assignments::consumers(clients.iter().copied(), service);
            // With the assignments before, so that an equal list costs nothing.
            let purpose = ListPurpose {
                consumers,
                before: file.feed.newest().map(|contents| contents.assignments.clone()),
            };
            let (service, source) = (service.clone(), file.source.clone());
            self.effects.push(BackgroundWork::Read { service, source, begun, known, purpose }.into());
        }
    }

    /// A reading has ended; `result` is `None` if the file still has the known version.
    pub fn read(
        &mut self,
        service: &str,
        begun: u64,
        version: Version<Stamp>,
        result: Option<Result<Contents, SourceError>>,
        now: Instant,
    ) {
        let file = self.sources.files.get_mut(service).expect("it was read for its file");
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
                info!(service, path, "endpoint file is good again");
            }
            Some(FeedEffect::Failed(error)) => {
                warn!(service, error, "endpoint file cannot be used; what was in force stays");
            }
        }
    }
}

/// Completes assignments, reusing what is computed in those of an equal list.
pub fn complete(assignments: &mut Assignments, consumers: &[Consumer], before: Option<&Assignments>) {
    if let Some(before) = before {
        assignments.follow(before);
    }
    assignments.complete(consumers);
}
