//! Compares a configuration with the running configuration, which comes from the daemon or from the
//! pinned maps. The shares under the new configuration are those that a daemon would compute at its
//! start. The comparison changes nothing.

use std::collections::BTreeSet;
use std::path::Path;

use lb_core::plan::entries_by_slot;
use lb_kernel::Pins;
use lb_view::comparison::{self, BackendShares, ChangeKind, Comparison, Part, SCHEMA, ShareChanges};
use lb_view::configured::{Configured, SCHEMA as KEYS_SCHEMA};
use lb_view::status::StatusDocument;

use super::configured::{configured, from_pins};
use super::dry_run;
use super::status;
use crate::api::{self, Answer};
use crate::config::{ClientConfig, Config, Paths};
use crate::controller::fixed;
use crate::error::{CommandFailure, chain};
use crate::source::assignments::AssignmentsByService;

/// The running configuration; without a daemon, only the part that the pinned maps contain.
pub struct RunningState {
    configured: Configured,
    /// Whether `configured` comes from the daemon and therefore contains all keys.
    is_whole: bool,
    status: StatusDocument,
}

impl RunningState {
    /// The configuration of a daemon, from its answers.
    pub fn of_daemon(configured: Configured, status: StatusDocument) -> Self {
        Self { configured, is_whole: true, status }
    }

    fn find(paths: &Paths) -> Result<Self, CommandFailure> {
        let why = match api::query_daemon::<StatusDocument>(paths, "/v1/status")? {
            Answer::Given(status) => match api::query_daemon(paths, "/v1/configuration")? {
                Answer::Given(configured @ Configured { schema: KEYS_SCHEMA, .. }) => {
                    return Ok(Self::of_daemon(configured, status));
                }
                // A daemon of another version may have other names for keys.
                Answer::Given(_) => {
                    return Ok(Self { configured: from_pins(&paths.pins)?, is_whole: false, status });
                }
                Answer::NotRunning | Answer::NotResponding => api::not_responding(&paths.run),
            },
            Answer::NotRunning => format!("no daemon answers at {}", api::socket(&paths.run).display()),
            Answer::NotResponding => api::not_responding(&paths.run),
        };
        let status = status::from_pins(&paths.pins, String::new())?;
        if status.clients.is_empty() {
            let error = anyhow::anyhow!(
                "nothing to compare with: {why}, and no client has pins below {}",
                paths.pins.display()
            );
            return Err(error.into());
        }
        Ok(Self { configured: from_pins(&paths.pins)?, is_whole: false, status })
    }

    /// The present wanted shares of a service's backends in a client task; empty if the task does
    /// not dial the service.
    fn parts(&self, client: &str, service: &str) -> BackendShares {
        let service = self.status.client(client).and_then(|client| client.service(service));
        let Some(service) = service.filter(|service| service.open) else { return BackendShares::default() };
        // A leaving backend has no share in either configuration.
        let stays = service.backends.iter().filter(|backend| !backend.is_leaving());
        let part = |backend: &lb_view::backend::BackendStatus| {
            let (share, weight, active) = (backend.share_wanted, backend.weight, backend.active);
            (backend.address, Part { share, weight, active })
        };
        BackendShares { entries: service.table_entries, backends: stays.map(part).collect() }
    }

    /// The number of open flows of the clients and services for which `is_meant` returns `true`.
    fn active(&self, is_meant: impl Fn(&str, &str) -> bool) -> u64 {
        let services =
            self.status.clients.iter().flat_map(|client| {
                client.services.iter().map(move |service| (client.name.as_str(), service))
            });
        let meant = services.filter(|(client, service)| is_meant(client, &service.name));
        meant.flat_map(|(_, service)| &service.backends).map(|backend| backend.active).sum()
    }

    /// The changes that need a restart of the daemon. If the daemon has not sent its configuration
    /// keys, only the limits of the maps are checked.
    fn unchangeable(&self, config: &Config, pins: &Path) -> Vec<String> {
        if self.is_whole {
            let clients: Vec<&str> = self.configured.clients.keys().map(String::as_str).collect();
            return fixed::unchangeable(&self.configured.host, &configured(config).host, pins, &clients);
        }
        let pinned = config.clients.iter().filter(|client| self.status.client(&client.name).is_some());
        let misfit =
            |client: &ClientConfig| lb_kernel::check_pins(&Pins::of(pins, &client.name), &config.limits);
        pinned.filter_map(|client| misfit(client).err()).map(|error| chain(&error)).collect()
    }
}

/// Compares a configuration with the running configuration at `paths`. `by_service` contains the
/// lists of the new configuration.
///
/// # Errors
/// If there is no running configuration at `paths`, or it cannot be read.
pub fn compare(
    config: &Config,
    by_service: &AssignmentsByService,
    paths: &Paths,
) -> Result<Comparison, CommandFailure> {
    compare_with(&RunningState::find(paths)?, config, by_service, &paths.pins)
}

/// As [`compare`], with a running configuration that is known.
///
/// # Errors
/// If a list of the new configuration does not fit its limits.
pub fn compare_with(
    running: &RunningState,
    config: &Config,
    by_service: &AssignmentsByService,
    pins: &Path,
) -> Result<Comparison, CommandFailure> {
    let wanted = configured(config);
    let mut clients = comparison::changes(&running.configured.clients, &wanted.clients);
    let mut services = comparison::changes(&running.configured.services, &wanted.services);
    for change in clients.iter_mut().filter(|change| change.kind == ChangeKind::Removed) {
        change.active = Some(running.active(|client, _| client == change.name));
    }
    for change in services.iter_mut().filter(|change| change.kind == ChangeKind::Removed) {
        change.active = Some(running.active(|_, service| service == change.name));
    }
    Ok(Comparison {
        schema: SCHEMA,
        file: config.path.clone(),
        from_daemon: running.is_whole,
        clients,
        services,
        host: comparison::keys(&running.configured.host, &wanted.host),
        shares: shares(running, config, by_service)?,
        unchangeable: running.unchangeable(config, pins),
    })
}

/// The shares that change, for each client and service.
fn shares(
    running: &RunningState,
    config: &Config,
    by_service: &AssignmentsByService,
) -> Result<Vec<ShareChanges>, CommandFailure> {
    let mut changes = Vec::new();
    let mut reported = BTreeSet::new();
    let mut report = |client: &str, service: &str, after: &BackendShares| {
        if reported.insert((client.to_owned(), service.to_owned())) {
            let (backends, unchanged) = comparison::backends(&running.parts(client, service), after);
            if !backends.is_empty() {
                let (client, service) = (client.to_owned(), service.to_owned());
                changes.push(ShareChanges { client, service, backends, unchanged });
            }
        }
    };
    for client in &config.clients {
        for (service, after) in parts(config, client, by_service)? {
            report(&client.name, &service, &after);
        }
    }
    // Services that exist only in the running configuration.
    for client in &running.status.clients {
        for service in &client.services {
            report(&client.name, &service.name, &BackendShares::default());
        }
    }
    Ok(changes)
}

/// The wanted shares of the backends of each service of a client task, under the new configuration.
fn parts(
    config: &Config,
    client: &ClientConfig,
    by_service: &AssignmentsByService,
) -> Result<Vec<(String, BackendShares)>, CommandFailure> {
    let balancer = dry_run::balancer(config, client, by_service)?;
    let plan = balancer.plan();
    let mut all = Vec::new();
    for (service, index, _) in balancer.services() {
        let planned = &plan.services[&index];
        let entries = u32::try_from(planned.schedule.len()).unwrap_or(u32::MAX);
        let by_slot = entries_by_slot(&planned.schedule);
        let backends = plan.backends.iter().filter(|(_, backend)| backend.service == index);
        let part = |(slot, backend): (&lb_core::ids::Slot, &lb_core::plan::BackendPlan)| {
            let share = f64::from(by_slot.get(slot).copied().unwrap_or(0)) / f64::from(entries.max(1));
            (backend.address, Part { share, weight: backend.weight.into(), active: 0 })
        };
        all.push((service.name.clone(), BackendShares { entries, backends: backends.map(part).collect() }));
    }
    Ok(all)
}
