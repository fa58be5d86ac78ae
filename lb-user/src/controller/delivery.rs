//! The delivery of endpoint lists: passes a new list to the service's feed (`lb_core::feed`),
//! executes the feed's decision, and turns the list into a fact for the balancer of each client
//! task that uses it.
//!
//! The assignments of a list are computed outside of the event loop. If clients change in the
//! meantime, the missing assignments are computed next. Until then, clients without an assignment
//! retain their earlier lists.

use std::sync::Arc;
use std::time::Instant;

use lb_core::balancer::UnusableList;
use lb_core::feed::{Delivered, FeedAction, ListDecision, Version};
use tracing::{info, warn};

use super::changes::list_changes;
use super::client_task::ClientTask;
use super::sources::WatchedSource;
use super::{BackgroundWork, Controller};
use crate::assignments::{self, Assignments, AssignmentsByService};
use crate::config::EndpointSource;
use crate::source::{Contents, SourceError, Stamp};

impl Controller {
    /// Handles the result of a read of the service's list. `result` is `None` if the version of the
    /// list was already known.
    pub fn read(
        &mut self,
        service: &str,
        begun: u64,
        version: Version<Stamp>,
        mut result: Option<Result<Contents, SourceError>>,
        now: Instant,
    ) {
        let watched = self.note_result(service, version, result.as_mut(), now);
        let result = result.map(|result| result.map_err(SourceError::into_failure));
        let effect = watched.feed.read(now, begun, version, result);
        self.carry_out(service, effect, now);
        self.retake_addresses(now);
        self.resolve_hosts(now);
    }

    /// Stores everything in the result of a read except the list itself. If all lists together have
    /// too many host names, replaces the result by a fault. If a newer read has ended, the caller
    /// must not call this.
    pub fn note_result(
        &mut self,
        service: &str,
        version: Version<Stamp>,
        mut result: Option<&mut Result<Contents, SourceError>>,
        now: Instant,
    ) -> &mut WatchedSource {
        if let Some(result) = &mut result {
            if let Some(fault) = self.host_fault(service, result) {
                **result = Err(fault);
            } else if let Ok(contents) = result {
                contents.table = Arc::default();
            }
        }
        let watched =
            self.sources.watched.get_mut(service).expect("the caller checks that the service has a source");
        if let Some(Ok(contents)) = &result {
            watched.take_notes(service, &contents.notes);
            watched.take_pending(service, contents.pending.clone(), now);
        }
        watched.note_read(version, result.map(|result| result.as_ref().err()), now);
        watched
    }

    /// Executes a decision of the service's feed.
    pub fn carry_out(&mut self, service: &str, effect: Option<FeedAction<Contents>>, now: Instant) {
        match effect {
            None => {}
            Some(FeedAction::Deliver(contents)) => {
                let after = contents.assignments.list();
                let endpoints = after.as_slice().len();
                let before = self.sources.watched.get(service).and_then(|file| file.feed.newest());
                match before.map(|before| list_changes(before.assignments.list(), after)) {
                    Some(changes) => info!(service, endpoints, changes, "endpoint list read"),
                    None => info!(service, endpoints, "endpoint list read"),
                }
                self.deliver(service, contents, now);
            }
            Some(FeedAction::GoodAgain) => {
                let source =
                    self.sources.watched.get(service).map(|watched| watched.source.origin.to_string());
                info!(service, source, "the endpoint list can be used again; it is unchanged");
            }
            Some(FeedAction::Failed(error)) => {
                warn!(service, error, "the endpoint list cannot be used; the present list stays in force");
            }
        }
    }

    /// Delivers a list to every client that uses the service. Once all of them have accepted the
    /// list, it is stored for the next start of the daemon.
    pub fn deliver(&mut self, service: &str, contents: Contents, now: Instant) {
        let mut next = Some(contents);
        // Bound: once this list is in force, at most one other list, which was refused before, is
        // delivered again.
        while let Some(contents) = next.take() {
            let delivered = self.deliver_assignments(service, &contents.assignments, now);
            let file =
                self.sources.watched.get_mut(service).expect("the caller checks that the service has a file");
            match file.feed.delivered(contents, delivered) {
                ListDecision::Compute(contents) => self.compute(service, contents),
                ListDecision::Wait => {}
                ListDecision::InForce { was_refused, refused } => {
                    if was_refused {
                        info!(service, "the endpoint list that was refused is now in force");
                    }
                    let text = file.feed.in_force().map(|contents| std::mem::take(&mut contents.text));
                    // The text is empty if the list is already stored.
                    if let Some(text) = text.filter(|text| !text.is_empty()) {
                        self.sources.files_to_store.add(file.source.last_good.clone(), text);
                    }
                    next = refused;
                }
            }
        }
    }

    /// Delivers a list to every client that uses the service and has an assignment of the list.
    pub fn deliver_assignments(
        &mut self,
        service: &str,
        assignments: &Assignments,
        now: Instant,
    ) -> Delivered {
        let mut delivered = Delivered::default();
        for client_task in &mut self.clients.tasks {
            let Some(position) = client_task.position(service) else { continue };
            // A client that still runs with an earlier configuration may use a list that is part of
            // that configuration.
            match client_task.client.services[position].source {
                EndpointSource::Named(_) | EndpointSource::File(_) | EndpointSource::Remote(_) => {}
                EndpointSource::Static(_) => continue,
            }
            match client_task.deliver(position, assignments, now) {
                Ok(is_known) => delivered.is_incomplete |= !is_known,
                Err(refused) => {
                    warn!(client = %client_task.client.name, service, error = %refused, "endpoint list refused; the earlier list stays in use");
                    delivered.refused_by.insert(client_task.client.name.clone(), refused.to_string());
                }
            }
        }
        delivered
    }

    /// Starts to compute the assignments of a list for the current clients, outside of the event
    /// loop.
    fn compute(&mut self, service: &str, contents: Contents) {
        let clients = self.clients.tasks.iter().map(|client_task| &client_task.client);
        let consumers = assignments::consumers(clients, service);
        self.effects
            .push(BackgroundWork::Compute { service: service.to_owned(), contents, consumers }.into());
    }

    /// Handles the end of a computation that `compute` started. If clients have changed again, the
    /// missing assignments are computed next.
    pub fn computed(&mut self, service: &str, contents: &Contents, now: Instant) {
        let Some(file) = self.sources.watched.get_mut(service) else { return };
        if let Some(contents) = file.feed.computed(contents) {
            self.deliver(service, contents, now);
            self.retake_addresses(now);
            self.settle(now);
        }
    }

    /// Delivers again the lists that did not fit before, now that slots are free.
    pub fn assign_again(&mut self, now: Instant) {
        let has_refused = |client_task: &&mut ClientTask| {
            client_task.services.iter().any(|service| service.refused_static.is_some())
        };
        for client_task in self.clients.tasks.iter_mut().filter(has_refused) {
            if client_task.deliver_static(&self.sources.statics, now).is_ok() {
                info!(client = %client_task.client.name, "the endpoint list that was refused is now in force");
            }
        }
        let files = self.sources.watched.iter();
        let refused = files.filter_map(|(service, file)| Some((service.clone(), file.feed.room_appeared()?)));
        for (service, contents) in refused.collect::<Vec<_>>() {
            self.deliver(&service, contents, now);
        }
    }
}

impl ClientTask {
    /// Applies the static lists of the configuration.
    ///
    /// # Errors
    /// The error of the first list that does not fit. The other lists are applied nevertheless.
    pub fn deliver_static(
        &mut self,
        by_service: &AssignmentsByService,
        now: Instant,
    ) -> Result<(), UnusableList> {
        let mut result = Ok(());
        for position in 0..self.client.services.len() {
            let configured = &self.client.services[position];
            self.services[position].refused_static = None;
            // If the client could not apply the present configuration, it still uses an earlier
            // configuration, and retains the lists in it.
            let assignments = by_service.get(&configured.service.name);
            let is_static = matches!(configured.source, EndpointSource::Static(_));
            let Some(assignments) = assignments.filter(|_| is_static) else { continue };
            if let Err(refused) = self.deliver(position, assignments, now) {
                self.services[position].refused_static = Some(refused.to_string());
                result = result.and(Err(refused));
            }
        }
        result
    }

    /// The position of the service with this name among the client's services.
    pub fn position(&self, service: &str) -> Option<usize> {
        self.client.services.iter().position(|configured| configured.service.name == service)
    }

    /// Applies a new list for the service at this position. Returns `false` if the task's
    /// assignment of the list is not computed yet.
    ///
    /// # Errors
    /// If the list does not fit. The earlier list stays in force.
    pub fn deliver(
        &mut self,
        position: usize,
        assignments: &Assignments,
        now: Instant,
    ) -> Result<bool, UnusableList> {
        let Some(assignment) =
            assignments.assignment(&self.client.services[position].service, self.client.task)
        else {
            return Ok(false);
        };
        let assignment = match &mut self.services[position].size {
            Some(followed) => followed.take(assignment),
            None => assignment,
        };
        if self.balancer.handle(now, assignment.fact(position))? {
            self.settled = None;
        }
        Ok(true)
    }
}
