//! The commands `socklb agent ...`: what they are asked, and what they do. They print nothing: what is to be printed is what they return.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use clap::{Args, Subcommand};
use lb_document::LogFormat;
use lb_report::agent::name::Name;
use lb_view::text::Style;

use crate::check::CheckMethod;
use crate::client::Client;
use crate::config::{self, AgentConfig, BackendConfig, DEFAULT_PATH, HealthCheck};
use crate::name;
use crate::run::ProcessStatus;
use crate::serve::list;
use crate::serve::query::AcceptedReport;
use crate::status;
use crate::{config::read_key_file, keys};

mod run;

mod serve;

pub use run::Run;

/// The exit code for degraded: something works, and an operator should look.
const DEGRADED: u8 = 3;

/// `socklb agent`.
#[derive(Debug, Args)]
pub struct AgentOptions {
    /// What to do.
    #[command(subcommand)]
    pub command: AgentCommand,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum AgentCommand {
    /// Run the agent of this host: answer reports, check the backends, follow the file
    ///
    /// Needs no privilege but for a port below 1024. SIGHUP reads the file again; a change of it is taken on by itself.
    Serve(Serve),
    /// Run a backend's command: told of when it is ready, and ended without losing a request
    ///
    /// Clients are told that it is a lame duck until it is ready, and again as soon as SIGTERM comes; it gets SIGTERM once its
    /// connections have ended. Exit code and signals are the command's.
    Run(Box<Run>),
    /// Check an agent's configuration and the key files it names; reports all faults at once
    Check {
        /// The file
        #[arg(default_value = DEFAULT_PATH)]
        file: PathBuf,
    },
    /// Take a backend out: clients are told at once, and open no new connection to it
    ///
    /// Holds until `ready` takes it back, also over a restart of the agent.
    LameDuck {
        /// The backend, as in 10.0.0.1:8080 or 10.0.0.1:53/udp [default: all of this host]
        #[arg(value_parser = name::parse)]
        backend: Option<Name>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Take back what `lame-duck` has said: the backend is ready again if its health check says so
    Ready {
        /// The backend [default: all of this host]
        #[arg(value_parser = name::parse)]
        backend: Option<Name>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the backends: readiness and why, load, who is told
    ///
    /// Exit codes: 0 all that are shown are ready and nothing is wrong; 3 otherwise; 1 no agent answers; 4 permission.
    Status {
        /// Only this backend [default: all of this host]
        #[arg(value_parser = name::parse)]
        backend: Option<Name>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Say how loaded an application is; it is believed first, while its word holds
    Report(LoadReportOptions),
    /// Make a key of a service, or a backend's from it, and print it as lines of a file
    ///
    /// Client hosts have the service's key (`[reports] key`), backends their own alone. Keep either in a file of mode 0640 at most.
    Key {
        /// The number of a new key
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..), conflicts_with = "of")]
        id: u16,
        /// Derive a backend's keys from this file of its service's
        #[arg(long, value_name = "FILE", requires = "backend")]
        of: Option<PathBuf>,
        /// The backend, as in 10.0.0.1:8080 or 10.0.0.1:53/udp
        #[arg(requires = "of", value_parser = name::parse)]
        backend: Option<Name>,
    },
}

/// What an agent serves.
#[derive(Debug, Args)]
pub struct Serve {
    /// The configuration [default: /etc/socklb/agent.toml, without --backend]
    pub file: Option<PathBuf>,
    /// Listen at this address, for UDP and TCP; may be given several times
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Vec<SocketAddr>,
    /// Serve this one backend, without a file
    #[arg(long, value_name = "BACKEND", conflicts_with = "file", requires = "key", value_parser = name::parse)]
    pub backend: Option<Name>,
    /// The file of the backend's keys
    #[arg(long, value_name = "FILE", requires = "backend")]
    pub key: Option<PathBuf>,
    /// Check the backend so: tcp, tcp:ADDRESS, /PATH, http://ADDRESS/PATH, exec:COMMAND or off [default: tcp]
    #[arg(long, value_name = "CHECK", requires = "backend")]
    pub check: Option<String>,
}

/// What an application says of its load.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("said").required(true).multiple(true).args(["utilization", "qps", "eps"]))]
pub struct LoadReportOptions {
    /// How much of what it can do it does: 0 to 1, and above where requests wait
    #[arg(long, value_name = "SHARE", allow_negative_numbers = true)]
    pub utilization: Option<f64>,
    /// Requests a second
    #[arg(long, value_name = "RATE", allow_negative_numbers = true)]
    pub qps: Option<f64>,
    /// Errors a second
    #[arg(long, value_name = "RATE", allow_negative_numbers = true)]
    pub eps: Option<f64>,
    /// The backend, if there are several here
    #[arg(long, value_parser = name::parse)]
    pub backend: Option<Name>,
    /// How long this is believed, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 10_000)]
    pub valid_for: u64,
    /// Over how long it was measured, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 1_000)]
    pub window: u64,
}

/// Directories that the command line names, in place of the configuration's.
#[derive(Clone, Debug, Default)]
pub struct Directories {
    /// Of the control socket.
    pub run: Option<PathBuf>,
    /// Of what is kept between starts.
    pub state: Option<PathBuf>,
}

/// How a command has ended.
#[derive(Debug, PartialEq, Eq)]
pub struct Ended {
    /// What is to be printed.
    pub text: String,
    /// The exit code.
    pub code: u8,
    /// How the command that was run has ended, if one was: this process ends in the same way.
    pub status: Option<ProcessStatus>,
}

impl Ended {
    fn well(text: impl Into<String>) -> Self {
        Self { text: text.into(), code: 0, status: None }
    }
}

/// Runs a command.
///
/// # Errors
/// Why it failed. A [`config::ConfigError`] among its causes has the faults of a file; an [`std::io::Error`] of the kind
/// `PermissionDenied`, that this user may not.
pub fn run(agent: AgentOptions, directories: &Directories) -> Result<Ended> {
    match agent.command {
        AgentCommand::Serve(what) => serve::run(what, directories.clone()).map(|()| Ended::well("")),
        AgentCommand::Run(what) => {
            run::run(*what, directories).map(|status| Ended { status: Some(status), ..Ended::well("") })
        }
        AgentCommand::Check { file } => {
            let config = config::read(&std::path::absolute(&file)?)?;
            Ok(Ended::well(format!("{}: ok, {}\n", file.display(), backends(config.backends.len()))))
        }
        AgentCommand::LameDuck { backend, json } => {
            operator("/v1/lame-duck", "a lame duck", backend, json, directories)
        }
        AgentCommand::Ready { backend, json } => {
            operator("/v1/ready", "as its health check says", backend, json, directories)
        }
        AgentCommand::Status { backend, json } => status(backend, json, directories),
        AgentCommand::Report(report) => say(&report, directories),
        AgentCommand::Key { id, of: None, .. } => keys::new_line(id).map(Ended::well),
        AgentCommand::Key { of: Some(service), backend, .. } => {
            let backend = backend.context("the backend is missing: write `key --of FILE BACKEND`")?;
            keys::derived(&service, backend).map(Ended::well)
        }
    }
}

fn backends(count: usize) -> String {
    if count == 1 { "1 backend".to_owned() } else { format!("{count} backends") }
}

/// The directory of the control socket: as the command line, else as the default configuration has it, else the default.
fn client_directory(directories: &Directories) -> Result<PathBuf> {
    Ok(match &directories.run {
        Some(run) => std::path::absolute(run)?,
        // The file may be missing, faulty, or not readable for this user: then the default holds.
        None => config::read(Path::new(DEFAULT_PATH)).unwrap_or_default().run,
    })
}

fn client(directories: &Directories) -> Result<Client> {
    Ok(Client::new(&client_directory(directories)?))
}

/// Logs to standard error from now on.
fn init_log(format: LogFormat) {
    lb_host::log::init(format == LogFormat::Json, Style::for_stderr().colour);
}

/// Waits for something in a runtime of its own.
fn wait<T>(what: impl Future<Output = T>) -> Result<T> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(what))
}

fn operator(
    path: &str,
    what: &str,
    backend: Option<Name>,
    json: bool,
    directories: &Directories,
) -> Result<Ended> {
    let said: Vec<_> = backend.map(|backend| ("backend", backend.to_string())).into_iter().collect();
    let client = client(directories)?;
    let told: AcceptedReport = wait(client.tell(path, &said))??;
    if json {
        return Ok(Ended::well(serde_json::to_string_pretty(&told)? + "\n"));
    }
    let waiting = match told.unheard {
        0 if told.is_new => "; the agent is new, and not all of its clients may have asked yet".to_owned(),
        0 => String::new(),
        1 => "; 1 client has not acknowledged it yet".to_owned(),
        count => format!("; {count} clients have not acknowledged it yet"),
    };
    Ok(Ended::well(format!("{}: {what}{waiting}\n", told.backends.join(", "))))
}

fn status(backend: Option<Name>, json: bool, directories: &Directories) -> Result<Ended> {
    let client = client(directories)?;
    let mut status: status::AgentStatus = wait(client.ask("/v1/status"))??;
    if let Some(name) = backend.map(|name| name.to_string()) {
        let all: Vec<String> = status.backends.iter().map(|backend| backend.backend.clone()).collect();
        status.backends.retain(|backend| backend.backend == name);
        if status.backends.is_empty() {
            return Err(anyhow!("there is no backend {name} here, only {}", list(&all)));
        }
    }
    let text =
        if json { serde_json::to_string_pretty(&status)? + "\n" } else { status.text(Style::for_stdout()) };
    Ok(Ended { code: if status.is_good() { 0 } else { DEGRADED }, ..Ended::well(text) })
}

fn say(report: &LoadReportOptions, directories: &Directories) -> Result<Ended> {
    let mut said =
        vec![("valid_for_ms", report.valid_for.to_string()), ("window_ms", report.window.to_string())];
    said.extend(report.utilization.map(|number| ("utilization", number.to_string())));
    said.extend(report.qps.map(|number| ("qps", number.to_string())));
    said.extend(report.eps.map(|number| ("eps", number.to_string())));
    said.extend(report.backend.map(|backend| ("backend", backend.to_string())));
    let client = client(directories)?;
    let _: AcceptedReport = wait(client.tell("/v1/report", &said))??;
    Ok(Ended::well(""))
}

impl Serve {
    /// The configuration that is meant.
    ///
    /// # Errors
    /// If it cannot be read, or an option makes no sense.
    pub fn config(&self, directories: &Directories) -> Result<AgentConfig> {
        let mut config = match self.backend {
            Some(backend) => AgentConfig { backends: vec![self.one(backend)?], ..AgentConfig::default() },
            None => {
                config::read(&std::path::absolute(self.file.as_deref().unwrap_or(Path::new(DEFAULT_PATH)))?)?
            }
        };
        if !self.listen.is_empty() {
            config.listen = Some(self.listen.clone());
        }
        for (path, wanted) in [(&mut config.run, &directories.run), (&mut config.state, &directories.state)] {
            if let Some(wanted) = wanted {
                *path = std::path::absolute(wanted)?;
            }
        }
        Ok(config)
    }

    fn one(&self, name: Name) -> Result<BackendConfig> {
        let path = self.key.as_ref().context("--key is missing: it names the file of the backend's keys")?;
        let mut backend = BackendConfig::new(name, read_key_file(path)?);
        backend.check = match self.check.as_deref() {
            Some("off") => None,
            None if name.protocol() == lb_core::service::Protocol::Udp => {
                return Err(anyhow!("--check is missing: no connection can show that a UDP backend is well"));
            }
            text => {
                let check = CheckMethod::parse(text.unwrap_or("tcp"), name)
                    .map_err(|why| anyhow!("--check: {why}"))?;
                Some(HealthCheck::new(check))
            }
        };
        // Its key file is read once: without a file there is nothing that a reload could read.
        Ok(BackendConfig { key_file: None, ..backend })
    }
}

/// How long a stop may take: connections that are being answered.
const STOPPING: Duration = Duration::from_secs(2);
