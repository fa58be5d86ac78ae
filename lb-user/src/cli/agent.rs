//! `socklb agent`: runs the commands of `lb-agent`.

use std::process::ExitCode;

use lb_agent::cli::{AgentOptions, Directories};
use lb_agent::config::ConfigError;
use lb_agent::run::ProcessStatus;

use super::PathOptions;
use crate::error::CommandFailure;
use crate::output::print;

/// Runs a command of the agent.
///
/// # Errors
/// If the command fails. Faults of the agent's configuration file become
/// [`CommandFailure::Faults`].
pub fn run(agent: AgentOptions, files: PathOptions) -> Result<ExitCode, CommandFailure> {
    let directories = Directories { run: files.run, state: files.state };
    let ended =
        lb_agent::cli::run(agent, &directories).map_err(|error| match error.downcast::<ConfigError>() {
            Ok(ConfigError::Faulty(faults)) => CommandFailure::Faults(faults),
            Ok(error) => CommandFailure::Other(anyhow::Error::new(error)),
            Err(error) => CommandFailure::Other(error),
        })?;
    print::text(&ended.text)?;
    Ok(ended.status.map_or(ExitCode::from(ended.code), ProcessStatus::end))
}
