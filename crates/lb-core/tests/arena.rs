//! The schedule arena with a map that records its history. After any sequence of publications,
//! moves and waits, tables that a reader may be reading are unchanged, and every table that fits
//! the limit is published.

use std::collections::BTreeMap;

use lb_common::abi::{MAX_SUBSET, NO_MEMBERS, TableRef};
use lb_core::arena::{Arena, NoRoom};
use lb_core::ids::ServiceIndex;
use proptest::prelude::*;

const SERVICES: u16 = 12;
const FEW: usize = 3;

/// A simulated kernel: the maps of entries and members, and the tables that programs may be
/// reading.
struct Kernel {
    arena: Arena,
    /// The publication that wrote each entry.
    entries: Vec<u32>,
    /// The publication that wrote each member list.
    members: BTreeMap<u32, u32>,
    publications: u32,
    /// The current tables, each with its publication.
    current: BTreeMap<ServiceIndex, (TableRef, u32)>,
    /// Tables that were replaced since the last wait began and, in `waited_for`, the tables that
    /// the wait covers.
    replaced: Vec<Readable>,
    waited_for: Option<Vec<Readable>>,
}

/// A table that a program may be reading.
#[derive(Clone, Copy, Debug)]
struct Readable {
    service: ServiceIndex,
    table: TableRef,
    publication: u32,
}

impl Kernel {
    fn adopt(entries: u32, tables: &BTreeMap<ServiceIndex, TableRef>) -> Self {
        let arena = Arena::adopt(entries, tables.clone()).expect("the tables do not overlap");
        let mut kernel = Self {
            arena,
            entries: vec![0; entries as usize],
            members: BTreeMap::new(),
            publications: 0,
            current: BTreeMap::new(),
            replaced: Vec::new(),
            waited_for: None,
        };
        for (&service, &table) in tables {
            kernel.write(service, table);
        }
        kernel
    }

    fn limit(&self) -> usize {
        self.entries.len() / 2
    }

    /// Whether a table of a service fits the limit together with the current tables of the other
    /// services.
    fn is_within_limit(&self, service: ServiceIndex, length: u32) -> bool {
        let others = self.current.iter().filter(|(other, _)| **other != service);
        let others: u32 = others.map(|(_, (table, _))| table.len()).sum();
        (others + length) as usize <= self.limit()
    }

    /// Writes a new table as the daemon does: first the entries and the members, and last the
    /// reference.
    fn write(&mut self, service: ServiceIndex, table: TableRef) {
        self.publications += 1;
        let range = table.base as usize..(table.base + table.len()) as usize;
        self.entries[range].fill(self.publications);
        if let Some(position) = table.members_of(service.number()) {
            self.members.insert(position, self.publications);
        }
        self.switch(service, table, self.publications);
    }

    fn switch(&mut self, service: ServiceIndex, table: TableRef, publication: u32) {
        if let Some((table, publication)) = self.current.insert(service, (table, publication)) {
            self.replaced.push(Readable { service, table, publication });
        }
    }

    /// Publishes a table. If there is no room, executes the moves that make room, and returns their
    /// number as the error.
    fn publish(&mut self, service: ServiceIndex, length: u32, members: usize) -> Result<(), usize> {
        let before = self.arena.table(service);
        match self.arena.publish(service, length, members) {
            Ok(table) => {
                assert_eq!(table.len(), length);
                assert_eq!(table.generation, before.generation.wrapping_add(1));
                assert_eq!(
                    table.base % length.max(1),
                    0,
                    "{table:?} does not begin at a multiple of its length"
                );
                let is_listed = length != 0 && members <= MAX_SUBSET as usize;
                assert_eq!(table.members != NO_MEMBERS, is_listed, "{members} members: {table:?}");
                assert!(
                    !is_listed || table.members != before.members,
                    "{table:?} has the member list of {before:?}"
                );
                self.write(service, table);
                Ok(())
            }
            Err(NoRoom { moves }) => {
                assert!(self.arena.is_waiting() || !self.is_within_limit(service, length));
                for step in &moves {
                    let (table, publication) = self.current[&step.service];
                    assert_eq!(table, step.from);
                    assert_eq!(step.to, TableRef { base: step.to.base, ..table });
                    let (from, to) = (table.base as usize, step.to.base as usize);
                    self.entries.copy_within(from..from + table.len() as usize, to);
                    self.switch(step.service, step.to, publication);
                }
                Err(moves.len())
            }
        }
    }

    /// Writes another service at the index.
    fn overwrite(&mut self, service: ServiceIndex) {
        self.arena.retire(service);
        if let Some((table, publication)) = self.current.remove(&service) {
            self.replaced.push(Readable { service, table, publication });
        }
    }

    fn begin_wait(&mut self) {
        if self.waited_for.is_none() {
            self.arena.before_wait();
            self.waited_for = Some(std::mem::take(&mut self.replaced));
        }
    }

    fn end_wait(&mut self) {
        if self.waited_for.take().is_some() {
            self.arena.after_wait();
        }
    }

    fn fail_wait(&mut self) {
        self.replaced.extend(self.waited_for.take().into_iter().flatten());
    }

    /// Another daemon adopts the maps. It waits for readers before it publishes.
    fn restart(&mut self) {
        (self.replaced, self.waited_for) = (Vec::new(), None);
        let tables = self.current.iter().map(|(service, (table, _))| (*service, *table));
        self.arena = Arena::adopt(self.arena_entries(), tables)
            .expect("an arena can adopt the tables of another arena");
    }

    fn arena_entries(&self) -> u32 {
        u32::try_from(self.entries.len()).expect("the map is small")
    }

    /// Checks that tables that a reader may be reading are unchanged.
    fn check(&self) {
        let current = self.current.iter().map(|(service, (table, publication))| Readable {
            service: *service,
            table: *table,
            publication: *publication,
        });
        let waited_for = self.waited_for.iter().flatten().copied();
        for readable in current.chain(self.replaced.iter().copied()).chain(waited_for) {
            let Readable { service, table, publication } = readable;
            let range = table.base as usize..(table.base + table.len()) as usize;
            assert!(self.entries[range].iter().all(|entry| *entry == publication), "entries of {readable:?}");
            if let Some(position) = table.members_of(service.number()) {
                assert_eq!(self.members[&position], publication, "members of {readable:?}");
            }
        }
        for (service, (table, _)) in &self.current {
            assert_eq!(self.arena.table(*service), *table);
        }
    }

    /// Publishes a table that fits the limit, with as many waits as necessary; returns the number
    /// of compactions.
    fn settle(&mut self, service: ServiceIndex, length: u32, members: usize) -> u32 {
        let lengths = self.current.values().map(|(table, _)| table.len()).filter(|length| *length != 0);
        let shortest = lengths.min().unwrap_or(length);
        let at_most = length.max(shortest).ilog2() - shortest.ilog2();
        self.end_wait();
        let (mut waits, mut compactions) = (0, 0);
        while let Err(moves) = self.publish(service, length, members) {
            self.check();
            compactions += u32::from(moves != 0);
            assert!(compactions <= at_most, "{compactions} compactions for {length} entries");
            self.begin_wait();
            self.end_wait();
            waits += 1;
            // The first wait is for tables that were replaced before this call.
            assert!(waits <= 1 + compactions, "{waits} waits, {compactions} compactions");
        }
        self.check();
        compactions
    }
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Publish(ServiceIndex, u8, usize),
    Empty(ServiceIndex),
    Overwrite(ServiceIndex),
    BeginWait,
    EndWait,
    FailWait,
    Restart,
}

fn service() -> impl Strategy<Value = ServiceIndex> {
    (0..SERVICES).prop_map(ServiceIndex)
}

fn event() -> impl Strategy<Value = Event> {
    let members = prop_oneof![4 => Just(FEW), 1 => Just(MAX_SUBSET as usize + 1)];
    prop_oneof![
        12 => (service(), 2..=7u8, members).prop_map(|(service, log2, members)| Event::Publish(service, log2, members)),
        2 => service().prop_map(Event::Empty),
        1 => service().prop_map(Event::Overwrite),
        3 => Just(Event::BeginWait),
        3 => Just(Event::EndWait),
        1 => Just(Event::FailWait),
        1 => Just(Event::Restart),
    ]
}

/// Disjoint tables at multiples of their lengths, which have at most `at_most` entries together.
fn consistent(entries: u32, at_most: u32, wishes: &[(u8, u32)]) -> BTreeMap<ServiceIndex, TableRef> {
    let mut tables: BTreeMap<ServiceIndex, TableRef> = BTreeMap::new();
    for ((log2, position), service) in wishes.iter().zip((0..).map(ServiceIndex)) {
        let length = 1u32 << log2;
        let base = position % (entries / length) * length;
        let is_apart = |table: &TableRef| base + length <= table.base || table.base + table.len() <= base;
        let sum: u32 = tables.values().map(|table| table.len()).sum();
        if sum + length <= at_most && tables.values().all(is_apart) {
            let members = u8::try_from(position % 3).expect("the remainder is below 3");
            let table = TableRef { base, generation: service.0, length_log2: *log2, members };
            tables.insert(service, table);
        }
    }
    tables
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn data_that_a_reader_may_hold_is_never_overwritten(
        entries_log2 in 6u32..=10,
        events in prop::collection::vec(event(), 1..200),
    ) {
        let mut kernel = Kernel::adopt(1 << entries_log2, &BTreeMap::new());
        for event in events {
            match event {
                Event::Publish(service, log2, members) if kernel.is_within_limit(service, 1 << log2) => {
                    // If there is no room now, the daemon continues with other work.
                    let _ = kernel.publish(service, 1 << log2, members);
                }
                Event::Publish(..) => {}
                Event::Empty(service) => assert_eq!(kernel.publish(service, 0, 0), Ok(())),
                Event::Overwrite(service) => kernel.overwrite(service),
                Event::BeginWait => kernel.begin_wait(),
                Event::EndWait => kernel.end_wait(),
                Event::FailWait => kernel.fail_wait(),
                Event::Restart => kernel.restart(),
            }
            kernel.check();
        }
    }

    #[test]
    fn a_table_within_the_limit_is_published_after_any_history(
        entries_log2 in 7u32..=11,
        events in prop::collection::vec((service(), 2..=9u8, any::<bool>()), 1..120),
    ) {
        let mut kernel = Kernel::adopt(1 << entries_log2, &BTreeMap::new());
        for (service, log2, is_in_need) in events {
            if !kernel.is_within_limit(service, 1 << log2) {
                continue;
            }
            if is_in_need {
                kernel.settle(service, 1 << log2, FEW);
            } else {
                let _ = kernel.publish(service, 1 << log2, FEW);
            }
        }
    }

    #[test]
    fn a_table_within_the_limit_is_published_in_any_adopted_layout(
        entries_log2 in 7u32..=11,
        wishes in prop::collection::vec((1..=6u8, any::<u32>()), 0..300),
        part_log2 in 0..=4u32,
    ) {
        let entries = 1u32 << entries_log2;
        let length = entries >> part_log2 >> 1;
        let mut kernel = Kernel::adopt(entries, &consistent(entries, entries / 2 - length, &wishes));
        kernel.check();
        let new = ServiceIndex(u16::try_from(wishes.len()).expect("there are a few hundred services"));
        let first = ServiceIndex(0);
        kernel.settle(new, length, FEW);
        // Replaces the first table by one of the same length, and then by one of `length` entries.
        for length in [kernel.current.get(&first).map_or(2, |(table, _)| table.len().max(2)), length] {
            if kernel.is_within_limit(first, length) {
                kernel.settle(first, length, FEW);
            }
        }
    }
}
