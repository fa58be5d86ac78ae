//! The start and the end of the daemon.
//!
//! The daemon starts only if the host has the features that socklb requires. When the daemon ends,
//! it first releases everything that a successor needs, and only then waits for its own threads.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use lb_kernel::{DatapathError, Features};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tracing::warn;

use lb_host::notify::Notifier;
use lb_http::peer;

use crate::api::{self, ControllerQuery};
use crate::config::{Config, Metrics};
use crate::controller::{Controller, Event};
use crate::descriptors;
use crate::metrics;

/// Checks whether the host can run socklb, regardless of the configured clients: features of the
/// kernel, cgroup2, bpffs.
///
/// # Errors
/// If socklb cannot run on this host or as this user.
pub fn check_host(config: &Config) -> Result<Features> {
    if let Some(warning) = lb_kernel::namespace_warning() {
        warn!("{warning}");
    }
    let features = lb_kernel::probe()?;
    lb_kernel::cgroup2_mount()?;
    if !lb_kernel::host(&config.paths.pins).bpffs {
        return Err(DatapathError::NoBpffs(config.paths.pins.clone()).into());
    }
    Ok(features)
}

/// The daemon's socket, and the metrics port if one is configured. Both are bound before any change
/// in the kernel, so that a failure to bind changes nothing. They accept connections once the
/// daemon can answer.
pub struct Listeners {
    path: PathBuf,
    queries: mpsc::Sender<ControllerQuery>,
    /// Members of this group, root and the daemon's user may send commands that change state.
    admins: Option<u32>,
    bound: Option<(api::Bound, Option<TcpListener>)>,
    /// The configuration of the metrics port, with the host names that requests to the port may
    /// use.
    metrics: Metrics,
    servers: Vec<JoinHandle<()>>,
    /// The maximum number of simultaneous connections of each of the two listeners.
    connections: usize,
}

impl Listeners {
    /// # Errors
    /// If another process uses the socket or the port, or the directory of the socket cannot be
    /// written or is not trusted.
    pub fn bind(config: &Config, queries: mpsc::Sender<ControllerQuery>) -> Result<Self> {
        let (limit, clients) = (descriptors::raise(), config.clients.len() as u64);
        if let Some(shortage) = descriptors::shortage(limit, clients) {
            warn!("{shortage}");
        }
        let connections = descriptors::connections_limit(limit, clients);
        let path = api::socket(&config.paths.run);
        let admins = config.admins.as_deref().map(group_number).transpose()?;
        let bound = api::bind(&config.paths.run, admins)
            .with_context(|| format!("create the socket {}", path.display()))?;
        let port = config
            .metrics
            .listen
            .map(|port| metrics::bind(port).with_context(|| format!("listen on {port} ([metrics] listen)")));
        let bound = Some((bound, port.transpose()?));
        let metrics = config.metrics.clone();
        Ok(Self { path, queries, admins, bound, metrics, servers: Vec::new(), connections })
    }

    /// Starts to accept connections. Returns `false` if an earlier call has done so.
    ///
    /// # Errors
    /// If the socket cannot be renamed to its path.
    pub fn open(&mut self) -> Result<bool> {
        let Some((bound, port)) = self.bound.take() else { return Ok(false) };
        let listener = bound.show().with_context(|| format!("create the socket {}", self.path.display()))?;
        let metrics = metrics::router(&self.queries);
        if let Some(port) = port {
            let router = metrics::for_names_of(&self.metrics, metrics.clone());
            self.servers.push(tokio::spawn(lb_http::serve(port, router, self.connections)));
        }
        let router = api::router(&self.queries, self.admins).merge(metrics);
        self.servers.push(tokio::spawn(lb_http::serve(listener, router, self.connections)));
        Ok(true)
    }

    /// Stops accepting connections, and frees the socket and the port for a successor.
    async fn close(self) {
        // The path is removed before the listener is closed. Until the listener is closed, no other
        // daemon can have put its own socket at this path.
        if self.bound.is_none() {
            let _ = std::fs::remove_file(&self.path);
        }
        for server in &self.servers {
            server.abort();
        }
        for server in self.servers {
            let _ = server.await;
        }
    }
}

fn group_number(name: &str) -> Result<u32> {
    let number = peer::group_number(name).with_context(|| format!("look up the group {name} of [admin]"))?;
    number.with_context(|| {
        format!("[admin] names the group {name}, which does not exist (create it with `groupadd {name}`, or remove it from [admin])")
    })
}

/// Ends the daemon. Within seconds, even if a file system hangs, this closes the sockets, releases
/// the locks of all clients, and notifies the service manager, so that a successor can start. The
/// process itself may end later, if a thread is blocked by a file system that does not answer.
pub async fn stop(
    controller: Controller,
    stopping: &AtomicBool,
    notifier: Notifier,
    listeners: Listeners,
    events: mpsc::Sender<Event>,
    mut inbox: mpsc::Receiver<Event>,
) {
    /// How long to wait for clients that are being opened. To open a client takes tens of
    /// milliseconds, and the client's lock is held during this time.
    const PATIENCE: Duration = Duration::from_secs(1);
    stopping.store(true, Ordering::Relaxed);
    notifier.stopping();
    listeners.close().await;
    drop((controller, events));
    // Clients that have just been opened arrive here and are dropped, which releases their locks.
    // The channel ends when all senders are gone.
    let emptied = async { while inbox.recv().await.is_some() {} };
    let _ = tokio::time::timeout(PATIENCE, emptied).await;
    drop(inbox);
    notifier.finish();
}
