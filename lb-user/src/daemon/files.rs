//! Endpoint files: when each is read, and what becomes of the list that it holds.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Instant;

use tracing::{info, warn};

use super::{Daemon, Event};
use crate::config::{Config, Source};
use crate::source::{Contents, FileSource, FirstRead, Progress, SourceError, Stamp, directory_of};

/// A file that endpoints come from, and how it fares.
pub struct Watched {
    pub source: FileSource,
    pub progress: Progress,
    /// What is in force.
    pub contents: Option<Contents>,
    /// A list that was refused for want of room, to be offered again when something gets free.
    refused: Option<Contents>,
    pub good_since: Option<Instant>,
    pub error: Option<String>,
    pub failures: u64,
}

/// The sources of all services that some client uses and that come from files, by service.
pub fn sources(config: &Config) -> BTreeMap<String, FileSource> {
    let mut sources = BTreeMap::new();
    for configured in config.clients.iter().flat_map(|client| &client.services) {
        let Source::File(path) = &configured.source else { continue };
        let name = configured.service.name.clone();
        sources.entry(name).or_insert_with(|| FileSource::new(&configured.service, path.clone(), config));
    }
    sources
}

impl Daemon {
    /// Takes in the first reading of a file, which happens before anything is attached. A file that cannot be used is
    /// replaced by the last good one; without that, whatever the kernel holds stays, and on a first start connects get
    /// the service's errno.
    ///
    /// How the service's file has fared until now stays, if it had one.
    pub fn take_first(
        &mut self,
        service: &str,
        source: FileSource,
        first: FirstRead,
        before: Option<&Watched>,
        now: Instant,
    ) {
        let watched = Watched {
            source,
            progress: Progress::default(),
            contents: None,
            refused: None,
            good_since: before.and_then(|before| before.good_since),
            // Said once per fault, not once per reload.
            error: before.and_then(|before| before.error.clone()),
            failures: before.map_or(0, |before| before.failures),
        };
        self.files.insert(service.to_owned(), watched);
        self.read(service, first.stamp, first.result, now);
        match first.instead {
            None => {}
            Some(Ok(contents)) => {
                warn!(service, "using the last good endpoint list of an earlier run");
                self.deliver(service, contents);
            }
            Some(Err(error)) => {
                warn!(service, error = %crate::chain(&error), "the last good list cannot be used either");
            }
        }
    }

    pub fn files_changed(&mut self, changes: &BTreeSet<PathBuf>, now: Instant) {
        for file in self.files.values_mut() {
            // Whatever changes beside it: the file may be a link to something there.
            let directory = directory_of(&file.source.path);
            if changes.iter().any(|path| *path == directory || path.parent() == Some(&directory)) {
                file.progress.changed(now);
            }
        }
    }

    pub fn look_at_files(&mut self, now: Instant) {
        for file in self.files.values_mut() {
            file.progress.look(&file.source.path, now);
        }
    }

    /// Starts reading every file that has settled.
    pub fn start_reading(&mut self, now: Instant) {
        for (service, file) in &mut self.files {
            let Some(stamp) = file.progress.begin(&file.source.path, now) else { continue };
            let (service, source, events) = (service.clone(), file.source.clone(), self.events.clone());
            tokio::task::spawn_blocking(move || {
                let result = source.read();
                let _ = events.blocking_send(Event::Read { service, source, stamp, result });
            });
        }
    }

    pub fn read(
        &mut self,
        service: &str,
        stamp: Option<Stamp>,
        result: Result<Contents, SourceError>,
        now: Instant,
    ) {
        let file = self.files.get_mut(service).expect("it was read for its file");
        file.progress.done(stamp);
        match result {
            Ok(contents) => {
                let was_bad = file.error.take().is_some();
                file.good_since = Some(now);
                if file.contents.as_ref().map(|before| &before.list) != Some(&contents.list) {
                    info!(service, endpoints = contents.list.as_slice().len(), "endpoint list read");
                    self.deliver(service, contents);
                } else if was_bad {
                    info!(service, path = %file.source.path.display(), "endpoint file is good again");
                }
            }
            Err(error) => {
                let error = crate::chain(&error);
                // Said once per version of the file, not once per look.
                if file.error.as_ref() != Some(&error) {
                    warn!(service, %error, "endpoint file cannot be used; what was in force stays");
                }
                file.failures += 1;
                file.error = Some(error);
            }
        }
    }

    /// Gives a list to every client that uses the service. It is kept for later starts once all of them took it.
    pub fn deliver(&mut self, service: &str, contents: Contents) {
        let mut refusal = None;
        for agent in &mut self.agents {
            let mut services = agent.client.services.iter();
            let Some(position) = services.position(|configured| configured.service.name == service) else {
                continue;
            };
            if let Err(refused) = agent.deliver(position, contents.list.clone()) {
                warn!(client = %agent.client.name, service, error = %refused, "endpoint list refused");
                refusal = Some(format!("client {}: {refused}", agent.client.name));
            }
        }
        let file = self.files.get_mut(service).expect("delivered from its file");
        match refusal {
            None => {
                if let Err(error) = file.source.keep(&contents) {
                    let path = file.source.last_good.display();
                    warn!(%path, %error, "cannot keep the last good endpoint list");
                }
                file.contents = Some(contents);
                file.refused = None;
            }
            Some(refusal) => {
                file.error = Some(refusal);
                file.failures += 1;
                file.refused = Some(contents);
            }
        }
    }

    /// Offers lists again that found no room, now that there is some.
    pub fn offer_again(&mut self) {
        let refused: Vec<(String, Contents)> = self
            .files
            .iter_mut()
            .filter_map(|(service, file)| file.refused.take().map(|contents| (service.clone(), contents)))
            .collect();
        for (service, contents) in refused {
            self.deliver(&service, contents);
            let file = self.files.get_mut(&service).expect("one of its keys");
            if file.refused.is_none() {
                file.error = None;
                info!(service, "endpoint list that was refused is in force");
            }
        }
    }
}
