//! An endpoint list with what each client task here uses of it.
//!
//! Shares come from the subsets of the whole job, which costs as much as the job is large: so offers are completed beside
//! the event loop, which only takes them in. What a task uses is found by the service and the task that it was computed
//! for, so that an answer that comes late cannot be applied to another configuration. Starts no thread, reads no file.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use lb_core::endpoint::EndpointList;
use lb_core::membership::{Membership, Memberships};
use lb_core::service::{Service, Task};

use crate::config::{Client, Source};

/// A client task that dials a service: all that its membership depends on, besides the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dialler {
    /// The task. First, for it tells most of them apart.
    pub task: Task,
    /// The service as the task sees it.
    pub service: Service,
}

/// A list and what one task uses of it. Cheap to clone, and to compare with one that says the same again.
#[derive(Clone, Debug)]
pub struct Part {
    list: Arc<EndpointList>,
    membership: Arc<Membership>,
}

impl Part {
    /// The list.
    pub fn list(&self) -> &EndpointList {
        &self.list
    }

    /// What the task uses of it.
    pub fn membership(&self) -> &Membership {
        &self.membership
    }
}

impl PartialEq for Part {
    fn eq(&self, other: &Self) -> bool {
        fn same<T: PartialEq>(a: &Arc<T>, b: &Arc<T>) -> bool {
            Arc::ptr_eq(a, b) || a == b
        }
        same(&self.membership, &other.membership) && same(&self.list, &other.list)
    }
}

/// Those among `clients` that dial the service of this name.
pub fn diallers<'c>(clients: impl IntoIterator<Item = &'c Client>, service: &str) -> Vec<Dialler> {
    let dialler = |client: &Client| {
        let mut services = client.services.iter();
        let configured = services.find(|configured| configured.service.name == service)?;
        Some(Dialler { task: client.task, service: configured.service.clone() })
    };
    clients.into_iter().filter_map(dialler).collect()
}

/// A list, and what it gives to each of the tasks that were asked for. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Offer {
    list: Arc<EndpointList>,
    memberships: Vec<(Dialler, Arc<Membership>)>,
}

/// Offers by service name.
pub type Offers = BTreeMap<String, Offer>;

impl Offer {
    /// A list of which nobody's part is known yet.
    pub fn new(list: EndpointList) -> Self {
        Self { list: Arc::new(list), memberships: Vec::new() }
    }

    /// The list.
    pub fn list(&self) -> &EndpointList {
        &self.list
    }

    /// Whether the list is not only equal to the other offer's but the same: it was read once for both, or one follows the
    /// other.
    pub fn is_of_the_same_reading(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.list, &other.list)
    }

    /// The list with what a task uses of it; `None` if that was not computed.
    pub fn part(&self, service: &Service, task: Task) -> Option<Part> {
        let mut memberships = self.memberships.iter();
        let found = memberships.find(|(other, _)| other.task == task && other.service == *service);
        found.map(|(_, membership)| Part { list: self.list.clone(), membership: membership.clone() })
    }

    /// What a task uses of the list; `None` if that was not computed.
    pub fn membership(&self, dialler: &Dialler) -> Option<&Membership> {
        let mut memberships = self.memberships.iter();
        memberships.find(|(other, _)| other == dialler).map(|(_, membership)| &**membership)
    }

    /// Goes on from the offer before, if the list that was read now says the same: it becomes the same, so that nobody
    /// has to compare them again.
    pub fn follow(&mut self, before: &Self) {
        if self.list == before.list {
            self.list = before.list.clone();
            self.take_over(before);
        }
    }

    /// Takes over what another offer of an equal list knows.
    pub fn take_over(&mut self, other: &Self) {
        if Arc::ptr_eq(&self.list, &other.list) || self.list == other.list {
            let unknown = other.memberships.iter().filter(|(dialler, _)| self.membership(dialler).is_none());
            let unknown: Vec<_> = unknown.cloned().collect();
            self.memberships.extend(unknown);
        }
    }

    /// Computes what is missing for these tasks, and forgets all others. May take seconds for the largest jobs; what
    /// tasks of one job have in common is computed once.
    pub fn complete(&mut self, diallers: &[Dialler]) {
        /// One job at a time, in whatever threads: each may take two hundred megabytes and a whole CPU.
        static TURN: Mutex<()> = Mutex::new(());
        self.memberships.retain(|(dialler, _)| diallers.contains(dialler));
        let mut missing: Vec<&Dialler> = Vec::new();
        for dialler in diallers {
            if self.membership(dialler).is_none() && !missing.contains(&dialler) {
                missing.push(dialler);
            }
        }
        // Bound: each turn takes the first out.
        while let Some(first) = missing.first().copied() {
            let is_colleague =
                |other: &&Dialler| other.service == first.service && other.task.count == first.task.count;
            // A task that is alone asks nobody else's subset, and waits for nobody.
            let is_large = first.task.count > 1;
            let _turn = is_large.then(|| TURN.lock().unwrap_or_else(PoisonError::into_inner));
            let job = Memberships::new(&first.service, first.task.count, &self.list);
            let (colleagues, others): (Vec<_>, Vec<_>) = missing.into_iter().partition(is_colleague);
            let computed =
                colleagues.into_iter().map(|dialler| (dialler.clone(), Arc::new(job.of(dialler.task.index))));
            self.memberships.extend(computed);
            missing = others;
        }
    }
}

/// Offers of the lists that the configuration itself holds, for the tasks of these clients; what earlier ones of equal
/// lists know is not computed again.
pub fn statics(clients: &[Client], before: &Offers) -> Offers {
    let mut offers = Offers::new();
    for configured in clients.iter().flat_map(|client| &client.services) {
        let name = &configured.service.name;
        if let Source::Static(list) = &configured.source
            && !offers.contains_key(name)
        {
            let mut offer = Offer::new(list.clone());
            if let Some(before) = before.get(name) {
                offer.follow(before);
            }
            offer.complete(&diallers(clients, name));
            offers.insert(name.clone(), offer);
        }
    }
    offers
}

#[cfg(test)]
mod tests {
    use super::*;
    use lb_core::endpoint::{Endpoint, EndpointState};
    use lb_core::service::{Overflow, Policy, Protocol, Size, Subset, UNANSWERED_AFTER};
    use lb_core::subset::Algorithm;

    fn dialler(index: u32, count: u32, seed: u64) -> Dialler {
        let service = Service {
            name: "users".to_owned(),
            address: "10.96.0.10:80".parse().unwrap(),
            protocol: Protocol::Tcp,
            policy: Policy::WeightedRoundRobin,
            active_limit: None,
            overflow: Overflow::LeastLoaded,
            error_decay: None,
            connect_timeout: None,
            unanswered_after: UNANSWERED_AFTER,
            rebind: None,
            subset: Subset::Sized { algorithm: Algorithm::Rocksteadier, size: Size::Fixed(3) },
            seed,
            errno: 113,
        };
        Dialler { task: Task { index, count }, service }
    }

    fn list(endpoints: u32) -> EndpointList {
        let endpoint = |index| Endpoint {
            address: format!("10.0.0.{}:80", index + 1).parse().unwrap(),
            index,
            weight: 1,
            state: EndpointState::Healthy,
            zone: None,
        };
        EndpointList::new((0..endpoints).map(endpoint).collect(), "10.96.0.10:80".parse().unwrap(), &[])
            .unwrap()
    }

    #[test]
    fn every_task_gets_what_it_would_compute_alone() {
        let diallers =
            [dialler(0, 5, 7), dialler(4, 5, 7), dialler(4, 6, 7), dialler(4, 5, 8), dialler(0, 5, 7)];
        let mut offer = Offer::new(list(7));
        offer.complete(&diallers);
        assert_eq!(offer.memberships.len(), 4, "each once");
        for dialler in &diallers {
            let alone = Membership::of(&dialler.service, dialler.task, offer.list());
            let part = offer.part(&dialler.service, dialler.task).unwrap();
            assert_eq!((part.membership(), part.list()), (&alone, offer.list()));
        }
    }

    #[test]
    fn an_answer_is_only_for_the_service_and_task_that_asked() {
        let mut offer = Offer::new(list(7));
        offer.complete(&[dialler(0, 5, 7)]);
        for other in [dialler(1, 5, 7), dialler(0, 6, 7), dialler(0, 5, 8)] {
            assert_eq!(offer.part(&other.service, other.task), None);
        }
        let mut resized = dialler(0, 5, 7);
        resized.service.subset = Subset::All;
        assert_eq!(offer.part(&resized.service, resized.task), None);
    }

    #[test]
    fn what_is_known_is_kept_and_what_nobody_asks_for_is_forgotten() {
        let mut before = Offer::new(list(7));
        before.complete(&[dialler(0, 5, 7), dialler(1, 5, 7)]);
        let mut after = Offer::new(list(7));
        assert!(!after.is_of_the_same_reading(&before) && before.clone().is_of_the_same_reading(&before));
        after.follow(&before);
        assert!(after.is_of_the_same_reading(&before), "an equal list is the same from then on");
        after.complete(&[dialler(1, 5, 7), dialler(2, 5, 7)]);
        let at = |offer: &Offer, index| offer.memberships.iter().position(|(d, _)| d.task.index == index);
        assert_eq!([0, 1, 2].map(|index| at(&after, index)), [None, Some(0), Some(1)]);
        assert!(Arc::ptr_eq(&after.memberships[0].1, &before.memberships[1].1), "it was not computed again");
        // Of another list nothing is known.
        let mut longer = Offer::new(list(8));
        longer.take_over(&before);
        assert!(longer.memberships.is_empty());
    }
}
