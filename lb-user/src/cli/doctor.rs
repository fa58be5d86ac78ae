//! `socklb doctor`: prints what may be wrong with this host.

use std::process::ExitCode;

use super::{DEGRADED, PathOptions, paths_of, read_config};
use crate::api::{self, Answer};
use crate::config::Paths;
use crate::error::CommandFailure;
use crate::output::doctor;
use crate::output::print;
use lb_view::status::StatusDocument;
use lb_view::text::{self, Style};

/// Examines the host. If `pid` is given, examines instead whether a client covers that process.
///
/// # Errors
/// If a path cannot be made absolute, the output cannot be written, or no process has the id `pid`.
/// Also if the user has no permission to read which programs are attached to the cgroup of the
/// process.
pub fn run(pid: Option<u32>, json: bool, files: &PathOptions) -> Result<ExitCode, CommandFailure> {
    let mut files = files.clone();
    // Without `pid`, `doctor::examine` queries the daemon itself, so this query is needed only to
    // find the configuration.
    let is_wanted = files.config.is_none() || pid.is_some();
    let status = match paths_of(&files).ok().filter(|_| is_wanted) {
        Some(paths) => match api::query_daemon::<StatusDocument>(&paths, "/v1/status") {
            Ok(Answer::Given(status)) => Some(status),
            Ok(Answer::NotRunning | Answer::NotResponding) | Err(_) => None,
        },
        None => None,
    };
    // If the command line names no configuration file, uses the file that the running daemon
    // reports.
    if files.config.is_none()
        && let Some(status) = &status
    {
        files.config = status.daemon.as_ref().map(|daemon| daemon.config.clone());
    }
    let config = read_config(&files).map_err(|failure| failure.to_string());
    let paths = match &config {
        Ok(config) => config.paths.clone(),
        // The diagnosis reports the faults of the configuration.
        Err(_) => paths_of(&files).or_else(|_| files.over(Paths::default()))?,
    };
    let diagnosis = match pid {
        Some(pid) => doctor::examine_process(&paths, pid, config.as_ref().ok(), status.as_ref())?,
        None => doctor::examine(&paths, files.file(), config.as_ref()),
    };
    if json {
        print::json(&diagnosis)?;
    } else {
        print::text(&text::diagnosis(&diagnosis, Style::for_stdout()))?;
    }
    Ok(if diagnosis.is_degraded() { ExitCode::from(DEGRADED) } else { ExitCode::SUCCESS })
}
