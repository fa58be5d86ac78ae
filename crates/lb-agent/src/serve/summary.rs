//! The status of the agent, for queries and for the service manager.

use std::time::Instant;

use lb_report::agent::entry::Entry;
use lb_report::agent::load::Load;
use lb_report::agent::name::Name;
use lb_report::agent::streak::Outcome;
use lb_report::agent::word;
use lb_report::answer::Refused;
use lb_view::status::InterfaceStatus;

use super::event_loop::Server;
use super::responders::Responding;
use crate::status::{self, AgentStatus, SCHEMA};

impl Server {
    pub fn status(&self, now: Instant) -> AgentStatus {
        let counts = self.reports.counts();
        let (by_kernel, refused_by_kernel) =
            self.responding.as_ref().map(Responding::counts).unwrap_or_default();
        let refused = Refused::ALL.map(|why| {
            let number = why.number();
            (why.name().to_owned(), counts.refused[number] + refused_by_kernel[number])
        });
        AgentStatus {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            incarnation: self.reports.incarnation(),
            listen: self.addresses.iter().map(ToString::to_string).collect(),
            faults: self.faults(),
            configuration: self.reload.file.as_ref().map(|path| status::Configuration {
                path: path.display().to_string(),
                error: self.reload.error.clone(),
                takes_a_restart: self.reload.fixed.iter().map(|key| (*key).to_owned()).collect(),
            }),
            backends: self.reports.iter().map(|(name, entry)| self.backend(name, entry, now)).collect(),
            interfaces: self.interfaces(),
            datagrams: status::DatagramCounts {
                answered: counts.answered + by_kernel,
                answered_by_kernel: by_kernel,
                refused: refused.into(),
                pushed: counts.pushed,
                unsent: self.sockets.unsent,
                replaced: counts.replaced,
            },
        }
    }

    /// For each configured interface, whether the kernel or the agent's socket answers.
    fn interfaces(&self) -> Vec<InterfaceStatus> {
        let found = self.responding.as_ref().map(Responding::found).unwrap_or_default();
        let interfaces = found.interfaces.into_iter().map(|one| InterfaceStatus {
            mode: one.mode().to_owned(),
            name: one.name,
            why: one.attached.err(),
        });
        interfaces.collect()
    }

    fn backend(&self, name: Name, entry: &Entry, now: Instant) -> status::ServedBackendStatus {
        let ago = |at: Instant| now.saturating_duration_since(at).as_secs_f64();
        let check = self.checks.get(name).map(|(check, last)| status::HealthCheckStatus {
            check: check.check.to_string(),
            failure: last.and_then(|(outcome, _)| match outcome {
                Outcome::Passed => None,
                Outcome::Failed(why) => Some(why.clone()),
                Outcome::Impossible(why) => Some(format!("the check cannot be run: {why}")),
            }),
            ago_seconds: last.map(|(_, at)| ago(*at)),
        });
        let runner = self.registrations.get(name).map(|registration| status::Runner {
            process: registration.who().map(|who| who.process),
            user: registration.who().map(|who| who.user),
            alive: registration.is_alive(),
            others_refused: registration.refused.map_or(0, |(times, _)| times),
        });
        let (load, by_application) = entry.load(now);
        let number = |thousandths: u32| f64::from(thousandths) / 1000.0;
        let load = load.map(|Load { qps, eps, utilization, measured, .. }| status::ReportedLoadStatus {
            qps: qps.map(number),
            eps: eps.map(number),
            utilization: utilization.map(number),
            age_seconds: ago(measured),
            by_application,
        });
        status::ServedBackendStatus {
            backend: name.to_string(),
            readiness: word(entry.readiness()).to_owned(),
            why: entry.why().to_owned(),
            since_seconds: ago(entry.since()),
            operator_lame_duck: entry.is_lame_duck(),
            check,
            runner,
            load,
            subscribers: entry.subscribers(),
            unheard: entry.unacknowledged(now),
            keys: entry.keys().all().iter().map(|key| key.id).collect(),
        }
    }

    fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        if let Some(error) = &self.reload.error {
            faults.push(format!(
                "the configuration cannot be used; the earlier configuration stays in force: {error}"
            ));
        }
        if !self.reload.fixed.is_empty() {
            faults.push(format!(
                "these configuration changes need a restart: {}",
                self.reload.fixed.join(", ")
            ));
        }
        if let Some(why) = self.lame_duck_store.fault() {
            faults.push(format!("the lame-duck list cannot be saved; an agent restart would lose it: {why}"));
        }
        faults.extend(self.responding.iter().flat_map(Responding::faults));
        for (name, why) in &self.measuring.errors {
            faults.push(format!("{name}: its utilization cannot be measured: {why}"));
        }
        for (name, _) in self.reports.iter() {
            let Some(registration) = self.registrations.get(name) else { continue };
            if let (Some(first), Some((times, last))) = (registration.who(), registration.refused) {
                faults.push(format!(
                    "{name}: {first} runs this backend; other programs claimed it {times} times, most \
                     recently {last}"
                ));
            }
        }
        faults
    }

    /// Notifies the service manager that the agent answers requests or that it has read its
    /// configuration again.
    pub fn notify_ready(&mut self) {
        let summary = self.summary();
        if let Some(notifier) = &mut self.notifier {
            notifier.ready(summary);
        }
    }

    /// Notifies the service manager of the status, if it has changed.
    pub fn notify_status(&mut self) {
        if self.notifier.is_some() {
            let summary = self.summary();
            self.notifier.iter_mut().for_each(|notifier| notifier.status(summary.clone()));
        }
    }

    fn summary(&self) -> String {
        let all = self.reports.iter().count();
        let ready = self.reports.iter().filter(|(_, entry)| word(entry.readiness()) == "ready").count();
        let faulty = if self.reload.error.is_some() { "; the configuration file cannot be used" } else { "" };
        format!("{ready} of {all} backends ready{faulty}")
    }
}
