//! Keeps the lists that are in force for later starts: beside the loop, all in one turn, and again later if that fails.
//!
//! The directory may be full or may not answer. Connects do not need it, so a failure is logged once and tried again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::{Daemon, Event};
use crate::backoff::Backoff;
use crate::source::last_good;

/// How long the directory is waited for: all lists of a configuration are written and synchronized one by one.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is to be kept.
#[derive(Default)]
pub struct Keeping {
    /// By path. The newest list takes the place of an older one.
    lists: BTreeMap<PathBuf, Arc<[u8]>>,
    is_busy: bool,
    retry: Backoff,
}

/// What could not be kept, and the first reason.
pub struct Kept {
    left: BTreeMap<PathBuf, Arc<[u8]>>,
    error: Option<String>,
}

impl Keeping {
    /// Keeps a list soon.
    pub fn add(&mut self, path: PathBuf, text: Arc<[u8]>) {
        self.lists.insert(path, text);
    }

    /// Tries it at once, however often it has failed.
    pub fn hurry(&mut self) {
        self.retry.retry_now();
    }

    /// Why a file could not be kept the last time, if it waits for the next one.
    pub fn error_of(&self, path: &Path) -> Option<&str> {
        self.retry.error().filter(|_| self.lists.contains_key(path))
    }
}

impl Daemon {
    /// Starts to keep what is to be kept.
    pub fn start_keeping(&mut self, now: Instant) {
        if self.sources.keeping.is_busy
            || self.sources.keeping.lists.is_empty()
            || !self.sources.keeping.retry.is_due(now)
        {
            return;
        }
        self.sources.keeping.is_busy = true;
        let lists = std::mem::take(&mut self.sources.keeping.lists);
        let (io, events) = (self.sources.lists.io.clone(), self.events.clone());
        let directory = self.config.paths.state.join("last-good");
        let all = lists.clone();
        tokio::spawn(async move {
            let kept = match io.run(&directory, PATIENCE, move || keep(lists)).await {
                Ok(kept) => kept,
                Err(silent) => Kept { left: all, error: Some(silent.to_string()) },
            };
            let _ = events.send(Event::Kept(kept)).await;
        });
    }

    /// Lists were kept, or not.
    pub fn kept(&mut self, Kept { mut left, error }: Kept, now: Instant) {
        let keeping = &mut self.sources.keeping;
        keeping.is_busy = false;
        left.append(&mut keeping.lists);
        keeping.lists = left;
        match error {
            Some(error) if keeping.retry.failed(now, &error) => {
                warn!(
                    error,
                    "cannot keep what later starts need (endpoint lists, what was learnt of loads); tried again after a growing pause"
                );
            }
            Some(_) => {}
            None => {
                if keeping.retry.error().is_some() {
                    info!("what later starts need is kept again");
                }
                keeping.retry.succeeded();
                self.start_keeping(now);
            }
        }
    }
}

fn keep(lists: BTreeMap<PathBuf, Arc<[u8]>>) -> Kept {
    let mut kept = Kept { left: BTreeMap::new(), error: None };
    for (path, text) in lists {
        if let Err(error) = last_good::keep(&path, &text) {
            kept.error.get_or_insert_with(|| crate::error::chain(&error));
            kept.left.insert(path, text);
        }
    }
    kept
}
