//! Reads endpoint lists outside of the event loop, from files and from the answers of servers. A
//! file that does not answer delays no other file. At most `TEXTS` texts of files are in memory at
//! the same time.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lb_config::discovery::DnsSettings;
use lb_core::feed::Version;
use lb_discovery::{Finding, HostTable, Latest};
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

use super::file_io::{FileIo, PATIENCE};
use super::files::Files;
use super::remotes::{Servers, first};
use crate::controller::{FirstRead, ListPurpose, WorkResult};
use crate::source::{Contents, Guard, ListSource, MAX_BYTES, NO_VERSION, NoAnswer, SourceError, Stamp};

/// The maximum number of texts that are in memory for parsing at the same time. Each text has up to
/// 4 MiB.
const TEXTS: usize = 4;

/// Cheap to clone.
#[derive(Clone)]
pub struct ListReader {
    /// The threads that read the files.
    pub io: FileIo,
    pub files: Arc<dyn Files>,
    pub servers: Arc<dyn Servers>,
    texts: Arc<Semaphore>,
    /// Only one text is parsed at a time, because the result may need more memory than the text.
    parsing: Arc<Mutex<()>>,
}

impl ListReader {
    pub fn new(files: Arc<dyn Files>, servers: Arc<dyn Servers>) -> Self {
        let texts = Arc::new(Semaphore::new(TEXTS));
        Self { io: FileIo::new(), files, servers, texts, parsing: Arc::default() }
    }

    /// Reads the list and computes its missing assignments, unless the version of the list is still
    /// `known`.
    pub async fn read(
        &self,
        service: String,
        source: ListSource,
        begun: u64,
        known: Option<Option<Stamp>>,
        mut purpose: ListPurpose,
    ) -> WorkResult {
        let (version, result) = match source.file() {
            Some(path) => match self.version(path, PATIENCE).await {
                Ok(version) if known == Some(version.stamp) => (version, None),
                Ok(version) => {
                    purpose.guard.take_if(|_| purpose.seen != Some(version.stamp));
                    (version, Some(self.list(&source, path, purpose, PATIENCE).await))
                }
                Err(no_answer) => (NO_VERSION, Some(Err(no_answer.into()))),
            },
            None => {
                let latest = source.wanted().map(|wanted| self.servers.query(wanted).borrow().clone());
                let latest = latest.unwrap_or_default();
                match answer_version(&latest) {
                    version if known == Some(version.stamp) => (version, None),
                    version => (version, Some(self.answer(&source, latest, purpose, PATIENCE).await)),
                }
            }
        };
        WorkResult::Read { service, source, begun, version, result }
    }

    /// Reads the list for a start or a reload. If the list cannot be used and `wants_last_good` is
    /// set, reads the stored last good list instead, if it exists. Waits at most `patience` for
    /// each of the two lists.
    pub async fn read_first(
        &self,
        source: &ListSource,
        mut purpose: ListPurpose,
        wants_last_good: bool,
        patience: Duration,
    ) -> FirstRead {
        // At a start, the new list is compared with the stored list of an earlier daemon, so that a
        // removal of most endpoints is deferred.
        let is_compared = wants_last_good && source.rules().is_none_or(|rules| rules.limits_shrink);
        let (version, mut result) = match source.file() {
            Some(path) => {
                // Removals in a file are not deferred, because an operator may have edited the
                // file.
                purpose.guard = None;
                match self.version(path, patience).await {
                    Ok(version) => (version, self.list(source, path, purpose.clone(), patience).await),
                    Err(no_answer) => (NO_VERSION, Err(no_answer.into())),
                }
            }
            None => {
                let latest = match source.wanted() {
                    Some(wanted) => first(self.servers.query(wanted), patience).await,
                    None => Latest::default(),
                };
                if is_compared && matches!(latest.finding, Some(Finding::List(_))) {
                    purpose.guard = self.stored_guard(source, &purpose, patience).await;
                }
                (answer_version(&latest), self.answer(source, latest, purpose.clone(), patience).await)
            }
        };
        if is_compared
            && source.wanted().is_none()
            && let Ok(contents) = &result
            && !contents.hosts.is_empty()
            && let Some(guard) = self.stored_guard(source, &purpose, patience).await
        {
            // The second read of the list reuses these assignments if it defers no removal.
            purpose.before = Some(contents.assignments.clone());
            purpose.guard = Some(guard);
            result = match source.file() {
                Some(path) => self.list(source, path, purpose.clone(), patience).await,
                None => self.answer(source, Latest::default(), purpose.clone(), patience).await,
            };
        }
        if result.is_ok() || !wants_last_good {
            return FirstRead { version, result, instead: None };
        }
        let instead = self.list(source, &source.last_good, purpose, patience).await;
        FirstRead { version, result, instead: Some(instead).filter(|instead| !is_absent(instead)) }
    }

    /// The stored last good list, without assignments, for a comparison with the new list.
    async fn stored_guard(
        &self,
        source: &ListSource,
        purpose: &ListPurpose,
        patience: Duration,
    ) -> Option<Guard> {
        let bare = ListPurpose { consumers: Vec::new(), guard: None, ..purpose.clone() };
        let stored = self.list_now(source, &source.last_good, bare, patience).await.ok()?;
        Some(Guard { base: stored.assignments.shared_list(), accepted: None })
    }

    /// Waits, for at most `patience`, until DNS has answered for all host names of the list.
    /// Addresses that an earlier daemon stored are not answers. Returns whether a name had no
    /// answer at the beginning; the list must then be read again.
    async fn has_waited(
        &self,
        read: &Result<Contents, SourceError>,
        dns: &DnsSettings,
        patience: Duration,
    ) -> bool {
        let hosts = match read {
            Ok(contents) if contents.hosts.iter().all(|host| contents.table.is_answered(host)) => {
                return false;
            }
            Ok(contents) => &contents.hosts,
            Err(error) => match error.unanswered() {
                Some(hosts) => hosts,
                None => return false,
            },
        };
        let mut table = self.servers.resolve(hosts.clone(), dns);
        let is_answered = |table: &Arc<HostTable>| hosts.iter().all(|host| table.is_answered(host));
        // If the wait times out, the next read of the list uses stored addresses, and reports the
        // names without stored addresses.
        let _ = tokio::time::timeout(patience, table.wait_for(is_answered)).await;
        true
    }

    /// The list in a server's answer or in the configuration, with complete assignments.
    async fn answer(
        &self,
        source: &ListSource,
        latest: Latest,
        purpose: ListPurpose,
        patience: Duration,
    ) -> Result<Contents, SourceError> {
        let answer = self.answer_now(source, latest.clone(), purpose.clone()).await;
        if self.has_waited(&answer, &purpose.dns, patience).await {
            return self.answer_now(source, latest, purpose).await;
        }
        answer
    }

    async fn answer_now(
        &self,
        source: &ListSource,
        latest: Latest,
        purpose: ListPurpose,
    ) -> Result<Contents, SourceError> {
        let place = source.place();
        let answer = match latest.finding {
            _ if purpose.suspension.is_some() => None,
            _ if let Some(text) = source.static_text() => Some((text, Vec::new())),
            Some(Finding::List(snapshot)) => Some((snapshot.text.to_vec(), snapshot.notes)),
            Some(Finding::Empty { why }) => return Err(SourceError::Empty { place, why }),
            Some(Finding::Failed(failure)) => return Err(SourceError::Failed { place, failure }),
            None => return Err(SourceError::NoAnswerYet(place)),
        };
        let (source, hosts) = (source.clone(), self.servers.host_table());
        let parse = move |purpose: &ListPurpose| {
            let Some((text, notes)) = answer else {
                let suspension = purpose.suspension.expect("a list without an answer is suspended");
                return Ok(source.suspended(suspension));
            };
            let mut contents = source.parse(&place, text, Some(&hosts))?;
            contents.notes = notes.iter().chain(contents.notes.iter()).cloned().collect();
            contents.note_table(hosts);
            if let Some(guard) = &purpose.guard {
                contents.defer_removals(guard);
            }
            Ok(contents)
        };
        self.parsed(purpose, parse).await
    }

    pub async fn version(&self, path: &Path, patience: Duration) -> Result<Version<Stamp>, NoAnswer> {
        let (files, file) = (Arc::clone(&self.files), path.to_owned());
        self.io.run(path, patience, move || files.version(&file)).await
    }

    /// The list in a file, with complete assignments.
    async fn list(
        &self,
        source: &ListSource,
        path: &Path,
        purpose: ListPurpose,
        patience: Duration,
    ) -> Result<Contents, SourceError> {
        let list = self.list_now(source, path, purpose.clone(), patience).await;
        if self.has_waited(&list, &purpose.dns, patience).await {
            return self.list_now(source, path, purpose, patience).await;
        }
        list
    }

    async fn list_now(
        &self,
        source: &ListSource,
        path: &Path,
        purpose: ListPurpose,
        patience: Duration,
    ) -> Result<Contents, SourceError> {
        let permit = self.texts.clone().acquire_owned().await.expect("the semaphore is never closed");
        let (files, file, is_stored) = (Arc::clone(&self.files), path.to_owned(), path == source.last_good);
        let read = move || if is_stored { files.read_stored(&file, MAX_BYTES) } else { files.read(&file) };
        // If the file does not answer in time, this function returns here, which releases the
        // permit.
        let text = self.io.run(path, patience, read).await??;
        let (source, path, hosts) = (source.clone(), path.to_owned(), self.servers.host_table());
        let parse = move |purpose: &ListPurpose| {
            let parsed = source.parse(&path, text, Some(&hosts));
            drop(permit);
            let mut contents = parsed?;
            contents.note_table(hosts);
            if let Some(guard) = purpose.guard.as_ref().filter(|_| !contents.hosts.is_empty()) {
                contents.defer_removals(guard);
            }
            Ok(contents)
        };
        self.parsed(purpose, parse).await
    }

    /// Parses a text on a separate thread, and completes the assignments of its list.
    async fn parsed(
        &self,
        purpose: ListPurpose,
        parse: impl FnOnce(&ListPurpose) -> Result<Contents, SourceError> + Send + 'static,
    ) -> Result<Contents, SourceError> {
        let parsing = self.parsing.clone();
        let work = move || {
            let turn = parsing.lock().unwrap_or_else(PoisonError::into_inner);
            let parsed = parse(&purpose);
            drop(turn);
            let mut contents = parsed?;
            // This may take seconds for a job with many tasks and endpoints.
            if let Some(before) = &purpose.before {
                contents.assignments.follow(before);
            }
            contents.assignments.complete(&purpose.consumers);
            Ok(contents)
        };
        spawn_blocking(work).await.expect("the task does not panic")
    }
}

/// The version of a server's answer.
fn answer_version(latest: &Latest) -> Version<Stamp> {
    Version { stamp: Some(Stamp::numbered(latest.number)), is_settled: true }
}

/// Whether no list is stored.
fn is_absent(instead: &Result<Contents, SourceError>) -> bool {
    matches!(instead, Err(SourceError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound)
}
