//! The client tasks of a configuration that use each list, and the assignments of the lists in the
//! configuration itself.

use std::collections::BTreeMap;

use lb_core::membership::{Assignments, Consumer};

use super::complete_assignments;
use crate::config::{ClientConfig, EndpointSource};

/// The assignments of each service, keyed by service name.
pub type AssignmentsByService = BTreeMap<String, Assignments>;

/// The tasks of `clients` that dial the service with this name.
pub fn consumers<'c>(clients: impl IntoIterator<Item = &'c ClientConfig>, service: &str) -> Vec<Consumer> {
    let consumer = |client: &ClientConfig| {
        let mut services = client.services.iter();
        let configured = services.find(|configured| configured.service.name == service)?;
        Some(Consumer { task: client.task, service: configured.service.clone() })
    };
    clients.into_iter().filter_map(consumer).collect()
}

/// Computes the assignments of the lists in the configuration itself, for the tasks of these
/// clients. Reuses memberships in `before` if the lists are equal.
pub fn statics(clients: &[ClientConfig], before: &AssignmentsByService) -> AssignmentsByService {
    let mut by_service = AssignmentsByService::new();
    for configured in clients.iter().flat_map(|client| &client.services) {
        let name = &configured.service.name;
        if let EndpointSource::Static(list) = &configured.source
            && !by_service.contains_key(name)
        {
            let mut assignments = Assignments::new(list.clone());
            if let Some(before) = before.get(name) {
                assignments.follow(before);
            }
            complete_assignments(&mut assignments, &consumers(clients, name));
            by_service.insert(name.clone(), assignments);
        }
    }
    by_service
}
