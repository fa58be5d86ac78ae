//! The schedules of a client task's services: one map of entries that all tables share.
//!
//! A new table is written where no service points and becomes current with a single store of its table reference; the
//! region that it leaves is written again only after every program that may still be reading it has ended.

use std::collections::BTreeMap;
use std::mem::offset_of;

use lb_common::abi::{self, ENTRIES_PER_CELL, Members, NO_MEMBERS, ScheduleCell, Service, TableRef};
use lb_core::arena::region::{Region, first_fit, make_room};

use super::Tables;

/// A table that was replaced.
pub(super) struct Retired {
    entries: Region,
    /// Where its members lie, if they did not move on to its successor.
    members: Option<u32>,
}

impl Tables {
    /// The entries of a table, one slot each.
    pub fn schedule(&self, table: TableRef) -> Vec<u16> {
        let cells = table.base / ENTRIES_PER_CELL..(table.base + table.len()) / ENTRIES_PER_CELL;
        let cells = cells.filter(|cell| (*cell as usize) < self.maps.schedule.len());
        cells.flat_map(|cell| self.maps.schedule.get(cell as usize).slots).collect()
    }

    pub(super) fn publish(&mut self, index: u16, schedule: &[u16]) -> bool {
        let at = offset_of!(Service, table);
        let old = TableRef::from_word(self.maps.services.load64(usize::from(index), at));
        let generation = old.generation.wrapping_add(1);
        let length = u32::try_from(schedule.len()).expect("the planner bounds schedules");
        let shares = shares(schedule);
        let mut new = TableRef { base: 0, generation, length_log2: 0, members: NO_MEMBERS };
        if length != 0 {
            let Some(base) = self.room(length) else {
                self.make_room(length);
                return false;
            };
            if shares.len() <= abi::MAX_SUBSET as usize {
                let Some(half) = self.free_half(index, old) else { return false };
                new.members = half;
                self.write_members(index, new, shares.keys().copied());
            }
            self.write_entries(base, schedule);
            new = TableRef { base, length_log2: u8::try_from(length.ilog2()).expect("below 32"), ..new };
        }
        let dropped = self.schedule(old).into_iter().filter(|slot| !shares.contains_key(slot));
        let dropped: Vec<u16> = dropped.collect();
        for (slot, entries) in &shares {
            self.set_share(u32::from(*slot), *entries);
        }
        self.maps.services.store64(usize::from(index), at, new.to_word());
        for slot in dropped {
            self.set_share(u32::from(slot), 0);
        }
        if !old.is_empty() {
            let entries = Region { base: old.base, length: old.len() };
            self.retired.push(Retired { entries, members: old.members_of(u32::from(index)) });
        }
        true
    }

    /// The half of a service's members that neither its table nor a program that is still running refers to, as
    /// [`TableRef`] has it.
    fn free_half(&self, index: u16, current: TableRef) -> Option<u8> {
        let is_free = |half: &u8| {
            let members = TableRef { members: *half, ..current }.members_of(u32::from(index));
            let mut retired = self.retired.iter().chain(&self.waiting);
            *half != current.members && !retired.any(|retired| retired.members == members)
        };
        (NO_MEMBERS + 1..=NO_MEMBERS + 2).find(is_free)
    }

    fn write_members(&mut self, index: u16, table: TableRef, slots: impl ExactSizeIterator<Item = u16>) {
        let count = u32::try_from(slots.len()).expect("at most MAX_SUBSET");
        let mut members = Members { count, ..bytemuck::Zeroable::zeroed() };
        for (member, slot) in members.slots.iter_mut().zip(slots) {
            *member = slot;
        }
        let at = table.members_of(u32::from(index)).expect("a half was chosen");
        self.maps.members.set(at as usize, &members);
    }

    fn write_entries(&mut self, base: u32, schedule: &[u16]) {
        for (cell, slots) in schedule.chunks_exact(ENTRIES_PER_CELL as usize).enumerate() {
            let slots: [u16; 4] = slots.try_into().expect("chunks of four");
            let cell = (base / ENTRIES_PER_CELL) as usize + cell;
            self.maps.schedule.set(cell, &ScheduleCell { slots });
        }
    }

    /// A region of the schedule map for `length` entries that no program may be reading.
    fn room(&self, length: u32) -> Option<u32> {
        let mut taken = self.live();
        taken.extend(self.retired.iter().chain(&self.waiting).map(|retired| retired.entries));
        first_fit(&taken, self.entries(), length)
    }

    fn entries(&self) -> u32 {
        u32::try_from(self.maps.schedule.len()).unwrap_or(u32::MAX).saturating_mul(ENTRIES_PER_CELL)
    }

    /// Where the current tables lie.
    fn live(&self) -> Vec<Region> {
        let tables = (0..self.maps.services.len()).map(|index| self.table_of(index));
        tables
            .filter(|table| !table.is_empty())
            .map(|table| Region { base: table.base, length: table.len() })
            .collect()
    }

    fn table_of(&self, index: usize) -> TableRef {
        TableRef::from_word(self.maps.services.load64(index, offset_of!(Service, table)))
    }

    /// Copies tables together, so that there is room for `length` entries once readers of the old places are gone. Only
    /// if nothing is waited for already: what that frees may be enough.
    fn make_room(&mut self, length: u32) {
        if !self.retired.is_empty() || !self.waiting.is_empty() {
            return;
        }
        let moves = make_room(&self.live(), self.entries(), length).unwrap_or_default();
        for (from, base) in moves {
            let index = (0..self.maps.services.len()).find(|index| {
                let table = self.table_of(*index);
                !table.is_empty() && table.base == from.base
            });
            let index = index.expect("a table that is live belongs to a service");
            let table = self.table_of(index);
            let entries = self.schedule(table);
            self.write_entries(base, &entries);
            // The same table in another region: its generation stays.
            self.maps.services.store64(
                index,
                offset_of!(Service, table),
                TableRef { base, ..table }.to_word(),
            );
            self.retired.push(Retired { entries: from, members: None });
        }
    }

    /// Whether a region is not free yet; also after a wait that failed.
    pub(crate) fn has_retired(&self) -> bool {
        !self.retired.is_empty() || !self.waiting.is_empty()
    }

    pub(crate) fn before_wait(&mut self) {
        self.waiting.append(&mut self.retired);
    }

    pub(crate) fn after_wait(&mut self) {
        self.waiting.clear();
    }
}

/// How many entries each slot has.
fn shares(schedule: &[u16]) -> BTreeMap<u16, u32> {
    let mut shares = BTreeMap::new();
    for slot in schedule {
        *shares.entry(*slot).or_insert(0) += 1;
    }
    shares
}
