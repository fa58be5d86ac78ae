//! `socklb source`: prints, refreshes and checks the lists of services.

use std::process::ExitCode;

use anyhow::{Context as _, anyhow};
use clap::Subcommand;
use clap::builder::NonEmptyStringValueParser;
use lb_view::source::Refreshed;
use serde_json::value::RawValue;

use super::{DEGRADED, PathOptions, paths_of, read_config};
use crate::api::{self, Answer, quoted};
use crate::config::Paths;
use crate::error::CommandFailure;
use crate::output::print;
use crate::source;

/// Prints, refreshes and checks the lists of services.
#[derive(Clone, Debug, Subcommand)]
pub enum SourceCommand {
    /// Print the list of a service as an endpoint file (JSON)
    ///
    /// Prints the list in force, from any kind of source. A service can use the output as its
    /// endpoint file: `backends = { file = .. }`.
    Dump {
        /// Service
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        service: String,
        /// The newest list that the server has sent, even if it is not in force
        #[arg(long)]
        newest: bool,
    },
    /// Make the daemon read a list's file, or query the list's server, at once
    ///
    /// The daemon permits this for root, its own user, and members of the group in `[admin]`.
    Refresh {
        /// Services
        #[arg(required = true)]
        services: Vec<String>,
    },
    /// Read every file and query every server in the configuration, without the daemon
    ///
    /// Changes nothing. The command queries each server twice, and reports if the two answers
    /// differ.
    ///
    /// Exit codes: 0 all lists can be used; 3 a list cannot be used.
    Check {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// Runs the command.
///
/// # Errors
/// If the configuration cannot be read, no daemon answers, the daemon refuses this user, or the
/// service has no list.
pub fn run(command: SourceCommand, files: &PathOptions) -> Result<ExitCode, CommandFailure> {
    match command {
        SourceCommand::Dump { service, newest } => dump(&paths_of(files)?, &service, newest),
        SourceCommand::Refresh { services } => refresh(&paths_of(files)?, &services),
        SourceCommand::Check { json } => check(json, files),
    }
}

fn dump(paths: &Paths, service: &str, newest: bool) -> Result<ExitCode, CommandFailure> {
    let path = format!("/v1/source/{}?newest={newest}", quoted(service));
    let list = match api::query_daemon::<Box<RawValue>>(paths, &path)
        .with_context(|| format!("read the list of service {service:?}"))?
    {
        Answer::Given(list) => list,
        Answer::NotRunning => {
            return Err(
                anyhow!("the daemon is not running, and only the daemon has the lists in force").into()
            );
        }
        Answer::NotResponding => return Err(anyhow!(api::not_responding(&paths.run)).into()),
    };
    print::json_text(&format!("{}\n", list.get().trim_end()))?;
    Ok(ExitCode::SUCCESS)
}

fn refresh(paths: &Paths, services: &[String]) -> Result<ExitCode, CommandFailure> {
    for service in services {
        let path = format!("/v1/refresh/{}", quoted(service));
        let refreshed = match api::post_to_daemon::<Refreshed>(paths, &path)? {
            Answer::Given(refreshed) => refreshed,
            Answer::NotRunning => return Err(anyhow!("the daemon is not running").into()),
            Answer::NotResponding => return Err(anyhow!(api::not_responding(&paths.run)).into()),
        };
        let Some(origin) = refreshed.origin else {
            let text = format!(
                "no client here dials a service {service:?} whose list comes from a file or a server"
            );
            return Err(anyhow!(text).into());
        };
        print::text(&format!(
            "{service}: the daemon reads {origin} at once; `socklb status` shows the result\n"
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn check(json: bool, files: &PathOptions) -> Result<ExitCode, CommandFailure> {
    let config = read_config(files)?;
    let checked = source::check::check(&config)?;
    if json {
        print::json(&checked)?;
    } else if checked.is_empty() {
        print::text("nothing to check: the configuration itself contains every list\n")?;
    } else {
        let text: String = checked.iter().map(lb_view::source::CheckedSource::describe).collect();
        print::text(&text)?;
    }
    let is_good = checked.iter().all(|source| source.error.is_none());
    Ok(if is_good { ExitCode::SUCCESS } else { ExitCode::from(DEGRADED) })
}
