//! Watches on the directories of cgroups and of files.
//!
//! A watch can fail, and can be lost without notice, so the controller also checks everything once
//! a second.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use lb_host::watch::{Watch, Watcher};
use tracing::{info, warn};

/// Adds and removes watches, on any thread. Cheap to clone.
#[derive(Clone, Default)]
pub struct Watches(Arc<Mutex<WatchState>>);

#[derive(Default)]
struct WatchState {
    /// `None` if an inotify instance could not be created.
    watcher: Option<Watcher>,
    /// The paths for which a failed watch was already logged.
    unwatched: BTreeSet<PathBuf>,
}

impl Watches {
    pub fn of(watch: &Watch) -> Self {
        let watches = Self::default();
        watches.with(|state| state.watcher = watch.watcher());
        watches
    }

    fn with<T>(&self, act: impl FnOnce(&mut WatchState) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn watcher(&self) -> Option<Watcher> {
        self.with(|state| state.watcher.clone())
    }

    /// Watches a directory. Blocks until the directory's file system answers.
    pub fn add(&self, directory: &Path) {
        if let Some(Err(error)) = self.watcher().map(|watcher| watcher.add(directory)) {
            self.report(directory, &error.to_string());
        }
    }

    /// Creates an inotify instance if there is none. Returns the instance only if this call created
    /// it.
    pub fn open_again(&self) -> Option<Watch> {
        if self.watcher().is_some() {
            return None;
        }
        let watch = Watch::new().ok()?;
        info!("directories are watched now");
        self.with(|state| state.watcher = watch.watcher());
        Some(watch)
    }

    /// Watches for cgroups to appear, and removes the watches that are no longer needed. Watches on
    /// `directories`, the directories of files, remain. [`Self::add`] adds these watches when the
    /// files are checked.
    pub fn watch(&self, cgroups: &[PathBuf], mut directories: BTreeSet<PathBuf>) {
        let Some(watcher) = self.watcher() else { return };
        let mut failed = BTreeMap::new();
        // The nearest existing directory above a cgroup depends only on the cgroup's parent, so one
        // search for each parent is enough.
        let one_of_each: BTreeMap<_, _> = cgroups.iter().map(|path| (path.parent(), path)).collect();
        for path in one_of_each.into_values() {
            match watcher.add_nearest(path) {
                Ok(directory) => directories.extend(directory),
                Err(error) => drop(failed.insert(path.clone(), error.to_string())),
            }
        }
        self.with(|state| {
            state.unwatched.retain(|path| directories.contains(path) || failed.contains_key(path));
        });
        for (path, error) in failed {
            self.report(&path, &error);
        }
        // Runs on another thread, because a file system that does not answer may delay the removal
        // of a watch.
        tokio::task::spawn_blocking(move || watcher.retain_only(&directories));
    }

    /// Logs, once per path, that the path cannot be watched.
    fn report(&self, path: &Path, error: &str) {
        if self.with(|state| state.unwatched.insert(path.to_owned())) {
            warn!(path = %path.display(), error, "cannot watch the path; checking it once a second instead");
        }
    }
}
