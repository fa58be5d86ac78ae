//! The event loop. The loop receives queries, events and packets, and sends reports that are due.
//! It applies the reports and commands in queries, or refuses them. The loop waits for nothing
//! else. After the start, only this module reads the clock for reports, with one exception: a
//! reading of a cgroup contains the time of the reading.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Instant;

use lb_host::notify::Notifier;
use lb_host::watch::Watch;
use lb_report::agent::entry::Entry;
use lb_report::agent::load::Load;
use lb_report::agent::name::Name;
use lb_report::agent::{MAX_BACKENDS, Reports, word};
use lb_report::keys::{BackendKey, Keys};
use lb_report::wire::Readiness;
use tokio::sync::mpsc;
use tracing::{error, info, warn};

use super::AgentEvent;
use super::checks::Checks;
use super::lame_duck_store::{LameDuckLists, LameDuckStore, Receipt};
use super::measurements::Measuring;
use super::query::{AcceptedReport, ApplicationLoad, Query, QueryRefusal, Verb};
use super::registrations::{Claim, Claimed, Registrant, RegistrationEnd, Registrations};
use super::reload::ConfigReload;
use super::responders::Responding;
use super::udp::BoundSockets;
use crate::config::{AgentConfig, BackendConfig, Utilization};
use crate::status::SCHEMA;

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
                if self.checks.ended(name, number, &outcome, now) {
                    self.change_readiness(name, |entry| entry.checked(outcome, now));
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

impl Server {
    /// Applies a report or a command.
    ///
    /// # Errors
    /// The reason for a refusal.
    fn apply(&mut self, verb: Verb, who: Registrant, now: Instant) -> Result<AcceptedReport, QueryRefusal> {
        match verb {
            Verb::Operator { backend, lame_duck } => self.operator(backend, lame_duck, who, now),
            Verb::Load { backend, load } => self.load(backend, load, now),
            Verb::Register { backend, claim, keys, readiness } => {
                let configured = self.config.backends.iter().find(|one| one.name == backend);
                let configured = configured.map(|one| &one.keys);
                let has_key = keys.as_ref().is_some_and(|keys| has_a_key(configured, keys));
                let wanted = keys.map(|keys| BackendConfig::new(backend, keys));
                self.can_have(backend, wanted.as_ref())?;
                self.claim(backend, claim, has_key, who, now)?;
                if let Some(wanted) = wanted.filter(|_| !self.is_configured(backend)) {
                    self.have(&wanted, now);
                }
                info!(%backend, user = who.user, process = who.process, readiness = word(readiness), "a program has registered a backend");
                self.change_readiness(backend, |entry| entry.runner(Some(readiness), now));
                self.measure(now);
                Ok(self.about(&[backend], now))
            }
            Verb::Readiness { registration, readiness } => self.readiness(registration, readiness, now),
            Verb::Unregister { registration } => {
                let name = self.registrations.unregister(registration).ok_or_else(no_registration)?;
                info!(backend = %name, "a program has released its backend");
                let reported = self.reports.get(name).and_then(Entry::runner_readiness);
                if reported == Some(Readiness::Down) && self.checks.get(name).is_none() {
                    // Without a check, no other event shows that the backend has ended. The backend
                    // is reported as down for a further minute, so that all clients are notified.
                    self.registrations.remember(name, now);
                } else if self.is_configured(name) {
                    self.by_check_alone(name, now);
                } else {
                    self.reports.remove(name);
                }
                self.measure(now);
                Ok(self.about(&[name], now))
            }
        }
    }

    fn operator(
        &mut self,
        backend: Option<Name>,
        lame_duck: bool,
        who: Registrant,
        now: Instant,
    ) -> Result<AcceptedReport, QueryRefusal> {
        let names = self.names(backend)?;
        for name in &names {
            if lame_duck {
                self.lame_ducks.insert(*name);
            } else {
                self.lame_ducks.remove(name);
            }
            self.change_readiness(*name, |entry| entry.operator(lame_duck, now));
            info!(backend = %name, lame_duck, user = who.user, process = who.process, "an operator's command was applied");
        }
        Ok(self.about(&names, now))
    }

    fn load(
        &mut self,
        backend: Option<Name>,
        reported: ApplicationLoad,
        now: Instant,
    ) -> Result<AcceptedReport, QueryRefusal> {
        let names = self.names(backend)?;
        let [name] = names[..] else {
            let text = format!("there are {} backends: name one of {}", names.len(), list(&names));
            return Err(QueryRefusal::Wrong(text));
        };
        let configured = self.config.backends.iter().find(|backend| backend.name == name);
        if configured.is_some_and(|backend| backend.utilization == Utilization::Off) {
            return Err(QueryRefusal::Wrong(format!(
                "utilization of {name} is \"off\" in the configuration"
            )));
        }
        let ApplicationLoad { qps, eps, utilization, window, valid_for } = reported;
        if let Some(entry) = self.reports.get_mut(name) {
            entry.loaded(Load { qps, eps, utilization, window, measured: now }, now + valid_for, now);
        }
        Ok(self.about(&[name], now))
    }

    /// Checks that the agent can report this backend, with the keys of the program that claims it.
    fn can_have(&self, name: Name, wanted: Option<&BackendConfig>) -> Result<(), QueryRefusal> {
        let configured = self.config.backends.iter().find(|backend| backend.name == name);
        match (configured, wanted) {
            (None, None) => {
                let text = format!(
                    "backend {name} is not configured here, and no key was given, so the agent cannot report \
                     its state"
                );
                return Err(QueryRefusal::Absent(text));
            }
            (Some(configured), Some(wanted)) if !agree(&configured.keys, &wanted.keys) => {
                let text = format!(
                    "the configuration has other keys for {name}: pass no key, or correct the key or the \
                     configuration"
                );
                return Err(QueryRefusal::Wrong(text));
            }
            _ => {}
        }
        if self.reports.get(name).is_none() && self.reports.iter().count() >= MAX_BACKENDS {
            return Err(QueryRefusal::Wrong(format!(
                "this agent already has {MAX_BACKENDS} backends, the maximum"
            )));
        }
        Ok(())
    }

    fn claim(
        &mut self,
        name: Name,
        claim: Claim,
        has_key: bool,
        who: Registrant,
        now: Instant,
    ) -> Result<(), QueryRefusal> {
        let refused = self.registrations.get(name).and_then(|registration| registration.refused);
        self.registrations.register(name, claim, has_key, who, now).map_err(|claimed| match claimed {
            Claimed::Backend(first) => {
                // A refused program retries for a while, so only its first refusal is logged.
                if refused.is_none_or(|(_, last)| last != who) {
                    warn!(backend = %name, first = %first, refused = %who, "refused a program: another program already runs the backend");
                }
                QueryRefusal::Taken(format!("{first} already runs {name}: stop that process first, or name another backend"))
            }
            Claimed::User(user) => QueryRefusal::Taken(format!(
                "a program of user {user} was the first to claim {name} without a key, so a program of \
                 another user needs the backend's key: pass this key, or restart the agent"
            )),
            Claimed::Number(other) => {
                QueryRefusal::Wrong(format!("the registration number belongs to {other}: draw another number for {name}"))
            }
        })
    }

    /// Makes the health check decide the readiness of a configured backend that no program runs any
    /// more. Earlier results are discarded, because the check may have passed while the program
    /// still ran.
    pub fn by_check_alone(&mut self, name: Name, now: Instant) {
        self.checks.restart(name);
        self.change_readiness(name, |entry| {
            entry.restart_check(now);
            entry.runner(None, now);
        });
    }

    fn readiness(
        &mut self,
        id: u64,
        readiness: Option<Readiness>,
        now: Instant,
    ) -> Result<AcceptedReport, QueryRefusal> {
        let name = self.registrations.refresh(id, now).ok_or_else(no_registration)?;
        if let Some(readiness) = readiness {
            self.change_readiness(name, |entry| entry.runner(Some(readiness), now));
        }
        Ok(self.about(&[name], now))
    }

    /// Applies an input to a backend's readiness, and logs the readiness if it has changed.
    fn change_readiness(&mut self, name: Name, apply: impl FnOnce(&mut Entry)) {
        let Some(entry) = self.reports.get_mut(name) else { return };
        let before = entry.readiness();
        apply(entry);
        if entry.readiness() != before {
            let why = entry.why();
            info!(backend = %name, readiness = word(entry.readiness()), why, "a backend's readiness has changed");
        }
    }

    fn names(&self, backend: Option<Name>) -> Result<Vec<Name>, QueryRefusal> {
        let all: Vec<Name> = self.reports.iter().map(|(name, _)| name).collect();
        match backend {
            // An operator may undo a command for a backend that no longer exists.
            Some(name) if all.contains(&name) || self.lame_ducks.contains(&name) => Ok(vec![name]),
            Some(name) => {
                Err(QueryRefusal::Absent(format!("there is no backend {name} here, only {}", list(&all))))
            }
            None if all.is_empty() => Err(QueryRefusal::Absent("there is no backend here".to_owned())),
            None => Ok(all),
        }
    }

    fn about(&self, names: &[Name], now: Instant) -> AcceptedReport {
        let entries = || names.iter().filter_map(|name| self.reports.get(*name));
        AcceptedReport {
            schema: SCHEMA,
            unheard: entries().map(|entry| entry.unacknowledged(now)).sum(),
            is_new: entries().any(|entry| entry.is_new(now)),
            backends: names.iter().map(ToString::to_string).collect(),
        }
    }
}

/// Whether each given key equals the configured key with the same ID, if there is such a key. While
/// an operator replaces keys, only one of the two files may have the new key; the configured keys
/// then apply.
fn agree(configured: &Keys<BackendKey>, given: &Keys<BackendKey>) -> bool {
    given.all().iter().all(|key| configured.get(key.id).is_none_or(|known| known == key.key))
}

/// Whether one of the given keys belongs to the backend: a configured key, or any key if the
/// backend is not configured.
fn has_a_key(configured: Option<&Keys<BackendKey>>, given: &Keys<BackendKey>) -> bool {
    configured.is_none_or(|configured| {
        let is_known = |key: &BackendKey, id| configured.get(id).is_some_and(|known| known == *key);
        given.all().iter().any(|key| is_known(&key.key, key.id))
    })
}

fn no_registration() -> QueryRefusal {
    QueryRefusal::Absent(
        "there is no such registration: the agent has restarted, or the program did not renew the \
         registration in time"
            .to_owned(),
    )
}

/// A list of names for a sentence.
pub fn list(names: &[impl ToString]) -> String {
    if names.is_empty() {
        return "none".to_owned();
    }
    names.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_configured_key_proves_a_configured_backend() {
        let keys = |text: &str| Keys::<BackendKey>::parse(text).unwrap();
        let (one, other) = ("0f".repeat(16), "0e".repeat(16));
        let configured = keys(&format!("7 {one}\n8 {other}\n"));
        let has = |text: String| has_a_key(Some(&configured), &keys(&text));
        assert!(has(format!("7 {one}\n")) && has(format!("6 {one}\n8 {other}\n")));
        assert!(!has(format!("6 {one}\n")), "the key's number is not configured");
        assert!(!has(format!("7 {other}\n")), "the keys differ");
        assert!(has_a_key(None, &keys(&format!("6 {one}\n"))), "the backend is not configured");
    }
}
