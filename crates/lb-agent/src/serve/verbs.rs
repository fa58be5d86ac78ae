//! How the event loop applies reports and commands about backends, or refuses them.

use std::time::Instant;

use lb_report::agent::load::Load;
use lb_report::agent::name::Name;
use lb_report::agent::{MAX_BACKENDS, word};
use lb_report::keys::{BackendKey, Keys};
use lb_report::wire::Readiness;
use tracing::{info, warn};

use super::event_loop::Server;
use super::query::{AcceptedReport, ApplicationLoad, QueryRefusal, Verb};
use super::registrations::{Claim, Claimed, Registrant};
use crate::config::{BackendConfig, Utilization};
use crate::status::SCHEMA;

impl Server {
    /// Applies a report or a command.
    ///
    /// # Errors
    /// The reason for a refusal.
    pub fn apply(
        &mut self,
        verb: Verb,
        who: Registrant,
        now: Instant,
    ) -> Result<AcceptedReport, QueryRefusal> {
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
                self.change_readiness(backend, |server| server.runner(backend, Some(readiness), now));
                self.measure(now);
                Ok(self.about(&[backend], now))
            }
            Verb::Readiness { registration, readiness } => self.readiness(registration, readiness, now),
            Verb::Unregister { registration } => {
                let name = self.registrations.unregister(registration).ok_or_else(no_registration)?;
                info!(backend = %name, "a program has released its backend");
                let reported =
                    self.reports.get(name).and_then(lb_report::agent::entry::Entry::runner_readiness);
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
            self.change_readiness(*name, |server| {
                if let Some(entry) = server.reports.get_mut(*name) {
                    entry.operator(lame_duck, now);
                }
            });
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
        self.change_readiness(name, |server| {
            if let Some(entry) = server.reports.get_mut(name) {
                entry.restart_check(now);
                entry.runner(None, now);
            }
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
            self.change_readiness(name, |server| server.runner(name, Some(readiness), now));
        }
        Ok(self.about(&[name], now))
    }

    fn runner(&mut self, name: Name, reported: Option<Readiness>, now: Instant) {
        if let Some(entry) = self.reports.get_mut(name) {
            entry.runner(reported, now);
        }
    }

    /// Applies a change that may affect a backend's readiness, and logs the new readiness.
    fn change_readiness(&mut self, name: Name, change: impl FnOnce(&mut Self)) {
        let readiness =
            |server: &Self| server.reports.get(name).map(lb_report::agent::entry::Entry::readiness);
        let before = readiness(self);
        change(self);
        if let Some(entry) = self.reports.get(name)
            && Some(entry.readiness()) != before
        {
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
