//! Reads endpoint lists outside of the event loop, from files and from the answers of servers. A
//! file that does not answer delays no other file. At most `TEXTS` texts of files are in memory at
//! the same time. `controller/lists/reads` has the rules for the lists that are read here.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lb_core::feed::Version;
use lb_discovery::{HostTable, Latest};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::file_io::{FileIo, Files, PATIENCE, beside};
use super::remotes::Servers;
use crate::controller::{ListPurpose, Reading, WorkResult};
use crate::source::{Contents, ListSource, MAX_BYTES, NO_VERSION, NoAnswer, SourceError, Stamp, unanswered};

/// The maximum number of texts that are in memory for parsing at the same time. Each text has up to
/// 4 MiB.
const TEXTS: usize = 4;

/// Cheap to clone.
#[derive(Clone)]
pub struct ListReader {
    pub io: FileIo,
    pub servers: Arc<dyn Servers>,
    texts: Arc<Semaphore>,
    /// Only one text is parsed at a time, because the result may need more memory than the text.
    parsing: Arc<Mutex<()>>,
}

impl ListReader {
    pub fn new(io: FileIo, servers: Arc<dyn Servers>) -> Self {
        Self { io, servers, texts: Arc::new(Semaphore::new(TEXTS)), parsing: Arc::default() }
    }

    /// Reads the list and computes its missing assignments, unless the version of the list is still
    /// `known`.
    pub async fn read(
        &self,
        service: String,
        source: ListSource,
        begun: u64,
        known: Option<Option<Stamp>>,
        purpose: ListPurpose,
    ) -> WorkResult {
        let latest = source.wanted().map(|wanted| self.servers.query(wanted).borrow().clone());
        let latest = latest.unwrap_or_default();
        let (version, result) = match self.version_of(&source, &latest, PATIENCE).await {
            Ok(version) if known == Some(version.stamp) => (version, None),
            Ok(version) => {
                let read = self.list(&source, Place::of(&source, latest), &purpose, PATIENCE).await;
                let of = source.clone();
                let complete = move || {
                    let contents = read?;
                    let guard = purpose.guard_for(&of, version, &contents.hosts);
                    Ok(contents.completed(guard, purpose.before.as_ref(), &purpose.consumers))
                };
                (version, Some(beside(complete).await))
            }
            Err(no_answer) => (NO_VERSION, Some(Err(no_answer.into()))),
        };
        WorkResult::Read { service, source, begun, version, result }
    }

    /// Reads the list for a start or a reload, and the stored last good list if it is needed. Each
    /// wait ends after `patience`. There are at most four waits for the list (for a file: its
    /// version, its text, DNS, and the text again), and at most three for the stored list. While a
    /// file system does not answer, each list has only one wait.
    pub async fn read_first(
        self,
        service: String,
        source: ListSource,
        purpose: ListPurpose,
        patience: Duration,
    ) -> Reading {
        let mut latest = Latest::default();
        if let Some(wanted) = source.wanted() {
            let mut answers = self.servers.query(wanted);
            let _ = timeout(patience, answers.wait_for(|latest| latest.finding.is_some())).await;
            latest = answers.borrow().clone();
        }
        let (version, read) = match self.version_of(&source, &latest, patience).await {
            Ok(version) => {
                (version, self.list(&source, Place::of(&source, latest), &purpose, patience).await)
            }
            Err(no_answer) => (NO_VERSION, Err(no_answer.into())),
        };
        let mut stored = None;
        if purpose.needs_stored(&source, &read) {
            stored = Some(self.list(&source, Place::File(&source.last_good), &purpose, patience).await);
        }
        beside(move || purpose.first_reading(service, source, version, read, stored)).await
    }

    /// The version of the list in a file, or of the server's answer.
    async fn version_of(
        &self,
        source: &ListSource,
        latest: &Latest,
        patience: Duration,
    ) -> Result<Version<Stamp>, NoAnswer> {
        match source.file() {
            Some(path) => self.version(path, patience).await,
            None => Ok(Stamp::version_of(latest)),
        }
    }

    pub async fn version(&self, path: &Path, patience: Duration) -> Result<Version<Stamp>, NoAnswer> {
        let file = path.to_owned();
        self.io.run(path, patience, move |files| files.version(&file)).await
    }

    /// The list, without assignments. If the list has host names without answers, waits for at most
    /// `patience` until DNS has answered, and reads the list again.
    async fn list(
        &self,
        source: &ListSource,
        place: Place<'_>,
        purpose: &ListPurpose,
        patience: Duration,
    ) -> Result<Contents, SourceError> {
        let read = self.list_now(source, &place, purpose, patience).await;
        let Some(hosts) = unanswered(&read) else { return read };
        let mut table = self.servers.resolve(hosts.clone(), &purpose.dns);
        let is_answered = |table: &Arc<HostTable>| hosts.iter().all(|host| table.is_answered(host));
        // If the wait times out, the next read of the list uses stored addresses, and reports the
        // names without stored addresses.
        let _ = timeout(patience, table.wait_for(is_answered)).await;
        self.list_now(source, &place, purpose, patience).await
    }

    async fn list_now(
        &self,
        source: &ListSource,
        place: &Place<'_>,
        purpose: &ListPurpose,
        patience: Duration,
    ) -> Result<Contents, SourceError> {
        let (source, suspension) = (source.clone(), purpose.suspension);
        match place {
            Place::Answer(latest) => {
                let (latest, hosts) = (latest.clone(), self.servers.host_table());
                self.parsed(move || source.answered(latest, suspension, &hosts)).await
            }
            Place::File(path) => {
                let permit = self.texts.clone().acquire_owned().await.expect("the semaphore is never closed");
                let file = path.to_path_buf();
                let is_stored = file == source.last_good;
                let read = move |files: &dyn Files| {
                    if is_stored { files.read_stored(&file, MAX_BYTES) } else { files.read(&file) }
                };
                // If the file does not answer in time, this function returns here, which releases
                // the permit.
                let text = self.io.run(path, patience, read).await??;
                let (path, hosts) = (path.to_path_buf(), self.servers.host_table());
                self.parsed(move || {
                    let parsed = source.parse(&path, text, Some(&hosts));
                    drop(permit);
                    parsed
                })
                .await
            }
        }
    }

    /// Parses a text on a separate thread.
    async fn parsed(
        &self,
        parse: impl FnOnce() -> Result<Contents, SourceError> + Send + 'static,
    ) -> Result<Contents, SourceError> {
        let parsing = self.parsing.clone();
        beside(move || {
            let _turn = parsing.lock().unwrap_or_else(PoisonError::into_inner);
            parse()
        })
        .await
    }
}

/// Where the text of a list is.
enum Place<'p> {
    File(&'p Path),
    /// The answer of a server, or the configuration.
    Answer(Latest),
}

impl<'p> Place<'p> {
    fn of(source: &'p ListSource, latest: Latest) -> Self {
        source.file().map_or(Self::Answer(latest), Self::File)
    }
}
