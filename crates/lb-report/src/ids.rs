//! Who has which report id: the place of its verdict in the kernel's array of them, which all client tasks share.
//!
//! An id is given back in steps, for the kernel refers to it from two sides: rows of backends and entries of senders. Both name
//! it no more; then every program that may have read it from there has ended; then its verdict is cleared; then it is free. This
//! says what is next. It knows neither a map nor whether a backend reports.

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
    /// Ids from here on were never in use, and are free.
    fresh: u32,
    /// Their entries are removed; readers may still have them.
    leaving: BTreeSet<u32>,
    periods: GracePeriods<u32>,
    /// Names for which no id was left.
    uncovered: BTreeSet<Name>,
    /// How many ids there are.
    capacity: u32,
}

impl Default for ReportIds {
    fn default() -> Self {
        Self::new(MAX_SENDERS)
    }
}

/// Why an entry of the register cannot be taken over: two names have the id, one name has two, or there is no such id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("report id {id} of {address} is another backend's as well, or none")]
pub struct Contradiction {
    /// The id.
    pub id: u32,
    /// Who has it, too.
    pub address: SocketAddr,
}

impl ReportIds {
    /// All ids from 1 to `capacity`, free.
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

    /// Takes over the id that a name has in the kernel's register.
    ///
    /// # Errors
    /// If that contradicts what was taken over before; the entry is then better removed.
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

    /// The id of a name: the one that it has, or the lowest free one; [`NO_REPORT`] if none is left, and the name is then counted
    /// as not covered until one is.
    ///
    /// An id that is new to a name may still have a verdict that an earlier daemon did not live to clear: it is to be cleared
    /// before an entry of the register names the id.
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

    /// The id that a name has, if it has one.
    pub fn get(&self, name: Name) -> Option<u32> {
        self.in_use.get(&name).copied()
    }

    /// Every name that has an id.
    pub fn iter(&self) -> impl Iterator<Item = (Name, u32)> + '_ {
        self.in_use.iter().map(|(name, id)| (*name, *id))
    }

    /// Names without an id that nobody asks for any more are not counted.
    pub fn retain_uncovered(&mut self, is_asked: impl Fn(&Name) -> bool) {
        self.uncovered.retain(is_asked);
    }

    /// How many names have no id because none was left.
    pub fn uncovered(&self) -> usize {
        self.uncovered.len()
    }

    /// Nothing names the backend's id any more: no row of a backend, and its entry is removed from the register. Should the name
    /// return, it gets another id.
    pub fn release(&mut self, name: Name) {
        self.uncovered.remove(&name);
        self.leaving.extend(self.in_use.remove(&name));
    }

    /// Whether some id needs a wait for readers that has not begun yet, or has not ended.
    pub fn wants_wait(&self) -> bool {
        self.periods.wants_wait(&self.leaving)
    }

    /// A wait for readers begins. One that was under way has failed.
    pub fn before_wait(&mut self) {
        self.periods.before_wait(&self.leaving);
    }

    /// The wait that began last has ended. The verdicts of the ids that are returned are to be cleared; then they are free:
    /// [`ReportIds::cleared`].
    pub fn after_wait(&mut self) -> BTreeSet<u32> {
        self.periods.after_wait();
        self.periods.take_idle(|_| false)
    }

    /// The verdicts of these ids are cleared.
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
    fn a_name_keeps_its_id_and_a_new_one_gets_the_lowest_free_one() {
        let mut ids = ReportIds::default();
        assert_eq!([1, 2, 1, 3].map(|n| ids.hold(name(n))), [1, 2, 1, 3]);
        // The same address by another protocol is another backend.
        assert_eq!(ids.hold(Name { protocol: Protocol::Udp, ..name(1) }), 4);
        ids.release(name(2));
        ids.release(name(1));
        assert_eq!(ids.hold(name(9)), 5, "readers may still have the others");
        assert_eq!(freed(&mut ids), [1, 2]);
        assert_eq!([1, 2, 7].map(|n| ids.hold(name(n))), [1, 2, 6]);
        assert_eq!(ids.get(name(9)), Some(5));
    }

    #[test]
    fn an_id_is_free_once_readers_are_gone_and_its_verdict_is_cleared() {
        let mut ids = ReportIds::new(2);
        let (a, b) = (ids.hold(name(1)), ids.hold(name(2)));
        assert!(!ids.wants_wait());
        ids.release(name(1));
        assert!(ids.wants_wait());
        ids.before_wait();
        // Released while the wait was under way: it needs the next one.
        ids.release(name(2));
        assert_eq!(ids.after_wait(), [a].into());
        assert_eq!((ids.hold(name(3)), ids.uncovered()), (NO_REPORT, 1), "not cleared yet");
        ids.cleared(&[a].into());
        assert_eq!((ids.hold(name(3)), ids.uncovered()), (a, 0));
        assert!(ids.wants_wait());
        assert_eq!(freed(&mut ids), [b]);
        assert!(!ids.wants_wait());
        // What was not waited for is not freed.
        ids.cleared(&[a].into());
        assert_eq!(ids.hold(name(4)), b);
    }

    #[test]
    fn past_the_last_id_names_are_not_covered_and_counted() {
        let mut ids = ReportIds::default();
        for n in 0..MAX_SENDERS {
            let name = Name { protocol: Protocol::Tcp, address: SocketAddr::from((n.to_be_bytes(), 80)) };
            assert_eq!(ids.hold(name), n + 1);
        }
        assert_eq!([1, 2, 1].map(|n| ids.hold(name(n))), [NO_REPORT; 3]);
        assert_eq!(ids.uncovered(), 2);
        ids.release(name(2));
        assert_eq!((ids.uncovered(), ids.wants_wait()), (1, false));
        ids.retain_uncovered(|asked| *asked != name(1));
        assert_eq!(ids.uncovered(), 0);
    }

    #[test]
    fn what_the_register_says_is_taken_over_unless_it_contradicts_itself() {
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
        /// Whatever happens, no two names share an id, and an id that was released comes back only after a wait that began later.
        #[test]
        fn no_id_is_given_out_that_a_reader_may_have(events in prop::collection::vec(event(), 0..80)) {
            let mut ids = ReportIds::new(6);
            // When each id was released last, when the wait under way began, and the last that has ended.
            let mut released = BTreeMap::new();
            let (mut begun, mut ended) = (None, None::<usize>);
            for (time, event) in events.into_iter().enumerate() {
                match event {
                    Event::Hold(n) => {
                        let before = ids.get(name(n));
                        let id = ids.hold(name(n));
                        if before.is_none() && let Some(at) = released.get(&id) {
                            prop_assert!(ended.is_some_and(|began| began > *at), "id {id}");
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
