//! Facts: a copy of the event loop's state. Status and metrics are built from it outside of the
//! event loop.

use std::collections::BTreeMap;
use std::time::Instant;

use lb_kernel::{Offsets, Pins};
use lb_view::fault::{Fault, FaultCode};
use lb_view::status::SourceStatus;

use super::clients::leaving::CannotLeave;
use super::clock::unix_seconds;
use super::{Controller, StoredFile, StoredOverrides};
use crate::controller::client_task::{ClientTask, ServiceTask};
use crate::counts::window::Lately;
use crate::descriptors;
use crate::error::chain;
use crate::output::facts::{ClientFacts, Facts, Reloads};

impl Controller {
    /// Collects the facts that status and metrics need from the loop. Makes a few system calls per
    /// client.
    pub fn facts(&self, now: Instant) -> Facts {
        // A client that runs, but could not apply a new configuration, is also in `unstarted`.
        let runs = |name: &str| self.clients.task(name).is_some();
        let unstarted = self.clients.unstarted.iter().filter(|(client, _)| !runs(&client.name));
        Facts {
            daemon: lb_view::status::DaemonStatus {
                pid: self.environment.pid,
                version: env!("CARGO_PKG_VERSION").to_owned(),
                config: self.config.path.clone(),
                pins: Some(self.config.paths.pins.clone()),
                features: self
                    .environment
                    .features
                    .named()
                    .map(|(name, has)| (name.to_owned(), has))
                    .collect(),
                offsets: self.offsets(),
            },
            started: self.started,
            reloads: Reloads {
                taken_on: self.reload.taken_on,
                refused: self.reload.refused,
                in_force_since: self.reload.in_force_since,
                is_faulty: self.reload.error.is_some(),
            },
            reports: self.probing.counts(),
            interfaces: self.probing.network().interfaces(),
            faults: self.faults(now),
            clients: self
                .clients
                .tasks
                .iter()
                .map(|client_task| self.client_facts(client_task, now))
                .collect(),
            unstarted: unstarted.map(|(client, _)| client.name.clone()).collect(),
            leaving: self.clients.leaving.iter().map(|leaving| leaving.pins.clone()).collect(),
        }
    }

    /// The offsets in kernel structures that the programs receive, keyed by name.
    fn offsets(&self) -> BTreeMap<String, u32> {
        let offsets = self.environment.features.offsets.iter().flat_map(Offsets::named);
        offsets.map(|(name, offset)| (name.to_owned(), offset)).collect()
    }

    fn client_facts(&self, client_task: &ClientTask, now: Instant) -> ClientFacts {
        // If the attachment cannot be read now, the client is assumed to be attached to the same
        // cgroup as before.
        let attached = client_task.cgroup().filter(|cgroup| client_task.covers(cgroup.id).unwrap_or(true));
        ClientFacts {
            pins: client_task.pins.clone(),
            is_unpinned: client_task.is_unpinned(),
            configured: client_task.path().to_owned(),
            cgroup: client_task.cgroup().map(|cgroup| cgroup.path.clone()),
            attached: attached.map(|cgroup| (cgroup.id, cgroup.path.clone())),
            is_attached: client_task.is_effective().unwrap_or(client_task.cgroup().is_some()),
            reclaim: self.reclaim(client_task),
            sources: self.sources(client_task, now),
            without_causes: client_task.without_causes(),
            panics: client_task.panics(),
            unused: client_task.unused(),
            lists: client_task.lists(),
            replace_after: client_task.replace_after(),
            unavailable: client_task.unavailable(now),
            probes: self.probe_views(client_task),
            loads: client_task.loads(),
            rebalances: client_task.rebalance_views(now),
            overrides: self.overrides_of(client_task),
            closed: client_task.closed.clone(),
            // If the run times of programs cannot be read, only these times are missing from the
            // facts.
            runs: client_task.datapath().kernel().runs().unwrap_or_default(),
            lately: Some(Lately { window: client_task.window().clone(), now }),
        }
    }

    /// The faults that cannot be determined from the maps.
    fn faults(&self, now: Instant) -> Vec<Fault> {
        let mut faults = Vec::new();
        for client_task in &self.clients.tasks {
            let mut add = |code, text| faults.push(Fault::of_client(code, &client_task.client.name, text));
            if let Some(text) = self.detachment(client_task) {
                add(FaultCode::NotAttached, text);
            }
            if let Some(text) = client_task.trouble() {
                add(FaultCode::TablesBehind, text.to_owned());
            }
        }
        for (client, error) in &self.clients.unstarted {
            faults.push(Fault::of_client(FaultCode::NotStarted, &client.name, error));
        }
        for CannotLeave { client, why, .. } in self.unable_to_leave() {
            let text = format!("the client should leave a cgroup, but {why}");
            faults.push(Fault::of_client(FaultCode::CannotLeave, &client, text));
        }
        for leaving in &self.clients.leaving {
            let (Pins { client, version, .. }, detach) = (&leaving.pins, leaving.pins.detach_command());
            if let Some(error) = leaving.error() {
                let text = format!(
                    "cannot remove the client's pins of ABI version {version}: {error}; retrying. To remove \
                     the pins even if flows are active, stop the daemon and run `{detach}`"
                );
                faults.push(Fault::of_client(FaultCode::CannotLeave, client, text));
            }
        }
        match self.strangers() {
            Ok(strangers) => faults.extend(strangers.iter().map(|pins| {
                let text =
                    format!("attached, but not configured; remove it with `{}`", pins.detach_command());
                Fault::of_client(FaultCode::NotConfigured, &pins.client, text)
            })),
            Err(error) => faults.push(Fault::of_host(FaultCode::Pins, chain(&error))),
        }
        let mut of_host = |code, text: String| faults.push(Fault::of_host(code, text));
        if let Some(error) = &self.reload.error {
            let text = format!(
                "the configuration cannot be used; the earlier configuration stays in force: {error}"
            );
            of_host(FaultCode::Configuration, text);
        }
        if let Some(text) =
            descriptors::shortage(self.environment.descriptors, self.config.clients.len() as u64)
        {
            of_host(FaultCode::OpenFiles, text);
        }
        for text in &self.reload.unchangeable {
            of_host(FaultCode::RestartNeeded, text.clone());
        }
        faults.extend(self.address_faults(now));
        faults.extend(self.envoy_files.fault());
        faults.extend(self.overrides_fault());
        let lost = self.overrides.lost();
        faults.extend(lost.map(|text| Fault::of_host(FaultCode::OverridesSetAside, text)));
        faults.extend(self.uncertain_counts());
        faults.extend(self.probing.faults());
        faults
    }

    fn overrides_fault(&self) -> Option<Fault> {
        let path = StoredOverrides::path(&self.config.paths.state);
        let text = match self.sources.files_to_store.error_of(&path) {
            _ if self.overrides.is_unread() => {
                "cannot read the operators' overrides of an earlier daemon, so no change is stored; drained \
                 backends stay drained, but changed weights are not in force; retrying (`socklb overrides` \
                 has the reason)"
                    .to_owned()
            }
            Some(error) => format!(
                "changes of operators' overrides are in force, but not stored; a restart of the daemon returns to the \
                 overrides that were stored last; retrying: {error}"
            ),
            None => return None,
        };
        Some(Fault::of_host(FaultCode::OverridesNotStored, text))
    }

    pub fn sources(&self, client_task: &ClientTask, now: Instant) -> BTreeMap<String, SourceStatus> {
        let list = |position, name: &str, service: &ServiceTask| match self.sources.watched.get(name) {
            None => {
                let error = service.refused_static.clone();
                SourceStatus {
                    file: None,
                    good_for_s: None,
                    failures: error.is_some().into(),
                    error,
                    notes: Vec::new(),
                    remote: None,
                    address_certificate_expiry_s: None,
                }
            }
            Some(watched) => {
                let has_adopted_table = client_task.balancer().has_adopted_table(position);
                let table = &self.sources.hosts.table;
                watched.status(&client_task.client.name, has_adopted_table, table, now, self.wall)
            }
        };
        let source = |(position, (name, service)): (usize, (&str, &ServiceTask))| {
            let address_certificate_expiry_s = self.addresses.expires(name).map(unix_seconds);
            (name.to_owned(), SourceStatus { address_certificate_expiry_s, ..list(position, name, service) })
        };
        client_task.named().enumerate().map(source).collect()
    }

    /// Why a client's programs are not attached as they should be, and the remedy; `None` if they
    /// are.
    fn detachment(&self, client_task: &ClientTask) -> Option<String> {
        let path = client_task.client.cgroup.display();
        if client_task.is_unpinned() {
            return Some(
                "the client's pins were removed, so its connects are not balanced; a reload (SIGHUP) or a \
                 restart creates the pins again and attaches the client"
                    .to_owned(),
            );
        }
        if let Some(error) = client_task.attach_error() {
            return Some(format!("the programs cannot be attached to the cgroup at {path}: {error}"));
        }
        match client_task.is_effective() {
            Ok(true) => return None,
            Ok(false) => {}
            Err(error) => {
                return Some(format!(
                    "cannot determine whether the programs are attached to the cgroup at {path}; existing links stay, and \
                     the daemon checks again within a minute: {}",
                    chain(&error)
                ));
            }
        }
        if client_task.cgroup().is_some() {
            return Some(format!(
                "the programs are not attached to the cgroup at {path}: the cgroup, or the links, were removed"
            ));
        }
        let warning = self
            .environment
            .namespace_warning
            .as_ref()
            .map(|warning| format!(" ({warning})"))
            .unwrap_or_default();
        Some(format!(
            "cgroup {path} does not exist; the daemon attaches the client when the cgroup appears{warning}"
        ))
    }
}
