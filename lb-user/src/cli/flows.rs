//! `socklb flows`: the flows that are open.

use std::process::ExitCode;

use super::{DEGRADED, Files, paths_of};
use crate::error::Failure;
use crate::flows::{self, Wanted};
use crate::print;
use crate::render::{self, Style};

/// Shows them.
///
/// # Errors
/// If no client can be read.
pub fn run(wanted: &Wanted, json: bool, files: &Files) -> Result<ExitCode, Failure> {
    let found = flows::find(&paths_of(files)?.pins, wanted)?;
    if json {
        print::json(&found)?;
    } else {
        print::text(&render::flows(&found, wanted, Style::for_stdout()))?;
    }
    Ok(if found.unreadable.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(DEGRADED) })
}
