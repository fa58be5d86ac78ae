//! The controller's start.
//!
//! A start is the first reload of a controller that has no clients yet. It fails only if no client
//! can be started. If at least one client can be started, the start succeeds, and the controller
//! retries the other clients.

use std::time::Instant;

use anyhow::{Result, anyhow};
use lb_kernel::DatapathError;
use tracing::info;

use super::fixed;
use crate::api;
use crate::config::Config;
use crate::controller::{Controller, Effect, Loaded, Opened, TICK};

impl Controller {
    pub fn begin(&mut self, config: Config, now: Instant) -> Vec<Effect> {
        self.next_tick = Some(now + TICK);
        self.resume_leaving(&config, now);
        let lookups = config.lookups.iter();
        self.addresses.known =
            lookups.filter_map(|lookup| Some((lookup.origin.to_string(), lookup.address?))).collect();
        self.load_given(config, now);
        self.take_effects()
    }

    /// Applies the first configuration.
    ///
    /// # Errors
    /// If no client can be started.
    pub fn first_loaded(&mut self, loaded: Loaded, now: Instant) -> Result<()> {
        if !loaded.opened.iter().any(|opened| opened.result.is_ok()) {
            return Err(why_none(loaded.opened, &self.config));
        }
        self.is_ready = true;
        self.loaded(loaded, now);
        let pins = self.config.paths.pins.display();
        let socket = api::socket(&self.config.paths.run);
        let (features, missing) =
            (self.environment.features.names(true), self.environment.features.names(false));
        info!(%pins, socket = %socket.display(), features, missing, "running");
        self.reclaim_flows(now);
        Ok(())
    }
}

/// The error if no client can be started: it contains the errors of all clients.
fn why_none(opened: Vec<Opened>, config: &Config) -> anyhow::Error {
    let mut faults: Vec<(String, anyhow::Error)> =
        opened.into_iter().filter_map(|opened| Some((opened.client.name, opened.result.err()?))).collect();
    if let [(client, _)] = &faults[..] {
        let what = format!("cannot start client {client}");
        return faults.remove(0).1.context(what);
    }
    let mut text = format!("cannot start any of {} clients:", faults.len());
    for (client, error) in &faults {
        text.push_str(&format!("\n  client {client}: {error:#}"));
    }
    let is_shape = |error: &anyhow::Error| {
        error.chain().any(|cause| cause.downcast_ref::<DatapathError>().is_some_and(DatapathError::is_shape))
    };
    let of_another_shape: Vec<&str> =
        faults.iter().filter(|(_, error)| is_shape(error)).map(|(client, _)| client.as_str()).collect();
    if of_another_shape.len() > 1 {
        let remove = fixed::remove_all(&of_another_shape, &config.paths.pins);
        text.push_str(&format!(
            "\nsome clients have maps that this configuration cannot use; to remove these clients, run: {remove}"
        ));
    }
    let denied = |error: &anyhow::Error| crate::error::is_permission(error);
    // If one of the errors is a missing privilege, this error becomes the cause of the result,
    // because the exit code depends on the cause.
    match faults.into_iter().find(|(_, error)| denied(error)) {
        Some((_, error)) => error.context(text),
        None => anyhow!(text),
    }
}
