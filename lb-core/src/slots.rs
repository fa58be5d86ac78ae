//! Where each backend lives in the kernel's arrays: a slot, and the generation of that slot.
//!
//! A backend is known by its service and address. It keeps its slot as long as anything may refer to it: a table, a
//! fallback, a flow. Only the datapath can know when the last reference is gone, so slots are freed only when it says so.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use thiserror::Error;

/// What a backend is known by: its service's index and its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity {
    /// The service's index in the kernel's arrays.
    pub service: u16,
    /// The backend's address.
    pub address: SocketAddr,
}

/// Where a backend lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Index in the kernel's arrays.
    pub number: u32,
    /// How many backends had it before, wrapping.
    pub generation: u32,
}

/// No slot is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "all {capacity} slots of the client task are taken (limits.slots); backends that were removed keep theirs until their last connection ends"
)]
pub struct SlotsExhausted {
    /// How many there are.
    pub capacity: u32,
}

/// The slots of one client task.
#[derive(Clone, Debug)]
pub struct Slots {
    in_use: BTreeMap<Identity, Slot>,
    free: BTreeSet<u32>,
    /// The next generation of each slot.
    generations: Vec<u32>,
}

impl Slots {
    /// `capacity` free slots.
    pub fn new(capacity: u32) -> Self {
        Self {
            in_use: BTreeMap::new(),
            free: (0..capacity).collect(),
            generations: vec![0; capacity as usize],
        }
    }

    /// The slot of a backend: the one it has, or the lowest free one.
    ///
    /// # Errors
    /// If it has none and none is free.
    pub fn hold(&mut self, identity: Identity) -> Result<Slot, SlotsExhausted> {
        if let Some(slot) = self.in_use.get(&identity) {
            return Ok(*slot);
        }
        let capacity = u32::try_from(self.generations.len()).unwrap_or(u32::MAX);
        let number = self.free.pop_first().ok_or(SlotsExhausted { capacity })?;
        let next = &mut self.generations[number as usize];
        let slot = Slot { number, generation: *next };
        *next = next.wrapping_add(1);
        self.in_use.insert(identity, slot);
        Ok(slot)
    }

    /// Takes over a slot that a backend already has in the kernel.
    ///
    /// # Panics
    /// If the slot is not free or past the end: the kernel's arrays hold one backend per slot.
    pub fn adopt(&mut self, identity: Identity, slot: Slot) {
        assert!(self.free.remove(&slot.number), "slot {} is not free", slot.number);
        self.generations[slot.number as usize] = slot.generation.wrapping_add(1);
        let before = self.in_use.insert(identity, slot);
        assert!(before.is_none(), "{identity:?} has two slots");
    }

    /// Sets the next generation of a slot; of one that is in use, or past the end, it stays as it is.
    pub fn set_generation(&mut self, slot: u32, next: u32) {
        if self.free.contains(&slot) {
            self.generations[slot as usize] = next;
        }
    }

    /// The slot of a backend, if it has one.
    pub fn get(&self, identity: Identity) -> Option<Slot> {
        self.in_use.get(&identity).copied()
    }

    /// Every backend that has a slot.
    pub fn iter(&self) -> impl Iterator<Item = (Identity, Slot)> + '_ {
        self.in_use.iter().map(|(identity, slot)| (*identity, *slot))
    }

    /// Frees the slot of a backend that nothing refers to any more.
    pub fn free(&mut self, identity: Identity) {
        if let Some(slot) = self.in_use.remove(&identity) {
            self.free.insert(slot.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(n: u16) -> Identity {
        Identity { service: 0, address: format!("10.0.0.1:{n}").parse().unwrap() }
    }

    #[test]
    fn a_backend_keeps_its_slot_and_a_reused_slot_is_told_apart() {
        let mut slots = Slots::new(2);
        let first = slots.hold(identity(1)).unwrap();
        let second = slots.hold(identity(2)).unwrap();
        assert_eq!((first.number, second.number), (0, 1));
        assert_eq!(slots.hold(identity(1)), Ok(first));
        assert_eq!(slots.hold(identity(3)), Err(SlotsExhausted { capacity: 2 }));
        slots.free(identity(1));
        let third = slots.hold(identity(3)).unwrap();
        assert_eq!((third.number, third.generation), (0, first.generation + 1));
        assert_eq!(slots.get(identity(2)), Some(second));
    }

    #[test]
    fn an_adopted_slot_goes_on_with_its_generation() {
        let mut slots = Slots::new(4);
        slots.adopt(identity(9), Slot { number: 2, generation: 7 });
        assert_eq!(slots.hold(identity(9)), Ok(Slot { number: 2, generation: 7 }));
        assert_eq!(slots.hold(identity(1)).unwrap().number, 0);
        slots.free(identity(9));
        slots.hold(identity(2)).unwrap();
        assert_eq!(slots.hold(identity(3)), Ok(Slot { number: 2, generation: 8 }));
    }

    #[test]
    fn a_free_slot_goes_on_with_its_generation() {
        let mut slots = Slots::new(2);
        slots.adopt(identity(1), Slot { number: 0, generation: 3 });
        slots.set_generation(0, 9);
        slots.set_generation(1, 5);
        slots.set_generation(2, 7);
        assert_eq!(slots.hold(identity(1)), Ok(Slot { number: 0, generation: 3 }), "it is in use");
        assert_eq!(slots.hold(identity(2)), Ok(Slot { number: 1, generation: 5 }));
    }
}
