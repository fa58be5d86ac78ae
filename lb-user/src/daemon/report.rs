//! What the daemon tells: answers on its socket, and the service manager's notifications (sd_notify(3)).

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use sd_notify::NotifyState;
use tokio::sync::oneshot;
use tracing::warn;

use super::Daemon;
use crate::agent::Agent;
use crate::api::{Coverage, Question};
use crate::datapath::{self, Cgroup, Pins};
use crate::explain;
use crate::status::{self, Overlay, Status};

/// Somebody who waits until a client's programs cover a cgroup.
pub struct Waiter {
    client: String,
    cgroups: Vec<u64>,
    answer: oneshot::Sender<Coverage>,
}

/// The service manager that started the daemon, if one did.
///
/// A thread of its own speaks to it: a manager that does not read lets a sender wait, and the loop must not.
pub struct Notifier {
    messages: Option<mpsc::SyncSender<String>>,
    /// Closed when the thread has said everything.
    said: mpsc::Receiver<()>,
    status: String,
}

impl Notifier {
    pub fn new() -> Self {
        /// What is not taken by then is dropped: a later message says how it is by then.
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

    /// How often it wants a sign of life: twice as often as it demands.
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

    /// The last word. Waits until it is said, but not for a manager that does not listen.
    pub fn stopping(&mut self) {
        const PATIENCE: Duration = Duration::from_secs(1);
        self.tell(&[NotifyState::Stopping]);
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
        // Said once, not once per sign of life.
        if let Some(error) = error.as_ref().filter(|error| before.as_ref() != Some(*error)) {
            warn!(%error, "cannot notify the service manager");
        }
        before = error;
    }
}

impl Daemon {
    /// The tables are in the kernel.
    pub fn notify_ready(&mut self) {
        let status = self.summary();
        self.notifier.ready(status);
    }

    pub fn notify_status(&mut self) {
        let status = self.summary();
        self.notifier.status(status);
    }

    /// One line on how it goes, from what is at hand.
    fn summary(&self) -> String {
        let clients = self.config.clients.len();
        let attached = self.agents.iter().filter(|agent| agent.cgroup().is_some()).count();
        let mut summary = format!("{attached} of {clients} clients attached");
        let bad = self.files.values().filter(|file| file.error.is_some()).count();
        if bad > 0 {
            summary.push_str(&format!("; {bad} of {} endpoint files cannot be used", self.files.len()));
        }
        if self.reload.error.is_some() {
            summary.push_str("; the configuration file cannot be used");
        }
        summary
    }

    pub fn answer(&mut self, question: Question, now: Instant) {
        match question {
            Question::Status(answer) => {
                let _ = answer.send(self.status(now));
            }
            Question::Facts(answer) => {
                let _ = answer.send(self.facts(now));
            }
            Question::Explain { service, client, answer } => {
                let mut explanations = Vec::new();
                for agent in &self.agents {
                    if client.as_ref().is_none_or(|client| *client == agent.client.name) {
                        explanations.extend(explain::explain(
                            &agent.client,
                            agent.balancer(),
                            Some(&service),
                            true,
                        ));
                    }
                }
                let _ = answer.send(explanations);
            }
            Question::Cover { client, cgroups, answer } => {
                self.waiters.push(Waiter { client, cgroups, answer });
                // Who asks has just made its cgroup, most likely: attach now, not when the watch tells.
                self.follow_cgroups();
            }
        }
    }

    /// Answers those whose cgroup is covered, and those who wait for a client that there is not.
    pub fn answer_waiters(&mut self) {
        for waiter in std::mem::take(&mut self.waiters) {
            let Waiter { client, cgroups, answer } = waiter;
            let Some(agent) = self.agents.iter().find(|agent| agent.client.name == client) else {
                // One that could not be started is tried again.
                if self.unstarted.iter().any(|(other, _)| other.name == client) && !answer.is_closed() {
                    self.waiters.push(Waiter { client, cgroups, answer });
                    continue;
                }
                let clients = self.agents.iter().map(|agent| agent.client.name.clone()).collect();
                let _ = answer.send(Coverage::UnknownClient { clients });
                continue;
            };
            // What the path names now. Where nothing is, the asker's cgroup may have been removed under it.
            let now = Cgroup::open(agent.path()).ok();
            if cgroups.iter().any(|cgroup| agent.covers(*cgroup)) {
                let _ = answer.send(Coverage::Covered);
            } else if let Some(now) = now.filter(|now| !cgroups.contains(&now.id)) {
                let _ = answer.send(Coverage::Elsewhere { configured: now.path });
            } else if !answer.is_closed() {
                self.waiters.push(Waiter { client, cgroups, answer });
            }
        }
    }

    fn status(&self, now: Instant) -> Status {
        let mut clients = Vec::new();
        let mut degraded = Vec::new();
        for agent in &self.agents {
            let name = &agent.client.name;
            match status::of_client(&agent.pins, agent.datapath().tables(), Some(&self.overlay(agent, now))) {
                Ok(client) => clients.push(client),
                Err(error) => degraded.push(format!("client {name}: {}", crate::chain(&error))),
            }
            if let Some(fault) = detachment(agent) {
                degraded.push(format!("client {name}: {fault}"));
            }
            if let Some(trouble) = agent.trouble() {
                degraded.push(format!("client {name}: {trouble}"));
            }
        }
        for (client, error) in &self.unstarted {
            degraded.push(format!("client {}: {error}", client.name));
        }
        for (client, successor) in self.held_back() {
            degraded.push(format!(
                "client {client}: it is to leave, and is kept until client {successor}, which takes over, is attached"
            ));
        }
        for Pins { client, .. } in self.strangers() {
            degraded.push(format!("client {client}: attached, but not configured; `socklb detach {client}`"));
        }
        if let Some(error) = &self.reload.error {
            degraded.push(format!("the configuration cannot be used, the one before is in force: {error}"));
        }
        degraded.extend(self.reload.unchangeable.iter().cloned());
        degraded.extend(status::faults(&clients));
        let daemon = status::Daemon {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            config: self.config.path.clone(),
            pins: Some(self.config.paths.pins.clone()),
            features: self.features,
        };
        let leaving = self.leaving.iter().map(|leaving| status::leaving(&leaving.pins)).collect();
        Status { schema: status::SCHEMA, daemon: Some(daemon), degraded, clients, leaving }
    }

    fn overlay<'a>(&self, agent: &'a Agent, now: Instant) -> Overlay<'a> {
        Overlay {
            window: agent.window(),
            now,
            sources: self.sources(agent, now),
            configured: Some(agent.path().to_owned()),
            attached: agent.cgroup().filter(|cgroup| agent.covers(cgroup.id)),
            neighbours: agent.neighbours().ok(),
            repair: self.repair(agent),
        }
    }

    /// What became of a client's flow records.
    pub fn repair(&self, agent: &Agent) -> status::Repair {
        let (last, removed) = self.repairs.get(&agent.client.name).copied().unwrap_or_default();
        status::Repair {
            removed,
            kept_never_listed: last.kept_never_listed,
            kept_elsewhere: last.kept_elsewhere,
        }
    }

    pub fn sources(&self, agent: &Agent, now: Instant) -> BTreeMap<String, status::Source> {
        let services = agent.client.services.iter();
        let source = |name: &String| match self.files.get(name) {
            None => {
                let error = agent.refused_static().get(name).cloned();
                status::Source { file: None, good_for_s: None, failures: error.is_some().into(), error }
            }
            Some(file) => status::Source {
                file: Some(file.source.path.clone()),
                good_for_s: file.good_since.map(|since| now.duration_since(since).as_secs()),
                error: file.error.clone(),
                failures: file.failures,
            },
        };
        services.map(|configured| &configured.service.name).map(|name| (name.clone(), source(name))).collect()
    }
}

/// Why a client's programs are not attached where they should be, and what it takes; nothing if they are.
fn detachment(agent: &Agent) -> Option<String> {
    let path = agent.client.cgroup.display();
    if agent.is_unpinned() {
        return Some(
            "its pins were removed, so its connects go unbalanced; SIGHUP or a restart makes them anew and attaches it"
                .to_owned(),
        );
    }
    if let Some(error) = agent.attach_error() {
        return Some(format!("the programs cannot be attached to the cgroup at {path}: {error}"));
    }
    if agent.is_effective() {
        return None;
    }
    if agent.cgroup().is_some() {
        return Some(format!(
            "the programs are not attached to the cgroup at {path}: it, or their links, were removed"
        ));
    }
    let warning = datapath::namespace_warning().map(|warning| format!(" ({warning})")).unwrap_or_default();
    Some(format!("there is no cgroup {path}; it is attached when it appears{warning}"))
}
