//! `socklb doctor`: what may be wrong with this host.

use std::process::ExitCode;

use super::{DEGRADED, Files, paths_of, read_config};
use crate::api::{self, Answer};
use crate::config::Paths;
use crate::error::Failure;
use crate::{doctor, print};
use lb_view::status::Status;
use lb_view::text::{self, Style};

/// Examines the host.
///
/// # Errors
/// If a path cannot be made absolute, or the output cannot be written.
pub fn run(json: bool, files: &Files) -> Result<ExitCode, Failure> {
    let mut files = files.clone();
    // The daemon that runs knows which configuration is its own.
    if files.config.is_none()
        && let Ok(Answer::Given(status)) = api::ask_daemon::<Status>(&paths_of(&files)?, "/v1/status")
    {
        files.config = status.daemon.map(|daemon| daemon.config);
    }
    let config = read_config(&files).map_err(|failure| failure.to_string());
    let paths = match &config {
        Ok(config) => config.paths.clone(),
        // The diagnosis tells what is wrong with the configuration.
        Err(_) => paths_of(&files).or_else(|_| files.over(Paths::default()))?,
    };
    let diagnosis = doctor::examine(&paths, files.file(), config.as_ref());
    if json {
        print::text(&(serde_json::to_string_pretty(&diagnosis)? + "\n"))?;
    } else {
        print::text(&text::diagnosis(&diagnosis, Style::for_stdout()))?;
    }
    Ok(if diagnosis.is_degraded() { ExitCode::from(DEGRADED) } else { ExitCode::SUCCESS })
}
