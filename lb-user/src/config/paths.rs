//! The `[paths]` table: the directories that outlive the daemon.
//!
//! Every command has options that override them. Whether they exist is not for this file to know.

use std::path::{Path, PathBuf};

use crate::diagnostic::Report;
use crate::document::{Item, Table};

/// Directories that outlive the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    /// Pinned maps and links; a directory in a bpffs.
    pub pins: PathBuf,
    /// The daemon's socket.
    pub run: PathBuf,
    /// Last good endpoint lists.
    pub state: PathBuf,
}

impl Default for Paths {
    fn default() -> Self {
        Self {
            pins: lb_kernel::DEFAULT_PINS.into(),
            run: "/run/socklb".into(),
            state: "/var/lib/socklb".into(),
        }
    }
}

/// Reads the table, if there is one; what is relative is so to `directory`.
pub fn read(root: &Table<'_>, directory: &Path, report: &mut Report<'_>) -> Paths {
    let mut paths = Paths::default();
    let Some(table) = root.get("paths").and_then(|item| item.table("[paths]", report)) else { return paths };
    table.check_keys(&["pins", "run", "state"], report);
    for (key, path) in [("pins", &mut paths.pins), ("run", &mut paths.run), ("state", &mut paths.state)] {
        if let Some(text) = table.get(key).and_then(|item| path_text(&item, report)) {
            *path = directory.join(text);
        }
    }
    paths
}

/// The text of a path. A file system cannot have a zero byte in a path, and no path is empty.
pub fn path_text<'t>(item: &Item<'t>, report: &mut Report<'_>) -> Option<&'t str> {
    let text = item.text(report)?;
    let why = match text {
        "" => "is empty",
        text if text.contains('\0') => "contains a zero byte",
        _ => return Some(text),
    };
    report.add(item.span(), format!("{} {why}", item.name()), None);
    None
}
