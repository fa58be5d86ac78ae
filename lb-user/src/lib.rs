//! socklb's daemon and commands, as a library for its own binary and benchmark. The library is not
//! a public interface.
//!
//! In reading order: errors for people ([`error`]) and the configuration ([`config`]); the sources
//! of endpoints ([`source`]) and the endpoints that client tasks use ([`assignments`]); the counts
//! of the last minute ([`window`]), flows with an end that no program recorded ([`reclaimed`]),
//! connections that an operator closes ([`close_jobs`]), reports of backends ([`reports`]), probes
//! by connection ([`probes`]), pauses before retries ([`backoff`]) and the state that only the
//! event loop has ([`facts`]).
//!
//! Then the decisions of the daemon ([`controller`]) and the event loop around them ([`daemon`]),
//! its socket ([`api`]), its metrics ([`metrics`]), its need for descriptors ([`descriptors`]) and
//! the release of freed memory ([`memory`]).
//!
//! Last, the output for people ([`status`], [`flows`], [`explain`], [`print`](mod@print)), what a
//! daemon would decide if it were started ([`dry_run`]) and the cost of its probes
//! ([`probe_cost`]), the files that Envoy reads ([`envoy`]), the configuration as keys and values
//! ([`configured`]), its comparison with the running configuration ([`comparison`]), the diagnosis
//! of the host ([`doctor`]), and the commands ([`cli`]).
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod error;

pub mod config;

pub mod source;

mod source_check;

pub mod assignments;

pub mod memory;

pub mod window;

pub mod reports;

pub mod probes;

pub mod backoff;

pub mod reclaimed;

pub mod close_jobs;

pub mod facts;

pub mod controller;

pub mod daemon;

pub mod descriptors;

pub mod api;

pub mod metrics;

pub mod status;

pub mod names;

pub mod flows;

pub mod explain;

pub mod envoy;

pub mod print;

pub mod doctor;

pub mod dry_run;

pub mod probe_cost;

pub mod configured;

pub mod comparison;

pub mod cli;

use std::process::ExitCode;

use crate::error::{CommandFailure, is_permission};

/// Runs the command line.
pub fn main() -> ExitCode {
    let cli = cli::Cli::of_command_line();
    match cli::run(cli) {
        Ok(code) => code,
        Err(CommandFailure::Faults(faults)) => {
            print::faults(&faults);
            ExitCode::FAILURE
        }
        Err(CommandFailure::Other(error)) => {
            print::failure(format_args!("{error:#}"));
            // A missing privilege has its own exit code, because a change of the configuration does
            // not correct it.
            if is_permission(&error) { ExitCode::from(4) } else { ExitCode::FAILURE }
        }
    }
}
