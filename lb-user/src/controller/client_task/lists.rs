//! Turns the endpoint lists of a client task's services into facts for its balancer. The fact of
//! each list is the task's assignment of this list.

use std::collections::BTreeMap;
use std::time::Instant;

use lb_core::balancer::UnusableList;

use super::ClientTask;
use crate::assignments::{Assignments, AssignmentsByService};
use crate::config::EndpointSource;

impl ClientTask {
    /// Applies the lists in the configuration itself.
    ///
    /// # Errors
    /// The error of the first list that does not fit. The other lists are applied nevertheless.
    pub fn deliver_static(
        &mut self,
        by_service: &AssignmentsByService,
        now: Instant,
    ) -> Result<(), UnusableList> {
        self.refused_static.clear();
        let mut result = Ok(());
        for position in 0..self.client.services.len() {
            let configured = &self.client.services[position];
            let name = configured.service.name.clone();
            // If the client could not apply the present configuration, it still has an earlier one,
            // and retains the lists of the earlier one.
            let Some(assignments) =
                by_service.get(&name).filter(|_| matches!(configured.source, EndpointSource::Static(_)))
            else {
                continue;
            };
            if let Err(refused) = self.deliver(position, assignments, now) {
                self.refused_static.insert(name, refused.to_string());
                result = result.and(Err(refused));
            }
        }
        result
    }

    /// For each service, by name: why the daemon refused the service's list in the configuration.
    pub fn refused_static(&self) -> &BTreeMap<String, String> {
        &self.refused_static
    }

    /// The position of the service with this name among the client's services.
    pub fn position(&self, service: &str) -> Option<usize> {
        self.client.services.iter().position(|configured| configured.service.name == service)
    }

    /// Applies a new list for the service at this position. Returns `false` if the task's
    /// assignment of the list is not computed yet. If the list equals the earlier one, this costs
    /// nothing.
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
        let fact = self.sized(position, assignment);
        if self.balancer.handle(now, fact)? {
            self.settled = None;
        }
        Ok(true)
    }
}
