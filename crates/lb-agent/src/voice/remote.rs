//! A voice by the host's agent: a registration, and a task that shows again and again that this program lives.
//!
//! An agent that is started anew has forgotten who is registered. The task tells it what was said last, so that a restart of the
//! agent is no event for the program.

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

use super::Voice;
use crate::client::{Client, ClientError};
use crate::config::read_key_file;
use crate::keys;
use crate::serve::query::AcceptedReport;
use crate::serve::registrations::{LEASE, draw};
use crate::utilization::{own_cgroup, own_tree};

/// Speaks for one backend by the host's agent. Without a farewell ([`RemoteVoice::leave`]) the agent takes the program for dead.
pub struct RemoteVoice {
    link: Arc<Mutex<Link>>,
    showing: JoinHandle<()>,
    following: Option<JoinHandle<()>>,
}

/// How often the program shows that it lives, and looks at its file of keys.
const SHOWN: Duration = Duration::from_millis(LEASE.as_secs() * 1000 / 3);

/// For how long a program tries to register a backend: longer than the agent takes to notice that a program was killed, and than a
/// service manager takes to start an agent again.
pub const CLAIM: Duration = Duration::from_secs(LEASE.as_secs() + 1);

/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(200);

/// What is known of the registration. One request at a time.
struct Link {
    client: Client,
    backend: Name,
    keys: Option<Keys<BackendKey>>,
    /// What is wrong with the file of keys, if it is followed.
    key_fault: Option<String>,
    said: Readiness,
    /// Drawn once: who registers again because an answer was lost is known by it.
    registration: u64,
    is_registered: bool,
}

impl RemoteVoice {
    /// Registers with the agent that has this directory. The keys are for a backend that the agent's configuration does not have.
    /// Where it may succeed later it is tried on for so long.
    ///
    /// # Errors
    /// If no agent answers there, it refuses, or another program runs the backend.
    pub async fn register(
        run: &Path,
        backend: Name,
        keys: Option<Keys<BackendKey>>,
        readiness: Readiness,
        patience: Duration,
    ) -> Result<Self, ClientError> {
        let client = Client::new(run);
        let registration = draw().map_err(ClientError::Number)?;
        let mut link = Link {
            client,
            backend,
            keys,
            key_fault: None,
            said: readiness,
            registration,
            is_registered: false,
        };
        let deadline = Instant::now() + patience;
        let mut has_told = false;
        // Bound: the deadline.
        while let Err(error) = link.register().await {
            if !link.may_succeed_later(&error) || Instant::now() >= deadline {
                return Err(error);
            }
            if !std::mem::replace(&mut has_told, true) {
                warn!(%backend, %error, "not registered yet; trying for {} s", patience.as_secs());
            }
            tokio::time::sleep(PAUSE).await;
        }
        let link = Arc::new(Mutex::new(link));
        let showing = tokio::spawn(show(Arc::clone(&link)));
        Ok(Self { link, showing, following: None })
    }

    /// Gives the agent other keys as soon as the file has others, from now on.
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

    /// Gives the backend back. What was said last is what clients remember.
    ///
    /// # Errors
    /// If the agent cannot be told; it then takes this program for dead.
    pub async fn leave(self) -> Result<(), ClientError> {
        self.stop_showing();
        let mut link = self.link.lock().await;
        link.is_registered = false;
        // Also if it is not known to be registered: an answer may have been lost.
        let said = [("registration", link.registration.to_string())];
        match link.client.tell::<AcceptedReport>("/v1/unregister", &said).await {
            Err(ClientError::Absent(_)) => Ok(()),
            told => told.map(drop),
        }
    }
}

impl Drop for RemoteVoice {
    fn drop(&mut self) {
        self.stop_showing();
    }
}

impl Voice for RemoteVoice {
    async fn say(&mut self, readiness: Readiness) -> anyhow::Result<()> {
        let mut link = self.link.lock().await;
        // Also if it fails now: then the task says it as soon as the agent answers.
        link.said = readiness;
        link.tell().await?;
        Ok(())
    }

    async fn unheard(&mut self) -> anyhow::Result<usize> {
        Ok(self.link.lock().await.tell().await?.awaited())
    }
}

impl Link {
    /// Whether what failed may succeed in a moment: a program that was killed has its backend until the agent notices, and an agent
    /// that is expected here, or without which nobody can speak for the backend, is perhaps being started.
    fn may_succeed_later(&self, error: &ClientError) -> bool {
        match error {
            ClientError::Taken(_)
            | ClientError::Silent(_)
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
        let mut said = vec![
            ("backend", self.backend.to_string()),
            ("registration", self.registration.to_string()),
            ("readiness", word(self.said).to_owned()),
        ];
        // The root of a container's own tree is another cgroup for the agent, and so is what has the same path in another tree.
        let cgroup = own_cgroup().filter(|cgroup| !cgroup.as_os_str().is_empty());
        let cgroup = cgroup.and_then(|cgroup| cgroup.into_os_string().into_string().ok());
        if let (Some(cgroup), Some(tree)) = (cgroup, own_tree()) {
            said.extend([("cgroup", cgroup), ("cgroup_tree", tree)]);
        }
        said.extend(self.keys.as_ref().map(|keys| ("keys", keys::lines(keys))));
        let told: AcceptedReport = self.client.tell("/v1/register", &said).await?;
        self.is_registered = true;
        Ok(told)
    }

    /// The file of keys was read again. Others are given to the agent by registering again; a fault of the file, or an agent that
    /// refuses them, changes nothing.
    async fn take_keys(&mut self, read: Result<Keys<BackendKey>, String>) {
        let fault = match read {
            Ok(keys) if self.keys.as_ref() == Some(&keys) => None,
            Ok(keys) => {
                info!(backend = %self.backend, "its file has other keys");
                let before = self.keys.replace(keys);
                match self.register().await {
                    Ok(_) => None,
                    Err(ClientError::Refused(why)) => {
                        self.keys = before;
                        Some(why)
                    }
                    Err(_) => {
                        // It is told them when it answers.
                        self.is_registered = false;
                        None
                    }
                }
            }
            Err(error) => Some(error),
        };
        if let Some(error) = fault.as_ref().filter(|_| self.key_fault != fault) {
            warn!(backend = %self.backend, error, "the keys before stay in force");
        }
        self.key_fault = fault;
    }

    /// Says what holds, which also shows that this program lives; registers anew where the agent does not know it.
    async fn tell(&mut self) -> Result<AcceptedReport, ClientError> {
        if !self.is_registered {
            return self.register().await;
        }
        let said =
            [("registration", self.registration.to_string()), ("readiness", word(self.said).to_owned())];
        match self.client.tell("/v1/readiness", &said).await {
            Err(ClientError::Absent(_)) => {
                self.is_registered = false;
                let told = self.register().await?;
                info!(backend = %self.backend, "registered anew with the agent");
                Ok(told)
            }
            told => told,
        }
    }
}

/// Until the voice is dropped.
async fn show(link: Arc<Mutex<Link>>) {
    let mut ticks = tokio::time::interval(SHOWN);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut is_silent = false;
    loop {
        ticks.tick().await;
        let mut link = link.lock().await;
        match link.tell().await {
            Ok(_) => is_silent = false,
            Err(error) => {
                if !is_silent {
                    warn!(backend = %link.backend, %error, "the agent is not told how the backend is; trying on");
                }
                is_silent = true;
            }
        }
    }
}

/// Until the voice is dropped. A task of its own, which keeps nobody waiting while it reads: a file system may not answer.
async fn follow(link: Arc<Mutex<Link>>, key_file: PathBuf) {
    let mut ticks = tokio::time::interval(SHOWN);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let read = keys_in(key_file.clone()).await;
        link.lock().await.take_keys(read).await;
    }
}

/// The keys in a file, or why there are none.
async fn keys_in(file: PathBuf) -> Result<Keys<BackendKey>, String> {
    let read = tokio::task::spawn_blocking(move || read_key_file(&file).map_err(|error| chain(&error)));
    read.await.unwrap_or_else(|error| Err(error.to_string()))
}
