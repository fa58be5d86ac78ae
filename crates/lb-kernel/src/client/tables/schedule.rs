//! The schedules of a client task's services, which share one map of entries, and the lists of
//! members that some tables have.
//!
//! The arena ([`lb_core::arena`]) decides the position of each table. This module writes a table to
//! a region that no service refers to, and then makes the table current with a single store of its
//! reference.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::offset_of;

use lb_common::abi::{ENTRIES_PER_CELL, Members, ScheduleCell, Service, TableRef};
use lb_core::arena::Move;
use lb_core::ids::{ServiceIndex, Slot};

use super::Tables;

impl Tables {
    /// The entries of a table, which are numbers of slots.
    pub fn schedule(&self, table: TableRef) -> Vec<u16> {
        let cells = table.base / ENTRIES_PER_CELL..(table.base + table.len()) / ENTRIES_PER_CELL;
        let cells = cells.filter(|cell| (*cell as usize) < self.maps.schedule.length());
        cells.flat_map(|cell| self.maps.schedule.get(cell as usize).slots).collect()
    }

    /// The capacity of the map in entries.
    pub(crate) fn schedule_entries(&self) -> u32 {
        u32::try_from(self.maps.schedule.length()).unwrap_or(u32::MAX).saturating_mul(ENTRIES_PER_CELL)
    }

    /// The table references in all rows of services, including free rows.
    pub(crate) fn table_refs(&self) -> impl Iterator<Item = (ServiceIndex, TableRef)> {
        self.all_indexes().map(|index| (index, self.table_ref(index)))
    }

    /// The reference of a service's table, read with a single load, because the daemon may switch
    /// tables at the same time.
    pub(super) fn table_ref(&self, index: ServiceIndex) -> TableRef {
        TableRef::from_word(self.maps.services.load64(index.index(), offset_of!(Service, table)))
    }

    /// The slots of replaced backends in a table's list of members. Empty if the table has no list.
    pub(super) fn replaced(&self, index: ServiceIndex, table: TableRef) -> Vec<u16> {
        let Some(position) = table.members_of(index.number()) else { return Vec::new() };
        let Members { count, listed, slots } = self.maps.members.get(position as usize);
        slots.get(count as usize..listed as usize).map_or_else(Vec::new, <[u16]>::to_vec)
    }

    /// Writes a service's new table and makes it current. `entries_of`: the number of entries of
    /// each slot. `replaced`: the slots of replaced backends.
    pub(crate) fn switch_schedule(
        &mut self,
        index: ServiceIndex,
        new: TableRef,
        schedule: &[Slot],
        entries_of: &BTreeMap<Slot, u32>,
        replaced: &[Slot],
    ) {
        let old = self.table_ref(index);
        if let Some(position) = new.members_of(index.number()) {
            self.write_members(position, entries_of.keys().copied(), replaced);
        }
        let entries: Vec<u16> = schedule.iter().map(|slot| slot.entry()).collect();
        self.write_entries(new.base, &entries);
        let before = self.schedule(old).into_iter().filter_map(|entry| Slot::new(entry.into()));
        let dropped: BTreeSet<Slot> = before.filter(|slot| !entries_of.contains_key(slot)).collect();
        for (slot, entries) in entries_of {
            self.set_entries(*slot, *entries);
        }
        self.store_table_ref(index, new);
        for slot in dropped {
            self.set_entries(slot, 0);
        }
    }

    /// Copies a service's table to another region and makes the copy current.
    pub(crate) fn move_schedule(&mut self, Move { service, from, to }: Move) {
        let entries = self.schedule(from);
        self.write_entries(to.base, &entries);
        self.store_table_ref(service, to);
    }

    fn store_table_ref(&mut self, index: ServiceIndex, table: TableRef) {
        self.maps.services.store64(index.index(), offset_of!(Service, table), table.to_word());
    }

    fn write_members(
        &mut self,
        position: u32,
        slots: impl ExactSizeIterator<Item = Slot>,
        replaced: &[Slot],
    ) {
        let number = |count: usize| u32::try_from(count).expect("a list has at most MAX_LISTED slots");
        let (count, listed) = (number(slots.len()), number(slots.len() + replaced.len()));
        let mut members = Members { count, listed, ..bytemuck::Zeroable::zeroed() };
        for (member, slot) in members.slots.iter_mut().zip(slots.chain(replaced.iter().copied())) {
            *member = slot.entry();
        }
        self.maps.members.set(position as usize, &members);
    }

    fn write_entries(&mut self, base: u32, entries: &[u16]) {
        for (cell, slots) in entries.chunks_exact(ENTRIES_PER_CELL as usize).enumerate() {
            let slots: [u16; 4] = slots.try_into().expect("each chunk has four slots");
            let cell = (base / ENTRIES_PER_CELL) as usize + cell;
            self.maps.schedule.set(cell, &ScheduleCell { slots });
        }
    }
}
