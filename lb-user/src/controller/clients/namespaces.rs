//! Searches for the network namespaces and the processes of all clients. The searches run outside
//! of the event loop, on one thread at a time.

use std::io;
use std::path::PathBuf;
use std::time::Instant;

use lb_kernel::{ClientNamespace, RecordedProcesses};

use crate::controller::{BackgroundWork, Controller};

/// The result of a search for the namespace of one client.
pub struct NamespaceSearch {
    pub client: String,
    /// The path of the searched cgroup.
    pub path: PathBuf,
    pub result: io::Result<Option<ClientNamespace>>,
    /// The client's processes according to its flow records; `None` if no flow has begun since the
    /// records were last read, or if they cannot be read.
    pub recorded: Option<RecordedProcesses>,
}

impl Controller {
    /// Starts to search for the namespaces of the clients whose search is due, unless a search is
    /// under way.
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
        self.effects.push(BackgroundWork::SearchNamespaces(wanted).into());
    }

    pub fn namespaces_found(&mut self, found: Vec<NamespaceSearch>, now: Instant) {
        self.clients.is_searching = false;
        for NamespaceSearch { client, path, result, recorded } in found {
            // A reload may have changed the client's cgroup in the meantime.
            if let Some(client_task) = self.clients.task_mut(&client).filter(|task| task.path() == path) {
                client_task.search_ended(result, recorded, now);
            }
        }
    }
}
