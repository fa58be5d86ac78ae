//! The tables about the daemon itself and its host. Each table may be absent; relative paths are
//! relative to the directory of the configuration.

pub mod metrics;
pub mod reports;

use std::path::{Path, PathBuf};
use std::time::Duration;

use lb_core::limits::Limits;
use lb_document::diagnostic::quote;
use lb_document::kind::Refusal;
use lb_document::{LogFormat, Table};

use super::keys::{accounting, admin, daemon, envoy, limits, paths};

/// The directories. Every command has options that override them. Nothing here checks that they
/// exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    /// The directory of pinned maps and links, in a bpffs.
    pub pins: PathBuf,
    /// The directory of the daemon's socket.
    pub run: PathBuf,
    /// The directory of the state for a later start: learnt weights and the last valid endpoint
    /// lists.
    pub state: PathBuf,
}

impl Default for Paths {
    fn default() -> Self {
        let [pins, run, state] =
            [&paths::PINS, &paths::RUN, &paths::STATE].map(|key| PathBuf::from(&*key.default()));
        Self { pins, run, state }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DaemonConfig {
    /// Whether the daemon reads the configuration and endpoint files when they change. If `false`,
    /// the daemon reads these files only when it starts and on SIGHUP.
    pub watch: bool,
    pub log_format: LogFormat,
}

pub fn read_paths(root: &Table<'_>, directory: &Path) -> Paths {
    let table = root.table(&paths::SECTION);
    let [pins, run, state] =
        [&paths::PINS, &paths::RUN, &paths::STATE].map(|key| directory.join(&*key.take_or_default(&table)));
    Paths { pins, run, state }
}

/// Reads the sizes of the maps. [`client`](crate::client) checks that the services fit them.
pub fn read_limits(root: &Table<'_>) -> Limits {
    let table = root.table(&limits::SECTION);
    Limits {
        schedule_entries: limits::SCHEDULE_ENTRIES.take_or_default(&table),
        flow_records: limits::FLOW_RECORDS.take_or_default(&table),
        slots: limits::SLOTS.take_or_default(&table),
    }
}

pub fn read_daemon(root: &Table<'_>) -> DaemonConfig {
    let table = root.table(&daemon::SECTION);
    DaemonConfig {
        watch: daemon::WATCH.take_or_default(&table),
        log_format: daemon::LOG_FORMAT.take_or_default(&table),
    }
}

/// Reads the time between two passes over the flow records.
pub fn read_reclaim_interval(root: &Table<'_>) -> Duration {
    let table = root.table(&accounting::SECTION);
    accounting::RECLAIM_INTERVAL.take_or_default(&table)
}

/// Reads the group that may control the daemon. The daemon checks at its start that the host has
/// this group.
pub fn read_admins(root: &Table<'_>) -> Option<String> {
    let table = root.table(&admin::SECTION);
    admin::GROUP.take_written(&table).flatten()
}

/// Reads the directory of the files that Envoy reads.
pub fn read_envoy(root: &Table<'_>, directory: &Path) -> Option<PathBuf> {
    let table = root.table(&envoy::SECTION);
    let written = envoy::DIRECTORY.take_written(&table).flatten();
    written.map(|written| directory.join(&*written))
}

pub fn group(text: &str) -> Result<String, Refusal> {
    // At most 32 of the characters that useradd(8) and similar tools allow.
    let is_name = !text.is_empty()
        && text.len() <= 32
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte));
    if is_name {
        return Ok(text.to_owned());
    }
    let help = "write the name of a group, or its number, in quotes".to_owned();
    Err((format!("{} is not the name of a group", quote(text)), Some(help)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{LEAST, faults, good};

    #[test]
    fn files_are_watched_and_the_log_is_text_by_default() {
        let of = |lines: &str| good(&format!("{LEAST}{lines}")).daemon;
        let default = DaemonConfig { watch: true, log_format: LogFormat::Text };
        assert_eq!([of(""), of("[daemon]\nwatch = true\nlog_format = 'text'")], [default; 2]);
        let other = of("[daemon]\nwatch = false\nlog_format = 'json'");
        assert_eq!(other, DaemonConfig { watch: false, log_format: LogFormat::Json });
    }

    #[test]
    fn there_are_no_admins_unless_a_group_is_named() {
        let of = |lines: &str| good(&format!("{LEAST}{lines}")).admins;
        assert_eq!([of(""), of("[admin]")], [None, None]);
        assert_eq!(of("[admin]\ngroup = 'ops'").as_deref(), Some("ops"));
        assert_eq!(of("[admin]\ngroup = '27'").as_deref(), Some("27"));
    }

    #[test]
    fn the_directory_is_relative_to_the_configuration() {
        let of = |lines: &str| good(&format!("{LEAST}{lines}")).envoy;
        assert_eq!([of(""), of("[envoy]")], [None, None]);
        assert_eq!(of("[envoy]\ndirectory = '/srv/eds'"), Some(PathBuf::from("/srv/eds")));
        assert_eq!(of("[envoy]\ndirectory = 'eds'"), Some(PathBuf::from("/etc/socklb/eds")));
    }

    #[test]
    fn passes_are_a_minute_apart_by_default() {
        let of = |lines: &str| good(&format!("{LEAST}{lines}")).reclaim_interval;
        let interval = |text: &str| of(&format!("[accounting]\nreclaim_interval = '{text}'"));
        assert_eq!([of(""), of("[accounting]"), interval("60s")], [Duration::from_secs(60); 3]);
        assert_eq!([interval("1s"), interval("1h")], [1, 3600].map(Duration::from_secs));
    }

    #[test]
    fn a_wrong_value_is_reported_with_the_valid_ones() {
        let name = "(write the name of a group, or its number, in quotes)";
        let time = "(write \"1s\" to \"1h\")";
        for (line, expected) in [
            ("[daemon]\nwatch = 'no'", "9:9: watch must be true or false, not a string".to_owned()),
            (
                "[daemon]\nlog_format = 'JSON'",
                "9:14: unknown log_format \"JSON\" (write \"text\" or \"json\")".to_owned(),
            ),
            ("[admin]\ngroup = ''", format!("9:9: group \"\" is not the name of a group {name}")),
            ("[admin]\ngroup = 'a b'", format!("9:9: group \"a b\" is not the name of a group {name}")),
            ("[envoy]\ndirectory = ''", "9:13: directory is empty".to_owned()),
            ("[accounting]\nreclaim_interval = '0s'", format!("9:20: reclaim_interval is \"0s\" {time}")),
            (
                "[accounting]\nreclaim_interval = '3601s'",
                format!("9:20: reclaim_interval is \"3601s\" {time}"),
            ),
            (
                "[accounting]\nreclaim_interval = 60",
                format!("9:20: reclaim_interval must be a string, not a whole number {time}"),
            ),
        ] {
            assert_eq!(faults(&format!("{LEAST}{line}")), [expected], "{line}");
        }
        assert_eq!(faults(&format!("{LEAST}[admin]\ngroup = 27")).len(), 1);
    }
}
