//! The command line. A command that changes anything states this in its help; all other commands
//! only read.

use std::ffi::OsString;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::builder::{NonEmptyStringValueParser, PossibleValuesParser, TypedValueParser};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use lb_document::control::escaped;
use lb_view::status::SortBy;

use super::{close, load, overrides, source};
use crate::config::{DEFAULT_PATH, Paths};

/// The variable with the path of the configuration file. `agent` ignores it.
const CONFIG_VARIABLE: &str = "SOCKLB_CONFIG";

/// socklb balances connections at the socket, in the kernel.
///
/// When a process in a configured cgroup calls connect() to a service address, a kernel program
/// rewrites the destination to one backend. From then on, the process talks to that backend
/// directly. The daemon (`socklb run`) decides on the backends and their weights, and writes both
/// into kernel maps. Connects never wait for the daemon, and continue to work without it.
///
/// Every command except `agent` reads its directories from `[paths]` in the configuration file
/// (--config or SOCKLB_CONFIG).
///
/// Exit codes: 0 ok, 1 failed, 2 usage, 3 degraded (the help of each command explains it), 4 a
/// permission is missing; exec returns the exit code of its command.
#[derive(Debug, Parser)]
#[command(name = "socklb", version)]
pub struct Cli {
    /// Command to run
    #[command(subcommand)]
    pub command: Command,
    /// Configuration file and directories
    #[command(flatten)]
    pub files: PathOptions,
}

impl Cli {
    /// Parses the command line. If the command line is wrong, prints the error with a hint and
    /// exits the process.
    pub fn of_command_line() -> Self {
        let mut command = Self::command();
        let matches = command.try_get_matches_from_mut(std::env::args_os()).unwrap_or_else(|mut error| {
            let hint = hint_of_another(&error)
                .or_else(|| hint_of_ipvsadm(&error))
                .map(str::to_owned)
                .or_else(|| hint_of_file(&error));
            make_readable(&mut error);
            if let Some(hint) = hint {
                error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![hint.into()]));
            }
            error.exit()
        });
        let mut cli =
            Self::from_arg_matches(&matches).unwrap_or_else(|error| error.format(&mut command).exit());
        if let Some(error) = cli.conflict(&mut command) {
            error.exit();
        }
        // Not by clap, which would show --config as required in the usage of each command.
        let by_variable = || std::env::var_os(CONFIG_VARIABLE).filter(|file| !file.is_empty());
        cli.files.config = cli.files.config.or_else(|| by_variable().map(PathBuf::from));
        cli
    }

    /// The error for options that clap cannot check, with the usage of the subcommand.
    fn conflict(&self, command: &mut clap::Command) -> Option<clap::Error> {
        let (name, text) = match &self.command {
            Command::Agent(_) if self.files.config.is_some() || self.files.pins.is_some() => (
                "agent",
                "--config and --pins are for the daemon: to name an agent's file, write `socklb agent serve FILE`",
            ),
            Command::Load { command: Some(_), client, service, json }
                if client.is_some() || service.is_some() || *json =>
            {
                ("load", load::MISPLACED)
            }
            Command::Drain(options) if options.ends_before_closing() => {
                ("drain", overrides::ENDS_BEFORE_CLOSING)
            }
            Command::Weight(options) if options.ends_with_a_time() => ("weight", overrides::ENDS_AT_ONCE),
            _ => return None,
        };
        Some(command.find_subcommand_mut(name)?.error(ErrorKind::ArgumentConflict, text))
    }
}

/// Cuts a long invalid value in an error, so that the text after it remains visible, and escapes
/// control characters.
fn make_readable(error: &mut clap::Error) {
    const SHOWN: usize = 40;
    for kind in [ContextKind::InvalidValue, ContextKind::InvalidArg, ContextKind::InvalidSubcommand] {
        let Some(ContextValue::String(value)) = error.get(kind) else { continue };
        let mut text = escaped(value).into_owned();
        if kind == ContextKind::InvalidValue && text.chars().count() > 2 * SHOWN {
            text = text.chars().take(SHOWN).collect::<String>() + "…";
        }
        error.insert(kind, ContextValue::String(text));
    }
}

/// A hint if the argument looks like the name of a configuration file.
fn hint_of_file(error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidArg) else { return None };
    let is_file = error.kind() == ErrorKind::UnknownArgument && word.ends_with(".toml");
    is_file.then(|| format!("to name a configuration file, write `--config {word}`"))
}

/// A hint if the user has written a subcommand of another load balancer (HAProxy, ipvsadm).
fn hint_of_another(error: &clap::Error) -> Option<&'static str> {
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand) else { return None };
    Some(match word.as_str() {
        "disable" | "maint" | "maintenance" => {
            "use `socklb drain SERVICE BACKEND`, which acts on this host; on the backend's host, use `socklb agent lame-duck`"
        }
        "lame-duck" => {
            "use `socklb agent lame-duck` on the backend's host, or `socklb drain SERVICE BACKEND` for this host only"
        }
        "enable" | "ready" => "use `socklb undrain SERVICE BACKEND`",
        "set" | "edit-server" | "edit" => {
            "use `socklb weight SERVICE BACKEND 50%`, or change the endpoint in its file: the daemon applies \
             the change"
        }
        "show" | "list" | "stats" | "info" | "server" | "servers" | "backends" | "get" => {
            "use `socklb status`"
        }
        "sessions" | "conns" | "connections" | "sess" => "use `socklb flows`",
        "kill" | "shutdown-sessions" | "disconnect" => "use `socklb close SERVICE BACKEND`",
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
            "there is nothing to save: the kernel retains the tables, and the daemon reads its lists again when it starts"
        }
        "zero" => "counters cannot be reset: `socklb status` shows the rates of the last minute",
        _ => return None,
    })
}

/// A hint if the argument is an option of ipvsadm, which has no subcommands.
fn hint_of_ipvsadm(error: &clap::Error) -> Option<&'static str> {
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else { return None };
    Some(match option.as_str() {
        "-l" | "-L" | "--list" => "use `socklb status`",
        "-a" | "-e" | "-d" | "-A" | "-E" | "-D" => {
            "change the list of the service: the daemon applies the change"
        }
        "-C" | "--clear" => "use `socklb detach`",
        "-Z" | "--zero" => "counters cannot be reset: `socklb status` shows the rates of the last minute",
        _ => return None,
    })
}

/// The configuration file, and directories that override its `[paths]`.
#[derive(Clone, Debug, Args)]
pub struct PathOptions {
    /// Configuration file [env: SOCKLB_CONFIG] [default: /etc/socklb/socklb.toml]
    #[arg(short, long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Directory in bpffs where maps and links are pinned
    #[arg(long, global = true, value_name = "DIR")]
    pub pins: Option<PathBuf>,
    /// Directory of the daemon's socket
    #[arg(long, global = true, value_name = "DIR")]
    pub run: Option<PathBuf>,
    /// Directory of the state that the daemon stores between starts
    #[arg(long, global = true, value_name = "DIR")]
    pub state: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the daemon: fill the kernel's tables, attach programs to the cgroups, apply changes of
    /// the sources
    Run,
    /// Check a configuration and its endpoint files; report all faults at once
    ///
    /// Needs no privilege and changes nothing. For each fault the command prints the file, line and
    /// column, and a correction. The command also rejects combinations that cannot work, such as
    /// the policy least-loaded over a subset that can have more than 256 backends, and values that
    /// would have no effect.
    ///
    /// Exit codes: 0 no faults, even if --against-running shows changes; 1 faults, or nothing is
    /// running to compare with.
    Check {
        /// Configuration file, instead of the file in --config
        file: Option<PathBuf>,
        /// Also show what would change in the running configuration: clients, services, shares, and
        /// changes that need a restart
        ///
        /// The command queries the daemon at the directories that the file of --config configures.
        /// Without --config, it uses the directories of the checked file. If that daemon does not
        /// answer, the command reads the pinned maps, which needs root and does not show all keys.
        #[arg(long)]
        against_running: bool,
        /// Read the endpoints of a service from this file, to preview a list before it replaces the
        /// present list; may be given for several services
        #[arg(long, value_name = "SERVICE=FILE", requires = "against_running", value_parser = preview)]
        endpoints: Vec<(String, PathBuf)>,
        /// Print the changes as JSON
        #[arg(long, requires = "against_running")]
        json: bool,
    },
    /// Show clients, services and backends: states, wanted and actual shares, active flows, rates,
    /// latency, failures
    Status {
        /// Only this client
        client: Option<String>,
        /// Only this service
        #[arg(short, long, value_parser = NonEmptyStringValueParser::new())]
        service: Option<String>,
        /// Only this backend (address and port)
        #[arg(long, value_name = "ADDRESS")]
        backend: Option<SocketAddr>,
        /// Only failing backends, with their services and clients
        #[arg(long)]
        failing: bool,
        /// Order of backends; failing backends always come first [default: by address; with --json
        /// unsorted]
        #[arg(long, value_name = "BY", value_parser = sort_by())]
        sort: Option<SortBy>,
        /// Print JSON
        #[arg(long, conflicts_with = "watch")]
        json: bool,
        /// Repeat every SECONDS seconds (1 if not given); on a terminal until q is pressed
        #[arg(short, long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1")]
        watch: Option<u32>,
    },
    /// Show the active flows: client, process, age, backend, and the reason for the choice
    ///
    /// Reads the pinned maps and needs no daemon. The oldest flows come first.
    Flows {
        /// Only this client
        #[arg(long)]
        client: Option<String>,
        /// Only this service
        #[arg(short, long, value_parser = NonEmptyStringValueParser::new())]
        service: Option<String>,
        /// Only this backend (address and port)
        #[arg(long, value_name = "ADDRESS")]
        backend: Option<SocketAddr>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Explain why a client has this subset of a service, these shares and this schedule
    Explain {
        /// Service
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        service: String,
        /// Only this client
        #[arg(long)]
        client: Option<String>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Wait until a client covers the cgroup of this process; for ExecStartPre= of a systemd unit
    ///
    /// A cgroup is covered if the client's programs are attached to it or to a cgroup above it,
    /// even if no daemon runs or answers.
    ///
    /// Exit codes: 0 covered; 1 the cgroup is not covered in time, or cannot be covered (the
    /// message states the reason); 4 a permission is missing.
    Wait {
        /// Client
        client: String,
        /// Give up after SECONDS seconds
        #[arg(long, value_name = "SECONDS", default_value_t = 30)]
        timeout: u32,
    },
    /// Start a command in a client's cgroup once the cgroup is covered
    ///
    /// If the cgroup does not exist but its parent does, `exec` creates the cgroup, reports this on
    /// standard error, and does not remove the cgroup afterwards. It does not create the cgroup
    /// while the client's programs are attached to another cgroup.
    ///
    /// The command replaces this process, and its exit code is returned. Other exit codes: 127 the
    /// command does not exist; 126 the command cannot be started; 1 the cgroup is not covered in
    /// time, or cannot be covered; 4 a permission is missing.
    Exec {
        /// Client
        client: String,
        /// Give up after SECONDS seconds
        #[arg(long, value_name = "SECONDS", default_value_t = 30)]
        timeout: u32,
        /// Command and its arguments
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
    /// Check this host (kernel, privileges, mounts, other programs, uncovered sockets), or whether
    /// a process is covered
    ///
    /// Exit codes: 0 nothing is wrong, or the process is covered; 3 something is wrong, or the
    /// process is not covered; with --pid also 1 if there is no such process, and 4 if a permission
    /// is missing to read which programs are attached.
    Doctor {
        /// Check whether a client covers this process; print the client, or why no client covers it
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
        pid: Option<u32>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Let connects choose an ejected backend again before its trial
    ///
    /// The daemon permits this for root, its own user, and members of the group in `[admin]`.
    ///
    /// Exit codes: 0 at least one client readmitted the backend; 1 the backend was not ejected, or
    /// the command failed (the message states the reason); 4 a permission is missing.
    Readmit {
        /// Service
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        service: String,
        /// Backend (address and port)
        #[arg(value_name = "BACKEND")]
        backend: SocketAddr,
        /// Only this client, instead of all clients that have the backend
        #[arg(long)]
        client: Option<String>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Drain backends on this host: they get no new connections, but open connections continue
    ///
    /// The daemon stores the drain across restarts and upgrades, until `socklb undrain` or the end
    /// of --for. It refuses a drain after which a client would have no available backend, unless
    /// --force is given. The daemon permits this for root, its own user, and members of the group
    /// in `[admin]`. Other hosts are not affected.
    ///
    /// Exit codes: 0 the backends are drained (with --wait: and have no open flows); 1 the daemon
    /// refused the drain, or the service or a backend does not exist, or another command ended a
    /// drain before this command ended; 3 drained, but a restart of the daemon would lose the
    /// drain, or connections that --close selects stay open, or flows are still open after
    /// --timeout; 4 a permission is missing; 130 (^C) or 143 (SIGTERM) the command stopped waiting
    /// or closing early, and the backends stay drained.
    Drain(overrides::DrainOptions),
    /// End the drain of backends on this host
    ///
    /// Exit codes: 0 the backends are not drained; 1 the daemon refused the change, or neither the
    /// configuration nor an override contains the service or a backend, or another command has
    /// drained a backend again; 3 the change is made, but a restart of the daemon would lose the
    /// change; 4 a permission is missing.
    Undrain(overrides::UndrainOptions),
    /// Multiply the weight of a backend on this host, from 1% to 1000%; 100% removes the override
    ///
    /// The percentage multiplies the weight that load control has computed; while the override
    /// exists, load control does not change the factor of this backend. The shares of the other
    /// backends change so that all shares add up to 100 %. The daemon stores the weight across
    /// restarts and upgrades.
    ///
    /// Exit codes: the same as for `socklb undrain`.
    Weight(overrides::WeightOptions),
    /// List the drains and weights that operators have set on this host
    ///
    /// If no daemon runs, the command reads the overrides from the daemon's file, and their effects
    /// from the pinned maps, as far as this user may read them. If there is no file, it shows the
    /// drains that the maps contain.
    ///
    /// Exit codes: 0 ok; 1 the command failed, or the service does not exist; 3 no daemon runs, or
    /// the overrides are not stored, or stored ones could not be parsed; 4 a permission is missing.
    Overrides {
        /// Only this service
        #[arg(short, long, value_parser = NonEmptyStringValueParser::new())]
        service: Option<String>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show how weights follow the load that backends report; freeze weights, or switch load
    /// control off or on
    ///
    /// Needs the daemon, which accepts freeze, off and on only from root, the daemon's own user,
    /// and members of the group in `[admin]`.
    Load {
        #[command(subcommand)]
        command: Option<load::LoadCommand>,
        /// Only this client
        #[arg(long)]
        client: Option<String>,
        /// Only this service
        #[arg(short, long, value_parser = NonEmptyStringValueParser::new())]
        service: Option<String>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print, refresh or check the endpoint lists of services
    #[command(subcommand)]
    Source(source::SourceCommand),
    /// Report readiness, lame-duck state and load of this host's backends to clients
    ///
    /// `socklb agent serve` runs beside backends and needs neither root nor the daemon. Its
    /// configuration file is /etc/socklb/agent.toml, or the file given to `serve`. --run and
    /// --state set its directories; --config and --pins are only for the daemon.
    Agent(lb_agent::cli::AgentOptions),
    /// Close the connections of a backend's flows
    ///
    /// The processes with these connections receive ECONNABORTED; whether they dial again depends
    /// on the application. Only flows that began before the command are closed. If the backend is
    /// not drained first (for example by `socklb drain`), new connections may use it again.
    ///
    /// UDP sockets are closed if they are connected and --idle is not given. The command prints how
    /// many flows it has closed, and why other flows stay. Ctrl-C or SIGTERM ends the closing
    /// within a second; the daemon's log has the number of closed flows. The daemon permits this
    /// command for root, its own user, and members of the group in `[admin]`.
    ///
    /// Exit codes: 0 all selected flows are closed or have ended; 1 nothing was done (the message
    /// states the reason); 3 some flows stay open: they are in network namespaces that the daemon
    /// cannot enter, the kernel did not close them, or the command ended after an hour; 4 a
    /// permission is missing; 130 (^C) or 143 (SIGTERM) the command stopped early.
    Close(close::CloseOptions),
    /// Remove the programs, maps and pins of one client, or of all clients, from the kernel
    #[command(group = clap::ArgGroup::new("which").required(true).args(["client", "all"]))]
    Detach {
        /// Client
        client: Option<String>,
        /// Every client
        #[arg(long)]
        all: bool,
    },
}

impl PathOptions {
    /// The path of the configuration file, or its default.
    pub fn file(&self) -> &Path {
        self.config.as_deref().unwrap_or(Path::new(DEFAULT_PATH))
    }

    /// Replaces each path for which the command line has an option with the option's value.
    ///
    /// # Errors
    /// If a path is relative and the current directory cannot be determined.
    pub fn over(&self, mut paths: Paths) -> io::Result<Paths> {
        let Self { pins, run, state, config: _ } = self;
        for (path, wanted) in [(&mut paths.pins, pins), (&mut paths.run, run), (&mut paths.state, state)] {
            if let Some(wanted) = wanted {
                *path = std::path::absolute(wanted)?;
            }
        }
        Ok(paths)
    }
}

/// Parses `SERVICE=FILE`.
fn preview(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((service, file)) if !service.is_empty() && !file.is_empty() => {
            Ok((service.to_owned(), file.into()))
        }
        _ => Err("write the name of a service and a file: users=/tmp/users.toml".to_owned()),
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
        for (word, command) in [
            ("maint", "socklb drain"),
            ("disable", "socklb drain"),
            ("enable", "socklb undrain"),
            ("ready", "socklb undrain"),
            ("set", "socklb weight"),
            ("edit-server", "socklb weight"),
            ("lame-duck", "socklb agent lame-duck"),
        ] {
            assert!(hint(word).is_some_and(|hint| hint.contains(command)), "{word}");
        }
        assert_eq!((hint("show"), hint("conns")), (Some("use `socklb status`"), Some("use `socklb flows`")));
        assert_eq!(hint("frobnicate"), None);
    }

    #[test]
    fn an_error_shows_the_usage_of_the_subcommand() {
        for (line, usage) in [
            (
                "socklb drain users 0 --for 2s --close all --after 5s",
                "socklb drain [OPTIONS] <SERVICE> <BACKEND>...",
            ),
            ("socklb weight users 0 100% --for 1h", "socklb weight [OPTIONS] <SERVICE> <BACKEND> <PERCENT%>"),
            ("socklb load --json freeze users", "socklb load [OPTIONS] [COMMAND]"),
            ("socklb --pins /sys/fs/bpf agent status", "socklb agent [OPTIONS] <COMMAND>"),
        ] {
            let mut command = Cli::command();
            let matches = command.try_get_matches_from_mut(line.split(' ')).expect(line);
            let cli = Cli::from_arg_matches(&matches).expect(line);
            let text = cli.conflict(&mut command).expect(line).to_string();
            assert!(text.contains(&format!("Usage: {usage}\n")), "{text}");
        }
    }

    #[test]
    fn a_long_invalid_value_is_cut() {
        let of = |length: usize| {
            let words = ["socklb", "drain", "users", "0", "--reason", &"x".repeat(length)].map(str::to_owned);
            let mut error = Cli::command().try_get_matches_from(words).expect_err("it is too long");
            make_readable(&mut error);
            error.to_string()
        };
        let text = of(10_000);
        let expected = format!(
            "invalid value '{}…' for '--reason <TEXT>': the reason has 10000 characters; at most 200 are allowed",
            "x".repeat(40)
        );
        assert!(text.contains(&expected) && text.len() < 400, "{text}");
    }

    #[test]
    fn the_error_about_a_value_escapes_control_characters_and_names_an_empty_service() {
        let of = |words: &[&str]| {
            let mut error = Cli::command().try_get_matches_from(words).expect_err("it is wrong");
            make_readable(&mut error);
            error.to_string()
        };
        let text = of(&["socklb", "drain", "users", "0", "--for", "1h\nsocklb: \u{202e}"]);
        assert!(text.contains("invalid value '1h\\u{a}socklb: \\u{202e}' for"), "{text}");
        for words in [&["drain", "", "0"][..], &["explain", ""], &["status", "--service", ""]] {
            let text = of(&[&["socklb"], words].concat());
            assert!(text.contains("a value is required for '"), "{text}");
        }
        let text = of(&["socklb", "weight", "users", "0", "50%", "--for", "1500ms"]);
        assert!(text.contains("invalid value '1500ms' for '--for <TIME>'"), "{text}");
    }

    #[test]
    fn a_short_option_means_the_same_in_every_command() {
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
        assert_eq!(
            without.into_iter().find(is_short),
            None,
            "other commands have a short form of this option"
        );
    }
}
