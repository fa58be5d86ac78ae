//! The schedules of a client task's services, as they lie in one map of entries that all tables share, and the members
//! that some tables list.
//!
//! Where a table lies is the arena's decision ([`lb_core::arena`]). Here a table is written where no service points, and
//! then becomes current with a single store of its reference.

use std::collections::BTreeMap;
use std::mem::offset_of;

use lb_common::abi::{ENTRIES_PER_CELL, Members, ScheduleCell, Service, TableRef};
use lb_core::arena::Move;

use super::Tables;

impl Tables {
    /// The entries of a table, one slot each.
    pub fn schedule(&self, table: TableRef) -> Vec<u16> {
        let cells = table.base / ENTRIES_PER_CELL..(table.base + table.len()) / ENTRIES_PER_CELL;
        let cells = cells.filter(|cell| (*cell as usize) < self.maps.schedule.len());
        cells.flat_map(|cell| self.maps.schedule.get(cell as usize).slots).collect()
    }

    /// How many entries the map has.
    pub(crate) fn schedule_entries(&self) -> u32 {
        u32::try_from(self.maps.schedule.len()).unwrap_or(u32::MAX).saturating_mul(ENTRIES_PER_CELL)
    }

    /// The references of all rows of services, free rows included.
    pub(crate) fn table_refs(&self) -> impl Iterator<Item = (u16, TableRef)> {
        let rows = 0..u16::try_from(self.maps.services.len()).expect("MAX_SERVICES fits in 16 bits");
        rows.map(|index| (index, self.table_ref(index)))
    }

    /// The reference of a service's table, read in one piece: the daemon may be switching tables meanwhile.
    pub(super) fn table_ref(&self, index: u16) -> TableRef {
        TableRef::from_word(self.maps.services.load64(usize::from(index), offset_of!(Service, table)))
    }

    /// Writes a service's new table and makes it current. `entries_of` tells how many entries each slot has in it.
    pub(crate) fn switch_schedule(
        &mut self,
        index: u16,
        new: TableRef,
        schedule: &[u16],
        entries_of: &BTreeMap<u16, u32>,
    ) {
        let old = self.table_ref(index);
        if let Some(position) = new.members_of(u32::from(index)) {
            self.write_members(position, entries_of.keys().copied());
        }
        self.write_entries(new.base, schedule);
        let mut dropped = self.schedule(old);
        dropped.retain(|slot| !entries_of.contains_key(slot));
        for (slot, entries) in entries_of {
            self.set_entries(u32::from(*slot), *entries);
        }
        self.store_table_ref(index, new);
        for slot in dropped {
            self.set_entries(u32::from(slot), 0);
        }
    }

    /// Copies a service's table to another region and makes it current there.
    pub(crate) fn move_schedule(&mut self, Move { service, from, to }: Move) {
        let entries = self.schedule(from);
        self.write_entries(to.base, &entries);
        self.store_table_ref(service, to);
    }

    fn store_table_ref(&mut self, index: u16, table: TableRef) {
        self.maps.services.store64(usize::from(index), offset_of!(Service, table), table.to_word());
    }

    fn write_members(&mut self, position: u32, slots: impl ExactSizeIterator<Item = u16>) {
        let count = u32::try_from(slots.len()).expect("at most MAX_SUBSET");
        let mut members = Members { count, ..bytemuck::Zeroable::zeroed() };
        for (member, slot) in members.slots.iter_mut().zip(slots) {
            *member = slot;
        }
        self.maps.members.set(position as usize, &members);
    }

    fn write_entries(&mut self, base: u32, schedule: &[u16]) {
        for (cell, slots) in schedule.chunks_exact(ENTRIES_PER_CELL as usize).enumerate() {
            let slots: [u16; 4] = slots.try_into().expect("chunks of four");
            let cell = (base / ENTRIES_PER_CELL) as usize + cell;
            self.maps.schedule.set(cell, &ScheduleCell { slots });
        }
    }
}
