//! How much of a client task's maps is in use.

use lb_common::abi::{ENTRIES_PER_CELL, FlowBucket, map};

use super::Tables;
use crate::client::flow_table::FlowTable;
use crate::error::DatapathError;

/// How full a map is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fullness {
    /// Its name; where a limit of the configuration sets its size, that of the limit.
    pub map: &'static str,
    /// How much is in use.
    pub used: u64,
    /// How much there is.
    pub capacity: u64,
}

impl Tables {
    /// How full the maps are whose sizes limit a client task. Looks at every bucket of the flow table, which takes
    /// about a millisecond for the default number: not for the event loop.
    ///
    /// # Errors
    /// If a map cannot be read.
    pub fn fullness(&self) -> Result<[Fullness; 5], DatapathError> {
        let entries = self.services().iter().map(|service| u64::from(service.table.len())).sum();
        // The map holds twice what may be in use.
        let room = self.maps.schedule.length() as u64 * u64::from(ENTRIES_PER_CELL) / 2;
        // Each bucket counts what its sockets have elsewhere.
        let (mut records, mut overflowed, mut datagrams) = (0, 0, 0);
        let table = FlowTable::open(&self.pins, false)?;
        for bucket in 0..table.len() {
            records += u64::from(table.cookie(bucket) != 0);
            overflowed += FlowBucket::in_overflow(table.elsewhere(bucket));
            datagrams += FlowBucket::in_datagrams(table.elsewhere(bucket));
        }
        let capacity = table.len() as u64;
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
