//! The numbers of elements in use in a client task's maps.

use lb_common::abi::{ENTRIES_PER_CELL, FlowBucket, map};

use super::Tables;
use crate::client::flow_table::FlowTable;
use crate::error::DatapathError;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fullness {
    /// The map's name, or the name of the configured limit that sets its size.
    pub map: &'static str,
    pub used: u64,
    pub capacity: u64,
}

impl Tables {
    /// The number of used elements and the capacity of each map that limits a client task. Reads
    /// every bucket of the flow table, which takes about a millisecond for the default number of
    /// buckets: do not call this in the event loop.
    ///
    /// # Errors
    /// If a map cannot be read.
    pub fn fullness(&self) -> Result<[Fullness; 5], DatapathError> {
        let entries = self.services().iter().map(|service| u64::from(service.table.len())).sum();
        // The map is twice as large as the limit.
        let room = self.maps.schedule.length() as u64 * u64::from(ENTRIES_PER_CELL) / 2;
        // Each bucket counts the flows that its sockets have in other maps.
        let (mut records, mut overflowed, mut datagrams) = (0, 0, 0);
        let table = FlowTable::open(&self.pins, false)?;
        for bucket in 0..table.length() {
            records += u64::from(table.cookie(bucket) != 0);
            overflowed += FlowBucket::in_overflow(table.elsewhere(bucket));
            datagrams += FlowBucket::in_datagrams(table.elsewhere(bucket));
        }
        let capacity = table.length() as u64;
        let of = |map, used, capacity| Fullness { map, used, capacity };
        Ok([
            of("schedule_entries", entries, room),
            of("slots", self.slots().len() as u64, self.maps.backends.length() as u64),
            of("flow_records", records, capacity),
            of(map::FLOW_OVERFLOW, overflowed, capacity),
            of(map::DATAGRAMS, datagrams, capacity),
        ])
    }
}
