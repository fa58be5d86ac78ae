//! Whether a process is covered by a client.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Whether a client's programs are attached to a cgroup that somebody is in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "coverage")]
pub enum Coverage {
    /// They are.
    Covered,
    /// They will not be: the client's cgroup is another one, and exists.
    Elsewhere {
        /// The client's cgroup.
        configured: PathBuf,
    },
    /// There is no such client.
    UnknownClient {
        /// Those that there are.
        clients: Vec<String>,
    },
}
