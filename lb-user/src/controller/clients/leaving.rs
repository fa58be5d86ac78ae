//! Leaving clients: no flow begins through their programs any more, and the daemon removes them
//! after their last flow.
//!
//! A client leaves when a reload removes it from the configuration, or when a socklb of another ABI
//! version has taken over its hooks. A leaving client has no links through which flows begin. From
//! the absence of these links, a later daemon recognizes that the client is leaving, and continues
//! the removal.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use lb_kernel::{DatapathError, Kernel, Lock, Pins};
use tracing::{info, warn};

use crate::backoff::Backoff;
use crate::config::Config;
use crate::controller::Controller;
use crate::controller::client_task::ClientTask;

pub struct Leaving {
    pub pins: Pins,
    /// Whether no flows of the client begin any more. Flows still begin until the client that takes
    /// over the cgroup is attached.
    retired: bool,
    /// The pauses between attempts to remove the client.
    removing: Backoff,
    _lock: Option<Lock>,
}

/// A client that should leave a cgroup but still balances connects there, with the reason.
pub struct CannotLeave {
    pub client: String,
    version: u32,
    pub why: String,
}

impl Leaving {
    /// Locks the client, so that no other process can change it.
    ///
    /// # Errors
    /// If another process holds the lock, or the pins cannot be read.
    fn new(kernel: &dyn Kernel, pins: Pins) -> Result<Self, DatapathError> {
        let lock = kernel.lock(&pins)?;
        let retired = kernel.is_retired(&pins)?;
        Ok(Self { retired, pins, removing: Backoff::default(), _lock: lock })
    }

    /// Whether connects may still be balanced with the client's tables.
    pub const fn begins_flows(&self) -> bool {
        !self.retired
    }

    /// A client of this daemon that leaves. Reuses the lock of the client task, so that no later
    /// step can fail for lack of a file descriptor.
    pub fn of(client_task: ClientTask) -> Self {
        let (pins, lock) = client_task.into_lock();
        Self { retired: false, pins, removing: Backoff::default(), _lock: lock }
    }
}

/// Locks the pins that other versions have created for a client, except the pins of clients that
/// are already leaving.
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
        let what = format!("take over client {} from ABI version {}", pins.client, pins.version);
        Leaving::new(kernel, pins).context(what)
    };
    others.into_iter().map(lock).collect()
}

impl Controller {
    /// Resumes the removals that an earlier daemon began. Clients that are attached but not
    /// configured are reported and not changed, because they may belong to another socklb with
    /// another configuration.
    pub fn resume_leaving(&mut self, config: &Config, now: Instant) {
        match self.find_leaving(config) {
            Ok(()) => self.clients.resuming.succeeded(),
            Err(error) => {
                let error = crate::error::chain(&error);
                if self.clients.resuming.failed(now, &error) {
                    warn!(error, "cannot find the clients that an earlier daemon was removing; retrying");
                }
            }
        }
    }

    /// Repeats [`Controller::resume_leaving`] if it has failed.
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
                    // A client that is not configured is logged only at the start; `status` always
                    // shows it.
                    if !self.is_ready {
                        let detach = pins.detach_command();
                        warn!(client = %pins.client, "attached, but not configured; remove it with `{detach}`");
                    }
                    Ok(())
                }
                Err(error) => Err(error),
            };
            // A fault of one client does not prevent the removal of other clients.
            result = result.and(found);
        }
        result
    }

    /// Clients that have pins, but are neither configured nor being removed.
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

    /// Prevents new flows of leaving clients, and removes the clients whose last flow has ended. If
    /// another client is to take over the cgroup, the leaving client balances connects there until
    /// the other client is attached. Failures are retried after a growing pause.
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
                        warn!(%client, version, error, "cannot remove the leaving client; retrying");
                    }
                    true
                }
            }
        });
    }

    /// Clients that should leave a cgroup, or be removed, but still balance connects there: the
    /// client that takes over the cgroup is not attached yet, or the daemon cannot determine
    /// whether it is attached.
    pub fn unable_to_leave(&self) -> Vec<CannotLeave> {
        let mut unable_to_leave = Vec::new();
        let mut add = |pins: &Pins, missing: Result<Option<String>, DatapathError>| {
            let why = match missing {
                Ok(None) => return,
                Ok(Some(successor)) => {
                    format!("it stays until client {successor}, which takes over the cgroup, is attached")
                }
                Err(error) => format!(
                    "it stays because it is unknown whether another client has taken over the cgroup: {}",
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

    /// The first client, other than `other_than`, that should be attached to one of these cgroups
    /// but is not; `None` if all such clients are attached.
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
    /// Why the last attempt to remove the client failed; `None` if it succeeded.
    pub fn error(&self) -> Option<&str> {
        self.removing.error()
    }

    /// Prevents new flows of the client, and removes the client if its last flow has ended. Returns
    /// whether the client was removed.
    fn go_on(&mut self, kernel: &dyn Kernel) -> Result<bool, DatapathError> {
        let Pins { client, version, .. } = &self.pins;
        if !self.retired {
            kernel.retire(&self.pins)?;
            self.retired = true;
            info!(%client, version, "the client is leaving: no new flow begins in its cgroup");
        }
        if kernel.open_flows(&self.pins)? > 0 {
            return Ok(false);
        }
        kernel.detach(&self.pins)?;
        info!(%client, version, "the client's last flow has ended; the client is removed");
        Ok(true)
    }
}
