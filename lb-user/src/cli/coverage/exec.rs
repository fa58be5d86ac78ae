//! `socklb exec`: starts a command in a client's cgroup once the client's programs are attached to
//! it.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::Context;
use lb_kernel::CgroupTree;

use super::in_time;
use crate::cli::{PathOptions, paths_of};
use crate::error::CommandFailure;
use crate::output::print;

/// The exit codes of shells: 127 if a command does not exist, 126 if it cannot be started.
const NOT_FOUND: u8 = 127;
const NOT_STARTED: u8 = 126;

/// Creates the client's cgroup if it does not exist, and moves this process into it. Waits until
/// the programs cover the cgroup, and then replaces the process with `command`. Returns only if the
/// command cannot be started, with the exit code of shells for this failure.
///
/// # Errors
/// If the cgroup cannot be entered, or is not covered in time.
pub fn run(
    client: &str,
    command: &[OsString],
    timeout: Duration,
    files: &PathOptions,
) -> Result<ExitCode, CommandFailure> {
    let (program, arguments) = command.split_first().context("no command is given")?;
    in_time(client, &paths_of(files)?, timeout, async |waiting| {
        let cgroup = waiting.cgroup().await?;
        let tree = CgroupTree::open()?;
        waiting.make(&tree, &cgroup)?;
        tree.enter(&cgroup)?;
        waiting.until_covered().await
    })?;
    let error = Command::new(program).args(arguments).exec();
    print::failure(format_args!("start {}: {error}", program.display()));
    Ok(ExitCode::from(if error.kind() == io::ErrorKind::NotFound { NOT_FOUND } else { NOT_STARTED }))
}
