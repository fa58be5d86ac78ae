//! What the daemon tells: answers on its socket, and the service manager's notifications (sd_notify(3)).

use std::net::SocketAddr;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use lb_kernel::Cgroup;
use lb_kernel::peer::Peer;
use sd_notify::NotifyState;
use tokio::sync::oneshot;
use tracing::{info, warn};

use super::Daemon;
use lb_view::coverage::Coverage;
use lb_view::readmission::{self, Readmission, Readmitted};

use crate::api::Query;
use crate::configured::configured;
use crate::daemon::client_task::ClientTask;
use crate::explain;

/// A request that waits until a client's programs cover a cgroup.
pub struct Waiter {
    client: String,
    cgroups: Vec<u64>,
    answer: oneshot::Sender<Coverage>,
}

/// The service manager that started the daemon, if one did.
///
/// A thread of its own speaks to it: a manager that does not read blocks the sender, and the loop must not block.
pub struct Notifier {
    messages: Option<mpsc::SyncSender<String>>,
    /// Closed when the thread has sent everything.
    said: mpsc::Receiver<()>,
    status: String,
}

impl Notifier {
    pub fn new() -> Self {
        /// Messages beyond this are dropped: a later one reports the state at its time.
        const WAITING: usize = 16;
        let (ended, said) = mpsc::channel();
        let messages = std::env::var_os("NOTIFY_SOCKET").and_then(|_| {
            let (messages, inbox) = mpsc::sync_channel(WAITING);
            let speak = move || {
                speak(&inbox);
                drop(ended);
            };
            std::thread::Builder::new().name("notify".to_owned()).spawn(speak).ok().map(|_| messages)
        });
        Self { messages, said, status: String::new() }
    }

    /// How often to send it a sign of life: twice as often as it demands.
    pub fn watchdog(&self) -> Option<Duration> {
        sd_notify::watchdog_enabled().map(|limit| limit / 2).filter(|interval| !interval.is_zero())
    }

    pub fn watchdog_fed(&self) {
        self.tell(&[NotifyState::Watchdog]);
    }

    pub fn ready(&mut self, status: String) {
        self.tell(&[NotifyState::Ready, NotifyState::Status(&status)]);
        self.status = status;
    }

    pub fn status(&mut self, status: String) {
        if status != self.status {
            self.tell(&[NotifyState::Status(&status)]);
            self.status = status;
        }
    }

    pub fn reloading(&self) {
        // The protocol wants the time of the monotonic clock beside it.
        match NotifyState::monotonic_usec_now() {
            Ok(now) => self.tell(&[NotifyState::Reloading, now]),
            Err(_) => self.tell(&[NotifyState::Reloading]),
        }
    }

    pub fn stopping(&self) {
        self.tell(&[NotifyState::Stopping]);
    }

    /// Waits until everything is sent, but not long for a manager that does not read.
    pub fn finish(mut self) {
        const PATIENCE: Duration = Duration::from_secs(1);
        if self.messages.take().is_some() {
            let _ = self.said.recv_timeout(PATIENCE);
        }
    }

    fn tell(&self, state: &[NotifyState<'_>]) {
        if let Some(messages) = &self.messages {
            let lines: Vec<String> = state.iter().map(ToString::to_string).collect();
            let _ = messages.try_send(lines.join("\n"));
        }
    }
}

/// Passes messages on until there are no more.
fn speak(inbox: &mpsc::Receiver<String>) {
    let mut before = None;
    for message in inbox {
        let error = sd_notify::notify(&[NotifyState::Custom(&message)]).err().map(|error| error.to_string());
        // Logged once, not once per sign of life.
        if let Some(error) = error.as_ref().filter(|error| before.as_ref() != Some(*error)) {
            warn!(%error, "cannot notify the service manager");
        }
        before = error;
    }
}

impl Daemon {
    /// Tells the service manager that the daemon is ready: the tables are in the kernel, and the socket accepts.
    pub fn notify_ready(&mut self) {
        let status = self.summary();
        self.notifier.ready(status);
    }

    pub fn notify_status(&mut self) {
        let status = self.summary();
        self.notifier.status(status);
    }

    /// One line on the state of the daemon. Makes no system call.
    fn summary(&self) -> String {
        let clients = self.config.clients.len();
        let attached = self.clients.tasks.iter().filter(|client_task| client_task.cgroup().is_some()).count();
        let mut summary = format!("{attached} of {clients} clients attached");
        let bad = self.sources.files.values().filter(|file| file.feed.error().is_some()).count();
        if bad > 0 {
            summary
                .push_str(&format!("; {bad} of {} endpoint files cannot be used", self.sources.files.len()));
        }
        if self.reload.error.is_some() {
            summary.push_str("; the configuration file cannot be used");
        }
        summary
    }

    pub fn answer(&mut self, query: Query, now: Instant) {
        match query {
            Query::Facts(answer) => {
                let _ = answer.send(self.facts(now));
            }
            Query::Clients(answer) => {
                let _ = answer.send(
                    self.clients.tasks.iter().map(|client_task| client_task.client.name.clone()).collect(),
                );
            }
            Query::Configured(answer) => {
                let _ = answer.send(configured(&self.config));
            }
            Query::Explain { service, client, answer } => {
                let client_task = self.clients.task(&client);
                let explain = |client_task: &ClientTask| {
                    explain::explain(&client_task.client, client_task.balancer(), Some(&service), true)
                };
                let _ = answer.send(client_task.map(explain).unwrap_or_default());
            }
            Query::Readmit { service, backend, client, who, answer } => {
                // Who has given up was told that it is not done.
                if !answer.is_closed() {
                    let readmission = self.readmit(&service, backend, client.as_deref(), &who);
                    let _ = answer.send(readmission);
                }
            }
            Query::Cover { client, cgroups, answer } => {
                // Requests whose sender has given up are dropped.
                self.waiters.retain(|waiter| !waiter.answer.is_closed());
                self.waiters.push(Waiter { client, cgroups, answer });
                // The sender has most likely just made its cgroup: attach now, not when the watch reports it.
                self.follow_cgroups(now);
            }
        }
    }

    /// Lifts the ejection of a backend, for one client task or all that have it.
    fn readmit(
        &mut self,
        service: &str,
        backend: SocketAddr,
        client: Option<&str>,
        who: &Peer,
    ) -> Readmission {
        let (user, process) = (who.user, who.process);
        let mut clients = Vec::new();
        let tasks = self.clients.tasks.iter_mut();
        for client_task in tasks.filter(|task| client.is_none_or(|client| client == task.client.name)) {
            let Some(was_ejected) = client_task.readmit(service, backend) else { continue };
            let client = client_task.client.name.clone();
            info!(%client, %service, %backend, was_ejected, user, process, "asked to lift an ejection");
            clients.push(Readmitted { client, was_ejected });
        }
        if clients.is_empty() {
            info!(?service, %backend, user, process, "asked to lift an ejection of what no client has");
        }
        Readmission { schema: readmission::SCHEMA, service: service.to_owned(), backend, clients }
    }

    /// Answers the requests whose cgroup is covered, and those for a client that does not exist.
    pub fn answer_waiters(&mut self) {
        for waiter in std::mem::take(&mut self.waiters) {
            let Waiter { client, cgroups, answer } = waiter;
            let Some(client_task) = self.clients.task(&client) else {
                // A client that could not be started is tried again, so the request waits.
                if self.clients.unstarted.iter().any(|(other, _)| other.name == client) && !answer.is_closed()
                {
                    self.waiters.push(Waiter { client, cgroups, answer });
                    continue;
                }
                let clients =
                    self.clients.tasks.iter().map(|client_task| client_task.client.name.clone()).collect();
                let _ = answer.send(Coverage::UnknownClient { clients });
                continue;
            };
            // The cgroup that the path names now. If there is none, the one of the sender may have been removed.
            let now = Cgroup::open(client_task.path()).ok();
            // While it cannot be seen whether a cgroup is covered, the request goes on waiting.
            if cgroups.iter().any(|cgroup| client_task.covers(*cgroup).unwrap_or(false)) {
                let _ = answer.send(Coverage::Covered);
            } else if let Some(now) = now.filter(|now| !cgroups.contains(&now.id)) {
                let _ = answer.send(Coverage::Elsewhere { configured: now.path });
            } else if !answer.is_closed() {
                self.waiters.push(Waiter { client, cgroups, answer });
            }
        }
    }
}
