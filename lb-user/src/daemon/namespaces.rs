//! The network namespaces of all clients, searched for by one thread beside the loop.

use std::io;
use std::path::PathBuf;
use std::time::Instant;

use lb_kernel::ClientNamespace;

use super::{Daemon, Event};

/// The result of a search for the namespace of one client.
pub struct Found {
    client: String,
    /// The path of the cgroup that was searched.
    path: PathBuf,
    result: io::Result<Option<ClientNamespace>>,
}

impl Daemon {
    /// Starts to search for the namespaces of clients for which that is due, unless a search is under way.
    pub fn search_namespaces(&mut self, now: Instant) {
        if self.clients.is_searching {
            return;
        }
        let due = self.clients.tasks.iter_mut().filter(|client_task| client_task.is_search_due(now));
        let wanted: Vec<_> =
            due.map(|client_task| (client_task.client.name.clone(), client_task.begin_search(now))).collect();
        if wanted.is_empty() {
            return;
        }
        self.clients.is_searching = true;
        let events = self.events.clone();
        tokio::task::spawn_blocking(move || {
            let find = |(client, (path, known)): (String, (PathBuf, _))| {
                let result = ClientNamespace::find(&path, known);
                Found { client, path, result }
            };
            let _ = events.blocking_send(Event::NamespacesFound(wanted.into_iter().map(find).collect()));
        });
    }

    pub fn namespaces_found(&mut self, found: Vec<Found>, now: Instant) {
        self.clients.is_searching = false;
        for Found { client, path, result } in found {
            // A reload may have given the client another cgroup.
            if let Some(client_task) = self.clients.task_mut(&client).filter(|task| task.path() == path) {
                client_task.search_ended(result, now);
            }
        }
    }
}
