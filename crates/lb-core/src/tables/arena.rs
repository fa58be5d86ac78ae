//! The schedule arena assigns a region in the map of schedule entries to each service's table, and
//! determines when a region may be written again.
//!
//! Kernel programs read tables at any time. So a new table is written to a region that no program
//! can be reading, and becomes current with a single store of its reference. After that store, the
//! owner of the maps waits until every program that was running has ended (a *wait for readers*).
//! Then the region of the replaced table is free.
//!
//! For a new table, the arena chooses the region, one of the service's two member lists (a *half*),
//! and the generation. If there is no room, the arena decides which tables to copy to other
//! regions. The owner of the maps executes these decisions, and reports when a wait begins and
//! ends.

mod region;

use std::collections::BTreeMap;

use lb_common::abi::{MAX_SUBSET, NO_MEMBERS, TableRef};
use thiserror::Error;

use crate::ids::ServiceIndex;
use region::{ScheduleRegion, first_fit, make_room};

/// The reference of a service that has never published a table.
const NO_TABLE: TableRef = TableRef { base: 0, generation: 0, length_log2: 0, members: NO_MEMBERS };

/// The used regions of the schedule map, and their tables.
#[derive(Clone, Debug)]
pub struct Arena {
    /// The number of entries in the schedule map. It is at least twice the sum of the lengths of
    /// all current tables.
    entries: u32,
    /// The current tables, keyed by service index. Empty tables are included, because their
    /// generation counts the service's publications.
    tables: BTreeMap<ServiceIndex, TableRef>,
    /// Tables that were replaced since the last wait for readers began.
    retired: Vec<RetiredTable>,
    /// Tables that were replaced before the last wait for readers began. They remain here if the
    /// wait fails.
    waiting: Vec<RetiredTable>,
}

/// A replaced table that programs may still read.
#[derive(Clone, Copy, Debug)]
struct RetiredTable {
    region: ScheduleRegion,
    /// The position of the table's list in the map of members. `None` if the table has no list, or
    /// if the table was only moved: the moved table still uses the list.
    members: Option<u32>,
}

/// A table fits only after running programs can no longer read the replaced tables.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "the arena assumes that the caller executes the moves"]
pub struct NoRoom {
    /// Current tables to move to other regions before the wait. If this is empty, the caller only
    /// waits for readers.
    pub moves: Vec<Move>,
}

/// A current table to copy. The caller copies the entries from `from` to `to`, then replaces the
/// reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// The service's index.
    pub service: ServiceIndex,
    /// The present reference.
    pub from: TableRef,
    /// The new reference. Only its region differs from `from`.
    pub to: TableRef,
}

/// Why [`Arena::adopt`] refuses tables. No arena creates such tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum AdoptError {
    /// Two tables share entries.
    #[error("the tables of the services at indexes {0} and {1} overlap")]
    Overlap(ServiceIndex, ServiceIndex),
    /// A table reaches past the end of the map.
    #[error("the table of the service at index {0} reaches past the end of the schedule map")]
    Outside(ServiceIndex),
}

impl Arena {
    /// Creates the arena of a schedule map with `entries` entries. `tables`: the current tables,
    /// keyed by service index. All other regions are treated as free. So if programs may still be
    /// reading older tables of adopted maps, the caller must wait for readers before the first
    /// publication.
    ///
    /// # Errors
    /// If tables overlap or reach past the end.
    pub fn adopt(
        entries: u32,
        tables: impl IntoIterator<Item = (ServiceIndex, TableRef)>,
    ) -> Result<Self, AdoptError> {
        let tables: BTreeMap<ServiceIndex, TableRef> = tables.into_iter().collect();
        let mut regions = Vec::new();
        for (&service, &table) in tables.iter().filter(|(_, table)| !table.is_empty()) {
            let length = 1u32.checked_shl(table.length_log2.into());
            let end = length.and_then(|length| table.base.checked_add(length));
            if end.is_none_or(|end| end > entries) {
                return Err(AdoptError::Outside(service));
            }
            regions.push((region_of(table), service));
        }
        regions.sort_by_key(|(region, _)| region.base);
        match regions.windows(2).find(|pair| pair[0].0.overlaps(pair[1].0)) {
            Some(pair) => Err(AdoptError::Overlap(pair[0].1, pair[1].1)),
            None => Ok(Self { entries, tables, retired: Vec::new(), waiting: Vec::new() }),
        }
    }

    /// The current table of a service.
    pub fn table(&self, service: ServiceIndex) -> TableRef {
        self.tables.get(&service).copied().unwrap_or(NO_TABLE)
    }

    /// Makes a new table the current table of a service. The new table has `length` entries (a
    /// power of two above 1, or 0 for no table) and `members` different slots.
    ///
    /// Returns the table's reference. The reference names the region for the entries and, if the
    /// members are few enough for a list, one of the service's two member lists. The caller writes
    /// the entries and the list, and then stores the reference.
    ///
    /// # Errors
    /// If the table does not fit until a wait for readers has ended. The caller must execute the
    /// moves, wait for readers, and repeat the call. In the meantime, other services may publish.
    ///
    /// # Panics
    /// If the length is neither a power of two above 1 nor 0.
    pub fn publish(
        &mut self,
        service: ServiceIndex,
        length: u32,
        members: usize,
    ) -> Result<TableRef, NoRoom> {
        let old = self.table(service);
        let mut new = TableRef { generation: old.generation.wrapping_add(1), ..NO_TABLE };
        if length != 0 {
            assert!(
                length.is_power_of_two() && length > 1,
                "the length {length} is neither a power of two above 1 nor 0"
            );
            let Some(base) = first_fit(&self.in_use(), self.entries, length) else {
                return Err(NoRoom { moves: self.compact(length) });
            };
            let length_log2 = u8::try_from(length.ilog2()).expect("the logarithm of a u32 fits into a u8");
            new = TableRef { base, length_log2, ..new };
            if members <= MAX_SUBSET as usize {
                new.members = self.free_half(service).ok_or(NoRoom { moves: Vec::new() })?;
            }
        }
        self.retire(service);
        self.tables.insert(service, new);
        Ok(new)
    }

    /// Retires the table of a service after its reference has been overwritten with the reference
    /// of an empty table.
    pub fn retire(&mut self, service: ServiceIndex) {
        let old = self.table(service);
        self.tables.remove(&service);
        if !old.is_empty() {
            let members = old.members_of(service.number());
            self.retired.push(RetiredTable { region: region_of(old), members });
        }
    }

    /// Whether any replaced table waits for readers, including the tables of a failed wait.
    pub fn is_waiting(&self) -> bool {
        self.replaced().next().is_some()
    }

    /// Call this before a wait for readers begins. The regions of all tables replaced so far are
    /// free after the wait.
    pub fn before_wait(&mut self) {
        self.waiting.append(&mut self.retired);
    }

    /// Call this when the wait that began after [`Arena::before_wait`] has succeeded.
    pub fn after_wait(&mut self) {
        self.waiting.clear();
    }

    fn replaced(&self) -> impl Iterator<Item = &RetiredTable> {
        self.retired.iter().chain(&self.waiting)
    }

    fn live(&self) -> impl Iterator<Item = ScheduleRegion> {
        self.tables.values().filter(|table| !table.is_empty()).map(|table| region_of(*table))
    }

    /// Every region that a program may be reading, or may begin to read.
    fn in_use(&self) -> Vec<ScheduleRegion> {
        self.live().chain(self.replaced().map(|table| table.region)).collect()
    }

    /// The member list that a service may overwrite, as a value of [`TableRef::members`]. Neither
    /// the service's current table nor a running program refers to this list.
    fn free_half(&self, service: ServiceIndex) -> Option<u8> {
        let current = self.table(service);
        let position = |half| TableRef { members: half, ..NO_TABLE }.members_of(service.number());
        (NO_MEMBERS + 1..=NO_MEMBERS + 2).find(|&half| {
            let is_of = |members: Option<u32>| members.is_some() && members == position(half);
            !is_of(current.members_of(service.number())) && !self.replaced().any(|table| is_of(table.members))
        })
    }

    /// Moves tables together, so that a table of `length` entries fits after the next wait for
    /// readers. Returns no moves while replaced tables wait for readers, because the regions of
    /// these tables may be enough.
    fn compact(&mut self, length: u32) -> Vec<Move> {
        if self.is_waiting() {
            return Vec::new();
        }
        let live: Vec<ScheduleRegion> = self.live().collect();
        let mut moves = Vec::new();
        for (from, base) in make_room(&live, self.entries, length).unwrap_or_default() {
            let mut tables = self.tables.iter_mut();
            let table = tables.find(|(_, table)| !table.is_empty() && table.base == from.base);
            let (&service, table) = table.expect("only current tables are moved");
            // Only the region changes, so the table retains its generation.
            let moved = TableRef { base, ..*table };
            moves.push(Move { service, from: *table, to: moved });
            *table = moved;
            self.retired.push(RetiredTable { region: from, members: None });
        }
        moves
    }
}

fn region_of(table: TableRef) -> ScheduleRegion {
    ScheduleRegion { base: table.base, length: table.len() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(base: u32, generation: u16, length_log2: u8, members: u8) -> TableRef {
        TableRef { base, generation, length_log2, members }
    }

    fn arena(entries: u32) -> Arena {
        Arena::adopt(entries, []).unwrap()
    }

    /// A wait for readers, from beginning to end.
    fn wait(arena: &mut Arena) {
        arena.before_wait();
        arena.after_wait();
    }

    const NO_MOVES: NoRoom = NoRoom { moves: Vec::new() };

    #[test]
    fn halves_of_members_alternate_and_are_reused_only_after_a_wait() {
        let mut arena = arena(64);
        assert_eq!(arena.publish(ServiceIndex(5), 8, 3), Ok(table(0, 1, 3, 1)));
        assert_eq!(arena.publish(ServiceIndex(5), 8, 3), Ok(table(8, 2, 3, 2)));
        // There is room for the entries, but no free list for the members.
        assert_eq!(arena.publish(ServiceIndex(5), 8, 3), Err(NO_MOVES));
        assert_eq!(arena.table(ServiceIndex(5)), table(8, 2, 3, 2));
        // Another service has member lists of its own.
        assert_eq!(arena.publish(ServiceIndex(6), 8, 3), Ok(table(16, 1, 3, 1)));
        wait(&mut arena);
        assert_eq!(arena.publish(ServiceIndex(5), 8, 3), Ok(table(0, 3, 3, 1)));
    }

    #[test]
    fn a_table_with_too_many_members_uses_no_half() {
        let mut arena = arena(4096);
        let many = MAX_SUBSET as usize + 1;
        assert_eq!(arena.publish(ServiceIndex(0), 512, many - 1), Ok(table(0, 1, 9, 1)));
        assert_eq!(arena.publish(ServiceIndex(0), 512, many), Ok(table(512, 2, 9, NO_MEMBERS)));
        assert_eq!(arena.publish(ServiceIndex(0), 512, many), Ok(table(1024, 3, 9, NO_MEMBERS)));
        // Programs may still read the first table's list of members.
        assert_eq!(arena.publish(ServiceIndex(0), 512, many - 1), Ok(table(1536, 4, 9, 2)));
    }

    #[test]
    fn an_empty_table_needs_no_region_but_is_counted_as_a_publication() {
        let mut arena = arena(16);
        assert_eq!(arena.publish(ServiceIndex(0), 16, 1), Ok(table(0, 1, 4, 1)));
        assert_eq!(arena.publish(ServiceIndex(0), 0, 0), Ok(table(0, 2, 0, NO_MEMBERS)));
        assert_eq!(arena.publish(ServiceIndex(0), 16, 1), Err(NO_MOVES));
        wait(&mut arena);
        assert!(!arena.is_waiting());
        assert_eq!(arena.publish(ServiceIndex(0), 16, 1), Ok(table(0, 3, 4, 1)));
    }

    #[test]
    fn a_wait_frees_tables_replaced_before_it_began() {
        let mut arena = arena(32);
        arena.publish(ServiceIndex(0), 8, 1).unwrap();
        arena.publish(ServiceIndex(0), 8, 1).unwrap();
        arena.before_wait();
        // This table is replaced during the wait, so a program that began after the start of the
        // wait may be reading it.
        arena.publish(ServiceIndex(0), 0, 0).unwrap();
        arena.after_wait();
        assert!(arena.is_waiting());
        assert_eq!(arena.publish(ServiceIndex(1), 8, 1), Ok(table(0, 1, 3, 1)));
        assert_eq!(arena.publish(ServiceIndex(2), 16, 1), Ok(table(16, 1, 4, 1)));
        assert_eq!(arena.publish(ServiceIndex(3), 8, 1), Err(NO_MOVES));
        wait(&mut arena);
        assert_eq!(arena.publish(ServiceIndex(3), 8, 1), Ok(table(8, 1, 3, 1)));
    }

    #[test]
    fn a_failed_wait_frees_nothing_and_the_next_wait_frees_all() {
        let mut arena = arena(16);
        arena.publish(ServiceIndex(0), 8, 1).unwrap();
        arena.publish(ServiceIndex(0), 8, 1).unwrap();
        arena.before_wait();
        // The wait fails.
        assert!(arena.is_waiting());
        assert_eq!(arena.publish(ServiceIndex(1), 8, 1), Err(NO_MOVES));
        arena.retire(ServiceIndex(0));
        wait(&mut arena);
        assert!(!arena.is_waiting());
        assert_eq!(arena.publish(ServiceIndex(1), 16, 1), Ok(table(0, 1, 4, 1)));
    }

    #[test]
    fn a_retired_table_of_a_reused_index_remains_for_its_readers() {
        let mut arena = arena(32);
        arena.publish(ServiceIndex(7), 8, 1).unwrap();
        arena.retire(ServiceIndex(7));
        // The caller calls `retire` again if its next step failed.
        arena.retire(ServiceIndex(7));
        assert_eq!(arena.table(ServiceIndex(7)), table(0, 0, 0, NO_MEMBERS));
        assert_eq!(arena.publish(ServiceIndex(7), 8, 1), Ok(table(8, 1, 3, 2)));
    }

    #[test]
    fn a_moved_table_retains_its_generation_and_members() {
        let tables = [(ServiceIndex(3), table(0, 7, 2, 2)), (ServiceIndex(4), table(16, 9, 2, 1))];
        let mut arena = Arena::adopt(32, tables).unwrap();
        let moved = table(20, 7, 2, 2);
        let moves = vec![Move { service: ServiceIndex(3), from: table(0, 7, 2, 2), to: moved }];
        assert_eq!(arena.publish(ServiceIndex(5), 16, 1), Err(NoRoom { moves }));
        assert_eq!(arena.table(ServiceIndex(3)), moved);
        // No table is moved before readers of the old region have ended.
        assert_eq!(arena.publish(ServiceIndex(5), 16, 1), Err(NO_MOVES));
        wait(&mut arena);
        assert_eq!(arena.publish(ServiceIndex(5), 16, 1), Ok(table(0, 1, 4, 1)));
        // The moved table still uses its list of members, so the other list is free.
        assert_eq!(arena.publish(ServiceIndex(3), 4, 1), Ok(table(24, 8, 2, 1)));
    }

    /// No region of 32 entries is free: each contains a table of 8 entries. No region of 8 entries
    /// is free either, so the tables of 8 entries cannot move before the tables of 2 entries have
    /// moved.
    #[test]
    fn one_compaction_is_not_always_enough() {
        let windows = (0..16).map(|window| window * 32);
        let bases = windows.flat_map(|base| [(base, 3), (base + 8, 1), (base + 16, 1), (base + 24, 1)]);
        let tables =
            (0..).zip(bases).map(|(service, (base, log2))| (ServiceIndex(service), table(base, 1, log2, 1)));
        let mut arena = Arena::adopt(512, tables).unwrap();
        let mut compactions = 0;
        while let Err(NoRoom { moves }) = arena.publish(ServiceIndex(100), 32, 1) {
            assert!(!moves.is_empty());
            compactions += 1;
            wait(&mut arena);
        }
        assert_eq!(compactions, 2);
    }

    #[test]
    fn overlapping_or_outlying_tables_are_not_adopted() {
        let adopt = |tables: &[(u16, TableRef)]| {
            Arena::adopt(64, tables.iter().map(|(index, table)| (ServiceIndex(*index), *table))).err()
        };
        assert_eq!(adopt(&[(1, table(0, 1, 3, 1)), (2, table(8, 1, 3, 1)), (3, NO_TABLE)]), None);
        let overlap = AdoptError::Overlap(ServiceIndex(2), ServiceIndex(1));
        assert_eq!(adopt(&[(1, table(8, 1, 2, 1)), (2, table(0, 1, 4, 1))]), Some(overlap));
        for past in [table(64, 1, 1, 0), table(32, 1, 6, 0), table(u32::MAX - 1, 1, 1, 0), table(0, 1, 77, 0)]
        {
            assert_eq!(adopt(&[(9, past)]), Some(AdoptError::Outside(ServiceIndex(9))), "{past:?}");
        }
    }
}
