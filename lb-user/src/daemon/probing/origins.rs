//! The network namespaces that probes come from: the daemon's own, and those of clients that want it so.
//!
//! A client's namespace is that of its processes. It is left as soon as none of these is there: until then it lasts, and with it
//! the devices in it.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use lb_kernel::{NamespaceId, NetworkNamespace, namespace_of_cgroup};
use lb_view::fault::{Fault, FaultCode};
use tracing::warn;

use crate::probes::Origin;

/// Where the probes of clients come from that do not come from the host.
#[derive(Default)]
pub struct Origins {
    ours: Option<NamespaceId>,
    entered: BTreeMap<NamespaceId, Arc<NetworkNamespace>>,
    /// By client; why there is none.
    clients: BTreeMap<String, Result<Origin, Missing>>,
}

/// Why a client has no network namespace to probe from.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Missing {
    /// It has no process.
    Process,
    /// The kernel does not let the daemon in.
    Refused(String),
}

impl Origins {
    /// Looks where these clients' processes are, each with its cgroup, and enters what was not entered yet.
    pub fn look<'c>(&mut self, clients: impl Iterator<Item = (&'c str, Option<&'c Path>)>) {
        if self.ours.is_none() {
            self.ours = NamespaceId::ours().ok();
        }
        let before = std::mem::take(&mut self.clients);
        for (client, cgroup) in clients {
            let known = match before.get(client) {
                Some(Ok(Origin::Client(id))) => Some(*id),
                Some(Ok(Origin::Host)) => self.ours,
                _ => None,
            };
            let found = self.find(cgroup, known);
            if let Err(Missing::Refused(why)) = &found
                && before.get(client) != Some(&found)
            {
                warn!(client, "backends cannot be probed from its network namespace: {why}");
            }
            self.clients.insert(client.to_owned(), found);
        }
        let wanted: BTreeSet<Origin> = self.clients.values().flatten().copied().collect();
        self.entered.retain(|id, _| wanted.contains(&Origin::Client(*id)));
    }

    fn find(&mut self, cgroup: Option<&Path>, known: Option<NamespaceId>) -> Result<Origin, Missing> {
        let refused = |error: std::io::Error| Missing::Refused(error.to_string());
        let cgroup = cgroup.ok_or(Missing::Process)?;
        let (id, pid) = namespace_of_cgroup(cgroup, known).map_err(refused)?.ok_or(Missing::Process)?;
        if self.ours == Some(id) {
            return Ok(Origin::Host);
        }
        if let Entry::Vacant(entry) = self.entered.entry(id) {
            entry.insert(Arc::new(NetworkNamespace::of(pid, id).map_err(refused)?));
        }
        Ok(Origin::Client(id))
    }

    /// Where this client's probes come from; `None` if they cannot.
    pub fn of(&self, client: &str) -> Option<Origin> {
        self.clients.get(client)?.as_ref().ok().copied()
    }

    /// Why this client's backends are not probed.
    pub fn why_none(&self, client: &str) -> Option<String> {
        match self.clients.get(client)?.as_ref().err()? {
            Missing::Process => {
                Some("the client has no process, from whose network namespace it is to be probed".to_owned())
            }
            Missing::Refused(why) => {
                Some(format!("it cannot be probed from the client's network namespace: {why}"))
            }
        }
    }

    /// The way into a namespace; `None` into the host's, which needs none.
    pub fn entered(&self, origin: Origin) -> Option<Arc<NetworkNamespace>> {
        match origin {
            Origin::Host => None,
            Origin::Client(id) => self.entered.get(&id).map(Arc::clone),
        }
    }

    /// A client that is in a namespace.
    pub fn client_in(&self, origin: Origin) -> Option<&str> {
        let mut clients = self.clients.iter();
        clients.find(|(_, found)| **found == Ok(origin)).map(|(client, _)| client.as_str())
    }

    /// Clients whose namespaces may not be entered.
    pub fn faults(&self) -> impl Iterator<Item = Fault> {
        self.clients.iter().filter_map(|(client, found)| {
            let Err(Missing::Refused(why)) = found else { return None };
            let text = format!(
                "its backends are to be probed from its network namespace (probe_from = \"client\"), which cannot be entered: {why}; \
                 that takes CAP_SYS_ADMIN, and CAP_SYS_PTRACE where its processes are another user's"
            );
            Some(Fault::of_client(FaultCode::Probes, client, text))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_without_processes_has_no_namespace_and_one_that_is_forgotten_neither() {
        let mut origins = Origins::default();
        let empty = tempfile::tempdir().unwrap();
        origins.look([("a", None), ("b", Some(empty.path()))].into_iter());
        assert_eq!((origins.of("a"), origins.of("b"), origins.of("c")), (None, None, None));
        assert!(origins.why_none("a").unwrap().contains("no process"));
        assert_eq!((origins.why_none("c"), origins.faults().count()), (None, 0));
        // Where all that is known of a cgroup is this process, the host's namespace is meant.
        std::fs::write(empty.path().join("cgroup.procs"), std::process::id().to_string()).unwrap();
        origins.look([("b", Some(empty.path()))].into_iter());
        assert_eq!((origins.of("b"), origins.why_none("a")), (Some(Origin::Host), None));
        assert_eq!(origins.client_in(Origin::Host), Some("b"));
        assert!(origins.entered(Origin::Host).is_none() && origins.entered.is_empty());
    }
}
