//! socklb's daemon and commands, as a library for its own binary and benchmark. It is no interface for others.
//!
//! In reading order: errors as people read them ([`error`]) and the configuration ([`config`]); where endpoints come from
//! ([`source`]) and what client tasks use of them ([`assignments`]); what was counted of late ([`window`]), how many ends no
//! program saw ([`reclaimed`]), what backends report ([`reports`]) and what probes by connection say ([`probes`]), when to try
//! again ([`backoff`]) and what only the event loop knows ([`facts`]); what the daemon decides ([`controller`]) and the event loop around it ([`daemon`]), its socket ([`api`]) and
//! metrics ([`metrics`]), how many descriptors all that may take ([`descriptors`]) and how freed memory is given back
//! ([`memory`]); what people are shown ([`status`], [`flows`], [`explain`], [`print`](mod@print)), what a daemon would decide
//! ([`dry_run`]) and what its probes would cost ([`probe_cost`]), what is configured ([`configured`]) and what that changes
//! ([`comparison`]), and what may be wrong with the host ([`doctor`]); and the commands ([`cli`]).
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod error;

pub mod config;

pub mod source;

pub mod assignments;

pub mod memory;

pub mod window;

pub mod reports;

pub mod probes;

pub mod backoff;

pub mod reclaimed;

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
            // A missing privilege has an exit code of its own: no change of the configuration would help.
            if is_permission(&error) { ExitCode::from(4) } else { ExitCode::FAILURE }
        }
    }
}
