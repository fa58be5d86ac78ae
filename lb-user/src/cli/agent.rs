//! `socklb agent`: the commands of `lb-agent`, which print nothing by themselves.

use std::process::ExitCode;

use lb_agent::cli::{Agent, Directories};
use lb_agent::config::ConfigError;
use lb_agent::run::Status;

use super::Files;
use crate::error::Failure;
use crate::print;

/// Runs one of them.
///
/// # Errors
/// Why it failed; the faults of a file apart.
pub fn run(agent: Agent, files: Files) -> Result<ExitCode, Failure> {
    let directories = Directories { run: files.run, state: files.state };
    let ended =
        lb_agent::cli::run(agent, &directories).map_err(|error| match error.downcast::<ConfigError>() {
            Ok(ConfigError::Faulty(faults)) => Failure::Faults(faults),
            Ok(error) => Failure::Other(anyhow::Error::new(error)),
            Err(error) => Failure::Other(error),
        })?;
    print::text(&ended.text)?;
    Ok(ended.status.map_or(ExitCode::from(ended.code), Status::end))
}
