//! Leaving clients: their programs begin no flow any more, and they are removed when their last
//! flow has ended.
//!
//! A client leaves when a reload drops it, or when a socklb of another ABI version has taken over
//! its hooks. The kernel's state shows that a client is leaving, by the absence of links that begin
//! flows, so a later daemon can continue.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use lb_kernel::{DatapathError, Kernel, Lock, Pins};
use tracing::{info, warn};

use super::Controller;
use crate::backoff::Backoff;
use crate::config::Config;
use crate::controller::client_task::ClientTask;

pub struct Leaving {
    pub pins: Pins,
    /// Whether no flow begins there any more. Flows still begin until the client that takes over
    /// its cgroup is attached.
    retired: bool,
    /// When a failed removal is retried.
    removing: Backoff,
    _lock: Option<Lock>,
}

/// A client that still balances connects in a cgroup that it is to leave, and why.
pub struct CannotLeave {
    pub client: String,
    version: u32,
    pub why: String,
}

impl Leaving {
    /// Locks the client, so that no other process writes to it.
    ///
    /// # Errors
    /// If another process has the lock, or the pins cannot be read.
    fn new(kernel: &dyn Kernel, pins: Pins) -> Result<Self, DatapathError> {
        let lock = kernel.lock(&pins)?;
        let retired = kernel.is_retired(&pins)?;
        Ok(Self { retired, pins, removing: Backoff::default(), _lock: lock })
    }

    /// Whether its connects may still be balanced, with its tables.
    pub const fn begins_flows(&self) -> bool {
        !self.retired
    }

    /// A client of this daemon. Its lock is taken over, so that no later step can fail because a
    /// descriptor is missing.
    pub fn of(client_task: ClientTask) -> Self {
        let (pins, lock) = client_task.into_lock();
        Self { retired: false, pins, removing: Backoff::default(), _lock: lock }
    }
}

/// Locks the pins that other versions have of a client, except those that are leaving already.
///
/// # Errors
/// If another socklb has the lock.
pub fn lock_other_versions(
    kernel: &dyn Kernel,
    pins: &Path,
    client: &str,
    leaving: &[Pins],
) -> Result<Vec<Leaving>> {
    let mut others = kernel.clients(pins)?;
    others.retain(|pins| pins.client == client && !pins.is_of_this_version() && !leaving.contains(pins));
    let lock = |pins: Pins| {
        let what = format!("take client {} over from ABI version {}", pins.client, pins.version);
        Leaving::new(kernel, pins).context(what)
    };
    others.into_iter().map(lock).collect()
}

impl Controller {
    /// Resumes the removals that an earlier daemon had begun. Clients that are attached but not
    /// configured stay as they are and are reported, because another socklb may have them in its
    /// configuration.
    pub fn resume_leaving(&mut self, config: &Config, now: Instant) {
        match self.find_leaving(config) {
            Ok(()) => self.clients.resuming.succeeded(),
            Err(error) => {
                let error = crate::error::chain(&error);
                if self.clients.resuming.failed(now, &error) {
                    warn!(
                        error,
                        "cannot see which clients an earlier daemon had begun to remove; trying again"
                    );
                }
            }
        }
    }

    /// Repeats [`Controller::resume_leaving`] if it failed.
    pub fn try_to_resume_leaving(&mut self, now: Instant) {
        if self.clients.resuming.error().is_some() && self.clients.resuming.is_due(now) {
            self.resume_leaving(&self.config.clone(), now);
        }
    }

    fn find_leaving(&mut self, config: &Config) -> Result<(), DatapathError> {
        let mut result = Ok(());
        let kernel = &*self.environment.kernel;
        for pins in self.strangers_to(config)? {
            let found = match kernel.is_retired(&pins) {
                Ok(true) => Leaving::new(kernel, pins).map(|leaving| self.clients.leaving.push(leaving)),
                Ok(false) => {
                    // Logged only at the start; `status` shows it all the time.
                    if !self.is_ready {
                        let detach = pins.detach_command();
                        warn!(client = %pins.client, "attached, but not configured; remove it with `{detach}`");
                    }
                    Ok(())
                }
                Err(error) => Err(error),
            };
            // A fault of one client does not prevent the removal of others.
            result = result.and(found);
        }
        result
    }

    /// Clients that have pins, are not configured, and are not being removed.
    ///
    /// # Errors
    /// If the directory of pins cannot be read.
    pub fn strangers(&self) -> Result<Vec<Pins>, DatapathError> {
        self.strangers_to(&self.config)
    }

    fn strangers_to(&self, config: &Config) -> Result<Vec<Pins>, DatapathError> {
        let mut pinned = self.environment.kernel.clients(&config.paths.pins)?;
        pinned.retain(|pins| {
            !config.clients.iter().any(|client| client.name == pins.client)
                && !self.clients.leaving.iter().any(|leaving| leaving.pins == *pins)
        });
        Ok(pinned)
    }

    /// Stops leaving clients from beginning flows, and removes those whose last flow has ended. A
    /// client whose cgroup another client is to take over goes on until that client is attached.
    /// Failures are retried after a growing pause.
    pub fn retire_leaving(&mut self, now: Instant) {
        let unable_to_leave = self.unable_to_leave();
        let is_held_back = |pins: &Pins| {
            unable_to_leave.iter().any(|held| (&held.client, held.version) == (&pins.client, pins.version))
        };
        self.clients.leaving.retain_mut(|leaving| {
            if !leaving.removing.is_due(now) || (!leaving.retired && is_held_back(&leaving.pins)) {
                return true;
            }
            match leaving.go_on(&*self.environment.kernel) {
                Ok(is_gone) => {
                    leaving.removing.succeeded();
                    !is_gone
                }
                Err(error) => {
                    let error = crate::error::chain(&error);
                    if leaving.removing.failed(now, &error) {
                        let Pins { client, version, .. } = &leaving.pins;
                        warn!(%client, version, error, "cannot detach");
                    }
                    true
                }
            }
        });
    }

    /// Clients that are to leave a cgroup, or to leave altogether, but still balance there: the
    /// client that takes over the cgroup is not attached to it, or that cannot be determined.
    pub fn unable_to_leave(&self) -> Vec<CannotLeave> {
        let mut unable_to_leave = Vec::new();
        let mut add = |pins: &Pins, missing: Result<Option<String>, DatapathError>| {
            let why = match missing {
                Ok(None) => return,
                Ok(Some(successor)) => {
                    format!("is kept until client {successor}, which takes over, is attached")
                }
                Err(error) => format!(
                    "is kept because it cannot be seen whether another client has taken over: {}",
                    crate::error::chain(&error)
                ),
            };
            unable_to_leave.push(CannotLeave { client: pins.client.clone(), version: pins.version, why });
        };
        for Leaving { pins, .. } in self.clients.leaving.iter().filter(|leaving| !leaving.retired) {
            let begins_at = self.environment.kernel.begins_at(pins);
            add(pins, begins_at.and_then(|cgroups| self.missing_successor(&cgroups, None)));
        }
        for client_task in self.clients.tasks.iter().filter(|client_task| client_task.has_moved()) {
            let name = &client_task.client.name;
            let missing = |cgroups: Vec<u64>| self.missing_successor(&cgroups, Some(name));
            add(&client_task.pins, client_task.begins_elsewhere().and_then(missing));
        }
        unable_to_leave
    }

    /// The client, other than `other_than`, that is to be attached to one of these cgroups but is
    /// not, if there is one.
    fn missing_successor(
        &self,
        cgroups: &[u64],
        other_than: Option<&str>,
    ) -> Result<Option<String>, DatapathError> {
        if cgroups.is_empty() {
            return Ok(None);
        }
        let kernel = &*self.environment.kernel;
        let is_other = |name: &str| other_than != Some(name);
        for client in self.config.clients.iter().filter(|client| is_other(&client.name)) {
            let path = kernel.mount()?.join(&client.cgroup);
            let cgroup = match kernel.cgroup(&path) {
                Ok(cgroup) => cgroup.id,
                Err(DatapathError::NoCgroup(_) | DatapathError::OutsideCgroup2(_)) => continue,
                Err(error) => return Err(error),
            };
            if !cgroups.contains(&cgroup) {
                continue;
            }
            let mut is_covered = false;
            for client_task in
                self.clients.tasks.iter().filter(|client_task| is_other(&client_task.client.name))
            {
                is_covered |= client_task.covers(cgroup)?;
            }
            if !is_covered {
                return Ok(Some(client.name.clone()));
            }
        }
        Ok(None)
    }
}

impl Leaving {
    /// Why it cannot leave, if an attempt has failed.
    pub fn error(&self) -> Option<&str> {
        self.removing.error()
    }

    /// Stops the client from beginning flows, and removes it if its last flow has ended. Returns
    /// whether it is gone.
    fn go_on(&mut self, kernel: &dyn Kernel) -> Result<bool, DatapathError> {
        let Pins { client, version, .. } = &self.pins;
        if !self.retired {
            kernel.retire(&self.pins)?;
            self.retired = true;
            info!(%client, version, "leaving: no flow begins there any more");
        }
        if kernel.open_flows(&self.pins)? > 0 {
            return Ok(false);
        }
        kernel.detach(&self.pins)?;
        info!(%client, version, "its last flow has ended: removed");
        Ok(true)
    }
}
