//! Answers queries, and writes the status line for the service manager (sd_notify(3)).

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use lb_core::control::Switch;
use lb_discovery::Finding;
use lb_http::peer::PeerCredentials;
use tracing::info;

use super::{Controller, Effect};
use lb_view::coverage::Coverage;
use lb_view::explanation::Explanation;
use lb_view::filter::Filter;
use lb_view::load::{self, Switched, SwitchedClient};
use lb_view::readmission::{self, Readmission, Readmitted};
use lb_view::source::{self, Refreshed};

use crate::api::{ControllerQuery, Reply, SourceText};
use crate::output::configured::configured;
use crate::output::explain;
use crate::output::names;

/// A request that waits until a client's programs cover a cgroup.
pub struct Waiter {
    client: String,
    cgroups: Vec<u64>,
    answer: Reply<Coverage>,
}

impl Controller {
    /// One line on the state of the daemon, computed without a system call.
    pub fn summary(&self) -> String {
        let clients = self.config.clients.len();
        let attached = self.clients.tasks.iter().filter(|client_task| client_task.cgroup().is_some()).count();
        let mut summary = format!("{attached} of {clients} clients attached");
        let bad = self.sources.watched.values().filter(|file| file.feed.error().is_some()).count();
        if bad > 0 {
            summary.push_str(&format!(
                "; {bad} of {} endpoint lists cannot be used",
                self.sources.watched.len()
            ));
        }
        if self.reload.error.is_some() {
            summary.push_str("; the configuration file cannot be used");
        }
        summary
    }

    /// Why a client uses its backends of a service; empty if the client does not run, or has no
    /// such service with a list.
    pub fn explanations(&self, client: &str, service: &str) -> Vec<Explanation> {
        let Some(client_task) = self.clients.task(client) else { return Vec::new() };
        let (balancer, loads) = (client_task.balancer(), client_task.loads());
        let mut explanations = explain::explain(&client_task.client, balancer, Some(service), true, loads);
        for explanation in &mut explanations {
            explanation.operator_weights = self.operator_weights(client, service);
        }
        explanations
    }

    pub fn answer(&mut self, query: ControllerQuery, now: Instant) {
        match query {
            ControllerQuery::Facts(answer) => {
                answer.send(self.facts(now));
            }
            ControllerQuery::Clients(answer) => {
                answer.send(
                    self.clients.tasks.iter().map(|client_task| client_task.client.name.clone()).collect(),
                );
            }
            ControllerQuery::Configured(answer) => {
                answer.send(configured(&self.config));
            }
            ControllerQuery::Explain { service, client, answer } => {
                answer.send(self.explanations(&client, &service));
            }
            ControllerQuery::Readmit { service, backend, client, who, answer } => {
                // If the requesting process has closed the connection, its user has already
                // received the message that nothing was done.
                if !answer.is_closed() {
                    let readmission = self.readmit(&service, backend, client.as_deref(), &who);
                    answer.send(readmission);
                }
            }
            ControllerQuery::SwitchLoad { service, switch, client, who, answer } => {
                if !answer.is_closed() {
                    answer.send(self.switch_load(&service, switch, client.as_deref(), &who, now));
                }
            }
            ControllerQuery::Override { service, request, who, answer } => {
                if !answer.is_closed() {
                    self.override_backends(service, &request, &who, answer, now);
                }
            }
            ControllerQuery::Overrides(answer) => {
                answer.send(self.overrides_document());
            }
            ControllerQuery::Source { service, newest, answer } => {
                answer.send(self.source_text(&service, newest));
            }
            ControllerQuery::Refresh { service, who, answer } => {
                if !answer.is_closed() {
                    answer.send(self.refresh(service, &who, now));
                }
            }
            ControllerQuery::FindBackend { service, backend, answer } => {
                answer.send(self.find_backend(&service, &backend));
            }
            ControllerQuery::Close { order, who, answer } => {
                if !answer.is_closed() {
                    self.close_for_operator(order, who, answer, now);
                }
            }
            ControllerQuery::Cover { client, cgroups, answer } => {
                // Requests of processes that have closed the connection are dropped.
                self.waiters.retain(|waiter| !waiter.answer.is_closed());
                self.waiters.push(Waiter { client, cgroups, answer });
                // The requesting process has most likely just created its cgroup: attach now,
                // without waiting for the watch.
                self.follow_cgroups(now);
            }
        }
    }

    /// Checks that a client task has this service.
    ///
    /// # Errors
    /// If none has it. The message lists the services that exist.
    pub fn check_service(&self, service: &str) -> Result<(), String> {
        let filter = Filter { service: Some(service.to_owned()), ..Filter::default() };
        let configured = self.clients.tasks.iter().flat_map(|task| &task.client.services);
        let all = || configured.map(|one| (one.service.name.as_str(), BTreeSet::new())).collect();
        names::check(&filter, all)
    }

    /// The backend whose flows an operator wants to close. An address may be any, because flows may
    /// outlive the backend's place in the list, and the service's place in the configuration.
    fn find_backend(&self, service: &str, word: &str) -> Result<SocketAddr, String> {
        if let Ok(address) = word.parse() {
            return Ok(address);
        }
        // A service also has a list while its clients cannot be started.
        if self.list_of(service).is_none() {
            self.check_service(service)?;
        }
        self.backend_of(service, word, None)
    }

    /// Readmits a backend, for one client task or for all client tasks that have the backend.
    fn readmit(
        &mut self,
        service: &str,
        backend: SocketAddr,
        client: Option<&str>,
        who: &PeerCredentials,
    ) -> Readmission {
        let (user, process) = (who.user, who.process);
        let mut clients = Vec::new();
        let tasks = self.clients.tasks.iter_mut();
        for client_task in tasks.filter(|task| client.is_none_or(|client| client == task.client.name)) {
            let Some(was_ejected) = client_task.readmit(service, backend) else { continue };
            let client = client_task.client.name.clone();
            info!(%client, %service, %backend, was_ejected, user, process, "an operator requested a readmission");
            clients.push(Readmitted { client, was_ejected });
        }
        if clients.is_empty() {
            info!(?service, %backend, user, process, "readmission requested, but no client has this backend");
        }
        Readmission { schema: readmission::SCHEMA, service: service.to_owned(), backend, clients }
    }

    /// Sets the switch of a service's control law, as an operator has requested, for one client
    /// task or for all client tasks that have the service.
    fn switch_load(
        &mut self,
        service: &str,
        switch: Switch,
        client: Option<&str>,
        who: &PeerCredentials,
        now: Instant,
    ) -> Switched {
        let (user, process) = (who.user, who.process);
        let (mut clients, mut not_kept) = (Vec::new(), None);
        let tasks = self.clients.tasks.iter_mut();
        for client_task in tasks.filter(|task| client.is_none_or(|client| client == task.client.name)) {
            let Some(before) = client_task.switch_control(service, switch) else { continue };
            let client = client_task.client.name.clone();
            info!(%client, %service, switch = switch.name(), before = before.name(), user, process, "an operator changed whether weights follow load");
            clients.push(SwitchedClient { client, before: before.name().to_owned() });
        }
        if clients.is_empty() {
            info!(
                ?service,
                user,
                process,
                "a change of load control was requested, but no client has this service with weights that \
                 follow load"
            );
        } else {
            // The next tick applies the switch. The switch is stored as soon as possible, so that
            // it remains in force even if this process ends.
            not_kept = self.loads_store_error();
            self.load_store.hurry();
            self.sources.files_to_store.hurry();
            self.store_loads(now);
        }
        let (schema, switch) = (load::SCHEMA, switch.name().to_owned());
        Switched { schema, service: service.to_owned(), switch, clients, not_kept }
    }

    /// The list of a service: the newest list of its server if `newest` is set, otherwise the list
    /// that was delivered last.
    /// The list of a service.
    ///
    /// # Errors
    /// If no client has the service, or no list is known.
    fn source_text(&self, service: &str, newest: bool) -> Result<SourceText, String> {
        let watched = self.sources.watched.get(service);
        // A service also has a list while its clients cannot be started.
        if watched.is_none() && !self.sources.statics.contains_key(service) {
            self.check_service(service)?;
        }
        if newest {
            return match watched.and_then(|watched| watched.remote.latest.finding.as_ref()) {
                Some(Finding::List(list)) => Ok(SourceText::Text(Arc::clone(&list.text))),
                Some(Finding::Empty { .. } | Finding::Failed(_)) | None => {
                    Err(format!("no server has sent a list for service {service}"))
                }
            };
        }
        let list = self.list_of(service).map(SourceText::List);
        list.ok_or_else(|| format!("no list for service {service} is known yet"))
    }

    /// Reads or queries the source of a service's list at once.
    fn refresh(&mut self, service: String, who: &PeerCredentials, now: Instant) -> Refreshed {
        let (user, process) = (who.user, who.process);
        let watched = self.sources.watched.get_mut(&service);
        let origin = watched.map(|watched| {
            match watched.source.wanted() {
                Some(wanted) => self.effects.push(Effect::QueryAgain(wanted)),
                None => watched.feed.progress.changed(now),
            }
            self.effects.push(Effect::ResolveAgain(BTreeSet::clone(&watched.hosts)));
            watched.source.origin.to_string()
        });
        info!(?service, origin, user, process, "an operator requested to refresh a list");
        Refreshed { schema: source::SCHEMA, service, origin }
    }

    /// Answers the requests for which the result is known: the cgroup is covered, another cgroup is
    /// at the client's path, or the client does not exist.
    pub fn answer_waiters(&mut self) {
        for waiter in std::mem::take(&mut self.waiters) {
            let Waiter { client, cgroups, answer } = waiter;
            let Some(client_task) = self.clients.task(&client) else {
                // A client that could not be started is retried, so the request continues to wait.
                if self.clients.unstarted.iter().any(|(other, _)| other.name == client) && !answer.is_closed()
                {
                    self.waiters.push(Waiter { client, cgroups, answer });
                    continue;
                }
                let clients =
                    self.clients.tasks.iter().map(|client_task| client_task.client.name.clone()).collect();
                answer.send(Coverage::UnknownClient { clients });
                continue;
            };
            // The cgroup that is at the client's path now. If there is no cgroup, the request
            // continues to wait.
            let now = self.environment.kernel.cgroup(client_task.path()).ok();
            // While it cannot be determined whether a cgroup is covered, the request continues to
            // wait.
            if cgroups.iter().any(|cgroup| client_task.covers(*cgroup).unwrap_or(false)) {
                answer.send(Coverage::Covered);
            } else if let Some(now) = now.filter(|now| !cgroups.contains(&now.id)) {
                answer.send(Coverage::Elsewhere { configured: now.path });
            } else if !answer.is_closed() {
                self.waiters.push(Waiter { client, cgroups, answer });
            }
        }
    }
}
