//! The indexes of the kernel's arrays, each with its own type, so that they cannot be mixed up.
//!
//! Maps contain them as plain integers; the code that reads or writes a map converts them. In JSON
//! they are plain integers, too.

use std::fmt;

use lb_common::abi::{MAX_SERVICES, NO_SLOT};

/// The place of a backend in the kernel's arrays: an index below
/// [`MAX_SLOTS`](lb_common::abi::MAX_SLOTS), and therefore never [`NO_SLOT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(u16);

impl Slot {
    /// The slot at an index; `None` if no slot can have this index, for example [`NO_SLOT`].
    pub const fn new(index: u32) -> Option<Self> {
        #[expect(clippy::cast_possible_truncation, reason = "below NO_SLOT, which has 16 bits")]
        if index < NO_SLOT { Some(Self(index as u16)) } else { None }
    }

    /// The slots below an index.
    pub fn below(end: u32) -> impl Iterator<Item = Self> {
        (0..end).map_while(Self::new)
    }

    /// The index as a schedule entry.
    pub const fn entry(self) -> u16 {
        self.0
    }

    /// The index in map keys, and in map values that are not schedule entries.
    pub const fn number(self) -> u32 {
        self.0 as u32
    }

    /// The index into a slice.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// The number for an optional slot; [`NO_SLOT`] for `None`.
    pub const fn number_or_none(slot: Option<Self>) -> u32 {
        match slot {
            Some(slot) => slot.number(),
            None => NO_SLOT,
        }
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of earlier backends of a slot, modulo 2^32. It distinguishes the backends that use a
/// slot one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Generation(pub u32);

impl Generation {
    /// The generation of the slot's next backend.
    pub const fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }
}

/// A backend in its slot. Another generation of the same slot is another backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BackendRef {
    /// The backend's slot.
    pub slot: Slot,
    /// The slot's generation.
    pub generation: Generation,
}

/// A service's index in the kernel's arrays. It is not the service's position in the configuration:
/// a removed service retains its index until its last flow has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceIndex(pub u16);

impl ServiceIndex {
    /// All indexes that a client task can have.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..MAX_SERVICES).map_while(|index| u16::try_from(index).ok()).map(Self)
    }

    /// The index in map keys.
    pub const fn number(self) -> u32 {
        self.0 as u32
    }

    /// The index into a slice.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for ServiceIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use lb_common::abi::MAX_SLOTS;

    use super::*;

    #[test]
    fn every_index_below_no_slot_is_a_slot() {
        let last = Slot::new(MAX_SLOTS - 1).unwrap();
        assert_eq!((last.number(), last.entry(), last.index()), (65_534, 65_534, 65_534));
        assert_eq!([NO_SLOT, NO_SLOT + 1, u32::MAX].map(Slot::new), [None; 3]);
        assert_eq!([Some(last), None].map(Slot::number_or_none), [65_534, NO_SLOT]);
        assert_eq!(Slot::below(u32::MAX).count(), MAX_SLOTS as usize);
    }

    #[test]
    fn generations_wrap() {
        assert_eq!([0, 7, u32::MAX].map(|n| Generation(n).next().0), [1, 8, 0]);
    }
}
