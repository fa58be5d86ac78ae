//! Clients on their way out: no flow begins there any more, and they are removed when their last flow has ended.
//!
//! A client leaves when a reload drops it, or when a socklb of another ABI version has taken its hooks over. That it is
//! leaving is kept in the kernel, as the absence of links that begin flows: a daemon that starts goes on with it.

use anyhow::{Context, Result};
use tracing::{info, warn};

use super::Daemon;
use crate::datapath::{self, DatapathError, Lock, Pins};

/// One client that leaves.
pub struct Leaving {
    pub pins: Pins,
    _lock: Lock,
}

impl Leaving {
    /// Locks the client, so that nobody else writes it.
    ///
    /// # Errors
    /// If somebody does.
    pub fn new(pins: Pins) -> Result<Self, DatapathError> {
        let lock = pins.lock()?;
        Ok(Self { pins, _lock: lock })
    }
}

impl Daemon {
    /// Other versions' pins of a configured client.
    pub fn lock_other_versions(&self, client: &str) -> Result<Vec<Leaving>> {
        let mut others = Pins::all_versions(&self.config.paths.pins)?;
        others.retain(|pins| pins.client == client && !pins.is_of_this_version());
        let lock = |pins: Pins| {
            let what = format!("take client {} over from ABI version {}", pins.client, pins.version);
            Leaving::new(pins).context(what)
        };
        others.into_iter().map(lock).collect()
    }

    /// Takes up what an earlier daemon had begun to remove. Clients that are attached and not configured stay as they are,
    /// but not unnoticed: another socklb may have them in its configuration.
    pub fn finish_what_was_begun(&mut self) {
        for pins in self.strangers() {
            match datapath::begins_flows(&pins).map(|begins| (begins, Leaving::new(pins.clone()))) {
                Ok((false, Ok(leaving))) => self.leaving.push(leaving),
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

    /// Lets no flow begin at leaving clients. Only after those that take over are attached.
    pub fn retire_leaving(&mut self) {
        for leaving in &self.leaving {
            let Pins { client, version, .. } = &leaving.pins;
            match datapath::retire(&leaving.pins) {
                Ok(()) => info!(%client, version, "leaving: no flow begins there any more"),
                Err(error) => warn!(%client, version, error = %crate::chain(&error), "cannot detach"),
            }
        }
        self.finish_leaving();
    }

    /// Removes the leaving clients whose last flow has ended.
    pub fn finish_leaving(&mut self) {
        self.leaving.retain(|leaving| {
            let pins = &leaving.pins;
            // Without a count there is nothing to wait for: a start that was cut off made no flow.
            let open = datapath::open_flows(pins).unwrap_or(0);
            if open > 0 {
                return true;
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
