//! `socklb load`: shows how weights follow load. The subcommands freeze weights, or switch load
//! control off or on.

use std::process::ExitCode;

use anyhow::anyhow;
use clap::Subcommand;
use clap::builder::NonEmptyStringValueParser;
use lb_core::control::Switch;
use lb_view::filter::Filter;
use lb_view::load::{self, ClientLoad, LoadDocument, Switched};
use lb_view::text::{self, Style};

use super::{PathOptions, paths_of};
use crate::api::{self, Answer, quoted};
use crate::error::CommandFailure;
use crate::output::print;

/// Sets whether weights follow load.
#[derive(Clone, Debug, Subcommand)]
pub enum LoadCommand {
    /// Freeze the weights of a service: reports no longer change them
    ///
    /// The daemon stores this setting across restarts and upgrades, until `socklb load on`, or
    /// until the service's configuration no longer has `load`. Members in slow start still reach
    /// their full share.
    Freeze(LoadTarget),
    /// Set every member of a service to its structural weight: reports no longer change it
    ///
    /// The daemon discards the factors that it has computed from reports. It stores this setting
    /// across restarts and upgrades, until `socklb load on`, or until the service's configuration
    /// no longer has `load`.
    Off(LoadTarget),
    /// Adjust the weights of a service to load again, as configured
    On(LoadTarget),
}

/// Service, and optionally one client
#[derive(Clone, Debug, clap::Args)]
pub struct LoadTarget {
    /// Service
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub service: String,
    /// Only this client, instead of all clients that have the service
    #[arg(long)]
    pub client: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The error for options that are written before freeze, off or on, where they have no effect.
pub const MISPLACED: &str = "the options --client, --service and --json have no effect before freeze, off \
                             and on: write `socklb load freeze SERVICE --client CLIENT`";

/// Prints how weights follow load.
///
/// # Errors
/// If no daemon answers, because only the daemon has this state, or if no selected service has
/// `load` or `slow_start`.
pub fn show(filter: &Filter, json: bool, files: &PathOptions) -> Result<ExitCode, CommandFailure> {
    let paths = paths_of(files)?;
    let mut status = match api::query_daemon::<lb_view::status::StatusDocument>(&paths, "/v1/status")? {
        Answer::Given(status) => status,
        Answer::NotRunning => {
            let text = "the daemon is not running, and only the daemon has the reported loads; connects continue to use the present tables, which `socklb status` shows";
            return Err(anyhow!(text).into());
        }
        Answer::NotResponding => return Err(anyhow!(api::not_responding(&paths.run)).into()),
    };
    status.retain(filter, false);
    let clients = status.clients.into_iter().flat_map(|client| {
        let name = client.name;
        client.services.into_iter().filter_map(move |service| {
            Some(ClientLoad { client: name.clone(), service: service.name, load: service.load? })
        })
    });
    let loads = LoadDocument { schema: load::SCHEMA, services: clients.collect() };
    if loads.services.is_empty() {
        let of = |what: &str, name: &Option<String>| {
            name.as_ref().map_or_else(String::new, |name| format!(" {what} {name:?}"))
        };
        let text = format!(
            "no service here{}{} has `load` or `slow_start` in its configuration, see socklb.toml(5)",
            of("of client", &filter.client),
            of("with the name", &filter.service)
        );
        return Err(anyhow!(text).into());
    }
    if json {
        print::json(&loads)?;
        return Ok(ExitCode::SUCCESS);
    }
    print::text(&text::loads(&loads, Style::for_stdout()))?;
    Ok(ExitCode::SUCCESS)
}

/// Sets whether the weights of a service follow load.
///
/// # Errors
/// If no daemon answers, the daemon refuses this user, or no client has the service.
pub fn switch(command: &LoadCommand, files: &PathOptions) -> Result<ExitCode, CommandFailure> {
    let (switch, LoadTarget { service, client, json }) = match command {
        LoadCommand::Freeze(target) => (Switch::Frozen, target),
        LoadCommand::Off(target) => (Switch::Off, target),
        LoadCommand::On(target) => (Switch::On, target),
    };
    let paths = paths_of(files)?;
    let of_client = client.as_ref().map(|client| format!("&client={}", quoted(client))).unwrap_or_default();
    let path = format!("/v1/load/{}?switch={}{of_client}", quoted(service), switch.name());
    let switched = match api::post_to_daemon::<Switched>(&paths, &path)? {
        Answer::Given(switched) => switched,
        Answer::NotRunning => {
            return Err(anyhow!("the daemon is not running: nothing was changed").into());
        }
        Answer::NotResponding => {
            let text =
                "the daemon may still apply the setting when it continues; `socklb load` shows the result";
            return Err(anyhow!("{}: {text}", api::not_responding(&paths.run)).into());
        }
    };
    if switched.clients.is_empty() {
        let who = client
            .as_ref()
            .map_or_else(|| "no client here".to_owned(), |client| format!("no client {client:?} here"));
        return Err(
            anyhow!("{who} has a service {service:?} whose weights follow load: see `socklb load`").into()
        );
    }
    if *json {
        print::json(&switched)?;
    } else {
        print::text(&switched.describe())?;
    }
    Ok(ExitCode::SUCCESS)
}
