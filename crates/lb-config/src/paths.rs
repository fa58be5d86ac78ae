//! The `[paths]` table: the directories of the pins, of the socket, and of the stored state.
//!
//! Every command has options that override these paths. This module does not check that the
//! directories exist.

use std::path::{Path, PathBuf};

use super::keys::paths::{PINS, RUN, SECTION, STATE};
use lb_document::Table;
use lb_document::diagnostic::DiagnosticCollector;

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
        let [pins, run, state] = [&PINS, &RUN, &STATE].map(|key| PathBuf::from(&*key.default()));
        Self { pins, run, state }
    }
}

/// Reads the table, which may be absent; relative paths are relative to `directory`.
pub fn read(root: &Table<'_>, directory: &Path, report: &mut DiagnosticCollector<'_>) -> Paths {
    let table = root.table(&SECTION, report);
    let [pins, run, state] =
        [&PINS, &RUN, &STATE].map(|key| directory.join(&*key.take_or_default(&table, report)));
    Paths { pins, run, state }
}
