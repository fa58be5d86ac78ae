//! The event loop. The loop receives queries, events and packets, and sends reports that are due.
//! The loop waits for nothing else. After the start, only this module reads the clock for reports,
//! with one exception: a reading of a cgroup contains the time of the reading.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Instant;

use lb_host::notify::Notifier;
use lb_host::watch::Watch;
use lb_report::agent::name::Name;
use lb_report::agent::{Reports, word};
use lb_report::wire::Readiness;
use tokio::sync::mpsc;
use tracing::{error, info, warn};

use super::AgentEvent;
use super::checks::Checks;
use super::lame_duck_store::{LameDuckLists, LameDuckStore, Receipt};
use super::measurements::Measuring;
use super::query::{Query, Verb};
use super::registrations::{RegistrationEnd, Registrations};
use super::reload::ConfigReload;
use super::responders::Responding;
use super::udp::BoundSockets;
use crate::config::AgentConfig;

/// The whole state of an agent.
pub struct Server {
    pub reports: Reports,
    pub sockets: BoundSockets,
    pub addresses: Vec<SocketAddr>,
    pub registrations: Registrations,
    pub checks: Checks,
    pub measuring: Measuring,
    /// The kernel's answers in the agent's place, if they are configured.
    pub responding: Option<Responding>,
    /// Backends that the operator has made lame ducks, including backends that this host no longer
    /// has.
    pub lame_ducks: BTreeSet<Name>,
    pub lame_duck_store: LameDuckStore,
    pub reload: ConfigReload,
    pub watch: Watch,
    pub notifier: Option<Notifier>,
    pub config: AgentConfig,
}

impl Server {
    /// Runs until the task is aborted.
    pub async fn run(mut self, mut queries: mpsc::Receiver<Query>, mut events: mpsc::Receiver<AgentEvent>) {
        let mut watchdog = self.notifier.as_ref().and_then(Notifier::watchdog).map(tokio::time::interval);
        // Runs until the agent ends. Each iteration handles one batch of packets, one query or one
        // event.
        loop {
            let now = Instant::now();
            self.let_pass(now);
            self.prepare(self.reports.is_pushing(), now);
            let Self { reports, sockets, .. } = &mut self;
            reports.push(now, |to, push| sockets.send(to, push));
            let next = self.next_at(now).map(tokio::time::Instant::from_std);
            let waited = async {
                match next {
                    Some(next) => tokio::time::sleep_until(next).await,
                    None => std::future::pending().await,
                }
            };
            let fed = async {
                match &mut watchdog {
                    Some(watchdog) => drop(watchdog.tick().await),
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                readable = self.sockets.readable() => match readable {
                    Ok(number) => {
                        let now = Instant::now();
                        let Self { reports, sockets, .. } = &mut self;
                        sockets.answer(number, |bytes, requester| reports.answer(bytes, requester, now));
                    }
                    Err(failure) => {
                        error!(error = %failure, "cannot wait for packets; the agent ends");
                        return;
                    }
                },
                Some(query) = queries.recv() => self.on_query(query, Instant::now()),
                Some(event) = events.recv() => self.take(event, Instant::now()),
                _ = self.watch.changed() => self.reload.changed(Instant::now()),
                () = waited => {}
                () = fed => self.notifier.iter().for_each(Notifier::watchdog_fed),
            }
        }
    }

    fn on_query(&mut self, query: Query, now: Instant) {
        match query {
            Query::Status(answer) => {
                // The sender of the query may be waiting until the last client has acknowledged, so
                // the acknowledgements are read first.
                self.prepare(true, now);
                let _ = answer.send(self.status(now));
            }
            Query::Verb { verb, who, answer } => {
                self.prepare(true, now);
                // An operator's command waits for the disk before it is answered, because the
                // operator does not repeat the command after a restart of the agent. A program,
                // however, repeats its report.
                let is_sent_once = matches!(verb, Verb::Operator { .. });
                let outcome = self.apply(verb, who, now);
                let receipt = self.save_lame_ducks().filter(|_| is_sent_once);
                let _ = answer.send((outcome, receipt));
            }
            Query::Reload => self.reload_now(now),
            Query::Stopping => return self.notifier.iter().for_each(Notifier::stopping),
        }
        self.notify_status();
    }

    /// Prepares the kernel's answers, then reads which clients have sent requests to the kernel.
    /// The order matters: if a client is notified of a change and then sends a request, it must
    /// receive an answer that was prepared after the change.
    fn prepare(&mut self, is_urgent: bool, now: Instant) {
        let Self { responding, reports, sockets, .. } = self;
        if let Some(responding) = responding {
            responding.prepare(reports, now);
            responding.look(reports, sockets, is_urgent, now);
        }
    }

    fn take(&mut self, event: AgentEvent, now: Instant) {
        match event {
            AgentEvent::Checked { name, number, outcome } => {
                if self.checks.ended(name, number, &outcome, now)
                    && let Some(entry) = self.reports.get_mut(name)
                {
                    let before = entry.readiness();
                    entry.checked(outcome, now);
                    let after = entry.readiness();
                    if after != before {
                        let why = entry.why();
                        info!(backend = %name, readiness = word(after), why, "a backend's readiness has changed");
                    }
                }
            }
            AgentEvent::Measured(measured) => {
                for (name, measured) in measured {
                    let load = self.measuring.measured(name, measured);
                    if let Some(entry) = self.reports.get_mut(name) {
                        entry.measured(load, now);
                    }
                }
            }
            AgentEvent::Watched => self.reload.changed(now),
            AgentEvent::Read(read) => self.loaded(read.map(|config| *config), now),
        }
        self.notify_status();
    }

    fn let_pass(&mut self, now: Instant) {
        self.reports.expire(now);
        for end in self.registrations.expire(now) {
            match end {
                RegistrationEnd::Died(name) => {
                    warn!(backend = %name, "the program that runs the backend did not renew its registration \
                                            in time; treating the program as dead");
                    self.without_runner(name, now);
                }
                RegistrationEnd::Gone(name) if self.is_configured(name) => self.by_check_alone(name, now),
                RegistrationEnd::Gone(name) => self.reports.remove(name),
            }
            drop(self.save_lame_ducks());
            self.measure(now);
        }
        self.reload_if_due(now);
    }

    /// Sets the readiness of a backend after its program has died. A lame duck remains a lame duck,
    /// and a backend that is down remains down, while the backend is reported without its program.
    /// A passing check does not change this, because the application may still be ending. In other
    /// cases the health check decides from now on or, if the backend is not configured, its
    /// readiness is unknown.
    fn without_runner(&mut self, name: Name, now: Instant) {
        let is_configured = self.is_configured(name);
        let Some(entry) = self.reports.get_mut(name) else { return };
        match entry.runner_readiness() {
            Some(Readiness::LameDuck | Readiness::Down) => {}
            Some(Readiness::Ready | Readiness::Unknown) | None if is_configured => {
                self.by_check_alone(name, now);
            }
            Some(Readiness::Ready) => entry.runner(Some(Readiness::Unknown), now),
            Some(Readiness::Unknown) | None => {}
        }
    }

    /// Restores the state of an earlier agent. The backends in `by_run` were lame ducks by reports
    /// of their programs, which have to register again. If a program does not register again, its
    /// backend stays a lame duck for a minute, as after the death of a program.
    pub fn remember(&mut self, by_run: &BTreeSet<Name>, now: Instant) {
        let configured = self.config.backends.iter().map(|backend| backend.name);
        for name in &configured.filter(|name| by_run.contains(name)).collect::<Vec<_>>() {
            self.registrations.remember(*name, now);
            if let Some(entry) = self.reports.get_mut(*name) {
                entry.runner(Some(Readiness::LameDuck), now);
                info!(backend = %name, "still a lame duck: the backend's program has not registered again \
                                        yet");
            }
        }
    }

    /// Stores the list of lame ducks, if the list has changed.
    fn save_lame_ducks(&mut self) -> Option<Receipt> {
        let by_run =
            self.reports.iter().filter(|(_, entry)| entry.runner_readiness() == Some(Readiness::LameDuck));
        let by_run = by_run.map(|(name, _)| name).collect();
        self.lame_duck_store.save(LameDuckLists { lame_ducks: self.lame_ducks.clone(), by_run })
    }

    pub fn is_configured(&self, name: Name) -> bool {
        self.config.backends.iter().any(|backend| backend.name == name)
    }

    fn next_at(&self, now: Instant) -> Option<Instant> {
        let responding = self.responding.as_ref().and_then(|responding| responding.next_at(now));
        let times =
            [self.reports.next_at(now), self.registrations.next_at(), self.reload.due_at(), responding];
        times.into_iter().flatten().min()
    }
}
