//! The commands `socklb agent ...`: their options, and their effects. The commands print nothing;
//! each returns the text to print.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use clap::{Args, Subcommand};
use lb_document::LogFormat;
use lb_document::control::escaped_in_json;
use lb_report::agent::name::Name;
use lb_view::text::Style;
use serde::Serialize;

use crate::check::CheckMethod;
use crate::config::{self, AgentConfig, BackendConfig, DEFAULT_PATH, HealthCheck};
use crate::control::Client;
use crate::name;
use crate::run::ProcessStatus;
use crate::serve::list;
use crate::serve::query::AcceptedReport;
use crate::status;
use crate::{config::read_key_file, keys};

mod run;
mod serve;

pub use run::Run;

/// The exit code of `status` if a backend is not ready, or if the agent has a fault.
const DEGRADED: u8 = 3;

/// `socklb agent`.
#[derive(Debug, Args)]
pub struct AgentOptions {
    /// Command to run
    #[command(subcommand)]
    pub command: AgentCommand,
}

/// The commands of `socklb agent`.
#[derive(Debug, Subcommand)]
pub enum AgentCommand {
    /// Run the agent of this host: answer requests for reports and check the backends
    ///
    /// Needs no privilege except for a port below 1024 and for `[xdp]`. The agent applies changes
    /// of the file automatically; on SIGHUP it reads the file again.
    Serve(Serve),
    /// Run a backend's command: announce when it is ready, and end it without losing a request
    ///
    /// The backend is a lame duck until the command is ready, and again as soon as SIGTERM arrives.
    /// The command receives SIGTERM once its connections have ended. This process then ends as the
    /// command does: with the same exit code, or by the same signal.
    Run(Box<Run>),
    /// Check an agent's configuration and the key files in it; report all faults at once
    Check {
        /// Configuration file
        #[arg(default_value = DEFAULT_PATH)]
        file: PathBuf,
    },
    /// Make a backend a lame duck: clients are notified at once and open no new connection to it
    ///
    /// The backend stays a lame duck until `ready`, even if the agent restarts.
    LameDuck {
        /// Backend, as in 10.0.0.1:8080 or 10.0.0.1:53/udp [default: all backends of this host]
        #[arg(value_parser = name::parse)]
        backend: Option<Name>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Undo `lame-duck`: readiness again follows the health check or the backend's program
    Ready {
        /// Backend [default: all backends of this host]
        #[arg(value_parser = name::parse)]
        backend: Option<Name>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the backends: readiness with its reason, load, and subscribed clients
    ///
    /// Exit codes: 0 all shown backends are ready and there is no fault; 3 a shown backend is not
    /// ready, or there is a fault; 1 no agent answers; 4 no permission.
    Status {
        /// Show only this backend [default: all backends of this host]
        #[arg(value_parser = name::parse)]
        backend: Option<Name>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Report the load of an application; while the report is valid, it takes precedence over
    /// measured load
    Report(LoadReportOptions),
    /// Print the lines of a key file: a new key of a service, or a backend's key derived from the
    /// service's key
    ///
    /// Client hosts need the service's key (`[reports] key`); a backend's host needs only the
    /// backend's key. Store keys in files of mode 0640 at most. If the command fails, a file to
    /// which a shell redirects the output is empty, whatever the file contained before.
    Key {
        /// Number of the new key
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..), conflicts_with = "of")]
        id: u16,
        /// Key file of the service, from which the backend's keys are derived
        #[arg(long, value_name = "FILE", requires = "backend")]
        of: Option<PathBuf>,
        /// Backend, as in 10.0.0.1:8080 or 10.0.0.1:53/udp
        #[arg(requires = "of", value_parser = name::parse)]
        backend: Option<Name>,
    },
}

/// Options of `socklb agent serve`
#[derive(Debug, Args)]
pub struct Serve {
    /// Configuration file [default: /etc/socklb/agent.toml, without --backend]
    pub file: Option<PathBuf>,
    /// Address at which to listen, for UDP and TCP; may be given several times
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Vec<SocketAddr>,
    /// Serve only this backend, without a configuration file
    #[arg(long, value_name = "BACKEND", conflicts_with = "file", requires = "key", value_parser = name::parse)]
    pub backend: Option<Name>,
    /// Key file of the backend
    #[arg(long, value_name = "FILE", requires = "backend")]
    pub key: Option<PathBuf>,
    /// Health check of the backend: tcp, tcp:ADDRESS, /PATH, http://ADDRESS/PATH, exec:COMMAND or
    /// off [default: tcp]
    #[arg(long, value_name = "CHECK", requires = "backend")]
    pub check: Option<String>,
}

/// Options of `socklb agent report`
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("said").required(true).multiple(true).args(["utilization", "qps", "eps"]))]
pub struct LoadReportOptions {
    /// Utilization: the used part of the capacity, 0 to 1, or above 1 if requests wait
    #[arg(long, value_name = "SHARE", allow_negative_numbers = true)]
    pub utilization: Option<f64>,
    /// Requests per second
    #[arg(long, value_name = "RATE", allow_negative_numbers = true)]
    pub qps: Option<f64>,
    /// Errors per second
    #[arg(long, value_name = "RATE", allow_negative_numbers = true)]
    pub eps: Option<f64>,
    /// Backend, if this host has several
    #[arg(long, value_parser = name::parse)]
    pub backend: Option<Name>,
    /// How long the report is valid, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 10_000)]
    pub valid_for: u64,
    /// Time over which the load was measured, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 1_000)]
    pub window: u64,
}

/// Directories from the command line, which override the directories of the configuration.
#[derive(Clone, Debug, Default)]
pub struct Directories {
    /// Directory of the control socket.
    pub run: Option<PathBuf>,
    /// Directory of the state that is stored for the next start.
    pub state: Option<PathBuf>,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Ended {
    /// Text to print.
    pub text: String,
    pub code: u8,
    /// How the command of `agent run` has ended. This process ends in the same way.
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
/// If the command fails. A [`config::ConfigError`] among the causes contains the faults of a file.
/// An [`std::io::Error`] of kind `PermissionDenied` means that this user may not run the command.
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
            operator("/v1/ready", "lame-duck undone", backend, json, directories)
        }
        AgentCommand::Status { backend, json } => status(backend, json, directories),
        AgentCommand::Report(report) => report_load(&report, directories),
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

/// The directory of the control socket: from the command line, else from the configuration at the
/// default path, else the default directory.
fn client_directory(directories: &Directories) -> Result<PathBuf> {
    Ok(match &directories.run {
        Some(run) => std::path::absolute(run)?,
        // If the file is missing, faulty or not readable for this user, the default applies.
        None => config::read(Path::new(DEFAULT_PATH)).unwrap_or_default().run,
    })
}

fn client(directories: &Directories) -> Result<Client> {
    Ok(Client::new(&client_directory(directories)?))
}

fn init_log(format: LogFormat) {
    lb_host::log::init(format == LogFormat::Json, Style::for_stderr().colour);
}

/// Runs a future to its end, in a new runtime.
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
    let parameters: Vec<_> = backend.map(|backend| ("backend", backend.to_string())).into_iter().collect();
    let client = client(directories)?;
    let accepted: AcceptedReport = wait(client.post(path, &parameters))??;
    if json {
        return Ok(Ended::well(json_document(&accepted)?));
    }
    let waiting = match accepted.unheard {
        0 if accepted.is_new => {
            "; the agent has just begun to report the backend, and some clients may not have sent a request yet"
                .to_owned()
        }
        0 => String::new(),
        1 => "; 1 client has not acknowledged the change yet".to_owned(),
        count => format!("; {count} clients have not acknowledged the change yet"),
    };
    Ok(Ended::well(format!("{}: {what}{waiting}\n", accepted.backends.join(", "))))
}

fn json_document(value: &impl Serialize) -> Result<String> {
    Ok(escaped_in_json(&serde_json::to_string_pretty(value)?).into_owned() + "\n")
}

fn status(backend: Option<Name>, json: bool, directories: &Directories) -> Result<Ended> {
    let client = client(directories)?;
    let mut status: status::AgentStatus = wait(client.get("/v1/status"))??;
    if let Some(name) = backend.map(|name| name.to_string()) {
        let all: Vec<String> = status.backends.iter().map(|backend| backend.backend.clone()).collect();
        status.backends.retain(|backend| backend.backend == name);
        if status.backends.is_empty() {
            return Err(anyhow!("there is no backend {name} here, only {}", list(&all)));
        }
    }
    let text = if json { json_document(&status)? } else { status.text(Style::for_stdout()) };
    Ok(Ended { code: if status.is_good() { 0 } else { DEGRADED }, ..Ended::well(text) })
}

fn report_load(report: &LoadReportOptions, directories: &Directories) -> Result<Ended> {
    let mut parameters =
        vec![("valid_for_ms", report.valid_for.to_string()), ("window_ms", report.window.to_string())];
    parameters.extend(report.utilization.map(|number| ("utilization", number.to_string())));
    parameters.extend(report.qps.map(|number| ("qps", number.to_string())));
    parameters.extend(report.eps.map(|number| ("eps", number.to_string())));
    parameters.extend(report.backend.map(|backend| ("backend", backend.to_string())));
    let client = client(directories)?;
    let _: AcceptedReport = wait(client.post("/v1/report", &parameters))??;
    Ok(Ended::well(""))
}

impl Serve {
    /// The configuration from the file or from the options.
    ///
    /// # Errors
    /// If the configuration cannot be read, or an option is invalid.
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
        let path = self.key.as_ref().context("--key is missing (the file with the backend's keys)")?;
        let mut backend = BackendConfig::new(name, read_key_file(path)?);
        backend.check = match self.check.as_deref() {
            Some("off") => None,
            None if name.protocol() == lb_core::service::Protocol::Udp => {
                return Err(anyhow!("--check is missing: a TCP connection cannot check a UDP backend"));
            }
            text => {
                let check = CheckMethod::parse(text.unwrap_or("tcp"), name)
                    .map_err(|why| anyhow!("--check: {why}"))?;
                Some(HealthCheck::new(check))
            }
        };
        // The key file is not watched, because without a configuration file there is no reload.
        Ok(BackendConfig { key_file: None, ..backend })
    }
}

/// How long the end of a socklb command waits for threads that block, for example in a file system.
const STOPPING: Duration = Duration::from_secs(2);
