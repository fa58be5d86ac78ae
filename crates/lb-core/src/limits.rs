//! Sizes of one client task's maps, which limit what the task may use.

use lb_common::abi;

/// Sizes of one client task's maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Schedule entries of all its services together; a power of two.
    pub schedule_entries: u32,
    /// Sockets with a stored backend; a power of two.
    pub flow_records: u32,
    /// Backends of all its services together.
    pub slots: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { schedule_entries: abi::SCHEDULE_ENTRIES, flow_records: abi::FLOW_RECORDS, slots: abi::SLOTS }
    }
}
