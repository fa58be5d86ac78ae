//! The endpoint lists of a client task's services: what the task uses of each becomes a fact for
//! its balancer.

use std::collections::BTreeMap;
use std::time::Instant;

use lb_core::balancer::UnusableList;

use super::ClientTask;
use crate::assignments::{Assignments, AssignmentsByService};
use crate::config::EndpointSource;

impl ClientTask {
    /// Applies the lists that the configuration itself holds.
    ///
    /// # Errors
    /// The first list that does not fit; the others are applied all the same.
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
            // A client that stays with an earlier configuration, because it cannot have this one,
            // retains its lists as well.
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

    /// Why a list that the configuration holds was refused, by service name.
    pub fn refused_static(&self) -> &BTreeMap<String, String> {
        &self.refused_static
    }

    /// The index of the service of this name among this client's services.
    pub fn position(&self, service: &str) -> Option<usize> {
        self.client.services.iter().position(|configured| configured.service.name == service)
    }

    /// Applies a new list for the service at `position` of this client's services. Returns `false`
    /// if what this task uses of the list is not computed yet. A list equal to the one before costs
    /// nothing.
    ///
    /// # Errors
    /// If it does not fit; the one before stays in force.
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
