//! The `[daemon]` table: how the daemon logs, and when it reads files.

use lb_document::diagnostic::DiagnosticCollector;
use lb_document::{LogFormat, Table};

use super::keys::daemon::{LOG_FORMAT, SECTION, WATCH};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DaemonConfig {
    /// Whether the daemon reads the configuration and endpoint files when they change. If `false`,
    /// the daemon reads these files only when it starts and on SIGHUP.
    pub watch: bool,
    pub log_format: LogFormat,
}

pub fn read(root: &Table<'_>, report: &mut DiagnosticCollector<'_>) -> DaemonConfig {
    let table = root.table(&SECTION, report);
    DaemonConfig {
        watch: WATCH.take_or_default(&table, report),
        log_format: LOG_FORMAT.take_or_default(&table, report),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{LEAST, faults, good};
    use super::*;

    #[test]
    fn files_are_watched_and_the_log_is_text_by_default() {
        let of = |lines: &str| good(&format!("{LEAST}{lines}")).daemon;
        let default = DaemonConfig { watch: true, log_format: LogFormat::Text };
        assert_eq!([of(""), of("[daemon]\nwatch = true\nlog_format = 'text'")], [default; 2]);
        let other = of("[daemon]\nwatch = false\nlog_format = 'json'");
        assert_eq!(other, DaemonConfig { watch: false, log_format: LogFormat::Json });
    }

    #[test]
    fn a_wrong_value_is_reported_with_the_valid_ones() {
        for (line, expected) in [
            ("watch = 'no'", "9:9: watch must be true or false, not a string"),
            ("log_format = 'JSON'", "9:14: unknown log_format \"JSON\" (write \"text\" or \"json\")"),
        ] {
            assert_eq!(faults(&format!("{LEAST}[daemon]\n{line}")), [expected], "{line}");
        }
    }
}
