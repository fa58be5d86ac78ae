//! The controller: what a host's daemon decides. It is pure: an event comes in with its time, effects go out.
//!
//! Call [`Controller::begin`] once; then [`Controller::handle`] for each event, and no later than [`Controller::next_wakeup`] with
//! [`Event::Wakeup`]. Both return effects. The shell carries them out in any order and at any time; the result of
//! each is an event of its own. An effect may fail, take for ever or never be carried out: what it was for stays as it is. An event may come
//! late, twice, or for something that is gone.
//!
//! The controller reads no clock and no file, starts no thread and draws no random number. It calls the kernel ([`Kernel`]) and the network
//! ([`Network`]) through traits, for what they answer at once, because what it does next depends on that.
//!
//! In reading order: events and effects (this file); endpoint files (`files`), how lists are given to clients (`delivery`) and what of them
//! is stored for later starts (`state_files`); another configuration (`reload`), what it changes (`changes`) and cannot change (`fixed`);
//! one client (`client_task`), all of them (`clients`), those that cannot be started (`unstarted`) and those that leave (`leaving`); the
//! start (`start`, `first_look`); flow records whose end no program saw (`flow_records`), the network namespaces of clients (`namespaces`);
//! which backends are probed (`probing`, by `network`), which of them report (`register`), weights that follow load (`control`) and what was
//! learnt of these (`learnt`); queries (`queries`) and what answers are made of (`facts`).

mod start;

mod files;

mod delivery;

mod state_files;

mod reload;

mod first_look;

pub mod fixed;

mod changes;

mod client_task;

mod clock;

mod control;

mod learnt;

mod clients;

mod unstarted;

mod leaving;

mod flow_records;

mod namespaces;

mod network;

mod probing;

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
use lb_core::feed::{Progress, Version};
use lb_kernel::{DatapathError, Features, Kernel, Pass, ReclaimTarget, Suspects};
use tracing::warn;

pub use self::client_task::namespace::Search;
pub use self::client_task::{ClientTask, ClientTaskError};
use self::clients::Clients;
pub use self::clock::Clock;
use self::files::Sources;
pub use self::files::{FirstRead, ListPurpose, Reading, complete, sources};
use self::flow_records::ReclaimPasses;
use self::learnt::Learnings;
pub use self::learnt::{LearntFile, MAX_BYTES as MAX_LEARNT_BYTES, StoredLoads, path as learnt_path};
pub use self::leaving::{Leaving, lock_other_versions};
pub use self::namespaces::NamespaceSearch as NamespaceFound;
pub use self::network::{LookAtReports, Network, ReceiveAt, ReportListener};
use self::probing::Probing;
use self::queries::Waiter;
pub use self::register::Stores;
use self::reload::Reload;
pub use self::reload::{ConfigLoad, LoadRequest, Loaded};
pub use self::state_files::{StateFiles, StoreFailures};
pub use self::unstarted::{ClientOpener, OpenRequest, Opened, Tried};
use crate::api::ControllerQuery;
use crate::assignments::Consumer;
use crate::config::Config;
use crate::source::{Contents, FileSource, NoAnswer, SourceError, Stamp};

/// Files and cgroups are looked at, and idle slots freed, this often: a watch can be lost without notice.
pub const TICK: Duration = Duration::from_secs(1);

/// Every how many ticks clients that could not be started are tried again.
const RETRY_TICKS: u32 = 10;

/// Everything that the controller takes in.
pub enum Event {
    /// Something changed in directories that are watched.
    Changed(BTreeSet<PathBuf>),
    /// Directories are watched, as [`Effect::Watch`] asked.
    Watched,
    /// The time of [`Controller::next_wakeup`] has come.
    Wakeup,
    /// An endpoint file of the service was looked at: the version that lies there.
    Looked { service: String, source: FileSource, result: Result<Option<Stamp>, NoAnswer> },
    /// The configuration file was looked at, to take it on if it has settled.
    LookedAtConfig { is_due: bool, result: Result<Option<Stamp>, NoAnswer> },
    /// An endpoint file was read, for the service. Readings are numbered in the order in which they were begun.
    /// `result` is `None` if the file is the version that is known.
    Read {
        service: String,
        source: FileSource,
        begun: u64,
        version: Version<Stamp>,
        result: Option<Result<Contents, SourceError>>,
    },
    /// What an earlier daemon had learnt was read, which could not be read at the start.
    LearntRead(LearntFile),
    /// Files for later starts were stored.
    Stored(StoreFailures),
    /// What client tasks use of the service's list was computed.
    Computed { service: String, contents: Contents },
    /// The configuration and all its files were read.
    Loaded(Box<Loaded>),
    /// Clients that could not be started were tried again.
    Opened(Box<Tried>),
    /// A wait for readers has ended: every program that was running when it began is done, unless the wait failed.
    ReadersGone(Result<(), DatapathError>),
    /// Flow records were compared with the kernel's lists of sockets.
    Reclaimed(Pass, Suspects),
    /// The network namespaces of clients were searched for.
    NamespacesFound(Vec<NamespaceFound>),
    /// A process asks on the socket or the port for metrics.
    Asked(ControllerQuery),
    /// Probes or reports have found a backend otherwise than before.
    Heard,
    /// An operator asks to read the configuration again, by SIGHUP.
    Hangup,
}

/// What the shell does for the controller.
pub enum Effect {
    /// Watch for these cgroups to appear and for changes in these directories, and for nothing else; then comes [`Event::Watched`].
    Watch { cgroups: Vec<PathBuf>, directories: BTreeSet<PathBuf> },
    /// Tell the service manager.
    Notify(Notice),
    /// What takes time.
    Work(Box<BackgroundWork>),
}

/// What takes time and is done beside the loop. Its result is the event of the same name.
pub enum BackgroundWork {
    /// Look at an endpoint file, and watch its directory.
    Look { service: String, source: FileSource },
    /// Look at the configuration file, and watch its directory.
    LookAtConfig { is_due: bool },
    /// Read an endpoint file unless it is the `known` version.
    Read {
        service: String,
        source: FileSource,
        begun: u64,
        known: Option<Option<Stamp>>,
        purpose: ListPurpose,
    },
    /// Read what an earlier daemon had learnt.
    ReadLearnt,
    /// Store files for later starts.
    Store(StateFiles),
    /// Compute what these tasks use of a list.
    Compute { service: String, contents: Contents, consumers: Vec<Consumer> },
    /// Read a configuration and the files that it names, and open its clients.
    Load(Box<LoadRequest>),
    /// Open clients.
    Open(Box<OpenRequest>),
    /// Wait until every program that is running now is done.
    WaitForReaders,
    /// Compare flow records with the kernel's lists of sockets.
    Reclaim { targets: Vec<ReclaimTarget>, suspects: Suspects, now: Instant, interval: Duration },
    /// Search for the network namespaces of clients, by name.
    SearchNamespaces(Vec<(String, Search)>),
}

impl From<BackgroundWork> for Effect {
    fn from(work: BackgroundWork) -> Self {
        Self::Work(Box::new(work))
    }
}

/// What the service manager is told.
#[derive(Debug, PartialEq, Eq)]
pub enum Notice {
    /// All is there that was asked for, with a line on the state.
    Ready(String),
    /// A line on the state.
    Status(String),
    /// A configuration is being read.
    Reloading,
}

/// What a controller is given at its start and what never changes.
#[derive(Clone)]
pub struct Environment {
    /// The kernel.
    pub kernel: Arc<dyn Kernel>,
    pub features: Features,
    pub clock: Clock,
    /// The name of this host.
    pub host: String,
    /// The process.
    pub pid: u32,
    /// How many descriptors it may have.
    pub descriptors: u64,
    /// Why cgroups may not be seen, if they may not.
    pub namespace_warning: Option<String>,
    /// Of 256: by how much of the longest jitter the first look begins later. Differs from host to host.
    pub jitter: u8,
    /// Clients that are opened at the same time.
    pub threads: usize,
    /// Whether the daemon is stopping, and does not wait for opened clients any more.
    pub stopping: Arc<AtomicBool>,
}

/// See the head of this file.
pub struct Controller {
    environment: Environment,
    /// The wall clock at the last event.
    wall: SystemTime,
    started: SystemTime,
    /// Whether the first configuration was taken on. Before that there is no client, and no answer.
    is_ready: bool,
    /// The configuration in force.
    config: Config,
    clients: Clients,
    sources: Sources,
    reload: Reload,
    passes: ReclaimPasses,
    probing: Probing,
    learnt: Learnings,
    waiters: Vec<Waiter>,
    ticks: u32,
    next_tick: Option<Instant>,
    /// By how much later than at once the first look begins on this host.
    first_look_jitter: Duration,
    effects: Vec<Effect>,
}

impl Controller {
    /// Without any client yet: what is configured comes with the first configuration that is taken on. `version`: that of the
    /// configuration file that was read.
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
            started: wall,
            is_ready: false,
            config: Config { clients: Vec::new(), ..config.clone() },
            clients: Clients::default(),
            sources: Sources::default(),
            reload: Reload::new(&config.path, version, wall),
            passes: ReclaimPasses::new(),
            probing: Probing::new(network),
            learnt: Learnings::default(),
            waiters: Vec::new(),
            ticks: 0,
            next_tick: None,
            first_look_jitter: Duration::ZERO,
            effects: Vec::new(),
        }
    }

    /// Handles one event.
    ///
    /// # Errors
    /// If the daemon cannot start. Once it is ready there is no error.
    pub fn handle(&mut self, event: Event, now: Instant, wall: SystemTime) -> Result<Vec<Effect>> {
        self.wall = wall;
        self.clients.has_settled = false;
        match event {
            Event::Changed(changes) => self.changed(&changes, now),
            Event::Watched => self.follow_cgroups(now),
            Event::Wakeup => self.wake_up(now),
            Event::Looked { service, source, result } => self.looked(&service, &source, result, now),
            Event::LookedAtConfig { is_due, result } => self.looked_at_config(is_due, result, now),
            Event::LearntRead(read) => self.take_learnt(read, now),
            Event::Stored(stored) => self.stored(stored, now),
            Event::Read { service, source, begun, version, result } => {
                // A reload may have changed where the service's endpoints come from.
                if self.sources.files.get(&service).is_some_and(|file| file.source == source) {
                    self.read(&service, begun, version, result, now);
                    self.settle(now);
                    self.probe_again(now);
                }
            }
            Event::Computed { service, contents } => {
                self.computed(&service, &contents, now);
                self.probe_again(now);
            }
            Event::Opened(tried) => {
                self.opened(*tried, now);
                self.probe_again(now);
            }
            Event::Loaded(loaded) if self.is_ready => {
                self.loaded(*loaded, now);
                self.probe_again(now);
            }
            Event::Loaded(loaded) => {
                self.first_loaded(*loaded, now)?;
                self.probe_again(now);
                self.poll_first();
                self.end_first_looks(now);
            }
            Event::ReadersGone(result) => self.readers_gone(result, now),
            Event::Reclaimed(pass, suspects) => self.reclaimed(pass, suspects, now),
            Event::NamespacesFound(found) => {
                self.namespaces_found(found, now);
                self.hear_probes(now);
            }
            Event::Asked(query) => self.answer(query, now),
            Event::Heard => {
                // What returns is tried if it is ejected: also by an ejection since the last tick.
                self.clients.tasks.iter_mut().for_each(|client_task| client_task.hear_kernel(now));
                self.hear_probes(now);
                self.end_first_looks(now);
            }
            Event::Hangup => self.reload_now(now),
        }
        self.start_storing(now);
        self.search_namespaces(now);
        Ok(std::mem::take(&mut self.effects))
    }

    /// By when [`Event::Wakeup`] is to come.
    pub fn next_wakeup(&self, now: Instant) -> Option<Instant> {
        let settling = self.clients.is_settling.then_some(now);
        self.next_due().into_iter().chain(self.next_tick).chain(settling).min()
    }

    /// Does one thing whose time has come: the others come with the next wake-up, so that what else wakes the loop has its turn.
    fn wake_up(&mut self, now: Instant) {
        if self.next_due().is_some_and(|due| due <= now) {
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

    /// Whether queries are answered: commands that wait for the daemon wait for the first look as well.
    pub fn is_open(&self) -> bool {
        self.is_ready && self.next_end_of_first_look().is_none()
    }

    /// When a file that changed is to be read, if one is waiting for that, or a first look is over.
    fn next_due(&self) -> Option<Instant> {
        let files = self.sources.files.values().map(|file| &file.feed.progress);
        let due = files.chain([self.reload.progress()]).filter_map(Progress::due);
        due.chain(self.next_end_of_first_look()).min()
    }

    fn changed(&mut self, changes: &BTreeSet<PathBuf>, now: Instant) {
        // Directories of cgroups are watched as well, and may be those of files that are not.
        if self.config.daemon.watch {
            self.files_changed(changes, now);
            self.reload.changed(changes, now);
        }
        // A directory above counts, too: it may be new, with all that is below it.
        let concerns =
            |client_task: &ClientTask| changes.iter().any(|path| client_task.path().starts_with(path));
        let mut any = false;
        for client_task in self.clients.tasks.iter_mut().filter(|client_task| concerns(client_task)) {
            client_task.cgroup_changed();
            // Where that cannot be seen, the next tick looks.
            any |= !client_task.is_effective().unwrap_or(true);
        }
        if any {
            self.watch();
            self.follow_cgroups(now);
        }
    }

    /// Has directories watched: where cgroups appear, and where files lie. A cgroup that appears before that is seen by the look that
    /// follows ([`Event::Watched`]), and one that appears later is a change.
    fn watch(&mut self) {
        let cgroups = self.clients.tasks.iter().map(|client_task| client_task.path().to_owned());
        let directories = if self.config.daemon.watch { self.directories() } else { BTreeSet::new() };
        self.effects.push(Effect::Watch { cgroups: cgroups.collect(), directories });
    }

    fn tick(&mut self, now: Instant) {
        // Before the first configuration is taken on there is nothing to look at.
        if !self.is_ready {
            return;
        }
        self.ticks = self.ticks.wrapping_add(1);
        self.watch();
        self.look_at_files();
        self.look_at_config();
        if self.ticks.is_multiple_of(RETRY_TICKS) {
            self.start_unstarted(now);
        }
        self.follow_cgroups(now);
        let mut freed = false;
        let mut unsettled = false;
        for client_task in &mut self.clients.tasks {
            client_task.hear_kernel(now);
            unsettled |= !client_task.is_settled();
            if let Err(error) = client_task.log_kernel() {
                warn!(client = %client_task.client.name, error = %crate::error::chain(&error), "cannot read counters");
            }
            freed |= client_task.free_idle(now);
            if let Err((error, true)) = client_task.sample(now) {
                warn!(client = %client_task.client.name, error = %crate::error::chain(&error), "cannot read counters");
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
        self.reclaim_flows(now);
        // A wait that failed is tried again.
        self.wait_for_readers();
        let status = self.summary();
        self.effects.push(Effect::Notify(Notice::Status(status)));
    }
}
