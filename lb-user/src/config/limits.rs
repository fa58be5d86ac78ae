//! The `[limits]` table: the sizes of every client task's maps.
//!
//! Whether services fit them is checked where clients are read, and again when lists are.

use std::ops::RangeInclusive;

use lb_common::abi;
use lb_core::limits::Limits;

use crate::diagnostic::Report;
use crate::document::Table;

/// Schedule entries that a client task may be given: eight times the default, 16 MiB of kernel memory.
const SCHEDULE_ENTRIES: RangeInclusive<u32> = 1 << abi::MIN_SCHEDULE_LOG2..=8 * abi::SCHEDULE_ENTRIES;
/// Flow records that a client task may be given: at most about 100 MB of kernel memory.
const FLOW_RECORDS: RangeInclusive<u32> = 64..=1 << 22;
/// Slots that a client task may be given: at most what a schedule entry can name.
const SLOTS: RangeInclusive<u32> = 64..=abi::MAX_SLOTS;

/// Reads the table, if there is one.
pub fn read(root: &Table<'_>, report: &mut Report<'_>) -> Limits {
    let mut limits = Limits::default();
    let Some(table) = root.get("limits").and_then(|item| item.table("[limits]", report)) else {
        return limits;
    };
    table.check_keys(&["schedule_entries", "flow_records", "slots"], report);
    for (key, range, limit) in [
        ("schedule_entries", SCHEDULE_ENTRIES, &mut limits.schedule_entries),
        ("flow_records", FLOW_RECORDS, &mut limits.flow_records),
        ("slots", SLOTS, &mut limits.slots),
    ] {
        let Some(item) = table.get(key) else { continue };
        let Some(number) = item.number(range, report) else { continue };
        if key != "slots" && !number.is_power_of_two() {
            let (above, below) = (number.next_power_of_two(), number.next_power_of_two() / 2);
            report.add(
                item.span(),
                format!("{key} is {number}, which is not a power of two"),
                format!("write {below} or {above}"),
            );
        }
        *limit = number;
    }
    limits
}
