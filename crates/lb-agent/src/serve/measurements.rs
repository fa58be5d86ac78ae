//! Measures the cgroups of backends every two seconds, on a thread outside of the event loop. The
//! agent measures the configured cgroups, and the cgroups of programs that run backends.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lb_report::agent::load::Load;
use lb_report::agent::name::Name;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::AgentEvent;
use crate::config::{BackendConfig, Utilization};
use crate::utilization::{Measured, Mounts, Usage, measure};

/// Time between two readings of the cgroups. Reported utilization is the mean over this time.
const INTERVAL: Duration = Duration::from_secs(2);

/// A backend, its cgroup, and the processors that the cgroup can use, in thousandths.
type Cgroup = (Name, PathBuf, Option<u32>);

pub struct Measuring {
    cgroups: Vec<Cgroup>,
    /// The number of configured cgroups, which come first.
    configured: usize,
    task: Option<JoinHandle<()>>,
    events: mpsc::Sender<AgentEvent>,
    before: BTreeMap<Name, Usage>,
    /// For each backend with a configured cgroup that cannot be measured: the reason.
    pub errors: BTreeMap<Name, String>,
}

impl Measuring {
    /// No cgroup is measured at first. Readings are sent to `events`.
    pub fn new(events: mpsc::Sender<AgentEvent>) -> Self {
        let (before, errors) = (BTreeMap::new(), BTreeMap::new());
        Self { cgroups: Vec::new(), configured: 0, task: None, events, before, errors }
    }

    /// Sets the cgroups to measure: the configured cgroups of `backends`, and the cgroups of
    /// `runs`, unless the configuration of the backend has another cgroup or `"off"`. Returns
    /// whether the cgroups have changed.
    pub fn set<'r>(
        &mut self,
        backends: &[BackendConfig],
        runs: impl Iterator<Item = (Name, &'r Path)>,
    ) -> bool {
        let configured = |backend: &BackendConfig| match &backend.utilization {
            Utilization::Cgroup { cgroup, cores } => Some((backend.name, cgroup.clone(), *cores)),
            Utilization::Application | Utilization::Off => None,
        };
        let mut cgroups: Vec<Cgroup> = backends.iter().filter_map(configured).collect();
        let is_free = |name: Name| {
            let backend = backends.iter().find(|backend| backend.name == name);
            backend.is_none_or(|backend| backend.utilization == Utilization::Application)
        };
        let configured = cgroups.len();
        cgroups.extend(
            runs.filter(|(name, _)| is_free(*name)).map(|(name, cgroup)| (name, cgroup.to_owned(), None)),
        );
        self.configured = configured;
        if cgroups == self.cgroups {
            return false;
        }
        if let Some(task) = self.task.take() {
            task.abort();
        }
        self.before.clear();
        self.errors.clear();
        self.cgroups = cgroups;
        if !self.cgroups.is_empty() {
            self.task = Some(tokio::spawn(repeat(self.cgroups.clone(), self.events.clone())));
        }
        true
    }

    /// Whether this backend is measured.
    pub fn has(&self, name: Name) -> bool {
        self.cgroups.iter().any(|(of, ..)| *of == name)
    }

    /// Handles a reading of a backend's cgroup. Returns the load since the previous reading; `None`
    /// if this reading is the first or has failed.
    pub fn measured(&mut self, name: Name, measured: Measured) -> Option<Load> {
        if !self.has(name) {
            // The reading began before the configuration changed.
            return None;
        }
        let usage = match measured {
            Ok(usage) => usage,
            Err(why) => {
                self.before.remove(&name);
                // The configuration does not request that a program's cgroup is measured, so a
                // failure is not a fault.
                if self.cgroups.iter().take(self.configured).any(|(of, ..)| *of == name) {
                    self.errors.insert(name, why);
                }
                return None;
            }
        };
        self.errors.remove(&name);
        let before = self.before.insert(name, usage)?;
        let (utilization, window) = usage.since(&before)?;
        Some(Load { qps: None, eps: None, utilization: Some(utilization), window, measured: usage.at })
    }
}

impl Drop for Measuring {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// Measures the cgroups every [`INTERVAL`], until the task is aborted.
async fn repeat(cgroups: Vec<Cgroup>, events: mpsc::Sender<AgentEvent>) {
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let cgroups = cgroups.clone();
        let read = tokio::task::spawn_blocking(move || {
            // The mounts are read each time, because cgroups may be mounted later.
            let mounts = Mounts::read().unwrap_or_default();
            let measured = cgroups.into_iter();
            measured
                .map(|(name, cgroup, cores)| (name, measure(&mounts, &cgroup, cores, Instant::now())))
                .collect()
        });
        let Ok(measured) = read.await else { return };
        if events.send(AgentEvent::Measured(measured)).await.is_err() {
            return;
        }
    }
}
