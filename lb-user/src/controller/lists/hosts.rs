//! Host names in lists: which names are resolved, and which lists are read again because a name has
//! other addresses.
//!
//! The reader of lists reports the names that a list contains. A name retains its last addresses,
//! so a name that does not resolve removes no endpoint, even after a restart (`stores/hosts`).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use lb_config::endpoints::MAX_HOSTS;
use lb_discovery::{HostName, HostState, HostTable};

use super::sources::WatchedSource;
use crate::controller::stores::hosts::HostStore;
use crate::controller::{Controller, Effect};
use crate::source::{Contents, SourceError};

/// The host names of all lists.
#[derive(Default)]
pub struct HostNames {
    /// The addresses of host names at the last comparison with the lists.
    pub table: Arc<HostTable>,
    /// The names that are resolved.
    pub resolving: BTreeSet<HostName>,
    /// The addresses that are stored for the next start of the daemon.
    pub store: HostStore,
}

/// Whether a list must be read again because the addresses of a name have changed.
fn is_changed(before: Option<&HostState>, after: Option<&HostState>) -> bool {
    let known = [before, after].map(|state| state.filter(|state| state.is_known()));
    match known {
        [Some(before), Some(after)] => before.addresses != after.addresses || before.refused != after.refused,
        [before, after] => before.is_some() != after.is_some(),
    }
}

impl WatchedSource {
    /// Reads the list once more, even if its file or the server's answer has not changed.
    fn read_again(&mut self, now: Instant) {
        self.remote.must_read = true;
        self.feed.progress.changed(now);
    }
}

impl Controller {
    /// Stores the host names of a list that was read. Returns a fault if all lists together have
    /// too many names; in this case, the names of the list's earlier version are still resolved.
    pub fn host_fault(
        &mut self,
        service: &str,
        result: &Result<Contents, SourceError>,
    ) -> Option<SourceError> {
        let after = &self.sources.hosts.table;
        // If DNS has answered after the list was read and before this call, the list must be read
        // again.
        let (hosts, is_outdated) = match result {
            Ok(contents) => {
                let before = &contents.table;
                let is_outdated = |host: &HostName| {
                    after.is_known(host) && is_changed(before.0.get(host), after.0.get(host))
                };
                (&contents.hosts, contents.hosts.iter().any(is_outdated))
            }
            Err(error) => {
                let is_outdated =
                    error.unanswered().is_some_and(|hosts| hosts.iter().all(|host| after.is_known(host)));
                let SourceError::Hosts { hosts, .. } = error else { return None };
                (hosts, is_outdated)
            }
        };
        let watched = &mut self.sources.watched;
        let others = watched.iter().filter(|(other, _)| *other != service);
        let others: BTreeSet<&HostName> = others.flat_map(|(_, other)| &*other.hosts).collect();
        let all = others.len() + hosts.iter().filter(|host| !others.contains(host)).count();
        // While the server's list is suspended, the list that was read has no names. The names of
        // the server's list are still resolved, because that list will be used again.
        let watched = watched.get_mut(service).filter(|watched| watched.remote.suspension.is_none())?;
        watched.has_outdated_hosts = is_outdated;
        watched.lacks_hosts = all > MAX_HOSTS;
        if watched.lacks_hosts {
            return Some(SourceError::TooManyHosts { place: watched.source.place(), own: hosts.len(), all });
        }
        watched.hosts = Arc::clone(hosts);
        None
    }

    /// Resolves the host names of all lists from now on, and no others. Until every list has been
    /// read, the names that an earlier daemon has stored are also resolved, because a list may
    /// contain them.
    pub fn resolve_hosts(&mut self, now: Instant) {
        let watched = &mut self.sources.watched;
        if watched.values().all(|watched| watched.feed.good_since().is_some()) {
            self.sources.hosts.store.earlier.clear();
        }
        for watched in watched.values_mut() {
            if std::mem::take(&mut watched.has_outdated_hosts) {
                watched.read_again(now);
            }
        }
        let of_lists = watched.values().flat_map(|watched| &*watched.hosts);
        let hosts: BTreeSet<HostName> = of_lists.chain(&self.sources.hosts.store.earlier).cloned().collect();
        // If some names are no longer needed, a list that was refused because of its number of
        // names may fit now.
        if !self.sources.hosts.resolving.is_subset(&hosts) {
            let refused = self.sources.watched.values_mut().filter(|watched| watched.lacks_hosts);
            refused.for_each(|watched| watched.read_again(now));
        }
        self.sources.hosts.resolving.clone_from(&hosts);
        self.effects.push(Effect::Resolve(hosts, self.config.dns.clone()));
    }

    /// Handles new results of DNS queries for host names. A list is read again once all of its
    /// names have a result, so that the list does not take effect with the addresses of only some
    /// names.
    pub fn resolved(&mut self, table: &Arc<HostTable>, now: Instant) {
        let before = std::mem::replace(&mut self.sources.hosts.table, Arc::clone(table));
        for watched in self.sources.watched.values_mut() {
            let is_known = |table: &HostTable| watched.hosts.iter().all(|host| table.is_known(host));
            let is_changed = |host: &HostName| is_changed(before.0.get(host), table.0.get(host));
            if is_known(table) && (!is_known(&before) || watched.hosts.iter().any(is_changed)) {
                watched.read_again(now);
            }
        }
    }
}
