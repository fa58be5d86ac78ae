//! `socklb agent run`: runs a command as a backend, with the host's agent or with its own agent.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use lb_document::LogFormat;
use lb_report::agent::name::Name;
use lb_report::wire::Readiness;
use tokio::sync::Mutex;
use tracing::{info, warn};

use super::{Directories, client_directory, init_log};
use crate::config::{AgentConfig, BackendConfig, read_key_file};
use crate::control::ClientError;
use crate::reporter::{CLAIM, LocalReporter, ReadinessReporter, RemoteReporter};
use crate::run::{self, ProcessStatus, Signals};
use crate::serve::{Role, start};

/// Options of `socklb agent run`
#[derive(Debug, Args)]
pub struct Run {
    /// Backend, as in 10.0.0.1:8080 or 10.0.0.1:53/udp
    #[arg(long, value_name = "BACKEND", value_parser = crate::name::parse)]
    pub backend: Name,
    /// Key file of the backend, if the backend is not in the configuration of the host's agent
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Address at which to answer clients if this host runs no agent; may be given several times
    /// [default: port 9465]
    #[arg(long, value_name = "ADDRESS", requires = "key")]
    pub listen: Vec<std::net::SocketAddr>,
    /// Format of the log's lines: text or json
    #[arg(long, value_name = "FORMAT", default_value = LogFormat::Text.name())]
    pub log_format: LogFormat,
    #[command(flatten)]
    args: run::Args,
}

/// Runs the command to its end.
///
/// # Errors
/// If no agent can report the backend. The command is not started in that case.
pub fn run(what: Run, directories: &Directories) -> Result<ProcessStatus> {
    init_log(what.log_format);
    let keys = what.key.as_deref().map(read_key_file).transpose()?;
    let run_directory = client_directory(directories)?;
    let Run { backend, key, listen, log_format: _, args } = what;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let ended = runtime.block_on(async {
        let mut signals = Signals::take().context("install signal handlers")?;
        let unknown = Readiness::Unknown;
        let registered = tokio::select! {
            registered = RemoteReporter::register(&run_directory, backend, keys.clone(), unknown, CLAIM) => registered,
            signal = signals.end_requested() => {
                info!(%backend, %signal, "a signal arrived before the command was started");
                return Ok(ProcessStatus::Killed(signal));
            }
        };
        match registered {
            Ok(mut reporter) => {
                if let Some(path) = key {
                    reporter.follow(path).await;
                }
                let reporter = Arc::new(Mutex::new(reporter));
                let ended = run_as(args, backend, signals, SharedReporter(Arc::clone(&reporter))).await;
                if let Some(reporter) = Arc::into_inner(reporter)
                    && let Err(error) = reporter.into_inner().leave().await
                {
                    warn!(%backend, %error, "cannot release the backend at the agent; the agent will treat the backend's program as dead");
                }
                Ok(ended)
            }
            Err(ClientError::NotRunning(_)) => {
                let keys = keys.context(
                    "no agent runs on this host, and --key is missing: name the file of the backend's keys, so that this process \
                     can answer clients itself",
                )?;
                info!(%backend, "no agent runs on this host; this process answers clients itself");
                let listen = (!listen.is_empty()).then_some(listen);
                let backends = vec![BackendConfig::new(backend, keys)];
                let agent = start(AgentConfig { listen, backends, ..AgentConfig::default() }, Role::Within, None).await?;
                let reporter = LocalReporter::new(&agent, backend, unknown).await?;
                let ended = run_as(args, backend, signals, reporter).await;
                // Clients receive the final report in this time.
                agent.wait_acknowledged(LAST_WORD).await;
                agent.stop().await;
                Ok(ended)
            }
            Err(error) => Err(anyhow::Error::new(error)),
        }
    });
    runtime.shutdown_timeout(super::STOPPING);
    ended
}

/// Time for clients to receive the final readiness of the backend. The agent sends all pushes of a
/// change within this time.
const LAST_WORD: Duration = Duration::from_millis(200);

async fn run_as(
    args: run::Args,
    backend: Name,
    signals: Signals,
    reporter: impl ReadinessReporter + 'static,
) -> ProcessStatus {
    run::run(args, backend.protocol(), backend.address(), signals, reporter).await
}

/// A reporter that the caller shares with `run::run`, so that the caller can release the backend
/// afterwards.
struct SharedReporter(Arc<Mutex<RemoteReporter>>);

impl ReadinessReporter for SharedReporter {
    async fn report(&mut self, readiness: Readiness) -> Result<()> {
        self.0.lock().await.report(readiness).await
    }

    async fn unacknowledged(&mut self) -> Result<usize> {
        self.0.lock().await.unacknowledged().await
    }
}
