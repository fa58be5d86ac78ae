//! In which network namespace the processes of a client are: as the daemon finds it by searches, which are carried out beside the loop.

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use lb_kernel::ClientNamespace;
use tracing::info;

use super::ClientTask;

/// Between two searches.
const EVERY: Duration = Duration::from_secs(10);
/// From a search that found another namespace, or no process, to the next: a service manager first starts a process and then moves it
/// into its namespace.
const SOON: Duration = Duration::from_secs(1);

/// When the namespace is searched for.
#[derive(Debug, Default)]
pub struct Search {
    /// The cgroup of the last search, and when the next is due.
    last: Option<(Option<u64>, Instant)>,
}

impl ClientTask {
    /// Whether a search is due: at the start, for another cgroup than at the last search, and some time after each.
    pub fn is_search_due(&self, now: Instant) -> bool {
        let cgroup = self.cgroup.as_ref().map(|cgroup| cgroup.id);
        self.search.last.is_none_or(|(last, due)| last != cgroup || due <= now)
    }

    /// Begins a search: below which path, and what is known.
    pub fn begin_search(&mut self, now: Instant) -> (PathBuf, Option<ClientNamespace>) {
        self.search.last = Some((self.cgroup.as_ref().map(|cgroup| cgroup.id), now + EVERY));
        (self.path.clone(), self.namespace)
    }

    /// Forgets what was found of another cgroup.
    pub(super) fn forget_namespace(&mut self) {
        (self.namespace, self.search) = (None, Search::default());
    }

    /// Applies the result of a search. If there is no process, the namespace before stays: nothing connects from anywhere.
    pub fn search_ended(&mut self, found: io::Result<Option<ClientNamespace>>, now: Instant) {
        let has_process = !matches!(found, Ok(None));
        let namespace = found.map_or(None, |found| found.or(self.namespace));
        let is_same = match (&self.namespace, &namespace) {
            (Some(before), Some(after)) => before.is_namespace_of(after),
            (before, after) => before.is_none() && after.is_none(),
        };
        if let Some((_, due)) = &mut self.search.last
            && !(is_same && has_process)
        {
            *due = now + SOON;
        }
        if is_same {
            // Only the process that decides may be another one.
            self.namespace = namespace;
        } else {
            self.namespace_found(namespace);
        }
    }

    /// Stores a namespace that differs from the one before, and what follows from it. `None`: it may not be looked at, so the
    /// daemon's counts.
    fn namespace_found(&mut self, namespace: Option<ClientNamespace>) {
        let was_elsewhere = self.is_elsewhere();
        self.namespace = namespace;
        let (client, pid) = (&self.client.name, self.namespace.map(|namespace| namespace.pid()));
        match (was_elsewhere, self.is_elsewhere()) {
            (false, true) => info!(%client, pid, "the client is in another network namespace"),
            (true, false) => info!(%client, pid, "the client is in the daemon's network namespace"),
            (false, false) | (true, true) => return,
        }
        // Failed probes mean something else from now on.
        self.probes_heard = None;
    }

    /// Whether the client's processes are in another network namespace than the daemon, as far as that is known.
    pub fn is_elsewhere(&self) -> bool {
        self.namespace.is_some_and(|namespace| !namespace.is_ours)
    }
}
