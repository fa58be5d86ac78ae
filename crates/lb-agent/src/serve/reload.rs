//! Applies a changed configuration to the running agent. The configuration is read and checked
//! outside of the event loop, then applied as a whole. If the configuration has a fault, nothing
//! changes.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lb_report::agent::name::Name;
use tokio::sync::mpsc;
use tracing::{info, warn};

use super::AgentEvent;
use super::Reread;
use super::event_loop::Server;
use crate::config::{AgentConfig, BackendConfig};

/// How long the files must stay unchanged before they are read, so that a program that writes
/// several files can finish.
const SETTLED: Duration = Duration::from_millis(200);

/// The maximum delay of a read, because another program may write to the directory all the time.
const LONGEST: Duration = Duration::from_secs(2);

/// The state of the configuration file.
pub struct ConfigReload {
    /// The configuration file, if the agent has one.
    pub file: Option<PathBuf>,
    /// The reason why the file cannot be used; `None` if it can be used.
    pub error: Option<String>,
    /// The keys that have changed in the file and need a restart.
    pub fixed: Vec<&'static str>,
    reread: Option<Reread>,
    /// The directories that are watched.
    watched: BTreeSet<PathBuf>,
    events: mpsc::Sender<AgentEvent>,
    /// The times of the first and of the last change since the files were read.
    changed_at: Option<(Instant, Instant)>,
    is_read: bool,
    is_requested: bool,
}

impl ConfigReload {
    /// `file` is the file of the present configuration; `reread` reads it again.
    pub const fn new(
        file: Option<PathBuf>,
        reread: Option<Reread>,
        events: mpsc::Sender<AgentEvent>,
    ) -> Self {
        Self {
            file,
            error: None,
            fixed: Vec::new(),
            reread,
            watched: BTreeSet::new(),
            events,
            changed_at: None,
            is_read: false,
            is_requested: false,
        }
    }

    /// Records that the file, or another file in its directory, has changed.
    pub fn changed(&mut self, now: Instant) {
        let (first, _) = self.changed_at.unwrap_or((now, now));
        self.changed_at = Some((first, now));
    }

    /// The time at which the agent should read the file.
    pub fn due_at(&self) -> Option<Instant> {
        let (first, last) = self.changed_at.filter(|_| !self.is_read)?;
        Some((last + SETTLED).min(first + LONGEST))
    }
}

impl Server {
    /// SIGHUP: reads the file at once, and logs the result.
    pub fn reload_now(&mut self, now: Instant) {
        if self.reload.reread.is_none() {
            info!("there is no configuration file to read again");
            return;
        }
        self.reload.is_requested = true;
        if self.reload.is_read {
            // A read in progress may return the previous content.
            self.reload.changed(now);
        } else {
            self.read();
        }
    }

    /// Reads a changed file after it has stayed unchanged for long enough.
    pub fn reload_if_due(&mut self, now: Instant) {
        if self.reload.due_at().is_some_and(|at| at <= now) {
            self.read();
        }
    }

    fn read(&mut self) {
        let Some(reread) = self.reload.reread.clone() else { return };
        self.reload.changed_at = None;
        self.reload.is_read = true;
        self.notifier.iter().for_each(lb_host::notify::Notifier::reloading);
        let events = self.reload.events.clone();
        tokio::spawn(async move {
            let read = tokio::task::spawn_blocking(move || reread()).await;
            let read = match read {
                Ok(Ok(config)) => Ok(Box::new(config)),
                Ok(Err(error)) => Err(format!("{error:#}")),
                Err(error) => Err(error.to_string()),
            };
            let _ = events.send(AgentEvent::Read(read)).await;
        });
    }

    /// Applies the configuration that was read, or records why it cannot be used.
    pub fn loaded(&mut self, read: Result<AgentConfig, String>, now: Instant) {
        let is_requested = std::mem::take(&mut self.reload.is_requested);
        self.reload.is_read = false;
        match read {
            Err(error) => {
                if is_requested || self.reload.error.as_ref() != Some(&error) {
                    warn!(error, "cannot use the configuration; the earlier configuration stays in force");
                }
                self.reload.error = Some(error);
            }
            Ok(config) => {
                let was_faulty = self.reload.error.take().is_some();
                let fixed = self.config.fixed(&config);
                if !fixed.is_empty() && (is_requested || fixed != self.reload.fixed) {
                    warn!(keys = fixed.join(", "), "these configuration changes need a restart");
                }
                let is_another = config.backends != self.config.backends;
                if is_another {
                    self.take_on(config, now);
                }
                if is_another || is_requested || was_faulty || fixed != self.reload.fixed {
                    info!(backends = self.config.backends.len(), "configuration applied");
                }
                self.reload.fixed = fixed;
                self.follow_files();
            }
        }
        self.notify_ready();
    }

    /// Replaces the backends with the backends of another configuration. Keys that need a restart
    /// retain their values.
    pub fn take_on(&mut self, config: AgentConfig, now: Instant) {
        let before: Vec<Name> = self.config.backends.iter().map(|backend| backend.name).collect();
        self.config.backends = config.backends;
        for name in before {
            if self.is_configured(name) {
                continue;
            }
            self.checks.remove(name);
            // A program that runs the backend continues to report its readiness. If the program has
            // died, its last report is used for a while.
            if self.registrations.get(name).is_none() {
                self.reports.remove(name);
            }
        }
        for backend in self.config.backends.clone() {
            self.have(&backend, now);
        }
        self.measure(now);
    }

    /// Measures the configured cgroups, and the cgroups of programs that run backends. Removes the
    /// measured load of all other backends.
    pub fn measure(&mut self, now: Instant) {
        if !self.measuring.set(&self.config.backends, self.registrations.cgroups()) {
            return;
        }
        let names: Vec<Name> = self.reports.iter().map(|(name, _)| name).collect();
        for name in names.into_iter().filter(|name| !self.measuring.has(*name)) {
            if let Some(entry) = self.reports.get_mut(name) {
                entry.measured(None, now);
            }
        }
    }

    /// Adds a backend, or applies changes of its configuration.
    pub fn have(&mut self, backend: &BackendConfig, now: Instant) {
        let name = backend.name;
        self.reports.set(name, backend.keys.clone(), backend.rules(), now);
        let is_another = self.checks.set(name, backend.check.as_ref());
        let lame_duck = self.lame_ducks.contains(&name);
        let Some(entry) = self.reports.get_mut(name) else { return };
        if is_another {
            entry.restart_check(now);
        }
        if entry.is_lame_duck() != lame_duck {
            entry.operator(lame_duck, now);
        }
    }

    /// Watches the directories of the file and of the key files. Runs in a task outside of the
    /// event loop, because a file system may hang. Then the files are read once more, to find
    /// changes from before a directory was watched.
    pub fn follow_files(&mut self) {
        let (Some(watcher), Some(file)) = (self.watch.watcher(), &self.reload.file) else { return };
        let directory = |path: &Path| path.parent().map(Path::to_owned);
        let files = self.config.files().chain([file.as_path()]);
        let directories: BTreeSet<PathBuf> = files.filter_map(directory).collect();
        if directories == self.reload.watched {
            return;
        }
        self.reload.watched.clone_from(&directories);
        let events = self.reload.events.clone();
        tokio::spawn(async move {
            let watched = tokio::task::spawn_blocking(move || {
                for directory in &directories {
                    if let Err(error) = watcher.add(directory) {
                        warn!(path = %directory.display(), %error, "cannot watch the directory; changes are applied only on SIGHUP");
                    }
                }
                watcher.retain_only(&directories);
            });
            let _ = watched.await;
            let _ = events.send(AgentEvent::Watched).await;
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_once_unchanged_or_after_two_seconds_of_changes() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let mut reload = ConfigReload::new(None, None, mpsc::channel(1).0);
        assert_eq!(reload.due_at(), None);
        reload.changed(at(0));
        assert_eq!(reload.due_at(), Some(at(200)));
        (1..=30).for_each(|turn| reload.changed(at(turn * 100)));
        assert_eq!(reload.due_at(), Some(at(2_000)));
        reload.is_read = true;
        assert_eq!(reload.due_at(), None);
    }
}
