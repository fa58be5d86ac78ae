//! The command line: commands that read never change anything, commands that write say so.

use std::ffi::OsString;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use lb_view::status::SortBy;

use super::load;
use crate::config::{DEFAULT_PATH, Paths};

/// socklb balances connections at the socket, in the kernel.
///
/// A process in a chosen cgroup calls connect() to a service address; a kernel program rewrites the destination to one
/// backend; from then on the process talks to that backend directly. The daemon (`socklb run`) decides which backends
/// with which weights and writes them into kernel maps; connects never wait for it and go on without it.
///
/// Every command reads the directories in `[paths]` of the configuration, which --config or SOCKLB_CONFIG names.
///
/// Exit codes: 0 ok, 1 failed, 2 usage, 3 degraded (status, flows, doctor), 4 permission; exec has those of its command.
#[derive(Debug, Parser)]
#[command(name = "socklb", version)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// The files and directories that are meant.
    #[command(flatten)]
    pub files: PathOptions,
}

impl Cli {
    /// What the command line says; ends the process where that cannot be understood.
    pub fn of_command_line() -> Self {
        let mut command = Self::command();
        let matches = command.try_get_matches_from_mut(std::env::args_os()).unwrap_or_else(|mut error| {
            let hint = hint_of_another(&error)
                .or_else(|| hint_of_ipvsadm(&error))
                .map(str::to_owned)
                .or_else(|| hint_of_file(&error));
            if let Some(hint) = hint {
                error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![hint.into()]));
            }
            error.exit()
        });
        // From the environment it may be set for the daemon.
        let is_given = |name| matches.value_source(name) == Some(ValueSource::CommandLine);
        if matches.subcommand_name() == Some("agent") && (is_given("config") || is_given("pins")) {
            let text = "--config and --pins are for the daemon: an agent's file is given as `socklb agent serve FILE`";
            command.error(ErrorKind::ArgumentConflict, text).exit();
        }
        let cli = Self::from_arg_matches(&matches).unwrap_or_else(|error| error.format(&mut command).exit());
        if let Command::Load { command: Some(_), client, service, json } = &cli.command
            && (client.is_some() || service.is_some() || *json)
        {
            command.error(ErrorKind::ArgumentConflict, load::MISPLACED).exit();
        }
        cli
    }
}

/// What to do instead of an argument that is a configuration's name.
fn hint_of_file(error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidArg) else { return None };
    let is_file = error.kind() == ErrorKind::UnknownArgument && word.ends_with(".toml");
    is_file.then(|| format!("name the configuration by an option: `--config {word}`"))
}

/// What to do instead of a subcommand that other load balancers have (HAProxy, ipvsadm), if it is one.
fn hint_of_another(error: &clap::Error) -> Option<&'static str> {
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand) else { return None };
    Some(match word.as_str() {
        "drain" | "undrain" | "disable" | "enable" | "maint" | "ready" | "lame-duck" => {
            "write `state = \"lame-duck\"` or `weight = 0` at the endpoint in its file, or use `socklb agent lame-duck` on the backend's host"
        }
        "weight" | "set" | "edit-server" | "edit" => "change the endpoint in its file: the daemon follows it",
        "show" | "list" | "stats" | "info" | "server" | "servers" | "backends" | "get" => {
            "use `socklb status`"
        }
        "sessions" | "conns" | "connections" | "sess" | "kill" => "use `socklb flows`",
        "reload" | "restart" => "send SIGHUP to the daemon (`systemctl reload socklb`)",
        "stop" | "start" | "shutdown" => "use `socklb run`, or the service manager (`systemctl stop socklb`)",
        "validate" | "test" | "lint" => "use `socklb check`",
        "flush" | "clear" | "remove" | "delete" | "del" => {
            "use `socklb detach`, or remove the endpoint from its file"
        }
        "add" | "add-server" | "add-service" => {
            "add the endpoint to its file, or the service to the configuration"
        }
        "save" | "restore" => {
            "nothing is to be saved: tables stay in the kernel, and the daemon follows its files"
        }
        "zero" => "counters only grow: `socklb status` shows the last minute",
        _ => return None,
    })
}

/// What to do instead of an option of ipvsadm, which has no subcommands.
fn hint_of_ipvsadm(error: &clap::Error) -> Option<&'static str> {
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else { return None };
    Some(match option.as_str() {
        "-l" | "-L" | "--list" => "use `socklb status`",
        "-a" | "-e" | "-d" | "-A" | "-E" | "-D" => "change the list of the service: the daemon follows it",
        "-C" | "--clear" => "use `socklb detach`",
        "-Z" | "--zero" => "counters only grow: `socklb status` shows the last minute",
        _ => return None,
    })
}

/// The configuration, and what overrides its `[paths]`.
#[derive(Clone, Debug, Args)]
pub struct PathOptions {
    /// The configuration [default: /etc/socklb/socklb.toml]
    #[arg(short, long, global = true, value_name = "FILE", env = "SOCKLB_CONFIG", hide_env_values = true)]
    pub config: Option<PathBuf>,
    /// Directory in bpffs where maps and links are pinned
    #[arg(long, global = true, value_name = "DIR")]
    pub pins: Option<PathBuf>,
    /// Directory of the daemon's socket
    #[arg(long, global = true, value_name = "DIR")]
    pub run: Option<PathBuf>,
    /// Directory of what the daemon remembers between starts
    #[arg(long, global = true, value_name = "DIR")]
    pub state: Option<PathBuf>,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the daemon: fill the tables, attach to the cgroups, follow the sources
    Run,
    /// Check a configuration and the endpoint files it names; reports all faults at once
    ///
    /// Needs no privilege and changes nothing. Each fault has its file, line and column and says what would be right. Also
    /// refused are combinations that cannot work, such as the policy least-loaded over a subset that can have more than 256
    /// backends, and values that would have no effect.
    ///
    /// Exit codes: 0 good, whether or not it would change anything; 1 faulty, or nothing runs to compare with.
    Check {
        /// The configuration, instead of the one that --config names
        file: Option<PathBuf>,
        /// Also show what it would change of what runs: clients, services, shares, and what takes a restart
        ///
        /// What runs is asked of the daemon that --config names, else of the one in the file's own `[paths]`; if none answers,
        /// it is read from the pinned maps, which takes root and does not have all keys.
        #[arg(long)]
        against_running: bool,
        /// Take the endpoints of a service from this file, to preview a list before it replaces the one in use; may be given
        /// for several services
        #[arg(long, value_name = "SERVICE=FILE", requires = "against_running", value_parser = preview)]
        endpoints: Vec<(String, PathBuf)>,
        /// Print what it would change as JSON
        #[arg(long, requires = "against_running")]
        json: bool,
    },
    /// Show clients, services and backends: states, shares wanted and real, active flows, rates, latency, failures
    Status {
        /// Only this client
        client: Option<String>,
        /// Only this service
        #[arg(short, long)]
        service: Option<String>,
        /// Only this backend, by its address and port
        #[arg(long, value_name = "ADDRESS")]
        backend: Option<SocketAddr>,
        /// Only backends that fail, and the services and clients that have such
        #[arg(long)]
        failing: bool,
        /// In which order backends come, those that fail always first: by address, unless JSON is asked for
        #[arg(long, value_name = "BY", value_parser = sort_by())]
        sort: Option<SortBy>,
        /// Print JSON
        #[arg(long, conflicts_with = "watch")]
        json: bool,
        /// Show it again and again, every so many seconds; on a terminal until q is pressed
        #[arg(short, long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1")]
        watch: Option<u32>,
    },
    /// Show the active flows: whose, since when, where they go, and why there
    ///
    /// Reads the pinned maps; no daemon is needed. The oldest come first.
    Flows {
        /// Only of this client
        #[arg(long)]
        client: Option<String>,
        /// Only to this service
        #[arg(short, long)]
        service: Option<String>,
        /// Only to this backend, by its address and port
        #[arg(long, value_name = "ADDRESS")]
        backend: Option<SocketAddr>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Tell why a client has this subset of a service, these shares, this schedule
    Explain {
        /// The service
        service: String,
        /// Only for this client
        #[arg(long)]
        client: Option<String>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Wait until the cgroup that this is started in is covered by a client: for a unit's ExecStartPre=
    ///
    /// Programs that are attached cover, whether or not a daemon runs or answers.
    ///
    /// Exit codes: 0 covered; 1 not covered in time, or never will be: the message says why; 4 permission.
    Wait {
        /// The client
        client: String,
        /// Give up after so many seconds
        #[arg(long, value_name = "SECONDS", default_value_t = 30)]
        timeout: u32,
    },
    /// Start a command in a client's cgroup, once that is covered
    ///
    /// The cgroup is made if it does not exist and the one above it does, which is said on standard error. It stays. It is
    /// not made while the client's programs are on another cgroup.
    ///
    /// Exit codes: that of the command, which takes the place of this one; 127 if the command is not there, 126 if it
    /// cannot be started; 1 the cgroup is not covered in time, or cannot be; 4 permission.
    Exec {
        /// The client
        client: String,
        /// Give up after so many seconds
        #[arg(long, value_name = "SECONDS", default_value_t = 30)]
        timeout: u32,
        /// The command and its arguments
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
    /// Check this host: kernel, privileges, mounts, other programs, sockets that are not covered; or whether a process is
    ///
    /// Exit codes: 0 nothing is wrong, or the process is covered; 3 otherwise; with --pid 1 if there is no such process, 4 if
    /// it cannot be seen what is attached.
    Doctor {
        /// Tell whether this process is covered, by which client, and if not, why
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
        pid: Option<u32>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Take a backend back that is ejected, before its trial
    ///
    /// Asks the daemon, which does it for root, its own user, and the members of the group that `[admin]` names.
    ///
    /// Exit codes: 0 taken back by one client at least; 1 it was not ejected, or nothing was done: the message says why;
    /// 4 permission.
    Readmit {
        /// The service
        service: String,
        /// The backend, by its address and port
        #[arg(value_name = "BACKEND")]
        backend: SocketAddr,
        /// Only for this client, and not for all that have it
        #[arg(long)]
        client: Option<String>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show how weights follow the load that backends report, or switch that
    ///
    /// Asks the daemon; what switches it does for root, its own user, and the members of the group that `[admin]` names.
    Load {
        #[command(subcommand)]
        command: Option<load::LoadCommand>,
        /// Only of this client
        #[arg(long)]
        client: Option<String>,
        /// Only of this service
        #[arg(short, long)]
        service: Option<String>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Say how the backends of this host are, to the clients that ask: readiness, lame duck, load
    ///
    /// `socklb agent serve` runs beside backends and needs neither root nor the daemon. Its file is /etc/socklb/agent.toml, or the
    /// one that is given to `serve`; --run and --state name its directories, --config and --pins are for the daemon alone.
    Agent(lb_agent::cli::AgentOptions),
    /// Remove a client, or all, from the kernel: programs, maps, pins
    #[command(group = clap::ArgGroup::new("which").required(true).args(["client", "all"]))]
    Detach {
        /// The client
        client: Option<String>,
        /// Every client
        #[arg(long)]
        all: bool,
    },
}

impl PathOptions {
    /// The configuration.
    pub fn file(&self) -> &Path {
        self.config.as_deref().unwrap_or(Path::new(DEFAULT_PATH))
    }

    /// These paths, but for those that are overridden.
    ///
    /// # Errors
    /// If a path is relative and the current directory cannot be found.
    pub fn over(&self, mut paths: Paths) -> io::Result<Paths> {
        let Self { pins, run, state, config: _ } = self;
        for (path, wanted) in [(&mut paths.pins, pins), (&mut paths.run, run), (&mut paths.state, state)] {
            if let Some(wanted) = wanted {
                // It is compared with paths that the kernel reports, which are absolute.
                *path = std::path::absolute(wanted)?;
            }
        }
        Ok(paths)
    }
}

/// Reads the name of a service and a file of endpoints for it.
fn preview(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((service, file)) if !service.is_empty() && !file.is_empty() => {
            Ok((service.to_owned(), file.into()))
        }
        _ => Err("write the name of a service and a file, as in users=/tmp/users.toml".to_owned()),
    }
}

fn sort_by() -> impl TypedValueParser<Value = SortBy> {
    let of = |name: String| SortBy::ALL.into_iter().find(|by| by.name() == name).expect("a possible value");
    PossibleValuesParser::new(SortBy::ALL.map(SortBy::name)).map(of)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn words_of_other_load_balancers_point_to_a_command() {
        let hint = |word: &str| {
            let error = Cli::command().try_get_matches_from(["socklb", word]).unwrap_err();
            hint_of_another(&error)
        };
        assert!(hint("drain").is_some_and(|hint| hint.contains("lame-duck")));
        assert_eq!((hint("show"), hint("conns")), (Some("use `socklb status`"), Some("use `socklb flows`")));
        assert_eq!(hint("frobnicate"), None);
    }

    #[test]
    fn a_short_option_is_the_same_with_every_command() {
        let whole = Cli::command();
        whole.clone().debug_assert();
        let options = whole.get_subcommands().chain([&whole]).flat_map(clap::Command::get_arguments);
        let mut longs: BTreeMap<char, &str> = BTreeMap::new();
        let mut without = Vec::new();
        for option in options {
            match (option.get_short(), option.get_long()) {
                (Some(short), Some(long)) => {
                    assert_eq!(*longs.entry(short).or_insert(long), long, "-{short}");
                }
                (None, Some(long)) => without.push(long),
                (_, None) => {}
            }
        }
        assert_eq!(longs, [('c', "config"), ('s', "service"), ('w', "watch")].into());
        let is_short = |long: &&str| longs.values().any(|other| other == long);
        assert_eq!(without.into_iter().find(is_short), None, "it is short with other commands");
    }
}
