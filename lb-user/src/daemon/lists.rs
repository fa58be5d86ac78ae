//! Reads endpoint lists beside the loop. Any number of files may fail to answer without delaying
//! the others, and only a few texts are in memory at the same time.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lb_core::feed::Version;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

use super::file_io::{FileIo, PATIENCE};
use super::files::Files;
use crate::controller::{self, FirstRead, ListPurpose};
use crate::source::{Contents, FileSource, MAX_BYTES, NO_VERSION, NoAnswer, SourceError, Stamp};

/// The most texts that are in memory for parsing at the same time. Each text has up to 4 MiB.
const TEXTS: usize = 4;

/// Cheap to clone.
#[derive(Clone)]
pub struct ListReader {
    /// The threads that read the files.
    pub io: FileIo,
    pub files: Arc<dyn Files>,
    texts: Arc<Semaphore>,
    /// Only one text is parsed at a time, because the result may need more memory than the text.
    parsing: Arc<Mutex<()>>,
}

impl ListReader {
    pub fn new(files: Arc<dyn Files>) -> Self {
        Self { io: FileIo::new(), files, texts: Arc::new(Semaphore::new(TEXTS)), parsing: Arc::default() }
    }

    /// Reads the file unless its version is still `known`, and completes its assignments.
    pub async fn read(
        &self,
        source: &FileSource,
        known: Option<Option<Stamp>>,
        purpose: ListPurpose,
    ) -> (Version<Stamp>, Option<Result<Contents, SourceError>>) {
        let version = match self.version(&source.file.path, PATIENCE).await {
            Ok(version) if known == Some(version.stamp) => return (version, None),
            Ok(version) => version,
            Err(no_answer) => return (NO_VERSION, Some(Err(no_answer.into()))),
        };
        let result = self.list(source, &source.file.path, purpose, PATIENCE).await;
        (version, Some(result))
    }

    /// Reads the file for a start. If it cannot be used, reads the stored last good list instead,
    /// if there is one and `wants_last_good` is set. Waits at most `patience` for each of the two
    /// files.
    pub async fn read_first(
        &self,
        source: &FileSource,
        purpose: ListPurpose,
        wants_last_good: bool,
        patience: Duration,
    ) -> FirstRead {
        let (version, result) = match self.version(&source.file.path, patience).await {
            Ok(version) => (version, self.list(source, &source.file.path, purpose.clone(), patience).await),
            Err(no_answer) => (NO_VERSION, Err(no_answer.into())),
        };
        if result.is_ok() || !wants_last_good {
            return FirstRead { version, result, instead: None };
        }
        let instead = self.list(source, &source.last_good, purpose, patience).await;
        FirstRead { version, result, instead: Some(instead).filter(|instead| !is_absent(instead)) }
    }

    pub async fn version(&self, path: &Path, patience: Duration) -> Result<Version<Stamp>, NoAnswer> {
        let (files, file) = (Arc::clone(&self.files), path.to_owned());
        self.io.run(path, patience, move || files.version(&file)).await
    }

    async fn list(
        &self,
        source: &FileSource,
        path: &Path,
        purpose: ListPurpose,
        patience: Duration,
    ) -> Result<Contents, SourceError> {
        let permit = self.texts.clone().acquire_owned().await.expect("the semaphore is never closed");
        let (files, file, is_stored) = (Arc::clone(&self.files), path.to_owned(), path == source.last_good);
        let read = move || if is_stored { files.read_stored(&file, MAX_BYTES) } else { files.read(&file) };
        // If the file does not answer in time, this returns, and so releases the permit.
        let text = self.io.run(path, patience, read).await??;
        let (source, path, parsing) = (source.clone(), path.to_owned(), self.parsing.clone());
        let parse = move || {
            let turn = parsing.lock().unwrap_or_else(PoisonError::into_inner);
            let parsed = source.parse(&path, text);
            drop((turn, permit));
            let mut contents = parsed?;
            // This may take seconds for the largest jobs.
            controller::complete(&mut contents.assignments, &purpose.consumers, purpose.before.as_ref());
            Ok(contents)
        };
        spawn_blocking(parse).await.expect("a panic ends the process")
    }
}

/// Whether no list is stored.
fn is_absent(instead: &Result<Contents, SourceError>) -> bool {
    matches!(instead, Err(SourceError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound)
}
