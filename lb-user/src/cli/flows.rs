//! `socklb flows`: lists the active flows.

use std::process::ExitCode;

use super::{DEGRADED, PathOptions, paths_of};
use crate::error::CommandFailure;
use lb_view::filter::Filter;

use crate::output::flows;
use crate::output::print;
use lb_view::text::{self, Style};

/// Prints the flows. If the maps of a client cannot be read, the exit code is "degraded".
///
/// # Errors
/// If a permission is missing, or the filter names something that does not exist.
pub fn run(filter: &Filter, json: bool, files: &PathOptions) -> Result<ExitCode, CommandFailure> {
    let report = flows::find(&paths_of(files)?.pins, filter)?;
    if json {
        print::json(&report)?;
    } else {
        print::text(&text::flows(&report.listing(), filter, Style::for_stdout()))?;
    }
    Ok(if report.unreadable.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(DEGRADED) })
}
