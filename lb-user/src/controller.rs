//! The controller makes all decisions of a host's daemon. Each call takes an event and the time,
//! and returns effects.
//!
//! The event loop calls these methods, in this order:
//! 1. [`Controller::new`] and [`Controller::begin`], once. `begin` returns the first effects.
//! 2. [`Controller::next_wakeup`], which only reads. [`Event::Wakeup`] follows no later than at the
//!    time that it returns.
//! 3. [`Controller::handle`], for each event. Only this method receives events. It returns effects.
//! 4. [`Controller::is_open`] and [`Controller::summary`], which only read. The next call is 2.
//!
//! All other methods are parts of `handle`. The event loop may execute effects in any order and at
//! any time, and passes the result of each effect as an event. An effect may fail, take forever or
//! never be executed; the state that the effect concerns is then unchanged. An event may arrive
//! late, twice, or for an object that no longer exists.
//!
//! The controller reads no clock and no file, starts no thread and draws no random number. It calls
//! the kernel ([`Kernel`]) and the network ([`Network`]) through traits, because it needs the
//! results of these calls at once.
//!
//! In reading order:
//! - events and effects (this file);
//! - `lists`: their sources and their delivery to clients (`sources`), the rules for the read of
//!   one list (`reads`), servers that send lists (`remote`) or addresses of services
//!   (`addresses`), host names in lists (`hosts`);
//! - `stores`: the files for later starts (`files`), with the addresses of host names (`hosts`) and
//!   the learnt weights (`loads`), and the files that Envoy reads (`envoy`);
//! - a new configuration (`reload`), the changes in it (`changes`), the settings that it cannot
//!   change (`fixed`), and the start (`start`);
//! - one client (`client_task`) and the steps that make its maps match its plan
//!   (`client_task/plan_steps`), all clients (`clients`), the first look at a client's backends
//!   (`first_look`), clients that cannot be started (`unstarted`), clients that leave (`leaving`),
//!   and the network namespaces of clients (`namespaces`);
//! - passes over the flow records (`flow_records`), and jobs that close connections (`close_jobs`);
//! - the backends that are probed (`probe_targets`, through `network`), and the backends that
//!   report (`register`);
//! - decisions that threads of the shell request, and not the event loop: the exchange with agents
//!   (`exchange`), and the receivers on network interfaces (`receivers`);
//! - weights that follow load (`client_task/control`), and the overrides of operators
//!   (`overrides`);
//! - queries (`queries`), and the facts that answers are built from (`facts`).

mod reload;

mod lists;

mod stores;

mod client_task;

mod clock;

mod overrides;

mod clients;

mod flow_records;

mod close_jobs;

mod network;

mod probe_targets;

pub mod exchange;

pub mod receivers;

mod register;

mod facts;

mod queries;

#[cfg(test)]
mod scripts;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Result;
use lb_config::discovery::DnsSettings;
use lb_core::feed::{Progress, Version};
use lb_core::membership::Consumer;
use lb_discovery::{DiscoveryRequest, HostName, HostTable, Latest};
use lb_kernel::{DatapathError, Features, Kernel, Pass, ReclaimTarget, Suspects};
use lb_view::close_result::CloseAnswer;
use tracing::warn;

pub use self::client_task::namespace::Search;
pub use self::client_task::{ClientTask, ClientTaskError};
use self::clients::Clients;
pub use self::clients::leaving::{Leaving, lock_other_versions};
pub use self::clients::namespaces::NamespaceSearch as NamespaceFound;
pub use self::clients::unstarted::{ClientOpener, OpenRequest, Opened, Tried};
pub use self::clock::{Clock, unix_seconds};
use self::close_jobs::ClosingJobs;
use self::flow_records::ReclaimPasses;
use self::lists::addresses::Addresses;
pub use self::lists::addresses::address;
pub use self::lists::reads::{ListInForce, ListPurpose, Reading};
use self::lists::sources::Sources;
pub use self::lists::sources::sources;
pub use self::network::{Network, ReceiveAt};
use self::overrides::Overrides;
pub use self::overrides::{EarlierDrains, FROM_TABLES, StoredOverrides, drains_of_tables, lost_overrides};
use self::probe_targets::Probing;
use self::queries::Waiter;
use self::reload::Reload;
pub use self::reload::fixed;
pub use self::reload::{ConfigLoad, LoadRequest, Loaded};
use self::stores::envoy::EnvoyFiles;
pub use self::stores::envoy::{EnvoyChanges, EnvoyFile, EnvoyResults, path as envoy_places_path};
pub use self::stores::files::{
    OverridesRead, StateFiles, StoreFailures, StoredFile, StoredKinds, StoredRead, StoredState, asides,
};
pub use self::stores::hosts::StoredHosts;
use self::stores::loads::LoadStore;
pub use self::stores::loads::StoredLoads;
use crate::api::ControllerQuery;
use crate::close_jobs::{CloseJob, CloseOrder, CloseRequester};
use crate::config::Config;
use crate::source::{Contents, ListSource, NoAnswer, SourceError, Stamp};

/// The interval at which the controller checks files and cgroups and frees idle slots, even if no
/// watch reports a change: a watch can be lost without notice.
pub const TICK: Duration = Duration::from_secs(1);

/// The number of ticks between two attempts to start the clients that could not be started.
const RETRY_TICKS: u32 = 10;

pub enum Event {
    /// Something changed in these watched directories.
    Changed(BTreeSet<PathBuf>),
    /// The directories of [`Effect::Watch`] are now watched.
    Watched,
    /// The time that [`Controller::next_wakeup`] returned is reached.
    Wakeup,
    /// The newest answers of all queried servers ([`Effect::Query`]), and the addresses of all host
    /// names. This event follows each answer of a server and each resolution of a host name.
    Answered(Vec<(DiscoveryRequest, Latest)>, Arc<HostTable>),
    /// The background work with this number has ended ([`Effect::Work`]). The first such event
    /// counts; further events with the same number have no effect.
    Done(u64, WorkResult),
    /// A process has sent a query, through the socket or the metrics port.
    Query(ControllerQuery),
    /// Probes or reports have changed the health of a backend.
    HealthChanged,
    /// An operator has requested a reload by SIGHUP.
    Hangup,
}

/// The result of [`BackgroundWork`].
pub enum WorkResult {
    /// The stamp of the service's endpoint file was read; `None` if there is no file.
    Looked { service: String, source: ListSource, result: Result<Option<Stamp>, NoAnswer> },
    /// The stamp of the configuration file was read. If `is_due`, the file has stopped changing, so
    /// the controller loads a new version now.
    LookedAtConfig { is_due: bool, result: Result<Option<Stamp>, NoAnswer> },
    /// The list of the service was read. `begun` is the sequence number of the read, in the order
    /// in which reads began. `result` is `None` if the version of the list was already known.
    Read {
        service: String,
        source: ListSource,
        begun: u64,
        version: Version<Stamp>,
        result: Option<Result<Contents, SourceError>>,
    },
    /// A retry has read files that an earlier daemon stored and that could not be read at the
    /// start.
    StoredRead(Box<StoredState>),
    /// An attempt to store files for the next start of the daemon has ended.
    Stored(StoreFailures),
    /// An attempt to write files for Envoy has ended.
    EnvoyFilesWritten(EnvoyResults),
    /// The assignments of the service's list were computed for each client task.
    Computed { service: String, contents: Contents },
    /// A configuration and all files that it names were read.
    Loaded(Box<Loaded>),
    /// Another attempt to start the clients that could not be started has ended.
    Opened(Box<Tried>),
    /// The wait of [`BackgroundWork::WaitForReaders`] has ended. After `Ok`, every kernel program
    /// that was running when the wait began has ended.
    ReadersGone(Result<(), DatapathError>),
    /// Flow records were compared with the kernel's lists of sockets.
    Reclaimed(Pass, Suspects),
    /// A search for the network namespaces of clients has ended.
    NamespacesFound(Vec<NamespaceFound>),
    /// A job that closes connections has ended.
    FlowsClosed(CloseOrder, CloseAnswer, CloseRequester),
}

pub enum Effect {
    /// Watch these directories for changes, and watch for the appearance of these cgroups. The new
    /// watches replace all earlier ones. [`Event::Watched`] follows.
    Watch { cgroups: Vec<PathBuf>, directories: BTreeSet<PathBuf> },
    /// Query these servers from now on, and no others. [`Event::Answered`] follows.
    Query(Vec<DiscoveryRequest>),
    /// Query this server at once.
    QueryAgain(DiscoveryRequest),
    /// Resolve these host names from now on, and no others. [`Event::Answered`] follows each
    /// result.
    Resolve(BTreeSet<HostName>, DnsSettings),
    /// Resolve these host names at once.
    ResolveAgain(BTreeSet<HostName>),
    /// Notify the service manager.
    Notify(Notice),
    /// Run this work outside of the event loop. [`Event::Done`] with this number follows. Each work
    /// has another number.
    Work(u64, Box<BackgroundWork>),
}

/// Work that takes so long that it runs outside of the event loop. Its result is a [`WorkResult`].
#[expect(clippy::large_enum_variant, reason = "an effect stores the work in a box")]
pub enum BackgroundWork {
    /// Read the stamp of an endpoint file, and watch its directory.
    Look {
        service: String,
        source: ListSource,
        path: PathBuf,
    },
    /// Read the stamp of the configuration file, and watch its directory.
    LookAtConfig {
        is_due: bool,
    },
    /// Read an endpoint list, unless its version is still `known`.
    Read {
        service: String,
        source: ListSource,
        begun: u64,
        known: Option<Option<Stamp>>,
        purpose: ListPurpose,
    },
    /// Read these kinds of files that an earlier daemon stored. The DNS settings apply to the host
    /// names in these files.
    ReadStored(StoredKinds, DnsSettings),
    /// Store files for the next start of the daemon.
    Store(StateFiles),
    /// Write or remove files that Envoy reads.
    WriteEnvoyFiles(EnvoyChanges),
    /// Compute the assignments of a list for these client tasks.
    Compute {
        service: String,
        contents: Contents,
        consumers: Vec<Consumer>,
    },
    /// Read a configuration and the files that it names, and open clients that do not run yet.
    Load(Box<LoadRequest>),
    Open(Box<OpenRequest>),
    /// Wait until every kernel program that is running now has ended.
    WaitForReaders,
    /// Compare flow records with the kernel's lists of sockets.
    Reclaim {
        targets: Vec<ReclaimTarget>,
        suspects: Suspects,
        now: Instant,
        interval: Duration,
    },
    /// Search for the network namespaces of these clients, which are given by name.
    SearchNamespaces(Vec<(String, Search)>),
    /// Close connections. The work ends early if the requester closes its connection to the daemon.
    Close(CloseJob, CloseRequester),
}

impl From<BackgroundWork> for Effect {
    fn from(work: BackgroundWork) -> Self {
        // `take_effects` sets the number.
        Self::Work(0, Box::new(work))
    }
}

/// A notification to the service manager.
#[derive(Debug, PartialEq, Eq)]
pub enum Notice {
    /// The daemon is ready. The text is its status line.
    Ready(String),
    /// A new status line.
    Status(String),
    Reloading,
}

/// The values that a controller receives at its start and that never change.
#[derive(Clone)]
pub struct Environment {
    pub kernel: Arc<dyn Kernel>,
    pub features: Features,
    pub clock: Clock,
    pub host: String,
    /// The process id of the daemon.
    pub pid: u32,
    /// The limit of open file descriptors of this process.
    pub descriptors: u64,
    /// Why cgroups may be invisible to the daemon; `None` if all cgroups are visible.
    pub namespace_warning: Option<String>,
    /// The random delay before this host's first probes and polls (`first_look`), in 1/256 of the
    /// longest delay. The delay differs between hosts.
    pub jitter: u8,
    /// The number of clients that may be opened at the same time.
    pub threads: usize,
    /// Whether the daemon is stopping. While it is stopping, no further client is opened.
    pub stopping: Arc<AtomicBool>,
}

pub struct Controller {
    environment: Environment,
    /// The wall-clock time of the last event.
    wall: SystemTime,
    /// The CLOCK_BOOTTIME time of the last event.
    boot: Duration,
    started: SystemTime,
    /// Whether the first configuration is in force. Until then the controller has no clients and
    /// answers no queries.
    is_ready: bool,
    /// The configuration in force.
    config: Config,
    clients: Clients,
    sources: Sources,
    addresses: Addresses,
    reload: Reload,
    passes: ReclaimPasses,
    closing: ClosingJobs,
    probing: Probing,
    load_store: LoadStore,
    overrides: Overrides,
    envoy_files: EnvoyFiles,
    waiters: Vec<Waiter>,
    ticks: u32,
    next_tick: Option<Instant>,
    /// The random delay before this host's first probes and polls (`first_look`).
    first_look_jitter: Duration,
    effects: Vec<Effect>,
    /// The number of works that were started. `pending`: the numbers of those that have not ended.
    works: u64,
    pending: BTreeSet<u64>,
}

impl Controller {
    /// A controller without clients. The first configuration that is loaded adds clients. `version`
    /// is the version of the configuration file that was read.
    pub fn new(
        config: &Config,
        version: Version<Stamp>,
        environment: Environment,
        network: Box<dyn Network>,
        wall: SystemTime,
    ) -> Self {
        Self {
            environment,
            wall,
            boot: Duration::ZERO,
            started: wall,
            is_ready: false,
            config: Config { clients: Vec::new(), ..config.clone() },
            clients: Clients::default(),
            sources: Sources::default(),
            addresses: Addresses::default(),
            reload: Reload::new(&config.path, version, wall),
            passes: ReclaimPasses::new(),
            closing: ClosingJobs::default(),
            probing: Probing::new(network),
            load_store: LoadStore::default(),
            overrides: Overrides::default(),
            envoy_files: EnvoyFiles::default(),
            waiters: Vec::new(),
            ticks: 0,
            next_tick: None,
            first_look_jitter: Duration::ZERO,
            effects: Vec::new(),
            works: 0,
            pending: BTreeSet::new(),
        }
    }

    /// Handles one event.
    ///
    /// # Errors
    /// If the daemon cannot start. Once the daemon is ready, this never fails.
    pub fn handle(
        &mut self,
        event: Event,
        now: Instant,
        wall: SystemTime,
        boot: Duration,
    ) -> Result<Vec<Effect>> {
        (self.wall, self.boot) = (wall, boot);
        self.clients.has_settled = false;
        match event {
            Event::Changed(changes) => self.changed(&changes, now),
            Event::Watched => self.follow_cgroups(now),
            Event::Wakeup => self.wake_up(now),
            Event::Answered(answers, hosts) => self.answered(&answers, &hosts, now),
            // A result that arrives twice could end a later wait for readers, or apply an old
            // configuration again.
            Event::Done(number, result) if self.pending.remove(&number) => self.done(result, now)?,
            Event::Done(..) => {}
            Event::Query(query) => self.answer(query, now),
            Event::HealthChanged => {
                // If a backend becomes healthy while it is ejected, the next connect is its trial.
                // The verdicts of the kernel programs are read first, because the backend may have
                // been ejected after the last tick.
                self.clients.tasks.iter_mut().for_each(|client_task| client_task.apply_kernel_verdicts(now));
                self.apply_probes(now);
                self.end_first_looks(now);
            }
            Event::Hangup => self.reload_now(now),
        }
        self.start_storing(now);
        self.answer_overrides(now);
        self.search_namespaces(now);
        Ok(self.take_effects())
    }

    /// Handles the end of background work.
    fn done(&mut self, result: WorkResult, now: Instant) -> Result<()> {
        match result {
            WorkResult::Looked { service, source, result } => self.looked(&service, &source, result, now),
            WorkResult::LookedAtConfig { is_due, result } => self.looked_at_config(is_due, result, now),
            WorkResult::StoredRead(stored) => self.apply_stored(*stored, now),
            WorkResult::Stored(stored) => self.stored(stored, now),
            WorkResult::EnvoyFilesWritten(results) => self.envoy_files_written(results, now),
            WorkResult::Read { service, source, begun, version, result } => {
                // After the read began, a reload may have changed the source of the service's
                // endpoints, or a newer read may have ended.
                let watched = self.sources.watched.get(&service).filter(|file| file.source == source);
                if watched.is_some_and(|file| !file.feed.is_superseded(begun)) {
                    self.read(&service, begun, version, result, now);
                    self.settle(now);
                    self.probe_again(now);
                }
            }
            WorkResult::Computed { service, contents } => {
                self.computed(&service, &contents, now);
                self.probe_again(now);
            }
            WorkResult::Opened(tried) => {
                self.opened(*tried, now);
                self.probe_again(now);
            }
            WorkResult::Loaded(loaded) if self.is_ready => {
                self.loaded(*loaded, now);
                self.probe_again(now);
            }
            WorkResult::Loaded(loaded) => {
                self.first_loaded(*loaded, now)?;
                self.probe_again(now);
                self.poll_first();
                self.end_first_looks(now);
            }
            WorkResult::ReadersGone(result) => self.readers_gone(result, now),
            WorkResult::Reclaimed(pass, suspects) => self.reclaimed(pass, suspects, now),
            WorkResult::NamespacesFound(found) => {
                self.namespaces_found(found, now);
                self.apply_probes(now);
            }
            WorkResult::FlowsClosed(order, result, requester) => {
                self.flows_closed(order, result, requester, now);
            }
        }
        Ok(())
    }

    /// Returns the effects of an event, and numbers the works among them.
    fn take_effects(&mut self) -> Vec<Effect> {
        let mut effects = std::mem::take(&mut self.effects);
        for effect in &mut effects {
            if let Effect::Work(number, _) = effect {
                self.works += 1;
                *number = self.works;
                self.pending.insert(self.works);
            }
        }
        effects
    }

    /// The latest time for [`Event::Wakeup`].
    pub fn next_wakeup(&self, now: Instant) -> Option<Instant> {
        let settling = self.clients.is_settling.then_some(now);
        self.next_due().into_iter().chain(self.next_tick).chain(settling).min()
    }

    /// Handles one part of the work that is due. The next wake-ups handle the rest, so that the
    /// event loop can handle other events between them.
    fn wake_up(&mut self, now: Instant) {
        if self.next_due().is_some_and(|due| due <= now) {
            self.follow_servers(now);
            self.start_reading(now);
            self.look_at_due_config(now);
            self.end_first_looks(now);
        } else if self.next_tick.is_some_and(|tick| tick <= now) {
            self.next_tick = Some(now + TICK);
            self.tick(now);
        } else if self.clients.is_settling {
            self.go_on_settling(now);
        }
    }

    /// Whether the daemon answers queries. It answers none before the first probes and polls of new
    /// clients have ended (`first_look`). So commands that wait for the daemon also wait for these
    /// results.
    pub fn is_open(&self) -> bool {
        self.is_ready && self.next_end_of_first_look().is_none()
    }

    /// The earliest time at which a changed list or configuration is to be read, a server is to be
    /// queried again, or the first probes and polls of a client end (`first_look`); `None` if
    /// nothing is due.
    fn next_due(&self) -> Option<Instant> {
        let lists = self.sources.watched.values().map(|watched| &watched.feed.progress);
        let due = lists.chain([self.reload.progress()]).filter_map(Progress::due);
        let servers = self.sources.watched.values().filter_map(|watched| watched.remote.due());
        due.chain(servers).chain(self.next_end_of_first_look()).min()
    }

    fn changed(&mut self, changes: &BTreeSet<PathBuf>, now: Instant) {
        // If `watch` is off, changes of files are ignored, but the directories of cgroups are still
        // watched, and files may lie in these directories.
        if self.config.daemon.watch {
            self.files_changed(changes, now);
            self.reload.changed(changes, now);
        }
        // A changed parent directory concerns the client, too: if the directory is new, the
        // client's cgroup below it may also be new.
        let concerns =
            |client_task: &ClientTask| changes.iter().any(|path| client_task.path().starts_with(path));
        let mut any = false;
        for client_task in self.clients.tasks.iter_mut().filter(|client_task| concerns(client_task)) {
            client_task.cgroup_changed();
            // If this check fails, the next tick repeats it.
            any |= !client_task.is_effective().unwrap_or(true);
        }
        if any {
            self.watch();
            self.follow_cgroups(now);
        }
    }

    /// Requests watches on the directories of cgroups and of files. The check after
    /// [`Event::Watched`] finds a cgroup that appeared before the watch existed. The watch itself
    /// reports a cgroup that appears later.
    fn watch(&mut self) {
        let cgroups = self.clients.tasks.iter().map(|client_task| client_task.path().to_owned());
        let directories = if self.config.daemon.watch { self.directories() } else { BTreeSet::new() };
        self.effects.push(Effect::Watch { cgroups: cgroups.collect(), directories });
    }

    fn tick(&mut self, now: Instant) {
        // Until the first configuration is in force, there are no clients and no files to check.
        if !self.is_ready {
            return;
        }
        self.ticks = self.ticks.wrapping_add(1);
        self.watch();
        self.look_at_files();
        self.follow_servers(now);
        self.look_at_config();
        if self.ticks.is_multiple_of(RETRY_TICKS) {
            self.start_unstarted(now);
            self.read_unread();
        }
        self.lapse_overrides(now);
        self.follow_cgroups(now);
        let mut freed = false;
        let mut unsettled = false;
        for client_task in &mut self.clients.tasks {
            client_task.apply_kernel_verdicts(now);
            unsettled |= !client_task.is_settled();
            if let Err(error) = client_task.log_kernel() {
                warn!(client = %client_task.client.name, error = %crate::error::chain(&error), "cannot read the programs' counters; retrying");
            }
            freed |= client_task.free_idle(now);
            if let Err((error, true)) = client_task.sample(now) {
                warn!(client = %client_task.client.name, error = %crate::error::chain(&error), "cannot read the programs' counters; retrying");
            }
        }
        self.try_to_resume_leaving(now);
        self.leave_other_cgroups(now);
        if freed {
            self.assign_again(now);
        }
        let mut tasks = self.clients.tasks.iter();
        if freed || unsettled || tasks.any(|client_task| client_task.trouble().is_some()) {
            self.settle(now);
        }
        self.follow_flows(now);
        self.probe_again(now);
        self.follow_load(now);
        self.close_lost(now);
        self.rebalance(now);
        self.follow_envoy_files(now);
        self.store_hosts(now);
        self.reclaim_flows(now);
        // Retries the last wait for readers if it has failed.
        self.wait_for_readers();
        let status = self.summary();
        self.effects.push(Effect::Notify(Notice::Status(status)));
    }
}
