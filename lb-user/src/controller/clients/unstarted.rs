//! Clients that could not be started. They are opened again at intervals, outside of the event
//! loop, and then receive the lists in force.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::{Result, anyhow, ensure};
use lb_core::limits::Limits;
use lb_kernel::{DatapathError, Pins};
use tracing::warn;

use super::leaving::{Leaving, lock_other_versions};
use crate::config::ClientConfig;
use crate::controller::lists::reads::ListInForce;
use crate::controller::{BackgroundWork, ClientTask, ClientTaskError, Controller, Environment};
use crate::source::assignments::{self, AssignmentsByService};
use crate::source::complete_assignments;

/// The result of another attempt to start clients.
pub struct Tried {
    /// All clients that were retried.
    pub clients: Vec<ClientConfig>,
    /// The clients that the retry tried to open, each with the result. Clients that already run are
    /// not included.
    pub opened: Vec<Opened>,
    /// The lists in force when the retry began, with assignments for these clients.
    pub by_service: AssignmentsByService,
}

/// The result of opening a client outside of the event loop: either the client and its locked pins
/// of other versions, or the error.
pub struct Opened {
    pub client: ClientConfig,
    pub result: Result<(ClientTask, Vec<Leaving>)>,
}

pub struct OpenRequest {
    /// All clients that should be started. The clients in `there` already run with an earlier
    /// configuration.
    pub clients: Vec<ClientConfig>,
    pub there: BTreeSet<String>,
    /// The lists in the configuration itself. `in_force`: all other lists.
    pub statics: AssignmentsByService,
    pub in_force: BTreeMap<String, ListInForce>,
    pub opener: ClientOpener,
}

/// Everything that is needed to open clients.
pub struct ClientOpener {
    pub environment: Environment,
    pub pins: PathBuf,
    pub limits: Limits,
    /// The pins of leaving clients, which this daemon has already locked.
    pub leaving: Vec<Pins>,
    pub now: Instant,
}

impl OpenRequest {
    /// The clients to open: those that do not run.
    pub fn absent(&self) -> Vec<ClientConfig> {
        let absent = self.clients.iter().filter(|client| !self.there.contains(&client.name));
        absent.cloned().collect()
    }

    /// The lists in force, with assignments for all clients of the request. Takes seconds for jobs
    /// with many tasks and endpoints.
    pub fn assignments(&mut self) -> AssignmentsByService {
        let mut by_service = assignments::statics(&self.clients, &self.statics);
        for (service, ListInForce { mut assignments, .. }) in std::mem::take(&mut self.in_force) {
            complete_assignments(&mut assignments, &assignments::consumers(&self.clients, &service));
            by_service.entry(service).or_insert(assignments);
        }
        by_service
    }
}

impl Opened {
    /// The client, if it has adopted tables. An earlier daemon may have been killed just after it
    /// replaced tables, and its old tables must not be overwritten while a program reads them. The
    /// client is therefore used only after a wait for readers.
    pub fn adopted(&mut self) -> Option<&mut ClientTask> {
        let (client_task, _) = self.result.as_mut().ok()?;
        Some(client_task).filter(|client_task| !client_task.datapath().applied().services.is_empty())
    }

    /// The result after a wait for readers, which has failed if `waited` is an error.
    pub fn after_wait(mut self, waited: &Result<(), String>, now: Instant) -> Self {
        if let Some(client_task) = self.adopted() {
            match waited {
                Ok(()) => {
                    client_task.after_wait();
                    // Slots are freed before lists are delivered, because lists may need the slots
                    // of backends that no longer have flows.
                    client_task.free_idle(now);
                }
                Err(error) => self.result = Err(anyhow!(error.clone())),
            }
        }
        self
    }
}

impl ClientOpener {
    /// Opens a client, and locks the pins that other versions of socklb have created for it.
    pub fn open(&self, client: ClientConfig) -> Result<(ClientTask, Vec<Leaving>)> {
        let kernel = &*self.environment.kernel;
        // While the daemon is stopping, no further client may be opened, because a successor waits
        // for the locks.
        ensure!(!self.environment.stopping.load(Ordering::Relaxed), "the daemon is stopping");
        // The pins of other versions are locked before any change, because a socklb of another
        // version may be running.
        let others = lock_other_versions(kernel, &self.pins, &client.name, &self.leaving)?;
        match self.open_here(client) {
            Ok(client_task) => Ok((client_task, others)),
            // This error is not wrapped in `ClientTaskError`, because the code that selects the
            // remedy searches the chain of causes for a [`DatapathError`].
            Err(ClientTaskError::Datapath(error)) => Err(error.into()),
            Err(error) => Err(error.into()),
        }
    }

    fn open_here(&self, client: ClientConfig) -> Result<ClientTask, ClientTaskError> {
        let kernel = &*self.environment.kernel;
        let path = kernel.mount()?.join(&client.cgroup);
        // A path that can never be a cgroup is an error now. If the path does not exist yet, the
        // client waits until the cgroup is created.
        match kernel.cgroup(&path) {
            Ok(_) | Err(DatapathError::NoCgroup(_)) => {}
            Err(error) => return Err(error.into()),
        }
        let pins = Pins::of(&self.pins, &client.name);
        let kernel = kernel.client(pins.clone())?;
        ClientTask::open(client, pins, kernel, self.limits, &self.environment, self.now)
    }
}

impl Controller {
    /// Returns the values that are needed to open clients outside of the event loop.
    pub fn opener(&self, now: Instant) -> ClientOpener {
        ClientOpener {
            pins: self.config.paths.pins.clone(),
            limits: self.config.limits,
            environment: self.environment.clone(),
            leaving: self.clients.leaving.iter().map(|leaving| leaving.pins.clone()).collect(),
            now,
        }
    }

    /// Starts to retry the clients that could not be started, unless clients are being opened
    /// already.
    pub fn start_unstarted(&mut self, now: Instant) {
        if self.clients.unstarted.is_empty() || self.clients.opening || self.reload.turn.is_reading() {
            return;
        }
        // A client may be configured again while it is leaving. It can be opened only if its lock
        // is free, so the client is removed from the leaving clients, which releases the lock.
        let clients: Vec<ClientConfig> =
            self.clients.unstarted.iter().map(|(client, _)| client.clone()).collect();
        let names: BTreeSet<String> = clients.iter().map(|client| client.name.clone()).collect();
        self.clients
            .leaving
            .retain(|leaving| !leaving.pins.is_of_this_version() || !names.contains(&leaving.pins.client));
        let there = self.there();
        self.clients.opening = true;
        let (opener, in_force) = (self.opener(now), self.in_force());
        let statics = self.sources.statics.clone();
        self.effects.push(
            BackgroundWork::Open(Box::new(OpenRequest { clients, there, statics, in_force, opener })).into(),
        );
    }

    pub fn opened(&mut self, tried: Tried, now: Instant) {
        self.clients.opening = false;
        let Tried { clients, opened, by_service } = tried;
        let mut unstarted = self.clients.unstarted.clone();
        for client in clients {
            // A reload may have changed or removed the client in the meantime.
            let Some(at) = unstarted.iter().position(|(other, _)| *other == client) else { continue };
            let Some(client_task) = self.clients.task_mut(&client.name) else {
                continue;
            };
            if !client_task.is_unpinned() && client_task.reconfigure(client.clone(), now).is_ok() {
                unstarted.remove(at);
                self.make_controls(&client.name, now);
                self.deliver_to(&client.name, &by_service, now);
            }
        }
        for Opened { client, result } in opened {
            let Some(at) = unstarted.iter().position(|(other, _)| *other == client) else { continue };
            match result {
                Ok((client_task, others)) => {
                    unstarted.remove(at);
                    self.take_in(client_task, others, now);
                    self.deliver_to(&client.name, &by_service, now);
                }
                Err(error) => unstarted[at].1 = format!("{error:#}"),
            }
        }
        self.set_unstarted(unstarted);
        self.settle(now);
        self.watch();
        self.follow_cgroups(now);
        self.leave_other_cgroups(now);
    }

    /// Delivers the lists in force to one client: first the lists with assignments for this client,
    /// then the lists that have arrived since these assignments were computed.
    pub fn deliver_to(&mut self, client: &str, by_service: &AssignmentsByService, now: Instant) {
        let Some(client_task) = self.clients.task_mut(client) else {
            return;
        };
        if let Err(refused) = client_task.deliver_static(by_service, now) {
            warn!(client, error = %refused, "endpoint list refused; the earlier list stays in use");
        }
        let mut later = Vec::new();
        let names = client_task.client.services.iter().map(|configured| configured.service.name.clone());
        for (position, service) in names.collect::<Vec<_>>().into_iter().enumerate() {
            let Some(file) = self.sources.watched.get_mut(&service) else { continue };
            if let Some(assignments) = by_service.get(&service) {
                if let Err(refused) = client_task.deliver(position, assignments, now) {
                    warn!(client, service, error = %refused, "endpoint list refused; the earlier list stays in use");
                }
                file.take_over(assignments);
            }
            let newest = file.feed.newest().filter(|newest| {
                by_service
                    .get(&service)
                    .is_none_or(|assignments| assignments.list() != newest.assignments.list())
            });
            later.extend(newest.map(|newest| (service, newest.clone())));
        }
        for (service, newest) in later {
            self.deliver(&service, newest, now);
        }
    }
}
