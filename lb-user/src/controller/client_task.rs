//! One client task: its balancer, which makes the plan, and the kernel's maps and programs, which
//! implement the plan.
//!
//! Facts change the plan; [`ClientTask::settle`] makes the maps match the plan. A client task reads
//! no clock and starts no thread.
//!
//! Methods with `&self` only read (`forget_errors` also changes the maps). The most important other
//! methods, in the order in which the controller calls them:
//! - `open` or `reconfigure`, then `make_sizes` and `make_controls`;
//! - for facts: `deliver`, `apply_findings`, `apply_verdicts`, `note_restarts`, `take_report_ids`,
//!   `set_overrides`, `switch_control`, `cgroup_changed`, `search_ended`;
//! - then, to change maps and links: `follow_cgroup`, `settle`, `before_wait`,
//!   `after_wait`, `free_idle`;
//! - each second: `sample`, `follow_flows`, `weigh_errors`, `count_reported_errors`,
//!   `tick_controls`, `publish_factors`;
//! - for orders to close connections: `follow_losses` and `rebalance` return them, `continue_loss`
//!   and `rebalanced` receive the outcomes.
//!
//! In reading order:
//! - the plan and the maps (this file), and the steps to the plan (`plan_steps`);
//! - the cgroup (`attachment`), and the network namespace (`namespace`);
//! - the verdicts of the programs on backends (`health`), guesses from probes (`guesses`), and the
//!   counters (`counts`);
//! - weights that change without a new list (`control`), errors that count as load
//!   (`errors`), and subsets with a size that follows load (`size`);
//! - the overrides of operators (`overrides`), lost backends with connections that are closed
//!   (`loss`), and idle connections that are closed so that pools spread over all backends again
//!   (`rebalance`).

mod attachment;
mod control;
mod counts;
mod errors;
mod guesses;
mod health;
mod loss;
pub mod namespace;
mod overrides;
mod plan_steps;
mod rebalance;
mod size;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Instant;

use lb_core::balancer::{Adopted, Balancer, UnusableList};
use lb_core::control::reported_errors::ReportedErrors;
use lb_core::grace_period::GracePeriods;
use lb_core::health::loss::MissingBackends;
use lb_core::ids::{BackendRef, ServiceIndex, Slot};
use lb_core::limits::Limits;
use lb_core::rebalance::Rebalance;
use lb_core::service::{Policy, Service};
use lb_kernel::{
    Cgroup, ClientKernel, ClientNamespace, CursorSeed, Datapath, DatapathError, Features, Lock, Pins,
    Purpose, RecordedProcesses,
};
use thiserror::Error;

pub use self::attachment::Followed;
pub use self::overrides::effects;
use crate::backoff::Backoff;
use crate::close_jobs::CloseCause;
use crate::config::ClientConfig;
use crate::controller::{Clock, Environment};
use crate::counts::window::Window;

#[derive(Debug, Error)]
pub enum ClientTaskError {
    #[error(transparent)]
    Datapath(#[from] DatapathError),
    #[error(transparent)]
    Refused(#[from] UnusableList),
    #[error("cannot read the number of the kernel's possible CPUs")]
    Cpus(#[source] std::io::Error),
}

pub struct ClientTask {
    pub client: ClientConfig,
    pub pins: Pins,
    /// Whether an operator has removed the directory of the pins, and thereby the client.
    is_unpinned: bool,
    /// The full path of the client's cgroup.
    path: PathBuf,
    /// The cgroup that the programs are attached to; `None` while there is no cgroup at the
    /// client's path.
    cgroup: Option<Cgroup>,
    /// The network namespace of the client's processes; `None` until it is known.
    namespace: Option<ClientNamespace>,
    search: namespace::Searches,
    /// The client's processes according to the flow records.
    recorded: RecordedProcesses,
    /// Why the programs are not attached, if the kernel refused to attach them.
    attach_error: Option<String>,
    /// The pauses between attempts to attach the programs.
    attaching: Backoff,
    /// Whether any backend was ejected, or had failures, when the programs' verdicts were last
    /// read.
    has_verdicts: bool,
    /// Whether the last check found links to cgroups that the client has left.
    has_old_links: bool,
    /// The id of the cgroup that all links were attached to at the last check, and the time of that
    /// check.
    links_seen: Option<(u64, Instant)>,
    /// Whether flows may still begin in cgroups that the client has left. `leaving`: the pauses
    /// between attempts to stop such flows.
    has_moved: bool,
    leaving: Backoff,
    limits: Limits,
    features: Features,
    clock: Clock,
    pub(super) balancer: Balancer,
    /// One for each service of `client`, in the same order.
    pub(super) services: Vec<ServiceTask>,
    datapath: Datapath,
    /// The slots that neither the plan nor the maps use; `None` until the maps match the plan.
    pub(super) settled: Option<BTreeSet<Slot>>,
    host: String,
    cursor_seed: CursorSeed,
    /// For each unused slot, the progress of the grace period after which the slot can be freed.
    grace_periods: GracePeriods,
    window: Window,
    /// What was logged last about the backends.
    logged: health::LoggedHealth,
    /// Whether the client had no pins when this client task was opened.
    pub is_new: bool,
    /// The latest end of the client's first probes and polls (`first_look`), after which the client
    /// is attached; `None` if they are over or not needed.
    pub first_look: Option<Instant>,
    /// The version of the probe results that were applied last; `None` if the current results must
    /// be applied in any case.
    pub applied_probes: Option<(u64, u64)>,
    /// The pauses between attempts to read the counters.
    counting: Backoff,
    /// Why the maps do not match the plan; `None` if they do. `has_failed`: whether the kernel
    /// refused a step in the last attempt.
    trouble: Option<String>,
    has_failed: bool,
    errors_seen: errors::ErrorLook,
    /// For each backend that reports errors: how many of these errors are still to be added to the
    /// backend's recent errors.
    reported_errors: BTreeMap<BackendRef, ReportedErrors>,
    override_grace: overrides::OverrideGrace,
    /// The number of connections that were closed since the daemon started, for each service and
    /// cause. Contains services that are no longer configured but may have open flows.
    pub closed: BTreeMap<(String, CloseCause), u64>,
}

/// The state of one service of a client task.
#[derive(Default)]
pub(super) struct ServiceTask {
    /// Why the daemon refused the service's list in the configuration; `None` if it did not.
    pub refused_static: Option<String>,
    /// The health and panic that were logged last.
    logged: health::LoggedService,
    /// Whether the backends still accept connections, if too few of them are available.
    serving: Option<health::Serving>,
    /// The backends that fail probes, if the client and the daemon are in different network
    /// namespaces.
    guesses: BTreeMap<SocketAddr, guesses::Guess>,
    /// The control that changes the service's weights, if weights follow load or start slowly.
    control: Option<control::Controlled>,
    /// The size of the service's subset, if that size follows load.
    pub size: Option<size::FollowedSize>,
    /// The missing backends, if the service has the key `on_backend_loss`.
    missing: Option<MissingBackends>,
    /// The state of the key `rebalance`, if the service has this key.
    rebalance: Option<Rebalance>,
}

impl ClientTask {
    /// Adopts or creates the client's maps. Does not attach programs yet.
    ///
    /// # Errors
    /// If the existing maps do not fit the configured limits, or the kernel refuses.
    pub fn open(
        client: ClientConfig,
        pins: Pins,
        kernel: Box<dyn ClientKernel>,
        limits: Limits,
        environment: &Environment,
        now: Instant,
    ) -> Result<Self, ClientTaskError> {
        let Environment { features, clock, host, .. } = environment;
        let (features, clock) = (*features, *clock);
        let path = kernel.mount()?.join(&client.cgroup);
        let datapath = Datapath::open(kernel, &limits, features, purpose(&client))?;
        let is_new = datapath.applied().services.is_empty();
        let balancer = balancer(&client, features, limits, &datapath, now)?;
        let cpus = datapath.kernel().cpus().map_err(ClientTaskError::Cpus)?;
        let mut logged = health::LoggedService::adopted(&datapath.tables().slots());
        let adopted = |(service, index, _): (&Service, ServiceIndex, _)| ServiceTask {
            missing: loss::adopted(&datapath, &service.name),
            logged: logged.remove(&index).unwrap_or_default(),
            ..ServiceTask::default()
        };
        let services = balancer.services().map(adopted).collect();
        Ok(Self {
            cursor_seed: CursorSeed { task: task_on(&client, host), cpus },
            host: host.clone(),
            client,
            pins,
            is_unpinned: false,
            path,
            cgroup: None,
            namespace: None,
            search: namespace::Searches::default(),
            recorded: RecordedProcesses::default(),
            attach_error: None,
            attaching: Backoff::default(),
            has_verdicts: false,
            has_old_links: false,
            links_seen: None,
            has_moved: true,
            leaving: Backoff::default(),
            limits,
            features,
            clock,
            balancer,
            services,
            datapath,
            settled: None,
            grace_periods: GracePeriods::default(),
            window: Window::default(),
            logged: health::LoggedHealth::default(),
            is_new,
            first_look: None,
            applied_probes: None,
            counting: Backoff::default(),
            trouble: None,
            has_failed: false,
            errors_seen: errors::ErrorLook::default(),
            reported_errors: BTreeMap::new(),
            override_grace: overrides::OverrideGrace::default(),
            closed: BTreeMap::new(),
        })
    }

    /// Applies another configuration of the same client. The result is that of a restart: the
    /// tables in the kernel stay in use until lists are delivered again, and services and backends
    /// that are no longer configured are removed after their last flow. An equal configuration
    /// changes nothing. If the new configuration needs other programs, they are attached at the
    /// next check of the cgroup ([`ClientTask::follow_cgroup`]), which the controller retries until
    /// it succeeds.
    ///
    /// # Errors
    /// If the services do not fit, or the kernel refuses the programs. In both cases nothing
    /// changes.
    pub fn reconfigure(&mut self, client: ClientConfig, now: Instant) -> Result<(), ClientTaskError> {
        // A reload leaves most clients unchanged, and the creation of a new balancer takes time.
        if client == self.client {
            return Ok(());
        }
        let path = self.datapath.kernel().mount()?.join(&client.cgroup);
        let balancer = balancer(&client, self.features, self.limits, &self.datapath, now)?;
        let needs_other_programs = purpose(&client) != purpose(&self.client);
        if needs_other_programs {
            self.datapath.reload(&self.limits, self.features, purpose(&client))?;
        }
        let before = self.balancer.services().zip(std::mem::take(&mut self.services));
        let before = before.map(|((service, index, _), known)| (service.name.as_str(), (index, known)));
        let mut before: BTreeMap<&str, (ServiceIndex, ServiceTask)> = before.collect();
        let carry_over = |(service, index, _): (&Service, ServiceIndex, _)| {
            match before.remove(service.name.as_str()) {
                Some((of, known)) if of == index => known,
                // A service with another address or protocol has other backends in the maps.
                Some((_, known)) => {
                    let (logged, serving, guesses) = Default::default();
                    ServiceTask { logged, serving, guesses, ..known }
                }
                None => ServiceTask::default(),
            }
        };
        self.services = balancer.services().map(carry_over).collect();
        self.balancer = balancer;
        self.applied_probes = None;
        self.settled = None;
        self.cursor_seed.task = task_on(&client, &self.host);
        self.client = client;
        if path != self.path {
            self.path = path;
            self.forget_namespace();
        }
        self.has_moved = true;
        self.links_seen = None;
        self.attaching.retry_now();
        Ok(())
    }

    /// The number of active flows to all backends.
    pub fn open_flows(&self) -> u64 {
        let tables = self.datapath.tables();
        let slots = self.datapath.applied().backends.keys();
        slots.fold(0, |sum, slot| sum.saturating_add(tables.active(*slot)))
    }

    /// Removes old errors of all backends. `now` is the programs' tick.
    pub fn forget_errors(&self, now: u32) {
        let tables = self.datapath.tables();
        self.datapath.applied().backends.keys().for_each(|slot| tables.forget_errors(*slot, now));
    }

    /// Drops everything except the two values that are needed to remove the client.
    pub fn into_lock(self) -> (Pins, Option<Lock>) {
        (self.pins, self.datapath.into_lock())
    }

    /// Whether any service probes its backends or requests their reports.
    pub fn has_probes(&self) -> bool {
        self.client.services.iter().any(|configured| configured.probe.is_some())
    }

    pub fn balancer(&self) -> &Balancer {
        &self.balancer
    }

    pub fn datapath(&self) -> &Datapath {
        &self.datapath
    }

    /// The services with their names.
    pub(super) fn named(&self) -> impl Iterator<Item = (&str, &ServiceTask)> {
        let names = self.client.services.iter().map(|configured| configured.service.name.as_str());
        names.zip(&self.services)
    }

    /// Why the maps do not match the plan, if they do not.
    pub fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }

    /// Whether the kernel refused a step towards the plan in the last attempt.
    pub fn has_failed(&self) -> bool {
        self.has_failed
    }
}

fn balancer(
    client: &ClientConfig,
    features: Features,
    limits: Limits,
    datapath: &Datapath,
    now: Instant,
) -> Result<Balancer, UnusableList> {
    let knows_causes = health::knows_causes(client.accounting, features);
    let services = client.services.iter().map(|configured| {
        let service = configured.service.clone();
        Service { ejection: service.ejection.filter(|_| knows_causes), ..service }
    });
    let services = services.collect();
    let plan = datapath.applied().clone();
    let adopted = Adopted { plan, next_generations: datapath.tables().next_generations() };
    Balancer::new(services, limits, adopted, now)
}

/// What the client's programs must support.
fn purpose(client: &ClientConfig) -> Purpose {
    let mut services = client.services.iter().map(|configured| &configured.service);
    let scans =
        services.any(|service| service.policy == Policy::LeastLoaded || service.active_limit.is_some());
    Purpose { accounting: client.accounting, scans }
}

/// The seed for a client's cursors, computed from the task and the host. If two hosts have the same
/// index by mistake, or have no index, their cursors still start at different entries.
fn task_on(client: &ClientConfig, host: &str) -> String {
    format!("{}/{}@{host}", client.job, client.task.index)
}
