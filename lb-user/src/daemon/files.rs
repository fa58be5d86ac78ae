//! Endpoint files: when each is read, and what becomes of the list that it holds.
//!
//! A list is read, and what each client task uses of it computed, beside the loop; the loop takes both in together. If
//! clients have changed meanwhile, what they miss is computed in another turn, and until then they keep what they have.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Instant;

use tracing::{info, warn};

use super::file_io::{FileIo, NoAnswer, PATIENCE};
use super::keeping::Keeping;
use super::lists::{FirstRead, ListReader, Purpose};
use super::{Daemon, Event};
use crate::assignments::{self, Assignments, AssignmentsByService, Consumer};
use crate::config::{Client, Config, Source};
use crate::source::watch::Watcher;
use crate::source::{Contents, FileSource, Progress, SourceError, Stamp, directory_of};

/// Where the endpoints of all services come from.
pub struct Sources {
    /// Lists that the configuration holds.
    pub statics: AssignmentsByService,
    /// By service name.
    pub files: BTreeMap<String, WatchedFile>,
    /// How many readings of files were begun.
    pub readings: u64,
    /// What files are read with.
    pub lists: ListReader,
    /// Lists that are kept for later starts.
    pub keeping: Keeping,
}

impl Sources {
    /// None yet.
    pub fn new() -> Self {
        Self {
            statics: AssignmentsByService::new(),
            files: BTreeMap::new(),
            readings: 0,
            lists: ListReader::new(FileIo::new()),
            keeping: Keeping::default(),
        }
    }
}

/// A file that endpoints come from, and how it fares.
pub struct WatchedFile {
    pub source: FileSource,
    pub progress: Progress,
    /// The number of the last reading that was taken in. One that was begun before it says what the file said earlier: what
    /// tasks use of a list may take long to compute, and a reload reads all files for itself.
    reading: u64,
    /// What is in force.
    contents: Option<Contents>,
    /// What the file said last, if that is not in force.
    newer: Option<Newer>,
    pub good_since: Option<Instant>,
    /// Why what it says is not in force everywhere; [`WatchedFile::error_of`] tells it to a client.
    pub error: Option<String>,
    /// If that is because clients have no room for it: which, and what each of them lacks. Others took it.
    refused_by: BTreeMap<String, String>,
    pub failures: u64,
    /// Whether its file system does not answer. Once it does, the file is read whatever its version.
    is_silent: bool,
}

/// What a look at a file has found: the version of what lies there, and why its directory cannot be watched, if so.
pub struct Look {
    pub stamp: Option<Stamp>,
    pub unwatched: Option<String>,
}

/// A list that is not in force everywhere.
enum Newer {
    /// It was refused for want of room, and is offered again when something gets free.
    Refused(Contents),
    /// What some client task uses of it is being computed. The flag tells whether it was refused before.
    Computing(Contents, bool),
}

impl WatchedFile {
    /// Why what the file says is not in force at a client, if it is not.
    pub fn error_of(&self, client: &str) -> Option<String> {
        if self.refused_by.is_empty() { self.error.clone() } else { self.refused_by.get(client).cloned() }
    }

    /// The newest list that is in force, or will be once it is computed.
    pub fn newest(&self) -> Option<&Contents> {
        match &self.newer {
            Some(Newer::Computing(contents, _)) => Some(contents),
            Some(Newer::Refused(_)) | None => self.contents.as_ref(),
        }
    }

    /// Whether a reading was taken in that was begun after this one.
    pub fn was_read_after(&self, begun: u64) -> bool {
        self.reading > begun
    }

    /// What was read is of no configuration: it stays, and its list is delivered anew.
    pub fn carried_over(self) -> Self {
        Self { contents: None, newer: None, ..self }
    }

    /// Its file system does not answer. Said once.
    fn fell_silent(&mut self, service: &str, silent: &NoAnswer) {
        self.progress.found_nothing();
        if !std::mem::replace(&mut self.is_silent, true) {
            warn!(service, error = %silent, "endpoint file cannot be used; what was in force stays");
            self.failures += 1;
            self.error = Some(silent.to_string());
            self.refused_by.clear();
        }
    }

    /// Takes over what assignments of an equal list know.
    pub fn take_over(&mut self, assignments: &Assignments) {
        let newer = self.newer.as_mut().map(|newer| match newer {
            Newer::Refused(contents) | Newer::Computing(contents, _) => contents,
        });
        for contents in self.contents.iter_mut().chain(newer) {
            contents.assignments.take_over(assignments);
        }
    }
}

impl Look {
    /// Looks at a file and watches its directory. May take as long as its file system likes.
    pub fn at(path: &Path, watcher: Option<&Watcher>) -> Self {
        // Watched first: what changes from here on is an event of its own.
        let watched = watcher.map_or(Ok(()), |watcher| watcher.add(&directory_of(path)));
        Self { stamp: Stamp::at(path), unwatched: watched.err().map(|error| error.to_string()) }
    }
}

/// The sources of all services that some client uses and that come from files, by service.
pub fn sources(config: &Config) -> BTreeMap<String, FileSource> {
    let mut sources = BTreeMap::new();
    for configured in config.clients.iter().flat_map(|client| &client.services) {
        let Source::File(path) = &configured.source else { continue };
        let name = configured.service.name.clone();
        sources.entry(name).or_insert_with(|| {
            FileSource::new(&configured.service, path.clone(), &config.addresses, &config.paths.state)
        });
    }
    sources
}

impl Daemon {
    /// Takes in the first reading of a file, completed, which happens before anything is attached. A file that cannot be used is
    /// replaced by the last good one; without that, whatever the kernel holds stays, and on a first start connects get
    /// the service's errno.
    ///
    /// How the service's file has fared until now stays, if it had one.
    pub fn take_first(
        &mut self,
        service: &str,
        source: FileSource,
        begun: u64,
        first: FirstRead,
        before: Option<&WatchedFile>,
        now: Instant,
    ) {
        // A version that cannot be used is one failure, however often the configuration is read.
        let known = before.filter(|before| before.source == source).map(|before| before.progress);
        let watched = WatchedFile {
            source,
            progress: known.unwrap_or_default(),
            reading: 0,
            contents: None,
            newer: None,
            good_since: before.and_then(|before| before.good_since),
            // Said once per fault, not once per reload.
            error: before.and_then(|before| before.error.clone()),
            refused_by: before.map(|before| before.refused_by.clone()).unwrap_or_default(),
            failures: before.map_or(0, |before| before.failures),
            is_silent: false,
        };
        self.sources.files.insert(service.to_owned(), watched);
        self.read(service, begun, first.stamp, Some(first.result), now);
        match first.instead {
            None => {}
            Some(Ok(contents)) => {
                warn!(service, "using the last good endpoint list of an earlier run");
                self.deliver(service, contents, now);
            }
            Some(Err(error)) => {
                warn!(service, error = %crate::error::chain(&error), "the last good list cannot be used either");
            }
        }
    }

    pub fn files_changed(&mut self, changes: &BTreeSet<PathBuf>, now: Instant) {
        for file in self.sources.files.values_mut() {
            // Whatever changes beside it: the file may be a link to something there.
            let directory = directory_of(&file.source.path);
            if changes.iter().any(|path| *path == directory || path.parent() == Some(&directory)) {
                file.progress.changed(now);
            }
        }
    }

    /// Looks at every file, and watches its directory: beside the loop, for either may not answer.
    pub fn look_at_files(&mut self) {
        for (service, file) in &mut self.sources.files {
            if !file.progress.begin_look() {
                continue;
            }
            let (service, source, events) = (service.clone(), file.source.clone(), self.events.clone());
            let (io, watcher) = (self.sources.lists.io.clone(), self.watching.watch.watcher());
            tokio::spawn(async move {
                let path = source.path.clone();
                let look = move || Look::at(&path, watcher.as_ref());
                let result = io.run(&source.path, PATIENCE, look).await;
                let _ = events.send(Event::Looked { service, source, result }).await;
            });
        }
    }

    /// A look at a file has ended.
    pub fn looked(
        &mut self,
        service: &str,
        source: &FileSource,
        result: Result<Look, NoAnswer>,
        now: Instant,
    ) {
        // A reload may have changed where the service's endpoints come from.
        let Some(file) = self.sources.files.get_mut(service).filter(|file| file.source == *source) else {
            return;
        };
        match result {
            Ok(look) => {
                file.is_silent = false;
                if file.progress.looked(look.stamp) {
                    file.progress.changed(now);
                }
                self.tell_unwatched(&directory_of(&source.path), look.unwatched);
            }
            Err(silent) => file.fell_silent(service, &silent),
        }
    }

    /// Starts reading every file that has settled.
    pub fn start_reading(&mut self, now: Instant) {
        let clients: Vec<&Client> =
            self.clients.tasks.iter().map(|client_task| &client_task.client).collect();
        for (service, file) in &mut self.sources.files {
            let Some(known) = file.progress.begin(now) else { continue };
            self.sources.readings += 1;
            let begun = self.sources.readings;
            let (service, source, events) = (service.clone(), file.source.clone(), self.events.clone());
            let consumers = assignments::consumers(clients.iter().copied(), &service);
            // A file that says the same again costs nothing.
            let purpose =
                Purpose { consumers, before: file.newest().map(|contents| contents.assignments.clone()) };
            let lists = self.sources.lists.clone();
            tokio::spawn(async move {
                let (stamp, result) = lists.read(&source, known, purpose).await;
                let _ = events.send(Event::Read { service, source, begun, stamp, result }).await;
            });
        }
    }

    /// A reading has ended; without a result the file was as it is known.
    pub fn read(
        &mut self,
        service: &str,
        begun: u64,
        stamp: Option<Stamp>,
        result: Option<Result<Contents, SourceError>>,
        now: Instant,
    ) {
        let file = self.sources.files.get_mut(service).expect("it was read for its file");
        if begun < file.reading {
            return;
        }
        file.reading = begun;
        let is_another = file.progress.done(stamp);
        match result {
            None => {}
            Some(Ok(contents)) => {
                let was_bad = file.error.take().is_some();
                file.refused_by.clear();
                file.good_since = Some(now);
                let in_force = file.contents.as_ref().map(|before| before.assignments.list());
                // What is in force may be what the file has gone back to.
                if file.newer.is_some() || in_force != Some(contents.assignments.list()) {
                    info!(
                        service,
                        endpoints = contents.assignments.list().as_slice().len(),
                        "endpoint list read"
                    );
                    self.deliver(service, contents, now);
                } else if was_bad {
                    info!(service, path = %file.source.path.display(), "endpoint file is good again");
                }
            }
            Some(Err(SourceError::NoAnswer(silent))) => file.fell_silent(service, &silent),
            Some(Err(error)) => {
                let may_pass = error.may_pass();
                let error = crate::error::chain(&error);
                let is_new = file.error.as_ref() != Some(&error);
                // Said once per version of the file, not once per look.
                if is_new {
                    warn!(service, %error, "endpoint file cannot be used; what was in force stays");
                }
                if may_pass {
                    file.progress.found_nothing();
                }
                // One fault, however often it is tried again, or a version read that had only just been written.
                file.failures += u64::from(is_new || is_another && !may_pass);
                file.error = Some(error);
                file.refused_by.clear();
            }
        }
    }

    /// Gives a list to every client that uses the service. It is kept for later starts once all of them took it.
    pub fn deliver(&mut self, service: &str, mut contents: Contents, now: Instant) {
        let Delivered { is_complete, refused_by } =
            self.deliver_assignments(service, &contents.assignments, now);
        if !is_complete {
            self.compute(service, contents.assignments.clone());
        }
        let file = self.sources.files.get_mut(service).expect("delivered from its file");
        match refused_by.first_key_value() {
            // Whether it is in force is decided when it comes back.
            _ if !is_complete => {
                let was_refused = matches!(file.newer, Some(Newer::Refused(_) | Newer::Computing(_, true)));
                file.newer = Some(Newer::Computing(contents, was_refused));
            }
            None => {
                let (path, text) = (file.source.last_good.clone(), std::mem::take(&mut contents.text));
                file.contents = Some(contents);
                file.newer = None;
                // Nothing is left of it if it was kept before.
                if !text.is_empty() {
                    self.sources.keeping.add(path, text);
                }
            }
            Some((client, refused)) => {
                file.error = Some(format!("client {client}: {refused}"));
                file.refused_by = refused_by;
                file.failures += 1;
                file.newer = Some(Newer::Refused(contents));
            }
        }
    }

    /// Gives a list to every client that uses the service and whose part of it is known.
    pub fn deliver_assignments(
        &mut self,
        service: &str,
        assignments: &Assignments,
        now: Instant,
    ) -> Delivered {
        let mut delivered = Delivered { is_complete: true, refused_by: BTreeMap::new() };
        for client_task in &mut self.clients.tasks {
            let Some(position) = client_task.position(service) else { continue };
            // One that keeps an earlier configuration may have the list in it.
            if !matches!(client_task.client.services[position].source, Source::File(_)) {
                continue;
            }
            match client_task.deliver(position, assignments, now) {
                Ok(taken) => delivered.is_complete &= taken,
                Err(refused) => {
                    warn!(client = %client_task.client.name, service, error = %refused, "endpoint list refused");
                    delivered.refused_by.insert(client_task.client.name.clone(), refused.to_string());
                }
            }
        }
        delivered
    }

    /// Computes beside the loop what the clients that there are now use of a list.
    fn compute(&self, service: &str, mut assignments: Assignments) {
        let consumers =
            assignments::consumers(self.clients.tasks.iter().map(|client_task| &client_task.client), service);
        let (service, events) = (service.to_owned(), self.events.clone());
        tokio::task::spawn_blocking(move || {
            assignments.complete(&consumers);
            let _ = events.blocking_send(Event::Computed { service, assignments });
        });
    }

    /// What was computed has come back. It counts if it is of the reading that waits for it: another list may have come
    /// since. Clients that have changed again make another turn.
    pub fn computed(&mut self, service: &str, assignments: &Assignments, now: Instant) {
        let Some(file) = self.sources.files.get_mut(service) else { return };
        if let Some(Newer::Computing(contents, was_refused)) = &file.newer
            && contents.assignments.is_of_the_same_reading(assignments)
        {
            let (mut contents, was_refused) = (contents.clone(), *was_refused);
            contents.assignments.take_over(assignments);
            self.deliver(service, contents, now);
            if was_refused {
                self.end_of_refusal(service);
            }
            self.settle(now);
        }
    }

    /// Delivers lists again that found no room, now that there is some.
    pub fn assign_again(&mut self, now: Instant) {
        for client_task in
            self.clients.tasks.iter_mut().filter(|client_task| !client_task.refused_static().is_empty())
        {
            if client_task.deliver_static(&self.sources.statics, now).is_ok() {
                info!(client = %client_task.client.name, "endpoint list that was refused is in force");
            }
        }
        let refused = self.sources.files.iter().filter_map(|(service, file)| match &file.newer {
            Some(Newer::Refused(contents)) => Some((service.clone(), contents.clone())),
            Some(Newer::Computing(..)) | None => None,
        });
        for (service, contents) in refused.collect::<Vec<_>>() {
            self.deliver(&service, contents, now);
            self.end_of_refusal(&service);
        }
    }

    /// Says so if a list that was refused is in force now.
    fn end_of_refusal(&mut self, service: &str) {
        if let Some(file) = self.sources.files.get_mut(service)
            && file.newer.is_none()
        {
            file.error = None;
            file.refused_by.clear();
            info!(service, "endpoint list that was refused is in force");
        }
    }
}

/// What became of a list that was given to clients.
pub struct Delivered {
    /// Whether everybody's part was known.
    pub is_complete: bool,
    /// Which clients did not take it, and why not.
    refused_by: BTreeMap<String, String>,
}

/// Completes assignments, with what earlier ones of an equal list know already.
pub fn complete(assignments: &mut Assignments, consumers: &[Consumer], before: Option<&Assignments>) {
    if let Some(before) = before {
        assignments.follow(before);
    }
    assignments.complete(consumers);
}
