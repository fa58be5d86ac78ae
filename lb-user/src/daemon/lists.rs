//! Reads endpoint lists beside the loop: any number of files that may not answer, and few texts in memory at a time.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

use super::file_io::{FileIo, NoAnswer, PATIENCE};
use super::files;
use crate::assignments::{Assignments, Consumer};
use crate::source::{self, Contents, FileSource, SourceError, Stamp, last_good};

/// Texts that are in memory at the same time to be parsed, each of up to 4 MiB.
const TEXTS: usize = 4;

/// Reads lists. Cheap to clone.
#[derive(Clone)]
pub struct ListReader {
    /// What the files are read with.
    pub io: FileIo,
    texts: Arc<Semaphore>,
    /// One text is parsed at a time: what comes of it may take more memory than the text.
    parsing: Arc<Mutex<()>>,
}

/// What a list is completed for, and with.
#[derive(Clone)]
pub struct Purpose {
    /// The tasks that use it.
    pub consumers: Vec<Consumer>,
    /// The assignments before, of which much may be known already.
    pub before: Option<Assignments>,
}

/// What the first reading of a file gave.
pub struct FirstRead {
    /// The version that was read.
    pub stamp: Option<Stamp>,
    /// The file itself.
    pub result: Result<Contents, SourceError>,
    /// The last good list of an earlier run, if the file cannot be used and there is one.
    pub instead: Option<Result<Contents, SourceError>>,
}

impl ListReader {
    /// Reads with these threads.
    pub fn new(io: FileIo) -> Self {
        Self { io, texts: Arc::new(Semaphore::new(TEXTS)), parsing: Arc::default() }
    }

    /// Reads the file, unless it is the `known` version, and completes what it holds.
    pub async fn read(
        &self,
        source: &FileSource,
        known: Option<Option<Stamp>>,
        purpose: Purpose,
    ) -> (Option<Stamp>, Option<Result<Contents, SourceError>>) {
        let stamp = match self.stamp(&source.file.path, PATIENCE).await {
            Ok(stamp) if known == Some(stamp) => return (stamp, None),
            Ok(stamp) => stamp,
            Err(silent) => return (None, Some(Err(silent.into()))),
        };
        let result = self.list(source, &source.file.path, purpose, PATIENCE).await;
        (stamp, Some(result))
    }

    /// Reads the file as a start does: one that cannot be used is replaced by the last good one, if there is one and it is
    /// wanted. Each is waited for as long as `patience`.
    pub async fn read_first(
        &self,
        source: &FileSource,
        purpose: Purpose,
        wants_last_good: bool,
        patience: Duration,
    ) -> FirstRead {
        let (stamp, result) = match self.stamp(&source.file.path, patience).await {
            Ok(stamp) => (stamp, self.list(source, &source.file.path, purpose.clone(), patience).await),
            Err(silent) => (None, Err(silent.into())),
        };
        if result.is_ok() || !wants_last_good {
            return FirstRead { stamp, result, instead: None };
        }
        let instead = self.list(source, &source.last_good, purpose, patience).await;
        FirstRead { stamp, result, instead: Some(instead).filter(|instead| !is_absent(instead)) }
    }

    /// The version of the file. It is opened as well, because some file systems answer stat(2) from a cache.
    async fn stamp(&self, path: &Path, patience: Duration) -> Result<Option<Stamp>, NoAnswer> {
        let file = path.to_owned();
        self.io.run(path, patience, move || source::answers(&file)).await
    }

    async fn list(
        &self,
        source: &FileSource,
        path: &Path,
        purpose: Purpose,
        patience: Duration,
    ) -> Result<Contents, SourceError> {
        let permit = self.texts.clone().acquire_owned().await.expect("it is never closed");
        let (file, is_kept) = (path.to_owned(), path == source.last_good);
        let read = move || if is_kept { last_good::read(&file) } else { source::read_whole(&file) };
        // If the file stops answering here, the permit is given back.
        let text = self.io.run(path, patience, read).await??;
        let (source, path, parsing) = (source.clone(), path.to_owned(), self.parsing.clone());
        let parse = move || {
            let turn = parsing.lock().unwrap_or_else(PoisonError::into_inner);
            let parsed = source.parse(&path, text);
            drop((turn, permit));
            let mut contents = parsed?;
            // May take seconds for the largest jobs.
            files::complete(&mut contents.assignments, &purpose.consumers, purpose.before.as_ref());
            Ok(contents)
        };
        spawn_blocking(parse).await.expect("a panic ends the process")
    }
}

/// Whether nothing was ever kept.
fn is_absent(instead: &Result<Contents, SourceError>) -> bool {
    matches!(instead, Err(SourceError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound)
}
