//! Clients on their way out: no flow begins there any more, and they are removed when their last flow has ended.
//!
//! A client leaves when a reload drops it, or when a socklb of another ABI version has taken its hooks over. That it is
//! leaving is kept in the kernel, as the absence of links that begin flows: a daemon that starts goes on with it.

use std::path::Path;

use anyhow::{Context, Result};
use tracing::{info, warn};

use super::Daemon;
use crate::datapath::{self, Cgroup, DatapathError, Lock, Pins};

/// One client that leaves.
pub struct Leaving {
    pub pins: Pins,
    /// Whether no flow begins there any more. Not before whoever takes its cgroup over is attached.
    retired: bool,
    _lock: Lock,
}

impl Leaving {
    /// Locks the client, so that nobody else writes it.
    ///
    /// # Errors
    /// If somebody does.
    pub fn new(pins: Pins) -> Result<Self, DatapathError> {
        let lock = pins.lock()?;
        Ok(Self { retired: datapath::is_retired(&pins)?, pins, _lock: lock })
    }
}

/// Locks what other versions have of a client, apart from what leaves already.
///
/// # Errors
/// If another socklb has it.
pub fn lock_other_versions(pins: &Path, client: &str, leaving: &[Pins]) -> Result<Vec<Leaving>> {
    let mut others = Pins::all_versions(pins)?;
    others.retain(|pins| pins.client == client && !pins.is_of_this_version() && !leaving.contains(pins));
    let lock = |pins: Pins| {
        let what = format!("take client {} over from ABI version {}", pins.client, pins.version);
        Leaving::new(pins).context(what)
    };
    others.into_iter().map(lock).collect()
}

impl Daemon {
    /// Takes up what an earlier daemon had begun to remove. Clients that are attached and not configured stay as they are,
    /// but not unnoticed: another socklb may have them in its configuration.
    pub fn finish_what_was_begun(&mut self) {
        for pins in self.strangers() {
            match datapath::is_retired(&pins).map(|retired| (retired, Leaving::new(pins.clone()))) {
                Ok((true, Ok(leaving))) => self.leaving.push(leaving),
                _ => warn!(
                    client = %pins.client,
                    "attached, but not configured; remove it with `socklb detach {}`", pins.client
                ),
            }
        }
    }

    /// Clients that have pins, are not configured, and are not about to be removed.
    pub fn strangers(&self) -> Vec<Pins> {
        let mut pinned = Pins::all_versions(&self.config.paths.pins).unwrap_or_default();
        pinned.retain(|pins| {
            !self.config.clients.iter().any(|client| client.name == pins.client)
                && !self.leaving.iter().any(|leaving| leaving.pins == *pins)
        });
        pinned
    }

    /// Lets no flow begin at leaving clients, and removes those whose last flow has ended. One whose cgroup another client
    /// is to take over goes on until that is attached.
    pub fn retire_leaving(&mut self) {
        let held_back: Vec<String> = self.held_back().into_iter().map(|(client, _)| client).collect();
        for leaving in self.leaving.iter_mut().filter(|leaving| !leaving.retired) {
            let Pins { client, version, .. } = &leaving.pins;
            if held_back.contains(client) {
                continue;
            }
            match datapath::retire(&leaving.pins) {
                Ok(()) => {
                    leaving.retired = true;
                    info!(%client, version, "leaving: no flow begins there any more");
                }
                Err(error) => warn!(%client, version, error = %crate::chain(&error), "cannot detach"),
            }
        }
        self.finish_leaving();
    }

    /// Leaving clients whose successor in their cgroup is not attached: both names.
    pub fn held_back(&self) -> Vec<(String, String)> {
        let attached = |cgroup: u64| self.agents.iter().any(|agent| agent.covers(cgroup));
        let mut held_back = Vec::new();
        for leaving in self.leaving.iter().filter(|leaving| !leaving.retired) {
            let cgroups = datapath::begins_at(&leaving.pins).unwrap_or_default();
            let successor = self.config.clients.iter().find(|client| {
                let path = datapath::cgroup2_mount().map(|mount| mount.join(&client.cgroup));
                let cgroup = path.and_then(|path| Cgroup::open(&path)).map(|cgroup| cgroup.id);
                cgroup.is_ok_and(|cgroup| cgroups.contains(&cgroup) && !attached(cgroup))
            });
            if let Some(successor) = successor {
                held_back.push((leaving.pins.client.clone(), successor.name.clone()));
            }
        }
        held_back
    }

    /// Removes the leaving clients whose last flow has ended.
    fn finish_leaving(&mut self) {
        self.leaving.retain(|leaving| {
            let pins = &leaving.pins;
            match datapath::open_flows(pins) {
                Ok(0) if leaving.retired => {}
                // A start that was cut off has left no count, and no flow.
                Err(error) if error.is_missing() => {}
                // What cannot be counted now may be counted at the next look.
                Ok(_) | Err(_) => return true,
            }
            match datapath::detach(pins) {
                Ok(()) => {
                    info!(client = %pins.client, version = pins.version, "its last flow has ended: removed");
                    false
                }
                Err(error) => {
                    warn!(client = %pins.client, error = %crate::chain(&error), "cannot remove it");
                    true
                }
            }
        });
    }
}
