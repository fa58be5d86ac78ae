//! Defers the removals of an answer that removes most endpoints at once.
//!
//! A server that has just started, or that answers from a part of its data, may list only some of
//! the endpoints. Such an answer is a valid, shorter list, but removes healthy backends. The
//! removals in an answer therefore take effect only after the server has repeated them; the
//! additions take effect at once.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;

use lb_core::endpoint::EndpointList;

/// Removals of fewer endpoints always take effect at once.
const LEAST: usize = 3;

/// The list with which an answer is compared, and the removals that may take effect.
#[derive(Clone, Debug)]
pub struct Guard {
    /// The list in force, without the additions of answers with pending removals.
    pub base: Arc<EndpointList>,
    /// The removals that the server has repeated.
    pub accepted: Option<Arc<BTreeSet<SocketAddr>>>,
}

/// The removals of an answer that have not taken effect yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingRemovals {
    pub removed: Arc<BTreeSet<SocketAddr>>,
    /// The list that contains these endpoints.
    pub base: Arc<EndpointList>,
}

impl Guard {
    /// The removals of an answer that do not take effect yet, and the list that takes effect
    /// instead: the base with the answer's changes and additions. `None` if the answer takes effect
    /// unchanged.
    pub fn defer_removals(&self, answer: &EndpointList) -> Option<(PendingRemovals, EndpointList)> {
        let gone = self.base.difference(answer).removed;
        if gone.len() < LEAST || gone.len() * 2 <= self.base.as_slice().len() {
            return None;
        }
        let removed: BTreeSet<SocketAddr> = gone.iter().map(|endpoint| endpoint.address).collect();
        if self.accepted.as_ref().is_some_and(|accepted| removed.is_subset(accepted)) {
            return None;
        }
        // If base and additions together are not a valid list, because two endpoints have the same
        // index or there are too many endpoints, the additions also wait.
        let joined = answer.joined(gone).unwrap_or_else(|| (*self.base).clone());
        Some((PendingRemovals { removed: Arc::new(removed), base: Arc::clone(&self.base) }, joined))
    }
}

#[cfg(test)]
mod tests {
    use lb_core::endpoint::{Endpoint, EndpointState};

    use super::*;

    /// A list of endpoints. Each number is the last byte of an endpoint's address, and its index.
    fn list(lasts: impl IntoIterator<Item = u8>) -> EndpointList {
        let endpoint = |last: u8| Endpoint {
            address: ([10, 0, 0, last], 80).into(),
            index: last.into(),
            weight: 1,
            state: EndpointState::Healthy,
            zone: None,
            agent: None,
        };
        let endpoints = lasts.into_iter().map(endpoint).collect();
        EndpointList::new(endpoints, "10.96.0.10:80".parse().unwrap(), &[]).unwrap()
    }

    fn guard(base: impl IntoIterator<Item = u8>) -> Guard {
        Guard { base: Arc::new(list(base)), accepted: None }
    }

    #[test]
    fn only_the_loss_of_more_than_half_and_of_three_endpoints_is_deferred() {
        for (base, answer) in [(1..=2, 2..=2), (1..=10, 6..=10), (1..=10, 1..=20), (1..=3, 2..=3)] {
            assert_eq!(
                guard(base.clone()).defer_removals(&list(answer.clone())),
                None,
                "from {base:?} to {answer:?}"
            );
        }
        let empty = Guard { base: Arc::default(), accepted: None };
        assert_eq!(empty.defer_removals(&list(1..=9)), None);
        for (base, answer) in [(1..=10, 7..=10), (1..=4, 4..=4), (1..=3, 4..=4), (1..=100, 101..=200)] {
            let (pending, joined) = guard(base.clone()).defer_removals(&list(answer.clone())).unwrap();
            let gone: Vec<u8> = base.clone().filter(|last| !answer.contains(last)).collect();
            let removed: BTreeSet<SocketAddr> =
                gone.iter().map(|last| SocketAddr::from(([10, 0, 0, *last], 80))).collect();
            assert_eq!((&*pending.base, &*pending.removed), (&list(base), &removed));
            assert_eq!(joined, list(answer.chain(gone)), "additions take effect at once");
        }
    }

    #[test]
    fn repeated_removals_take_force_and_further_ones_do_not() {
        let mut guard = guard(1..=10);
        let (pending, _) = guard.defer_removals(&list(7..=10)).unwrap();
        guard.accepted = Some(pending.removed);
        assert_eq!(guard.defer_removals(&list(7..=10)), None);
        assert_eq!(guard.defer_removals(&list(7..=20)), None);
        assert!(guard.defer_removals(&list(8..=10)).is_some());
    }

    #[test]
    fn additions_wait_if_their_indexes_are_taken() {
        let moved = list([4]).as_slice()[0].clone();
        let moved = Endpoint { index: 1, ..moved };
        let answer = EndpointList::new(vec![moved], "10.96.0.10:80".parse().unwrap(), &[]).unwrap();
        let (_, joined) = guard(1..=3).defer_removals(&answer).unwrap();
        assert_eq!(joined, list(1..=3));
    }
}
