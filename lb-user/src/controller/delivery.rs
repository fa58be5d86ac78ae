//! The delivery of endpoint lists to the client tasks that use them.
//!
//! The assignments of a list are computed off the loop. If clients change in the meantime, the
//! missing assignments are computed next. Until they are, these clients retain their earlier lists.

use std::time::Instant;

use lb_core::feed::{Delivered, ListDecision};
use tracing::{info, warn};

use super::{BackgroundWork, Controller};
use crate::assignments::{self, Assignments};
use crate::config::EndpointSource;
use crate::source::Contents;

impl Controller {
    /// Delivers a list to every client that uses the service. Once all of them have accepted the
    /// list, it is stored for later starts.
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
                    // The text is empty if it is already stored.
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
            // A client that still has an earlier configuration may have a list for the service in
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

    /// Starts to compute, off the loop, the assignments of a list for the current clients.
    fn compute(&mut self, service: &str, contents: Contents) {
        let clients = self.clients.tasks.iter().map(|client_task| &client_task.client);
        let consumers = assignments::consumers(clients, service);
        self.effects
            .push(BackgroundWork::Compute { service: service.to_owned(), contents, consumers }.into());
    }

    /// Handles the end of the computation. If clients have changed again, the missing assignments
    /// are computed next.
    pub fn computed(&mut self, service: &str, contents: &Contents, now: Instant) {
        let Some(file) = self.sources.watched.get_mut(service) else { return };
        if let Some(contents) = file.feed.computed(contents) {
            self.deliver(service, contents, now);
            self.settle(now);
        }
    }

    /// Delivers again the lists that did not fit before, now that slots are free.
    pub fn assign_again(&mut self, now: Instant) {
        for client_task in
            self.clients.tasks.iter_mut().filter(|client_task| !client_task.refused_static().is_empty())
        {
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
