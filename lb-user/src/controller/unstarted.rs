//! Clients that are opened beside the loop: at a reload, and again while they could not be started.
//!
//! To open a client takes its lock and loads its programs, tens of milliseconds each; several wait for readers
//! together.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Result, anyhow, ensure};
use lb_core::limits::Limits;
use lb_kernel::{DatapathError, Pins};
use tracing::warn;

use super::leaving::{self, Leaving};
use super::{ClientTask, ClientTaskError, Controller, Environment, Work};
use crate::assignments::{self, Assignments, AssignmentsByService};
use crate::config::Client;
use crate::source::FileSource;

/// Clients that could not be started, tried again.
pub struct Tried {
    /// All that were tried.
    pub clients: Vec<Client>,
    /// Those of them that did not run, opened.
    pub opened: Vec<Opened>,
    /// The lists that were in force when it began, for all of them.
    pub by_service: AssignmentsByService,
}

/// A client that was opened beside the loop, with the locked pins that other versions have of it; or why it could not
/// be.
pub struct Opened {
    /// As it is configured.
    pub client: Client,
    /// What came of it.
    pub result: Result<(ClientTask, Vec<Leaving>)>,
}

/// Clients that are to be opened.
pub struct OpenRequest {
    /// All of them. Those that are `there` run with an earlier configuration.
    clients: Vec<Client>,
    there: BTreeSet<String>,
    /// The lists that are in force.
    statics: AssignmentsByService,
    in_force: BTreeMap<String, (FileSource, Assignments)>,
    opener: Opener,
}

impl OpenRequest {
    /// Opens them. May block for as long as [`Opener::open_all`], and for seconds to compute lists of the largest jobs.
    pub fn carry_out(self) -> Tried {
        let Self { clients, there, statics, in_force, opener } = self;
        let mut by_service = assignments::statics(&clients, &statics);
        for (service, (_, mut assignments)) in in_force {
            assignments.complete(&assignments::consumers(&clients, &service));
            by_service.entry(service).or_insert(assignments);
        }
        let absent = clients.iter().filter(|client| !there.contains(&client.name));
        let opened = opener.open_all(absent.cloned());
        Tried { clients, opened, by_service }
    }
}

impl Controller {
    /// What it takes to open clients beside the loop.
    pub fn opener(&self, now: Instant) -> Opener {
        Opener {
            pins: self.config.paths.pins.clone(),
            limits: self.config.limits,
            environment: self.environment.clone(),
            leaving: self.clients.leaving.iter().map(|leaving| leaving.pins.clone()).collect(),
            now,
        }
    }

    /// Tries clients again that could not be started.
    pub fn start_unstarted(&mut self, now: Instant) {
        if self.clients.unstarted.is_empty() || self.clients.opening || self.reload.turn.is_reading() {
            return;
        }
        // A client that was leaving and is configured again is opened anew, which needs the lock that is held for it.
        let clients: Vec<Client> = self.clients.unstarted.iter().map(|(client, _)| client.clone()).collect();
        let names: BTreeSet<String> = clients.iter().map(|client| client.name.clone()).collect();
        self.clients
            .leaving
            .retain(|leaving| !leaving.pins.is_of_this_version() || !names.contains(&leaving.pins.client));
        // Those that are there run with an earlier configuration.
        let there = self.there();
        self.clients.opening = true;
        let (opener, in_force) = (self.opener(now), self.in_force());
        let statics = self.sources.statics.clone();
        self.effects
            .push(Work::Open(Box::new(OpenRequest { clients, there, statics, in_force, opener })).into());
    }

    pub fn opened(&mut self, tried: Tried, now: Instant) {
        self.clients.opening = false;
        let Tried { clients, opened, by_service } = tried;
        let mut unstarted = self.clients.unstarted.clone();
        for client in clients {
            // A reload may have changed or dropped it meanwhile.
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

    /// Gives one client the lists that are in force: at first those of which its part was computed, then those that
    /// have come since.
    pub fn deliver_to(&mut self, client: &str, by_service: &AssignmentsByService, now: Instant) {
        let Some(client_task) = self.clients.task_mut(client) else {
            return;
        };
        if let Err(refused) = client_task.deliver_static(by_service, now) {
            warn!(client, error = %refused, "endpoint list refused");
        }
        let mut later = Vec::new();
        let names = client_task.client.services.iter().map(|configured| configured.service.name.clone());
        for (position, service) in names.collect::<Vec<_>>().into_iter().enumerate() {
            let Some(file) = self.sources.files.get_mut(&service) else { continue };
            if let Some(assignments) = by_service.get(&service) {
                if let Err(refused) = client_task.deliver(position, assignments, now) {
                    warn!(client, service, error = %refused, "endpoint list refused");
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

/// Opens clients, on any thread.
pub struct Opener {
    environment: Environment,
    pins: PathBuf,
    limits: Limits,
    /// Pins of leaving clients, which this daemon has locked already.
    leaving: Vec<Pins>,
    /// When the opening began.
    now: Instant,
}

impl Opener {
    /// Opens a client, and locks what other versions have of it.
    fn open(&self, client: Client) -> Result<(ClientTask, Vec<Leaving>)> {
        let kernel = &*self.environment.kernel;
        // A successor waits for the locks of those that are open already.
        ensure!(!self.environment.stopping.load(Ordering::Relaxed), "the daemon is stopping");
        // Locked before anything is changed: another socklb of another version may be running.
        let others = leaving::lock_other_versions(kernel, &self.pins, &client.name, &self.leaving)?;
        match self.open_here(client) {
            Ok(client_task) => Ok((client_task, others)),
            // Unwrapped, so that its kind is found among the causes: what to do about it depends on that.
            Err(ClientTaskError::Datapath(error)) => Err(error.into()),
            Err(error) => Err(error.into()),
        }
    }

    fn open_here(&self, client: Client) -> Result<ClientTask, ClientTaskError> {
        let kernel = &*self.environment.kernel;
        let path = kernel.mount()?.join(&client.cgroup);
        // A path that can never be a cgroup is found out now; one that is not there yet is waited for.
        match kernel.cgroup(&path) {
            Ok(_) | Err(DatapathError::NoCgroup(_)) => {}
            Err(error) => return Err(error.into()),
        }
        let pins = Pins::of(&self.pins, &client.name);
        let kernel = kernel.client(pins.clone())?;
        ClientTask::open(client, pins, kernel, self.limits, &self.environment, self.now)
    }

    /// Opens several, on all CPUs at once: nearly all of it is the kernel's verifier. May block for tens of milliseconds each.
    pub fn open_all(&self, clients: impl IntoIterator<Item = Client>) -> Vec<Opened> {
        let clients: Vec<Client> = clients.into_iter().collect();
        let open = |client: &Client| Opened { result: self.open(client.clone()), client: client.clone() };
        let mut opened = on_threads(self.environment.threads, &clients, open);
        let mut adopted = Vec::new();
        for Opened { client, result } in &mut opened {
            if let Ok((client_task, _)) = result
                && !client_task.datapath().applied().services.is_empty()
            {
                client_task.before_wait();
                adopted.push(client.name.clone());
            }
        }
        if adopted.is_empty() {
            return opened;
        }
        // A daemon that was killed may have replaced tables just now: what it left must not be written over while a program
        // reads it.
        let waited = self.environment.kernel.wait_for_readers().map_err(|error| crate::error::chain(&error));
        for Opened { client, result } in &mut opened {
            let (true, Ok((client_task, _))) = (adopted.contains(&client.name), &mut *result) else {
                continue;
            };
            match &waited {
                Ok(()) => {
                    client_task.after_wait();
                    // Before lists come in: they may need the slots of backends whose last flow ended meanwhile.
                    client_task.free_idle(self.now);
                }
                Err(error) => *result = Err(anyhow!(error.clone())),
            }
        }
        opened
    }
}

/// Does something with each of several things, on so many threads. Results are in the order of the things.
fn on_threads<T: Sync, R: Send>(threads: usize, things: &[T], of: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let threads = threads.min(things.len());
    if threads < 2 {
        return things.iter().map(of).collect();
    }
    let next = AtomicUsize::new(0);
    let work = || {
        let numbers = std::iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed));
        let theirs = numbers.map_while(|number| Some((number, of(things.get(number)?))));
        theirs.collect::<Vec<(usize, R)>>()
    };
    let mut results: Vec<(usize, R)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("no thread panics")).collect()
    });
    results.sort_by_key(|(number, _)| *number);
    results.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_the_order_of_things() {
        for count in [0, 1, 2, 63, 64] {
            let things: Vec<u32> = (0..count).collect();
            assert_eq!(
                on_threads(3, &things, |thing| thing * 2),
                things.iter().map(|thing| thing * 2).collect::<Vec<_>>()
            );
        }
    }
}
