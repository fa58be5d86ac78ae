//! Reports through the host's agent. The program has a registration, and a task renews it regularly
//! to show that the program is alive.
//!
//! An agent that was restarted has no registrations. The task then registers again and repeats the
//! last report, so the program need not handle a restart of the agent.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use lb_document::diagnostic::chain;
use lb_report::agent::name::Name;
use lb_report::agent::word;
use lb_report::keys::{BackendKey, Keys};
use lb_report::wire::Readiness;
use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::{info, warn};

use super::ReadinessReporter;
use crate::config::read_key_file;
use crate::control::{Client, ClientError};
use crate::keys;
use crate::serve::query::AcceptedReport;
use crate::serve::registrations::{LEASE, draw};
use crate::utilization::{own_cgroup, own_tree};

/// Reports the readiness of one backend through the host's agent. If the program ends without
/// [`RemoteReporter::leave`], the agent treats the program as dead.
pub struct RemoteReporter {
    link: Arc<Mutex<Link>>,
    showing: JoinHandle<()>,
    following: Option<JoinHandle<()>>,
}

/// The interval at which the program renews its registration and reads its key file again.
const SHOWN: Duration = Duration::from_millis(LEASE.as_secs() * 1000 / 3);

/// How long a program retries to register a backend. This time is longer than the agent takes to
/// detect that a program was killed, and longer than a service manager takes to restart an agent.
pub const CLAIM: Duration = Duration::from_secs(LEASE.as_secs() + 1);

/// Pause between two attempts to register.
const PAUSE: Duration = Duration::from_millis(200);

/// The state of the registration. The mutex around this state allows one request at a time.
struct Link {
    client: Client,
    backend: Name,
    keys: Option<Keys<BackendKey>>,
    /// The fault of the key file; `None` if the file has no fault, or if there is no file to watch.
    key_fault: Option<String>,
    readiness: Readiness,
    /// A random number, drawn once. If an answer was lost and the program registers again, the
    /// agent recognizes the program by this number.
    registration: u64,
    is_registered: bool,
}

impl RemoteReporter {
    /// Registers with the agent that has its control socket in the directory `run`. `keys` are the
    /// backend's keys if the agent's configuration does not have the backend. If a later attempt
    /// may succeed, retries for up to `patience`.
    ///
    /// # Errors
    /// If no agent answers in this directory, if the agent refuses the registration, or if another
    /// program runs the backend.
    pub async fn register(
        run: &Path,
        backend: Name,
        keys: Option<Keys<BackendKey>>,
        readiness: Readiness,
        patience: Duration,
    ) -> Result<Self, ClientError> {
        let client = Client::new(run);
        let registration = draw().map_err(ClientError::Number)?;
        let mut link =
            Link { client, backend, keys, key_fault: None, readiness, registration, is_registered: false };
        let deadline = Instant::now() + patience;
        let mut has_warned = false;
        // Bound: the deadline.
        while let Err(error) = link.register().await {
            if !link.may_succeed_later(&error) || Instant::now() >= deadline {
                return Err(error);
            }
            if !std::mem::replace(&mut has_warned, true) {
                warn!(%backend, %error, "cannot register with the agent yet; retrying for {} s", patience.as_secs());
            }
            tokio::time::sleep(PAUSE).await;
        }
        let link = Arc::new(Mutex::new(link));
        let showing = tokio::spawn(show(Arc::clone(&link)));
        Ok(Self { link, showing, following: None })
    }

    /// Reads the key file regularly from now on. If the keys have changed, sends the new keys to
    /// the agent.
    pub async fn follow(&mut self, key_file: PathBuf) {
        let read = keys_in(key_file.clone()).await;
        self.link.lock().await.take_keys(read).await;
        let following = tokio::spawn(follow(Arc::clone(&self.link), key_file));
        if let Some(before) = self.following.replace(following) {
            before.abort();
        }
    }

    fn stop_showing(&self) {
        self.showing.abort();
        self.following.iter().for_each(JoinHandle::abort);
    }

    /// Releases the backend. Clients continue to use its last report.
    ///
    /// # Errors
    /// If the agent does not accept the release. The agent then treats this program as dead.
    pub async fn leave(self) -> Result<(), ClientError> {
        self.stop_showing();
        let mut link = self.link.lock().await;
        link.is_registered = false;
        // The request is sent even if the registration is uncertain, because an answer may have
        // been lost.
        let parameters = [("registration", link.registration.to_string())];
        match link.client.post::<AcceptedReport>("/v1/unregister", &parameters).await {
            Err(ClientError::Absent(_)) => Ok(()),
            accepted => accepted.map(drop),
        }
    }
}

impl Drop for RemoteReporter {
    fn drop(&mut self) {
        self.stop_showing();
    }
}

impl ReadinessReporter for RemoteReporter {
    async fn report(&mut self, readiness: Readiness) -> anyhow::Result<()> {
        let mut link = self.link.lock().await;
        // The readiness is stored even if the request fails now, because the task then reports it
        // as soon as the agent answers.
        link.readiness = readiness;
        link.refresh().await?;
        Ok(())
    }

    async fn unacknowledged(&mut self) -> anyhow::Result<usize> {
        Ok(self.link.lock().await.refresh().await?.awaited())
    }
}

impl Link {
    /// Whether a retry may succeed. If the backend is taken, its program may have been killed, and
    /// the agent detects this after a while. If no agent runs on a host that should have an agent,
    /// an agent may be starting. A program without keys cannot report by itself, so it always
    /// retries if no agent runs.
    fn may_succeed_later(&self, error: &ClientError) -> bool {
        match error {
            ClientError::Taken(_)
            | ClientError::TimedOut(_)
            | ClientError::Stopping(_)
            | ClientError::Unreadable(_) => true,
            ClientError::NotRunning(_) => self.keys.is_none() || self.client.is_expected(),
            ClientError::Connect { .. }
            | ClientError::Untrusted(_)
            | ClientError::Forbidden(_)
            | ClientError::Absent(_)
            | ClientError::Refused(_)
            | ClientError::Number(_) => false,
        }
    }

    async fn register(&mut self) -> Result<AcceptedReport, ClientError> {
        let mut parameters = vec![
            ("backend", self.backend.to_string()),
            ("registration", self.registration.to_string()),
            ("readiness", word(self.readiness).to_owned()),
        ];
        // A path identifies a cgroup only within one tree, so the request contains the path and its
        // tree. An empty path, which is the root of a container's tree, is not sent.
        let cgroup = own_cgroup().filter(|cgroup| !cgroup.as_os_str().is_empty());
        let cgroup = cgroup.and_then(|cgroup| cgroup.into_os_string().into_string().ok());
        if let (Some(cgroup), Some(tree)) = (cgroup, own_tree()) {
            parameters.extend([("cgroup", cgroup), ("cgroup_tree", tree)]);
        }
        parameters.extend(self.keys.as_ref().map(|keys| ("keys", keys::lines(keys))));
        let accepted: AcceptedReport = self.client.post("/v1/register", &parameters).await?;
        self.is_registered = true;
        Ok(accepted)
    }

    /// Handles the result of reading the key file. If the keys have changed, registers again with
    /// the new keys. If the file has a fault or the agent refuses the keys, the earlier keys stay
    /// in use.
    async fn take_keys(&mut self, read: Result<Keys<BackendKey>, String>) {
        let fault = match read {
            Ok(keys) if self.keys.as_ref() == Some(&keys) => None,
            Ok(keys) => {
                info!(backend = %self.backend, "the key file has changed");
                let before = self.keys.replace(keys);
                match self.register().await {
                    Ok(_) => None,
                    Err(ClientError::Refused(why)) => {
                        self.keys = before;
                        Some(why)
                    }
                    Err(_) => {
                        // The next request registers again, with the new keys.
                        self.is_registered = false;
                        None
                    }
                }
            }
            Err(error) => Some(error),
        };
        if let Some(error) = fault.as_ref().filter(|_| self.key_fault != fault) {
            warn!(backend = %self.backend, error, "cannot use the key file; the earlier keys stay in force");
        }
        self.key_fault = fault;
    }

    /// Reports the current readiness, which also shows that this program is alive. Registers again
    /// if the agent has no such registration.
    async fn refresh(&mut self) -> Result<AcceptedReport, ClientError> {
        if !self.is_registered {
            return self.register().await;
        }
        let parameters =
            [("registration", self.registration.to_string()), ("readiness", word(self.readiness).to_owned())];
        match self.client.post("/v1/readiness", &parameters).await {
            Err(ClientError::Absent(_)) => {
                self.is_registered = false;
                let accepted = self.register().await?;
                info!(backend = %self.backend, "registered again with the agent");
                Ok(accepted)
            }
            accepted => accepted,
        }
    }
}

/// Renews the registration at intervals, until the reporter is dropped.
async fn show(link: Arc<Mutex<Link>>) {
    let mut ticks = tokio::time::interval(SHOWN);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut has_failed = false;
    loop {
        ticks.tick().await;
        let mut link = link.lock().await;
        match link.refresh().await {
            Ok(_) => has_failed = false,
            Err(error) => {
                if !has_failed {
                    warn!(backend = %link.backend, %error, "cannot report the readiness to the agent; retrying");
                }
                has_failed = true;
            }
        }
    }
}

/// Reads the key file at intervals, until the reporter is dropped. This is a separate task that
/// holds no lock while it reads, because a file system may hang.
async fn follow(link: Arc<Mutex<Link>>, key_file: PathBuf) {
    let mut ticks = tokio::time::interval(SHOWN);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let read = keys_in(key_file.clone()).await;
        link.lock().await.take_keys(read).await;
    }
}

/// The keys in a file, or the reason why they cannot be used.
async fn keys_in(file: PathBuf) -> Result<Keys<BackendKey>, String> {
    let read = tokio::task::spawn_blocking(move || read_key_file(&file).map_err(|error| chain(&error)));
    read.await.unwrap_or_else(|error| Err(error.to_string()))
}
