//! The files that a later start needs. They are stored beside the loop, all of them in one piece of
//! background work. Files that could not be stored are retried.
//!
//! The file system may be full, or may not answer. Connects do not need these files, so a failure
//! is only logged, once.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use tracing::{info, warn};

use super::{BackgroundWork, Controller};
use crate::backoff::Backoff;

/// Files by path, each with its complete content.
pub type StateFiles = BTreeMap<PathBuf, Arc<[u8]>>;

#[derive(Default)]
pub struct FilesToStore {
    /// The files to store. New content of a file replaces older content that is not stored yet.
    files: StateFiles,
    is_busy: bool,
    retry: Backoff,
}

/// The files that could not be stored, and the first error.
#[derive(Default)]
pub struct StoreFailures {
    pub left: StateFiles,
    pub error: Option<String>,
}

impl FilesToStore {
    /// Schedules a file to be stored.
    pub fn add(&mut self, path: PathBuf, text: Arc<[u8]>) {
        self.files.insert(path, text);
    }

    /// Removes the pause after failures, so that the next attempt to store begins at once.
    pub fn hurry(&mut self) {
        self.retry.retry_now();
    }

    /// The error of the last attempt to store files, if this file still waits to be stored.
    pub fn error_of(&self, path: &Path) -> Option<&str> {
        self.retry.error().filter(|_| self.files.contains_key(path))
    }
}

impl Controller {
    /// Starts to store the waiting files, unless an attempt is under way or a pause has not ended.
    pub fn start_storing(&mut self, now: Instant) {
        let FilesToStore { files, is_busy, retry } = &mut self.sources.files_to_store;
        if !*is_busy && !files.is_empty() && retry.is_due(now) {
            *is_busy = true;
            self.effects.push(BackgroundWork::Store(std::mem::take(files)).into());
        }
    }

    /// Handles the end of an attempt to store files.
    pub fn stored(&mut self, StoreFailures { mut left, error }: StoreFailures, now: Instant) {
        let FilesToStore { files, is_busy, retry } = &mut self.sources.files_to_store;
        *is_busy = false;
        left.append(files);
        *files = left;
        match error {
            Some(error) if retry.failed(now, &error) => {
                warn!(
                    error,
                    "cannot store the state for later starts (endpoint lists, learnt weights); retrying after a growing pause"
                );
            }
            Some(_) => {}
            None => {
                if retry.error().is_some() {
                    info!("the state for later starts was stored");
                }
                retry.succeeded();
            }
        }
    }
}
