//! The assignment of report ids to backends. A report id is the index of a backend's verdict in the
//! kernel's verdict array, which all client tasks share.
//!
//! The rows of the map `backends` and the register of senders (the map `senders`) contain ids, so
//! an id is released in steps. First, the caller removes the id from all rows and from the
//! register. Then the caller waits until every program that may have read the id there has ended (a
//! grace period). Then the caller clears the verdict of the id, and the id is free.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use lb_common::abi::host::{MAX_SENDERS, NO_REPORT};
use lb_core::grace_period::GracePeriods;
use lb_core::reports::Name;

/// The report ids of a host.
#[derive(Clone, Debug)]
pub struct ReportIds {
    in_use: BTreeMap<Name, u32>,
    free: BTreeSet<u32>,
    /// This id and all above it were never in use, and are free.
    fresh: u32,
    /// Ids that are no longer in rows of `backends` or in the register, but that running programs
    /// may still use.
    leaving: BTreeSet<u32>,
    periods: GracePeriods<u32>,
    /// Names without an id, because no id was free.
    uncovered: BTreeSet<Name>,
    /// The number of ids.
    capacity: u32,
}

impl Default for ReportIds {
    fn default() -> Self {
        Self::new(MAX_SENDERS)
    }
}

/// An entry of the register cannot be adopted: its id does not exist, another name has the same id,
/// or the name also has another id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("report id {id} of {address} is invalid, or the id or the backend has another entry")]
pub struct Contradiction {
    /// The report id of the refused entry.
    pub id: u32,
    /// The address of the backend with this entry.
    pub address: SocketAddr,
}

impl ReportIds {
    /// Creates the ids from 1 to `capacity`, all of them free.
    pub fn new(capacity: u32) -> Self {
        Self {
            in_use: BTreeMap::new(),
            free: BTreeSet::new(),
            fresh: 1,
            leaving: BTreeSet::new(),
            periods: GracePeriods::default(),
            uncovered: BTreeSet::new(),
            capacity,
        }
    }

    /// Adopts the id that a name has in the kernel's register.
    ///
    /// # Errors
    /// If the id does not exist, or if the id or the name is in an entry that was adopted before.
    /// The caller should then remove the register's entry.
    pub fn adopt(&mut self, name: Name, id: u32) -> Result<(), Contradiction> {
        let is_ours = (1..=self.capacity).contains(&id) && (id >= self.fresh || self.free.contains(&id));
        if !is_ours || self.in_use.contains_key(&name) {
            return Err(Contradiction { id, address: name.address });
        }
        if id >= self.fresh {
            self.free.extend(self.fresh..id);
            self.fresh = id + 1;
        }
        self.free.remove(&id);
        self.in_use.insert(name, id);
        Ok(())
    }

    /// The id of a name: its present id, or else the lowest free id. [`NO_REPORT`] if no id is
    /// free; the name then counts as uncovered until it gets an id.
    ///
    /// An earlier daemon may have ended before it cleared the verdict of an id. So the caller must
    /// clear the verdict of a new id before it adds the id to the register.
    pub fn hold(&mut self, name: Name) -> u32 {
        if let Some(id) = self.in_use.get(&name) {
            return *id;
        }
        let id = match self.free.pop_first() {
            Some(id) => id,
            None if self.fresh <= self.capacity => {
                self.fresh += 1;
                self.fresh - 1
            }
            None => {
                self.uncovered.insert(name);
                return NO_REPORT;
            }
        };
        self.uncovered.remove(&name);
        self.in_use.insert(name, id);
        id
    }

    /// The id of a name, if it has one.
    pub fn get(&self, name: Name) -> Option<u32> {
        self.in_use.get(&name).copied()
    }

    /// Every name with an id.
    pub fn iter(&self) -> impl Iterator<Item = (Name, u32)> + '_ {
        self.in_use.iter().map(|(name, id)| (*name, *id))
    }

    /// Removes the uncovered names for which `is_wanted` returns false.
    pub fn retain_uncovered(&mut self, is_wanted: impl Fn(&Name) -> bool) {
        self.uncovered.retain(is_wanted);
    }

    /// The number of names that have no id because no id was free.
    pub fn uncovered(&self) -> usize {
        self.uncovered.len()
    }

    /// Begins to release the id of a backend. Before this call, the caller must remove the id from
    /// all rows of `backends` and from the register. If the name returns, it gets another id.
    pub fn release(&mut self, name: Name) {
        self.uncovered.remove(&name);
        self.leaving.extend(self.in_use.remove(&name));
    }

    /// Whether any released id still needs a grace period, so that a wait is necessary.
    pub fn wants_wait(&self) -> bool {
        self.periods.wants_wait(&self.leaving)
    }

    /// Records that a grace period begins. An earlier grace period that has not ended counts as
    /// failed.
    pub fn before_wait(&mut self) {
        self.periods.before_wait(&self.leaving);
    }

    /// Records that the current grace period has ended. The caller must clear the verdicts of the
    /// returned ids and then call [`ReportIds::cleared`], which frees the ids.
    pub fn after_wait(&mut self) -> BTreeSet<u32> {
        self.periods.after_wait();
        self.periods.take_idle(|_| false)
    }

    /// Frees these ids, whose verdicts the caller has cleared.
    pub fn cleared(&mut self, ids: &BTreeSet<u32>) {
        for id in ids {
            if self.leaving.remove(id) {
                self.free.insert(*id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use lb_core::service::Protocol;
    use proptest::prelude::*;

    use super::*;

    fn name(n: u16) -> Name {
        Name { protocol: Protocol::Tcp, address: ([10, 0, 0, 1], n).into() }
    }

    fn freed(ids: &mut ReportIds) -> Vec<u32> {
        ids.before_wait();
        let over = ids.after_wait();
        ids.cleared(&over);
        over.into_iter().collect()
    }

    #[test]
    fn a_name_retains_its_id_and_a_new_name_gets_the_lowest_free_id() {
        let mut ids = ReportIds::default();
        assert_eq!([1, 2, 1, 3].map(|n| ids.hold(name(n))), [1, 2, 1, 3]);
        // The same address with another protocol is another backend.
        assert_eq!(ids.hold(Name { protocol: Protocol::Udp, ..name(1) }), 4);
        ids.release(name(2));
        ids.release(name(1));
        assert_eq!(ids.hold(name(9)), 5, "programs may still use the released ids");
        assert_eq!(freed(&mut ids), [1, 2]);
        assert_eq!([1, 2, 7].map(|n| ids.hold(name(n))), [1, 2, 6]);
        assert_eq!(ids.get(name(9)), Some(5));
    }

    #[test]
    fn an_id_is_free_after_its_grace_period_and_a_cleared_verdict() {
        let mut ids = ReportIds::new(2);
        let (a, b) = (ids.hold(name(1)), ids.hold(name(2)));
        assert!(!ids.wants_wait());
        ids.release(name(1));
        assert!(ids.wants_wait());
        ids.before_wait();
        // This id is released during the grace period, so it needs the next grace period.
        ids.release(name(2));
        assert_eq!(ids.after_wait(), [a].into());
        assert_eq!((ids.hold(name(3)), ids.uncovered()), (NO_REPORT, 1), "the verdict is not cleared yet");
        ids.cleared(&[a].into());
        assert_eq!((ids.hold(name(3)), ids.uncovered()), (a, 0));
        assert!(ids.wants_wait());
        assert_eq!(freed(&mut ids), [b]);
        assert!(!ids.wants_wait());
        // An id that has not waited for a grace period is not freed.
        ids.cleared(&[a].into());
        assert_eq!(ids.hold(name(4)), b);
    }

    #[test]
    fn names_without_an_id_are_counted_as_uncovered() {
        let mut ids = ReportIds::default();
        for n in 0..MAX_SENDERS {
            let name = Name { protocol: Protocol::Tcp, address: SocketAddr::from((n.to_be_bytes(), 80)) };
            assert_eq!(ids.hold(name), n + 1);
        }
        assert_eq!([1, 2, 1].map(|n| ids.hold(name(n))), [NO_REPORT; 3]);
        assert_eq!(ids.uncovered(), 2);
        ids.release(name(2));
        assert_eq!((ids.uncovered(), ids.wants_wait()), (1, false));
        ids.retain_uncovered(|wanted| *wanted != name(1));
        assert_eq!(ids.uncovered(), 0);
    }

    #[test]
    fn entries_of_the_register_are_adopted_unless_contradictory() {
        let mut ids = ReportIds::new(9);
        for (n, id) in [(4, 4), (2, 2)] {
            assert_eq!(ids.adopt(name(n), id), Ok(()));
        }
        for (n, id) in [(5, 4), (4, 6), (5, 0), (5, 10)] {
            assert_eq!(ids.adopt(name(n), id), Err(Contradiction { id, address: name(n).address }));
        }
        assert_eq!([1, 2, 3, 4, 5].map(|n| ids.hold(name(n))), [1, 2, 3, 4, 5]);
    }

    #[derive(Clone, Debug)]
    enum Event {
        Hold(u16),
        Release(u16),
        Begin,
        End,
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            4 => (0..5u16).prop_map(Event::Hold),
            3 => (0..5u16).prop_map(Event::Release),
            2 => Just(Event::Begin),
            2 => Just(Event::End),
        ]
    }

    proptest! {
        /// For all events, no two names share an id, and a released id is assigned again only after
        /// a grace period that began later.
        #[test]
        fn ids_that_a_reader_may_have_are_never_assigned(events in prop::collection::vec(event(), 0..80)) {
            let mut ids = ReportIds::new(6);
            // When each id was last released, when the current grace period began, and when the
            // last completed one began.
            let mut released = BTreeMap::new();
            let (mut begun, mut ended) = (None, None::<usize>);
            for (time, event) in events.into_iter().enumerate() {
                match event {
                    Event::Hold(n) => {
                        let before = ids.get(name(n));
                        let id = ids.hold(name(n));
                        if before.is_none() && let Some(at) = released.get(&id) {
                            prop_assert!(ended.is_some_and(|began| began > *at), "id {id} was assigned again without a grace period");
                        }
                    }
                    Event::Release(n) => {
                        if let Some(id) = ids.get(name(n)) {
                            released.insert(id, time);
                        }
                        ids.release(name(n));
                    }
                    Event::Begin => {
                        ids.before_wait();
                        begun = Some(time);
                    }
                    Event::End => {
                        let over = ids.after_wait();
                        ids.cleared(&over);
                        ended = ended.max(begun.take());
                    }
                }
                let held: BTreeSet<u32> = ids.iter().map(|(_, id)| id).collect();
                prop_assert_eq!(held.len(), ids.iter().count());
            }
        }
    }
}
