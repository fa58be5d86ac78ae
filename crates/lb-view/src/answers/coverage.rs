//! Whether a client covers a process: whether it balances the connects of the process.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Whether a client's programs are attached to a cgroup that contains a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "coverage")]
pub enum Coverage {
    Covered,
    /// The process will not be covered: the client is configured for another cgroup, which exists.
    Elsewhere {
        /// The client's cgroup.
        configured: PathBuf,
    },
    UnknownClient {
        /// The clients that exist.
        clients: Vec<String>,
    },
}
