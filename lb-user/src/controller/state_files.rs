//! The files that later starts need. They are stored beside the loop, all in one turn, and again
//! later if that fails.
//!
//! The directory may be full or may not answer. Connects do not need it, so a failure is logged
//! once and retried.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use tracing::{info, warn};

use super::{BackgroundWork, Controller};
use crate::backoff::Backoff;

/// Files by path, each with its whole content.
pub type StateFiles = BTreeMap<PathBuf, Arc<[u8]>>;

#[derive(Default)]
pub struct FilesToStore {
    /// A newer content of a file replaces an older one.
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

    /// Lets the next attempt to store begin at once, however often storing has failed.
    pub fn hurry(&mut self) {
        self.retry.retry_now();
    }

    /// Why the last attempt to store the file failed, if the file waits for another.
    pub fn error_of(&self, path: &Path) -> Option<&str> {
        self.retry.error().filter(|_| self.files.contains_key(path))
    }
}

impl Controller {
    /// Starts to store the waiting files, unless that is under way.
    pub fn start_storing(&mut self, now: Instant) {
        let FilesToStore { files, is_busy, retry } = &mut self.sources.files_to_store;
        if !*is_busy && !files.is_empty() && retry.is_due(now) {
            *is_busy = true;
            self.effects.push(BackgroundWork::Store(std::mem::take(files)).into());
        }
    }

    /// An attempt to store files has ended.
    pub fn stored(&mut self, StoreFailures { mut left, error }: StoreFailures, now: Instant) {
        let FilesToStore { files, is_busy, retry } = &mut self.sources.files_to_store;
        *is_busy = false;
        left.append(files);
        *files = left;
        match error {
            Some(error) if retry.failed(now, &error) => {
                warn!(
                    error,
                    "cannot keep what later starts need (endpoint lists, what was learnt of loads); tried again after a growing pause"
                );
            }
            Some(_) => {}
            None => {
                if retry.error().is_some() {
                    info!("what later starts need is kept again");
                }
                retry.succeeded();
            }
        }
    }
}
