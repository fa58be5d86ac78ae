//! `socklb wait`: returns once the cgroup of this process is covered; for a unit's `ExecStartPre=`.

use std::process::ExitCode;
use std::time::Duration;

use super::in_time;
use crate::cli::{PathOptions, paths_of};
use crate::error::CommandFailure;

/// Returns once a client's programs are attached to the cgroup of this process, or to a cgroup
/// above it.
///
/// # Errors
/// If the programs are not attached in time, or cannot be attached.
pub fn run(client: &str, timeout: Duration, files: &PathOptions) -> Result<ExitCode, CommandFailure> {
    in_time(client, &paths_of(files)?, timeout, async |waiting| waiting.until_covered().await)?;
    Ok(ExitCode::SUCCESS)
}
