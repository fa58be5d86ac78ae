//! How the daemon starts and ends.
//!
//! A start is the first reload, of a daemon that has no client yet. What is wrong with one client does not fail the
//! start and is tried again; it fails only for what is wrong with the host, or if no client can be started. At its end
//! the daemon gives up what a successor needs before it waits for anything.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use lb_kernel::{DatapathError, Features};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tracing::{info, warn};

use super::loader::Loaded;
use super::opening::Opened;
use super::{Daemon, Event, fixed};
use lb_http::peer;

use crate::api::{self, Query};
use crate::config::{Config, Metrics};
use crate::descriptors;
use crate::metrics;

/// Checks what the host has, independent of the clients: the kernel's features, cgroup2 and the bpffs.
///
/// # Errors
/// If socklb cannot run here, or not as this user.
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

/// The socket, and the port for metrics if one is configured. Both are bound before anything is changed in the kernel, so
/// that a failure to bind changes nothing, and they accept once the daemon can answer.
pub struct Listeners {
    path: PathBuf,
    queries: mpsc::Sender<Query>,
    /// The group whose members may write.
    admins: Option<u32>,
    bound: Option<(api::Bound, Option<TcpListener>)>,
    /// The names that requests may give the port for metrics.
    metrics: Metrics,
    servers: Vec<JoinHandle<()>>,
    /// Connections at a time, for each of the two.
    connections: usize,
}

impl Listeners {
    /// Binds them.
    ///
    /// # Errors
    /// If another process has the socket or the port, or the directory of the socket cannot be written or is not
    /// trusted.
    pub fn bind(config: &Config, queries: mpsc::Sender<Query>) -> Result<Self> {
        let (limit, clients) = (descriptors::raise(), config.clients.len() as u64);
        if let Some(shortage) = descriptors::shortage(limit, clients) {
            warn!("{shortage}");
        }
        let connections = descriptors::connections_limit(limit, clients);
        let path = api::socket(&config.paths.run);
        let admins = config.admins.as_deref().map(group_number).transpose()?;
        let bound = api::bind(&config.paths.run, admins)
            .with_context(|| format!("create the socket {}", path.display()))?;
        let port = config.metrics.listen.map(|port| {
            metrics::bind(port)
                .with_context(|| format!("listen on {port}, which [metrics] in the configuration names"))
        });
        let bound = Some((bound, port.transpose()?));
        let metrics = config.metrics.clone();
        Ok(Self { path, queries, admins, bound, metrics, servers: Vec::new(), connections })
    }

    /// Begins to accept. Returns whether it had not before.
    ///
    /// # Errors
    /// If the socket cannot be given its path.
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

    /// Stops accepting, and frees the socket and the port for a successor.
    async fn close(self) {
        // Removed before the listener is closed: until then no other daemon can have put its socket at the path.
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

/// The number of the group that `[admin]` names.
fn group_number(name: &str) -> Result<u32> {
    let number = peer::group_number(name).with_context(|| format!("look up the group {name} of [admin]"))?;
    number.with_context(|| {
        format!("[admin] names the group {name}, and there is none (groupadd {name}, or leave it out)")
    })
}

/// Gives up, within seconds and whatever hangs, all that a successor needs: the sockets, the locks of all clients, and
/// what the service manager was told. Threads that a hanging file system holds may keep the process and its descriptors
/// for longer.
pub async fn stop(daemon: Daemon, listeners: Listeners, mut inbox: mpsc::Receiver<Event>) {
    /// A client that is being opened holds its lock, for tens of milliseconds.
    const PATIENCE: Duration = Duration::from_secs(1);
    daemon.stopping.store(true, Ordering::Relaxed);
    daemon.notifier.stopping();
    listeners.close().await;
    let Daemon { clients, notifier, events, .. } = daemon;
    drop((clients, events));
    // Clients that are being opened come in, and their locks are dropped. The channel ends when all senders are gone.
    let emptied = async { while inbox.recv().await.is_some() {} };
    let _ = tokio::time::timeout(PATIENCE, emptied).await;
    drop(inbox);
    notifier.finish();
}

impl Daemon {
    /// Begins the start with the configuration that was read for it.
    pub fn begin(&mut self, config: Config, now: Instant) {
        self.resume_leaving(&config, now);
        self.load_given(config, now);
    }

    /// Takes the first configuration on.
    ///
    /// # Errors
    /// If no client can be started.
    pub fn first_loaded(&mut self, loaded: Loaded, now: Instant) -> Result<()> {
        if !loaded.opened.iter().any(|opened| opened.result.is_ok()) {
            return Err(why_none(loaded.opened, &self.config));
        }
        self.is_ready = true;
        self.loaded(loaded, now);
        let pins = self.config.paths.pins.display();
        let socket = api::socket(&self.config.paths.run);
        let (features, missing) = (self.features.names(true), self.features.names(false));
        info!(%pins, socket = %socket.display(), features, missing, "running");
        self.reclaim_flows(now);
        Ok(())
    }
}

/// Why no client at all can be started: the errors of all clients at once.
fn why_none(opened: Vec<Opened>, config: &Config) -> anyhow::Error {
    let mut faults: Vec<(String, anyhow::Error)> =
        opened.into_iter().filter_map(|opened| Some((opened.client.name, opened.result.err()?))).collect();
    if let [(client, _)] = &faults[..] {
        let what = format!("start client {client}");
        return faults.remove(0).1.context(what);
    }
    let mut text = format!("none of {} clients can be started:", faults.len());
    for (client, error) in &faults {
        text.push_str(&format!("\n  client {client}: {error:#}"));
    }
    let is_shape = |error: &anyhow::Error| {
        error.chain().any(|cause| cause.downcast_ref::<DatapathError>().is_some_and(DatapathError::is_shape))
    };
    let of_another_shape: Vec<&str> =
        faults.iter().filter(|(_, error)| is_shape(error)).map(|(client, _)| client.as_str()).collect();
    if of_another_shape.len() > 1 {
        let remove = fixed::remove_all(&of_another_shape, &config.paths.pins);
        text.push_str(&format!("\nto remove all that have another shape: {remove}"));
    }
    let denied = |error: &anyhow::Error| crate::error::is_permission(error);
    // Whether a privilege is missing is looked up in the causes.
    match faults.into_iter().find(|(_, error)| denied(error)) {
        Some((_, error)) => error.context(text),
        None => anyhow!(text),
    }
}
