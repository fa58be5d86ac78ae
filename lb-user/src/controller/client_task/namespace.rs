//! Determines two things that the programs need to judge backends: the network namespace of the
//! client's processes, because only flows in this namespace are evidence about backends; and
//! whether several processes begin flows. A thread outside of the event loop determines both, and
//! the controller then publishes the results to the programs.

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use lb_kernel::{ClientNamespace, Pins, RecordedProcesses};
use tracing::info;

use super::ClientTask;

/// The time between two searches.
const EVERY: Duration = Duration::from_secs(10);
/// The time to the next search if a search found no process, or a namespace other than the last
/// one. It is short, because a service manager first starts a process and then moves it into its
/// namespace.
const SOON: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct Searches {
    /// The id of the client's cgroup at the last search, and when the next search is due.
    last: Option<(Option<u64>, Instant)>,
    /// Whether flows may have begun since the flow records were last read.
    has_new_flows: bool,
}

impl Default for Searches {
    /// No search has been made yet, and flows may have begun under an earlier daemon.
    fn default() -> Self {
        Self { last: None, has_new_flows: true }
    }
}

/// A search that should be made.
pub struct Search {
    /// The path of the client's cgroup.
    pub path: PathBuf,
    /// The namespace that is known so far.
    pub known: Option<ClientNamespace>,
    /// The pins of the flow records, if these are to be read.
    pub records: Option<Pins>,
}

impl ClientTask {
    /// Whether a search is due. A search is due at the start, when the client's cgroup has changed
    /// since the last search, and `EVERY` or `SOON` after each search.
    pub fn is_search_due(&self, now: Instant) -> bool {
        let cgroup = self.cgroup.as_ref().map(|cgroup| cgroup.id);
        self.search.last.is_none_or(|(last, due)| last != cgroup || due <= now)
    }

    pub fn begin_search(&mut self, now: Instant) -> Search {
        self.search.last = Some((self.cgroup.as_ref().map(|cgroup| cgroup.id), now + EVERY));
        let records = std::mem::take(&mut self.search.has_new_flows).then(|| self.pins.clone());
        Search { path: self.path.clone(), known: self.namespace, records }
    }

    /// Call this when flows have begun, so that the next search reads the flow records.
    pub(super) fn flows_have_begun(&mut self) {
        self.search.has_new_flows = true;
    }

    /// Discards the results, because the client has another cgroup now.
    pub(super) fn forget_namespace(&mut self) {
        (self.namespace, self.search) = (None, Searches::default());
    }

    /// Applies the result of a search. If the search found no process, the earlier namespace is
    /// retained, because without a process there are no connects.
    pub fn search_ended(
        &mut self,
        found: io::Result<Option<ClientNamespace>>,
        recorded: Option<RecordedProcesses>,
        now: Instant,
    ) {
        self.recorded = recorded.unwrap_or(self.recorded);
        let has_process = !matches!(found, Ok(None));
        // While a client restarts, the records may be those of both its old and its new process. So
        // if the search has found no process, the next search reads the records again.
        self.search.has_new_flows |= !has_process && self.recorded.are_several;
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
            // The process through which the namespace was found may have changed.
            self.namespace = namespace;
        } else {
            self.namespace_found(namespace);
        }
        self.publish_evidence_scope();
    }

    /// Publishes to the programs which flows may provide evidence: those in the namespace that the
    /// search found. If that namespace is unknown, publishes the namespace in the flow records, or
    /// if that is also unknown, the daemon's namespace. Call this for each new service, too.
    pub(super) fn publish_evidence_scope(&mut self) {
        let RecordedProcesses { are_several, namespace } = self.recorded;
        let found = self.namespace.and_then(|found| found.cookie);
        let own = self.datapath.kernel().own_namespace();
        self.datapath.set_evidence_scope(found.or(namespace).or(own), are_several);
    }

    /// Stores a namespace that differs from the earlier one; `None` if it is unknown. If the
    /// client's processes have entered or left the daemon's namespace, logs this and requests that
    /// the results of probes are applied again.
    fn namespace_found(&mut self, namespace: Option<ClientNamespace>) {
        let was_elsewhere = self.is_elsewhere();
        self.namespace = namespace;
        let (client, pid) = (&self.client.name, self.namespace.map(|namespace| namespace.pid()));
        match (was_elsewhere, self.is_elsewhere()) {
            (false, true) => {
                info!(%client, pid, "the client's processes are in another network namespace than the daemon");
            }
            (true, false) => {
                info!(%client, pid, "the client's processes are in the daemon's network namespace");
            }
            (false, false) | (true, true) => return,
        }
        // A failed probe from another namespace is judged differently, so the results of probes are
        // applied again.
        self.applied_probes = None;
    }

    /// Whether the client's processes are known to be in another network namespace than the daemon.
    pub fn is_elsewhere(&self) -> bool {
        self.namespace.is_some_and(|namespace| !namespace.is_ours)
    }
}
