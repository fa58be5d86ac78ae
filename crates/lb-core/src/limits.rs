//! Sizes of one client task's maps. They limit the number of the task's schedule entries, flow
//! records and backends.

use lb_common::abi;

/// Sizes of one client task's maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The largest number of schedule entries of all the task's services together; a power of two.
    pub schedule_entries: u32,
    /// The largest number of sockets with a stored backend; a power of two.
    pub flow_records: u32,
    /// The largest number of backends of all the task's services together.
    pub slots: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { schedule_entries: abi::SCHEDULE_ENTRIES, flow_records: abi::FLOW_RECORDS, slots: abi::SLOTS }
    }
}
