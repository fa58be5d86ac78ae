//! All clients of the daemon: they are added and removed with the configuration, and attached to
//! their cgroups.
//!
//! A fault of one client is logged once and retried; other clients are not affected.

pub mod first_look;
pub mod leaving;
pub mod namespaces;
pub mod unstarted;

use std::collections::BTreeSet;
use std::time::Instant;

use tracing::{info, warn};

use self::leaving::{CannotLeave, Leaving};
use super::Controller;
use super::client_task::{ClientTask, Followed};
use crate::backoff::Backoff;
use crate::config::{ClientConfig, Config};

#[derive(Default)]
pub struct Clients {
    /// The clients that run.
    pub tasks: Vec<ClientTask>,
    /// The names of the clients whose maps may not match their plans yet. One turn of the loop
    /// settles one of them (see [`ClientTask::settle`]).
    pub to_settle: BTreeSet<String>,
    /// Whether later turns must still settle clients. After the last client, the loop calls
    /// `all_settled`.
    pub is_settling: bool,
    /// Whether a client was settled in the current turn of the event loop.
    pub has_settled: bool,
    /// The clients that could not be started, or could not apply a new configuration, each with the
    /// reason. They are retried regularly.
    pub unstarted: Vec<(ClientConfig, String)>,
    /// Whether clients are being opened outside of the event loop.
    pub opening: bool,
    /// Clients that are leaving.
    pub leaving: Vec<Leaving>,
    /// The pauses between attempts to resume the removals that an earlier daemon began.
    pub resuming: Backoff,
    /// Whether a wait for readers is under way.
    pub waiting_for_readers: bool,
    /// Whether a search for network namespaces is under way.
    pub is_searching: bool,
    /// Why the last wait for readers failed; `None` if it succeeded.
    pub readers_error: Option<String>,
}

impl Clients {
    /// The client of this name, if it runs.
    pub fn task(&self, name: &str) -> Option<&ClientTask> {
        self.tasks.iter().find(|task| task.client.name == name)
    }

    pub fn task_mut(&mut self, name: &str) -> Option<&mut ClientTask> {
        self.tasks.iter_mut().find(|task| task.client.name == name)
    }
}

impl Controller {
    /// Adds a client that was opened. If a client of the same name runs, its pins were removed, and
    /// the new client replaces it.
    pub fn take_in(&mut self, mut client_task: ClientTask, others: Vec<Leaving>, now: Instant) {
        // This first sample is the base from which the counts of the last minute are computed.
        if let Err((error, _)) = client_task.sample(now) {
            warn!(client = %client_task.client.name, error = %crate::error::chain(&error), "cannot read the programs' counters; retrying");
        }
        if !client_task.has_cgroup() {
            // This is logged because the path may be mistyped.
            warn!(client = %client_task.client.name, cgroup = %client_task.client.cgroup.display(), "the client's cgroup does not exist; waiting for it");
        }
        let name = client_task.client.name.clone();
        client_task.is_new &= others.is_empty();
        match self.clients.task_mut(&name) {
            Some(before) => *before = client_task,
            None => self.clients.tasks.push(client_task),
        }
        self.clients.leaving.extend(others);
        self.make_controls(&name, now);
    }

    /// The names of the running clients, which need not be opened. If an operator has removed a
    /// client's pins, the client is not included, so that it is opened again.
    pub fn there(&mut self) -> BTreeSet<String> {
        let mut there = BTreeSet::new();
        for client_task in &mut self.clients.tasks {
            let was_unpinned = client_task.is_unpinned();
            // If the pins cannot be checked, they are assumed to exist.
            if client_task.look_for_pins().unwrap_or(true) {
                there.insert(client_task.client.name.clone());
            } else if !was_unpinned {
                log_attachment(client_task, Followed::Unpinned);
            }
        }
        there
    }

    pub fn names(&self) -> Vec<&str> {
        self.clients.tasks.iter().map(|client_task| client_task.client.name.as_str()).collect()
    }

    /// Stores which clients could not be started; logs each error once.
    pub fn set_unstarted(&mut self, unstarted: Vec<(ClientConfig, String)>) {
        for (client, error) in &unstarted {
            let known =
                |(other, before): &(ClientConfig, String)| other.name == client.name && before == error;
            if !self.clients.unstarted.iter().any(known) {
                warn!(client = %client.name, %error, "cannot start the client, or apply its new configuration; retrying");
            }
        }
        self.clients.unstarted = unstarted;
    }

    /// Removes and returns the running clients that are no longer configured. Their programs are
    /// still attached.
    pub fn drop_clients(&mut self, config: &Config) -> Vec<Leaving> {
        let stays = |client_task: &ClientTask| {
            config.clients.iter().any(|client| client.name == client_task.client.name)
        };
        let (stay, gone): (Vec<ClientTask>, Vec<ClientTask>) =
            std::mem::take(&mut self.clients.tasks).into_iter().partition(stays);
        self.clients.tasks = stay;
        gone.into_iter().map(Leaving::of).collect()
    }

    /// Attaches each client if its cgroup has changed or its links are missing.
    pub fn follow_cgroups(&mut self, now: Instant) {
        let mut moved = false;
        let Clients { tasks, to_settle, .. } = &mut self.clients;
        // A client that is not attached yet is attached only after it was settled, and only if the
        // kernel refused no step, so that no flow begins before its tables are complete. (If an
        // earlier daemon has attached it, its links stay attached.)
        let is_ready = |client_task: &ClientTask| {
            !client_task.has_failed() && !to_settle.contains(&client_task.client.name)
        };
        for client_task in
            tasks.iter_mut().filter(|client_task| client_task.cgroup().is_some() || is_ready(client_task))
        {
            match client_task.follow_cgroup(now) {
                Ok(followed) => {
                    moved |= followed != Followed::Unchanged;
                    log_attachment(client_task, followed);
                }
                // An error is logged once, not at each attempt.
                Err((error, is_new)) if is_new => {
                    warn!(client = %client_task.client.name, error = %crate::error::chain(&error), "cannot attach to the cgroup; retrying");
                }
                Err(_) => {}
            }
        }
        if moved {
            self.leave_other_cgroups(now);
        }
        self.answer_waiters();
    }

    /// Prevents new flows in cgroups that clients have left, and detaches from each of these
    /// cgroups once its flows have ended. Call this after all clients are attached to their new
    /// cgroups: if two clients swap cgroups, the old client of a cgroup must not leave the cgroup
    /// before the new client is attached to it.
    pub fn leave_other_cgroups(&mut self, now: Instant) {
        let unable_to_leave: BTreeSet<String> =
            self.unable_to_leave().into_iter().map(|CannotLeave { client, .. }| client).collect();
        for client_task in self
            .clients
            .tasks
            .iter_mut()
            .filter(|client_task| !unable_to_leave.contains(&client_task.client.name))
        {
            if let Err((error, true)) = client_task.leave_other_cgroups(now) {
                warn!(client = %client_task.client.name, error = %crate::error::chain(&error), "cannot detach from an old cgroup; retrying");
            }
        }
        self.retire_leaving(now);
    }
}

/// Logs a change of a client's attachment.
fn log_attachment(client_task: &ClientTask, followed: Followed) {
    let client = &client_task.client;
    match (followed, client_task.cgroup()) {
        (Followed::Attached, Some(cgroup)) => info!(
            client = %client.name, cgroup = %cgroup.path.display(), id = cgroup.id, index = client.task.index,
            count = client.task.count, services = client.services.len(), "client attached"
        ),
        (Followed::Lost, _) => {
            info!(client = %client.name, cgroup = %client.cgroup.display(), "the client's cgroup does not exist; waiting for it");
        }
        (Followed::Unpinned, _) => warn!(
            client = %client.name,
            "the client's pins were removed, so its connects are not balanced; a reload (SIGHUP) or a \
             restart creates the pins again and attaches the client"
        ),
        (Followed::Unchanged | Followed::Attached, _) => {}
    }
}
