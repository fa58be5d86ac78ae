//! socklb's daemon and commands, as a library for its own binary and benchmark. The library is not
//! a public interface.
//!
//! In reading order: errors for people ([`error`]) and the configuration ([`config`]); the sources
//! of endpoints and the endpoints that client tasks use ([`source`]); counts over time
//! ([`counts`]), connections that an operator closes ([`close_jobs`]), reports of backends
//! ([`reports`]), probes by connection ([`probes`]) and pauses before retries ([`backoff`]).
//!
//! Then the decisions of the daemon ([`controller`]) and the event loop around them ([`daemon`]),
//! its socket ([`api`]) and its metrics ([`metrics`]). Last, the output for people ([`output`]) and
//! the commands ([`cli`]).
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod api;
pub mod backoff;
pub mod cli;
pub mod close_jobs;
pub mod config;
pub mod controller;
pub mod counts;
pub mod daemon;
pub mod descriptors;
pub mod error;
pub mod metrics;
pub mod output;
pub mod probes;
pub mod reports;
pub mod source;

use std::process::ExitCode;

use crate::error::{CommandFailure, is_permission};

/// Runs the command line.
pub fn main() -> ExitCode {
    let cli = cli::Cli::of_command_line();
    match cli::run(cli) {
        Ok(code) => code,
        Err(CommandFailure::Faults(faults)) => {
            output::print::faults(&faults);
            ExitCode::FAILURE
        }
        Err(CommandFailure::Other(error)) => {
            output::print::failure(format_args!("{error:#}"));
            // A missing privilege has its own exit code, because a change of the configuration does
            // not correct it.
            if is_permission(&error) { ExitCode::from(4) } else { ExitCode::FAILURE }
        }
    }
}
