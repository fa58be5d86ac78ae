//! `socklb agent serve`: runs an agent until a signal ends it.

use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use rustix::thread::{CapabilitySet, configure_capability_in_ambient_set};
use tokio::signal::unix::{SignalKind, signal};
use tracing::info;

use super::{Directories, STOPPING, Serve, init_log};
use crate::config::AgentConfig;
use crate::serve::{Reread, Role, start};

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// If the configuration cannot be used, or the agent cannot be started.
pub fn run(what: Serve, directories: Directories) -> Result<()> {
    let config = what.config(&directories)?;
    // The options of the command line also apply when the file is read again.
    let log_format = config.log_format;
    let reread: Option<Reread> = match config.path {
        Some(_) => Some(Arc::new(move || what.config(&directories))),
        None => None,
    };
    init_log(log_format);
    drop_ambient_capabilities();
    // The event loop is one task. A second thread serves HTTP and does work that blocks for a
    // moment.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let served = runtime.block_on(serve(config, reread));
    // A thread that waits for a file system must not delay the end of this process.
    runtime.shutdown_timeout(STOPPING);
    served
}

/// Removes the capabilities that `[xdp]` needs from the ambient set, so that the command of a
/// health check does not inherit them. The change applies to the calling thread and to all threads
/// that it starts.
fn drop_ambient_capabilities() {
    for capability in [CapabilitySet::BPF, CapabilitySet::NET_ADMIN, CapabilitySet::PERFMON] {
        // The call fails if the kernel does not have the capability. In this case, no process can
        // inherit the capability.
        let _ = configure_capability_in_ambient_set(capability, false);
    }
}

async fn serve(config: AgentConfig, reread: Option<Reread>) -> Result<()> {
    let listen = |kind| signal(kind).context("install a signal handler");
    let (mut hangup, mut terminate, mut interrupt) =
        (listen(SignalKind::hangup())?, listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
    let mut agent = start(config, Role::Host, reread).await?;
    // Runs until a signal arrives.
    loop {
        tokio::select! {
            _ = hangup.recv() => agent.reload().await,
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            () = agent.ended() => bail!("the agent's event loop has ended"),
        }
    }
    info!("stopping; clients continue to use the last report of each backend");
    agent.stop().await;
    Ok(())
}
