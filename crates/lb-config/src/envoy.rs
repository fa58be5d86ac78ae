//! The `[envoy]` table: the directory of the files that Envoy reads.

use std::path::{Path, PathBuf};

use super::keys::envoy::{DIRECTORY, SECTION};
use lb_document::Table;
use lb_document::diagnostic::DiagnosticCollector;

/// Reads the directory; `None` if the table has no such key. A relative path is relative to
/// `directory`.
pub fn read(root: &Table<'_>, directory: &Path, report: &mut DiagnosticCollector<'_>) -> Option<PathBuf> {
    let table = root.table(&SECTION, report);
    let written = DIRECTORY.take_written(&table, report).flatten();
    written.map(|written| directory.join(&*written))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::super::tests::{LEAST, faults, good};

    #[test]
    fn the_directory_is_relative_to_the_configuration() {
        let of = |lines: &str| good(&format!("{LEAST}{lines}")).envoy;
        assert_eq!([of(""), of("[envoy]")], [None, None]);
        assert_eq!(of("[envoy]\ndirectory = '/srv/eds'"), Some(PathBuf::from("/srv/eds")));
        assert_eq!(of("[envoy]\ndirectory = 'eds'"), Some(PathBuf::from("/etc/socklb/eds")));
        assert_eq!(faults(&format!("{LEAST}[envoy]\ndirectory = ''")), ["9:13: directory is empty"]);
    }
}
