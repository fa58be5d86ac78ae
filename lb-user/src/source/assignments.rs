//! An endpoint list, with the assignments of the client tasks on this host.
//!
//! The shares of one task depend on the subsets of the whole job. For a large job, this computation
//! may take seconds. Other threads therefore compute the assignments, and the event loop only
//! applies them. The event loop looks up an assignment by the service and the task for which the
//! assignment was computed. A result that arrives after a reload can therefore not be applied to
//! another configuration. This module starts no thread and reads no file.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use lb_core::balancer::Fact;
use lb_core::endpoint::EndpointList;
use lb_core::membership::{Membership, Memberships};
use lb_core::service::{Service, Task};

use crate::config::{ClientConfig, EndpointSource};

/// A client task that dials a service. Its membership depends only on these fields and the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Consumer {
    /// This is the first field because it decides most comparisons of two consumers.
    pub task: Task,
    /// The service with the task's settings.
    pub service: Service,
}

/// A list, and one task's members of this list. Cheap to clone.
#[derive(Clone, Debug, PartialEq)]
pub struct Assignment {
    list: Arc<EndpointList>,
    membership: Arc<Membership>,
}

impl Assignment {
    pub fn list(&self) -> &EndpointList {
        &self.list
    }

    pub fn membership(&self) -> &Membership {
        &self.membership
    }

    /// The largest number of members that the subset may have, if its size follows load.
    pub fn most(&self) -> usize {
        self.membership.members.len() + self.membership.reserve.len()
    }

    /// This assignment, resized to `size` members if the size of its subset follows load.
    #[must_use]
    pub fn resized(&self, size: u32) -> Self {
        Self { list: Arc::clone(&self.list), membership: Arc::new(self.membership.resized(size)) }
    }

    /// Returns the fact by which the task's balancer receives this assignment. `position` is the
    /// position of the service in the task's configuration.
    pub fn fact(self, position: usize) -> Fact {
        Fact::Endpoints(position, self.list, self.membership)
    }
}

/// The tasks of `clients` that dial the service with this name.
pub fn consumers<'c>(clients: impl IntoIterator<Item = &'c ClientConfig>, service: &str) -> Vec<Consumer> {
    let consumer = |client: &ClientConfig| {
        let mut services = client.services.iter();
        let configured = services.find(|configured| configured.service.name == service)?;
        Some(Consumer { task: client.task, service: configured.service.clone() })
    };
    clients.into_iter().filter_map(consumer).collect()
}

/// A list, and the memberships that were computed for tasks. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Assignments {
    list: Arc<EndpointList>,
    memberships: Vec<(Consumer, Arc<Membership>)>,
}

/// The assignments of each service, keyed by service name.
pub type AssignmentsByService = BTreeMap<String, Assignments>;

impl Assignments {
    /// The list as a shared object.
    pub fn shared_list(&self) -> Arc<EndpointList> {
        Arc::clone(&self.list)
    }

    /// Creates a value with the list and no assignments.
    pub fn new(list: EndpointList) -> Self {
        Self { list: Arc::new(list), memberships: Vec::new() }
    }

    pub fn list(&self) -> &EndpointList {
        &self.list
    }

    /// Whether both have the same list object, not only equal lists. They have the same object if
    /// the list was read once for both, or after [`Self::follow`].
    pub fn is_of_the_same_reading(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.list, &other.list)
    }

    /// The assignment of a task; `None` if it was not computed.
    pub fn assignment(&self, service: &Service, task: Task) -> Option<Assignment> {
        let mut memberships = self.memberships.iter();
        let found = memberships.find(|(other, _)| other.task == task && other.service == *service);
        found.map(|(_, membership)| Assignment { list: self.list.clone(), membership: membership.clone() })
    }

    /// The membership of a consumer; `None` if it was not computed.
    pub fn membership(&self, consumer: &Consumer) -> Option<&Membership> {
        let mut memberships = self.memberships.iter();
        memberships.find(|(other, _)| other == consumer).map(|(_, membership)| &**membership)
    }

    /// If the earlier assignments have an equal list, reuses their list and memberships. Both then
    /// share one list object (see [`Self::is_of_the_same_reading`]).
    pub fn follow(&mut self, before: &Self) {
        if self.list == before.list {
            self.list = before.list.clone();
            self.take_over(before);
        }
    }

    /// Adds the memberships of other assignments, if the lists are equal.
    pub fn take_over(&mut self, other: &Self) {
        if Arc::ptr_eq(&self.list, &other.list) || self.list == other.list {
            let unknown =
                other.memberships.iter().filter(|(consumer, _)| self.membership(consumer).is_none());
            let unknown: Vec<_> = unknown.cloned().collect();
            self.memberships.extend(unknown);
        }
    }

    /// Computes the missing memberships of these tasks, and drops the memberships of all other
    /// tasks. May take seconds for the largest jobs. Results that tasks of one job share are
    /// computed once.
    pub fn complete(&mut self, consumers: &[Consumer]) {
        /// Only one large job is computed at a time, with all threads: each large job may need 200
        /// MB of memory and a whole CPU.
        static TURN: Mutex<()> = Mutex::new(());
        self.memberships.retain(|(consumer, _)| consumers.contains(consumer));
        let mut missing: Vec<&Consumer> = Vec::new();
        for consumer in consumers {
            if self.membership(consumer).is_none() && !missing.contains(&consumer) {
                missing.push(consumer);
            }
        }
        // Bound: each turn removes at least the first task.
        while let Some(first) = missing.first().copied() {
            let is_of_the_same_job =
                |other: &&Consumer| other.service == first.service && other.task.count == first.task.count;
            // A job with only one task needs no subsets of other tasks. It is computed quickly, and
            // does not wait for other jobs.
            let is_large = first.task.count > 1;
            let _turn = is_large.then(|| TURN.lock().unwrap_or_else(PoisonError::into_inner));
            let job = Memberships::new(&first.service, first.task.count, &self.list);
            let (of_the_same_job, others): (Vec<_>, Vec<_>) =
                missing.into_iter().partition(is_of_the_same_job);
            let computed = of_the_same_job
                .into_iter()
                .map(|consumer| (consumer.clone(), Arc::new(job.of(consumer.task.index))));
            self.memberships.extend(computed);
            missing = others;
        }
    }
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
            assignments.complete(&consumers(clients, name));
            by_service.insert(name.clone(), assignments);
        }
    }
    by_service
}

#[cfg(test)]
mod tests {
    use super::*;
    use lb_core::endpoint::{Endpoint, EndpointState};
    use lb_core::service::{Size, Subset};
    use lb_core::subset::Algorithm;

    fn consumer(index: u32, count: u32, seed: u64) -> Consumer {
        let service = {
            let subset = Subset::Sized { algorithm: Algorithm::Rocksteadier, size: Size::Fixed(3) };
            Service::new("users", "10.96.0.10:80".parse().unwrap(), subset, seed)
        };
        Consumer { task: Task { index, count }, service }
    }

    fn list(endpoints: u32) -> EndpointList {
        let endpoint = |index| Endpoint {
            address: format!("10.0.0.{}:80", index + 1).parse().unwrap(),
            index,
            weight: 1,
            state: EndpointState::Healthy,
            zone: None,
            agent: None,
        };
        EndpointList::new((0..endpoints).map(endpoint).collect(), "10.96.0.10:80".parse().unwrap(), &[])
            .unwrap()
    }

    #[test]
    fn tasks_computed_together_get_the_same_memberships_as_alone() {
        let consumers =
            [consumer(0, 5, 7), consumer(4, 5, 7), consumer(4, 6, 7), consumer(4, 5, 8), consumer(0, 5, 7)];
        let mut assignments = Assignments::new(list(7));
        assignments.complete(&consumers);
        assert_eq!(assignments.memberships.len(), 4, "one membership for each distinct consumer");
        for consumer in &consumers {
            let alone = Membership::of(&consumer.service, consumer.task, assignments.list());
            let assignment = assignments.assignment(&consumer.service, consumer.task).unwrap();
            assert_eq!((assignment.membership(), assignment.list()), (&alone, assignments.list()));
        }
    }

    #[test]
    fn an_assignment_is_only_for_its_service_and_task() {
        let mut assignments = Assignments::new(list(7));
        assignments.complete(&[consumer(0, 5, 7)]);
        for other in [consumer(1, 5, 7), consumer(0, 6, 7), consumer(0, 5, 8)] {
            assert_eq!(assignments.assignment(&other.service, other.task), None);
        }
        let mut resized = consumer(0, 5, 7);
        resized.service.subset = Subset::All;
        assert_eq!(assignments.assignment(&resized.service, resized.task), None);
    }

    #[test]
    fn known_memberships_are_reused_and_unused_ones_dropped() {
        let mut before = Assignments::new(list(7));
        before.complete(&[consumer(0, 5, 7), consumer(1, 5, 7)]);
        let mut after = Assignments::new(list(7));
        assert!(!after.is_of_the_same_reading(&before) && before.clone().is_of_the_same_reading(&before));
        after.follow(&before);
        assert!(after.is_of_the_same_reading(&before), "both readings share one list object");
        after.complete(&[consumer(1, 5, 7), consumer(2, 5, 7)]);
        let at = |assignments: &Assignments, index| {
            assignments.memberships.iter().position(|(d, _)| d.task.index == index)
        };
        assert_eq!([0, 1, 2].map(|index| at(&after, index)), [None, Some(0), Some(1)]);
        assert!(Arc::ptr_eq(&after.memberships[0].1, &before.memberships[1].1), "the membership is reused");
        // Assignments with another list have no memberships yet.
        let mut longer = Assignments::new(list(8));
        longer.take_over(&before);
        assert!(longer.memberships.is_empty());
    }
}
