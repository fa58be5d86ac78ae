//! Directories that are watched for changes: where cgroups appear, and where files lie.
//!
//! A watch can fail, and can be lost without notice: everything is looked at once a second all the same.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use tracing::{info, warn};

use super::Daemon;
use super::client_task::ClientTask;
use crate::source::directory_of;
use lb_host::watch::Watch;

/// The directories that are watched.
pub struct Watching {
    pub watch: Watch,
    /// Directories of which it was reported that they cannot be watched.
    unwatched: BTreeSet<PathBuf>,
}

impl Watching {
    /// Directories of `watch`, none of which was reported yet.
    pub fn new(watch: Watch) -> Self {
        Self { watch, unwatched: BTreeSet::new() }
    }
}

impl Daemon {
    /// Watches for cgroups to appear, and gives back the watches that are needed no more. Directories of files are
    /// watched when their files are looked at; what cannot be watched is looked at once a second all the same.
    pub fn watch_cgroups(&mut self) {
        let Some(watcher) = self.watching.watch.watcher() else { return };
        let files = self.sources.files.values().map(|file| &file.source.file.path).chain([&self.config.path]);
        let files = files.filter(|_| self.config.daemon.watch);
        let mut wanted: BTreeSet<PathBuf> = files.map(|path| directory_of(path)).collect();
        let mut failed = Vec::new();
        // Most cgroups lie side by side: one look at the directory will do.
        let siblings = self.clients.tasks.iter().map(ClientTask::path);
        let one_of_each: BTreeMap<_, _> = siblings.map(|path| (path.parent(), path)).collect();
        for path in one_of_each.into_values() {
            match watcher.add_nearest(path) {
                Ok(directory) => wanted.extend(directory),
                Err(error) => failed.push((path.to_owned(), error.to_string())),
            }
        }
        self.watching
            .unwatched
            .retain(|path| wanted.contains(path) || failed.iter().any(|(other, _)| other == path));
        for (path, error) in failed {
            self.report_unwatched(&path, Some(error));
        }
        // Beside the loop: a file system that does not answer may hold up the removal of a watch.
        tokio::task::spawn_blocking(move || watcher.keep_only(&wanted));
    }

    /// Tries again to make an inotify instance, if there is none.
    pub fn watch_again(&mut self) {
        if self.watching.watch.watcher().is_none()
            && let Ok(watch) = Watch::new()
        {
            info!("directories are watched");
            self.watching.watch = watch;
        }
    }

    /// Says once that a directory cannot be watched.
    pub fn report_unwatched(&mut self, path: &Path, error: Option<String>) {
        if let Some(error) = error
            && self.watching.unwatched.insert(path.to_owned())
        {
            warn!(path = %path.display(), error, "cannot watch; looking once a second instead");
        }
    }
}
