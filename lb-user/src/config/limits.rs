//! The `[limits]` table: the sizes of every client task's maps.
//!
//! Whether services fit them is checked where clients are read, and again when lists are.

use super::keys::limits::{FLOW_RECORDS, SCHEDULE_ENTRIES, SECTION, SLOTS};
use crate::diagnostic::Report;
use crate::document::Table;

/// Sizes of one client task's maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Schedule entries of all its services together; a power of two.
    pub schedule_entries: u32,
    /// Sockets whose backend is remembered; a power of two.
    pub flow_records: u32,
    /// Backends of all its services together.
    pub slots: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            schedule_entries: SCHEDULE_ENTRIES.default(),
            flow_records: FLOW_RECORDS.default(),
            slots: SLOTS.default(),
        }
    }
}

/// Reads the table, if there is one.
pub fn read(root: &Table<'_>, report: &mut Report<'_>) -> Limits {
    let table = root.table(&SECTION, report);
    Limits {
        schedule_entries: SCHEDULE_ENTRIES.take_or_default(&table, report),
        flow_records: FLOW_RECORDS.take_or_default(&table, report),
        slots: SLOTS.take_or_default(&table, report),
    }
}
