//! Endpoint lists on their way to the client tasks that use them.
//!
//! What each client task uses of a list is computed beside the loop. If clients change in the
//! meantime, the missing parts are computed in another turn; until then these clients retain the
//! lists that they have.

use std::time::Instant;

use lb_core::feed::{Delivered, ListDecision};
use tracing::{info, warn};

use super::{BackgroundWork, Controller};
use crate::assignments::{self, Assignments};
use crate::config::EndpointSource;
use crate::source::Contents;

impl Controller {
    /// Delivers a list to every client that uses the service. It is stored for later starts once
    /// all of them have accepted it.
    pub fn deliver(&mut self, service: &str, contents: Contents, now: Instant) {
        let mut next = Some(contents);
        // Bound: after a list that is in force at most one follows, which had been refused.
        while let Some(contents) = next.take() {
            let delivered = self.deliver_assignments(service, &contents.assignments, now);
            let file = self.sources.files.get_mut(service).expect("delivered from its file");
            match file.feed.delivered(contents, delivered) {
                ListDecision::Compute(contents) => self.compute(service, contents),
                ListDecision::Wait => {}
                ListDecision::Keep { was_refused, refused } => {
                    if was_refused {
                        info!(service, "endpoint list that was refused is in force");
                    }
                    let text = file.feed.in_force().map(|contents| std::mem::take(&mut contents.text));
                    // It is empty if it was stored before.
                    if let Some(text) = text.filter(|text| !text.is_empty()) {
                        self.sources.files_to_store.add(file.source.last_good.clone(), text);
                    }
                    next = refused;
                }
            }
        }
    }

    /// Delivers a list to every client that uses the service and whose part of it is computed.
    pub fn deliver_assignments(
        &mut self,
        service: &str,
        assignments: &Assignments,
        now: Instant,
    ) -> Delivered {
        let mut delivered = Delivered::default();
        for client_task in &mut self.clients.tasks {
            let Some(position) = client_task.position(service) else { continue };
            // A client that stays with an earlier configuration may have the service's list in
            // that.
            match client_task.client.services[position].source {
                EndpointSource::File(_) => {}
                EndpointSource::Static(_) => continue,
            }
            match client_task.deliver(position, assignments, now) {
                Ok(is_known) => delivered.is_incomplete |= !is_known,
                Err(refused) => {
                    warn!(client = %client_task.client.name, service, error = %refused, "endpoint list refused");
                    delivered.refused_by.insert(client_task.client.name.clone(), refused.to_string());
                }
            }
        }
        delivered
    }

    /// Starts to compute, beside the loop, what the current clients use of a list.
    fn compute(&mut self, service: &str, contents: Contents) {
        let clients = self.clients.tasks.iter().map(|client_task| &client_task.client);
        let consumers = assignments::consumers(clients, service);
        self.effects
            .push(BackgroundWork::Compute { service: service.to_owned(), contents, consumers }.into());
    }

    /// The computation has ended. If clients have changed again, the missing parts are computed in
    /// another turn.
    pub fn computed(&mut self, service: &str, contents: &Contents, now: Instant) {
        let Some(file) = self.sources.files.get_mut(service) else { return };
        if let Some(contents) = file.feed.computed(contents) {
            self.deliver(service, contents, now);
            self.settle(now);
        }
    }

    /// Delivers lists again that found no room, now that slots are free.
    pub fn assign_again(&mut self, now: Instant) {
        for client_task in
            self.clients.tasks.iter_mut().filter(|client_task| !client_task.refused_static().is_empty())
        {
            if client_task.deliver_static(&self.sources.statics, now).is_ok() {
                info!(client = %client_task.client.name, "endpoint list that was refused is in force");
            }
        }
        let files = self.sources.files.iter();
        let refused = files.filter_map(|(service, file)| Some((service.clone(), file.feed.room_appeared()?)));
        for (service, contents) in refused.collect::<Vec<_>>() {
            self.deliver(&service, contents, now);
        }
    }
}
