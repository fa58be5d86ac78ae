//! The commands, one file each. They combine the other parts of this crate and decide the exit
//! code. The commands `socklb agent` are those of [`lb_agent::cli`].
//!
//! This file calls the function of the selected command. It also reads the configuration, or only
//! the configuration's `[paths]`, for the commands.

mod check;
mod close;
mod coverage;
mod detach;
mod doctor;
mod explain;
mod flows;
mod load;
mod options;
mod overrides;
mod readmit;
mod run;
mod source;
mod status;

use std::process::ExitCode;
use std::time::Duration;

use self::status::Shown;
use crate::config::addresses::{AddressSource, WithAddresses};
use crate::config::{self, Config, HostEnvironment, Paths, ProcessEnvironment};
use crate::error::CommandFailure;
use crate::output::print;
use lb_agent::cli::Directories;
use lb_agent::run::ProcessStatus;
use lb_view::filter::Filter;
pub use options::{Cli, Command, PathOptions};

/// The exit code "degraded": the command worked, and its output shows a problem that an operator
/// should examine.
const DEGRADED: u8 = 3;

pub fn run(cli: Cli) -> Result<ExitCode, CommandFailure> {
    let files = cli.files;
    match cli.command {
        Command::Run => run::run(&files),
        Command::Check { file, against_running, endpoints, json } => {
            let form = if json { check::OutputFormat::Json } else { check::OutputFormat::Text };
            check::run(file.as_deref(), against_running.then_some(form), &endpoints, &files)
        }
        Command::Status { client, service, backend, failing, sort, json, watch } => {
            let shown = Shown { filter: Filter { client, service, backend }, only_failing: failing, sort };
            status::run(shown, json, watch, &files)
        }
        Command::Flows { client, service, backend, json } => {
            flows::run(&Filter { client, service, backend }, json, &files)
        }
        Command::Explain { service, client, json } => explain::run(&service, client.as_deref(), json, &files),
        Command::Wait { client, timeout } => coverage::wait::run(&client, seconds(timeout), &files),
        Command::Exec { client, timeout, command } => {
            coverage::exec::run(&client, &command, seconds(timeout), &files)
        }
        Command::Doctor { pid, json } => doctor::run(pid, json, &files),
        Command::Readmit { service, backend, client, json } => {
            readmit::run(&service, backend, client.as_deref(), json, &files)
        }
        Command::Drain(options) => overrides::drain(&options, &files),
        Command::Undrain(options) => overrides::undrain(&options, &files),
        Command::Weight(options) => overrides::weigh(&options, &files),
        Command::Overrides { service, json } => overrides::list(service.as_deref(), json, &files),
        Command::Load { command: Some(command), .. } => load::switch(&command, &files),
        Command::Load { command: None, client, service, json } => {
            load::show(&Filter { client, service, backend: None }, json, &files)
        }
        Command::Source(command) => source::run(command, &files),
        Command::Agent(agent) => {
            let ended = lb_agent::cli::run(agent, &Directories { run: files.run, state: files.state })?;
            print::text(&ended.text)?;
            Ok(ended.status.map_or(ExitCode::from(ended.code), ProcessStatus::end))
        }
        Command::Close(options) => close::run(&options, &files),
        Command::Detach { client, all: _ } => detach::run(client.as_deref(), &files),
    }
}

fn seconds(seconds: u32) -> Duration {
    Duration::from_secs(seconds.into())
}

fn read_config(files: &PathOptions) -> Result<Config, CommandFailure> {
    read_config_in(files, &HostEnvironment)
}

fn read_config_in(files: &PathOptions, env: &dyn ProcessEnvironment) -> Result<Config, CommandFailure> {
    // Relative paths in the file start at the file's directory. The path of the file is made
    // absolute, because paths in the file are later compared with absolute paths that the kernel
    // reports.
    let env = WithAddresses { env, addresses: AddressSource::Below(files.state.as_deref()) };
    let mut config = config::read(&std::path::absolute(files.file())?, &env)?;
    config.paths = files.over(config.paths)?;
    Ok(config)
}

/// Returns the directories, for commands that need nothing else from the configuration. Faults
/// outside `[paths]` do not stop these commands.
fn paths_of(files: &PathOptions) -> Result<Paths, CommandFailure> {
    let paths = match &files.config {
        Some(file) => config::read_paths(&std::path::absolute(file)?)?,
        // If the default file is missing or faulty, or this user cannot read it, the default
        // directories apply.
        None => config::read_paths(files.file()).unwrap_or_default(),
    };
    Ok(files.over(paths)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::addresses;

    #[test]
    fn stored_addresses_of_services_are_read_below_the_state_directory_of_the_command_line() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("socklb.toml");
        let text = "[[client]]\njob = 'j'\ncgroup = 'c'\n[[service]]\nname = 's'\n\
                    address = { kubernetes = 'shop/users' }\nbackends = { static = [] }\n\
                    [kubernetes]\nserver = 'http://127.0.0.1:1'\n[paths]\nstate = '/nonexistent'\n";
        std::fs::write(&file, text).unwrap();
        let address = "10.96.0.10:80".parse().unwrap();
        let known = [("kubernetes shop/users cluster IP tcp".to_owned(), address)].into();
        let stored = addresses::path(folder.path());
        crate::source::last_good::save(&stored, &addresses::render(&known)).unwrap();
        let read = |state: Option<&std::path::Path>| {
            let state = state.map(std::path::Path::to_owned);
            let files = PathOptions { config: Some(file.clone()), pins: None, run: None, state };
            read_config(&files).unwrap_or_else(|failure| panic!("{failure}")).lookups[0].address
        };
        assert_eq!((read(None), read(Some(folder.path()))), (None, Some(address)));
    }
}
