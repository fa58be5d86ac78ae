//! The `[accounting]` table: how soon the daemon reclaims the records of flows if no program saw
//! their end.

use std::time::Duration;

use super::keys::accounting::{RECLAIM_INTERVAL, SECTION};
use lb_document::Table;
use lb_document::diagnostic::DiagnosticCollector;

/// Reads the time between two passes over the flow records. The table may be absent.
pub fn read(root: &Table<'_>, report: &mut DiagnosticCollector<'_>) -> Duration {
    RECLAIM_INTERVAL.take_or_default(&root.table(&SECTION, report), report)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tests::{LEAST, faults, good};

    #[test]
    fn passes_are_a_minute_apart_by_default() {
        let of = |lines: &str| good(&format!("{LEAST}{lines}")).reclaim_interval;
        let interval = |text: &str| of(&format!("[accounting]\nreclaim_interval = '{text}'"));
        assert_eq!([of(""), of("[accounting]"), interval("60s")], [Duration::from_secs(60); 3]);
        assert_eq!([interval("1s"), interval("1h")], [1, 3600].map(Duration::from_secs));
    }

    #[test]
    fn a_wrong_value_is_reported_with_the_valid_ones() {
        let help = "(write \"1s\" to \"1h\")";
        for (line, expected) in [
            ("reclaim_interval = '0s'", format!("9:20: reclaim_interval is \"0s\" {help}")),
            ("reclaim_interval = '3601s'", format!("9:20: reclaim_interval is \"3601s\" {help}")),
            (
                "reclaim_interval = 60",
                format!("9:20: reclaim_interval must be a string, not a whole number {help}"),
            ),
        ] {
            assert_eq!(faults(&format!("{LEAST}[accounting]\n{line}")), [expected], "{line}");
        }
    }
}
