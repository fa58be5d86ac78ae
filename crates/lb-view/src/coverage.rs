//! Whether a process is covered by a client.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Whether a client's programs are attached to a cgroup that a process is in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "coverage")]
pub enum Coverage {
    /// They are attached.
    Covered,
    /// They will not be: the client is configured for another cgroup, which exists.
    Elsewhere {
        /// The client's cgroup.
        configured: PathBuf,
    },
    /// There is no such client.
    UnknownClient {
        /// The clients that exist.
        clients: Vec<String>,
    },
}
