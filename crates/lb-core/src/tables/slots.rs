//! The place of each backend in the kernel's arrays: a slot, and the generation of that slot.
//!
//! A backend is identified by its service and its address. It retains its slot as long as a table,
//! a fallback or a flow may refer to the slot. When the maps contain no reference to the slot any
//! more, the caller frees it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::{Bound, RangeBounds};

use thiserror::Error;

use crate::ids::{BackendRef, Generation, ServiceIndex, Slot};

/// The identity of a backend: its service's index and its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity {
    /// The service's index in the kernel's arrays.
    pub service: ServiceIndex,
    /// The backend's address.
    pub address: SocketAddr,
}

impl Identity {
    /// The range of all identities of a service.
    pub fn all_of(service: ServiceIndex) -> impl RangeBounds<Self> {
        // The smallest of all addresses.
        let first = |service| Self { service, address: SocketAddr::from(([0, 0, 0, 0], 0)) };
        let end = service
            .0
            .checked_add(1)
            .map_or(Bound::Unbounded, |next| Bound::Excluded(first(ServiceIndex(next))));
        (Bound::Included(first(service)), end)
    }
}

/// No slot is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "all {capacity} slots of the client task are in use (limits.slots); a removed backend retains its slot until its last connection ends"
)]
pub struct SlotsExhausted {
    /// The number of slots of the client, all of which are in use.
    pub capacity: u32,
}

/// The slots of one client task.
#[derive(Clone, Debug)]
pub struct Slots {
    in_use: BTreeMap<Identity, BackendRef>,
    free: BTreeSet<Slot>,
    /// The next generation of each slot.
    generations: Vec<Generation>,
}

impl Slots {
    /// Creates `capacity` free slots.
    pub fn new(capacity: u32) -> Self {
        Self {
            in_use: BTreeMap::new(),
            free: Slot::below(capacity).collect(),
            generations: vec![Generation::default(); capacity as usize],
        }
    }

    /// Returns the slot of a backend. If the backend has no slot, assigns the lowest free slot.
    ///
    /// # Errors
    /// If the backend has no slot and none is free.
    pub fn hold(&mut self, identity: Identity) -> Result<BackendRef, SlotsExhausted> {
        if let Some(backend) = self.in_use.get(&identity) {
            return Ok(*backend);
        }
        let capacity = u32::try_from(self.generations.len()).unwrap_or(u32::MAX);
        let slot = self.free.pop_first().ok_or(SlotsExhausted { capacity })?;
        let next = &mut self.generations[slot.index()];
        let backend = BackendRef { slot, generation: *next };
        *next = next.next();
        self.in_use.insert(identity, backend);
        Ok(backend)
    }

    /// Whether a backend has a slot, or a slot is free.
    pub fn has_room_for(&self, identity: Identity) -> bool {
        !self.free.is_empty() || self.in_use.contains_key(&identity)
    }

    /// The slots of several backends, in their order.
    ///
    /// # Errors
    /// If there are not enough free slots. In this case, nothing changes.
    pub fn hold_all(&mut self, identities: &[Identity]) -> Result<Vec<BackendRef>, SlotsExhausted> {
        let mut new = Vec::new();
        let mut held = Vec::with_capacity(identities.len());
        for identity in identities {
            let is_new = !self.in_use.contains_key(identity);
            match self.hold(*identity) {
                Ok(backend) => {
                    new.extend(is_new.then_some((*identity, backend)));
                    held.push(backend);
                }
                Err(exhausted) => {
                    for (identity, backend) in new {
                        self.free(identity);
                        self.set_generation(backend.slot, backend.generation);
                    }
                    return Err(exhausted);
                }
            }
        }
        Ok(held)
    }

    /// Adopts the slot that a backend has in the kernel.
    ///
    /// # Panics
    /// If the slot is not free, or past the end, or if the backend has a slot already.
    pub fn adopt(&mut self, identity: Identity, backend: BackendRef) {
        assert!(self.free.remove(&backend.slot), "slot {} is not free", backend.slot);
        self.generations[backend.slot.index()] = backend.generation.next();
        let before = self.in_use.insert(identity, backend);
        assert!(before.is_none(), "{identity:?} has two slots");
    }

    /// Sets the next generation of a free slot. Ignores slots that are in use or past the end.
    pub fn set_generation(&mut self, slot: Slot, next: Generation) {
        if self.free.contains(&slot) {
            self.generations[slot.index()] = next;
        }
    }

    /// The slot of a backend, if it has one.
    pub fn get(&self, identity: Identity) -> Option<BackendRef> {
        self.in_use.get(&identity).copied()
    }

    /// Every backend that has a slot.
    pub fn iter(&self) -> impl Iterator<Item = (Identity, BackendRef)> + '_ {
        self.in_use.iter().map(|(identity, backend)| (*identity, *backend))
    }

    /// Every backend of a service that has a slot.
    pub fn of(&self, service: ServiceIndex) -> impl Iterator<Item = (Identity, BackendRef)> + '_ {
        self.in_use.range(Identity::all_of(service)).map(|(identity, backend)| (*identity, *backend))
    }

    /// Frees the slot of a backend to which nothing refers any more.
    pub fn free(&mut self, identity: Identity) {
        if let Some(backend) = self.in_use.remove(&identity) {
            self.free.insert(backend.slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backend(slot: u32, generation: u32) -> BackendRef {
        BackendRef { slot: Slot::new(slot).unwrap(), generation: Generation(generation) }
    }

    fn identity(n: u16) -> Identity {
        Identity { service: ServiceIndex(0), address: format!("10.0.0.1:{n}").parse().unwrap() }
    }

    #[test]
    fn hold_all_assigns_all_slots_or_none() {
        let mut slots = Slots::new(3);
        let first = slots.hold(identity(1)).unwrap();
        let before = format!("{slots:?}");
        let four = [1, 2, 3, 4].map(identity);
        assert_eq!(slots.hold_all(&four), Err(SlotsExhausted { capacity: 3 }));
        assert_eq!(format!("{slots:?}"), before);
        let three = slots.hold_all(&four[..3]).unwrap();
        assert_eq!(three, [first, backend(1, 0), backend(2, 0)]);
        // A backend that is listed twice gets one slot.
        assert_eq!(slots.hold_all(&[identity(2), identity(2)]), Ok(vec![backend(1, 0); 2]));
    }

    #[test]
    fn slots_of_a_service_exclude_other_services() {
        let mut slots = Slots::new(9);
        let of = |service, address: &str| Identity {
            service: ServiceIndex(service),
            address: address.parse().unwrap(),
        };
        let all = [of(1, "0.0.0.0:0"), of(1, "[ffff::1]:65535"), of(2, "0.0.0.0:0"), of(u16::MAX, "[::]:1")];
        slots.hold_all(&all).unwrap();
        let those =
            |service| slots.of(ServiceIndex(service)).map(|(identity, _)| identity).collect::<Vec<_>>();
        assert_eq!((those(0), those(1)), (vec![], all[..2].to_vec()));
        assert_eq!((those(2), those(u16::MAX)), (vec![all[2]], vec![all[3]]));
    }

    #[test]
    fn a_backend_retains_its_slot_and_a_reused_slot_has_a_new_generation() {
        let mut slots = Slots::new(2);
        let first = slots.hold(identity(1)).unwrap();
        let second = slots.hold(identity(2)).unwrap();
        assert_eq!([first, second], [backend(0, 0), backend(1, 0)]);
        assert_eq!(slots.hold(identity(1)), Ok(first));
        assert_eq!(slots.hold(identity(3)), Err(SlotsExhausted { capacity: 2 }));
        slots.free(identity(1));
        assert_eq!(slots.hold(identity(3)), Ok(backend(0, 1)));
        assert_eq!(slots.get(identity(2)), Some(second));
    }

    #[test]
    fn an_adopted_slot_continues_its_generations() {
        let mut slots = Slots::new(4);
        slots.adopt(identity(9), backend(2, 7));
        assert_eq!(slots.hold(identity(9)), Ok(backend(2, 7)));
        assert_eq!(slots.hold(identity(1)), Ok(backend(0, 0)));
        slots.free(identity(9));
        slots.hold(identity(2)).unwrap();
        assert_eq!(slots.hold(identity(3)), Ok(backend(2, 8)));
    }

    #[test]
    fn a_free_slot_continues_at_a_set_generation() {
        let mut slots = Slots::new(2);
        slots.adopt(identity(1), backend(0, 3));
        for (slot, next) in [(0, 9), (1, 5), (2, 7)] {
            slots.set_generation(Slot::new(slot).unwrap(), Generation(next));
        }
        assert_eq!(slots.hold(identity(1)), Ok(backend(0, 3)), "the slot is in use");
        assert_eq!(slots.hold(identity(2)), Ok(backend(1, 5)));
    }
}
