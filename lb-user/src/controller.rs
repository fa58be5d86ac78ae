//! The controller makes all decisions of a host's daemon. It is pure: an event comes in with its
//! time, and effects go out.
//!
//! Call [`Controller::begin`] once. Then call [`Controller::handle`] for each event, and pass
//! [`Event::Wakeup`] no later than [`Controller::next_wakeup`]. Both calls return effects. The
//! shell may carry these out in any order and at any time; the result of each is an event of its
//! own. An effect may fail, take for ever or never be carried out: the state that it was meant to
//! change then stays as it is. An event may come late, twice, or for an object that is gone.
//!
//! The controller reads no clock and no file, starts no thread and draws no random number. It calls
//! the kernel ([`Kernel`]) and the network ([`Network`]) through traits, because its next decision
//! depends on what these calls return.
//!
//! In reading order: events and effects (this file); endpoint files (`files`), how lists are
//! delivered to clients (`delivery`) and which state files are stored for later starts
//! (`state_files`); a new configuration (`reload`), what it changes (`changes`) and cannot change
//! (`fixed`); one client (`client_task`), all of them (`clients`), those that cannot be started
//! (`unstarted`) and those that leave (`leaving`); the start (`start`, `first_look`); flow records
//! whose end no program saw (`flow_records`), the network namespaces of clients (`namespaces`);
//! which backends are probed (`probing`, by `network`), which of them report (`register`), weights
//! that follow load (`control`) and what the daemon has learnt about these (`learnt`); queries
//! (`queries`) and the facts that answers are built from (`facts`).

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

/// The controller checks files and cgroups and frees idle slots at this interval, because a watch
/// can be lost without notice.
pub const TICK: Duration = Duration::from_secs(1);

/// Ticks between two attempts to start the clients that could not be started.
const RETRY_TICKS: u32 = 10;

pub enum Event {
    /// Something changed in watched directories.
    Changed(BTreeSet<PathBuf>),
    /// The directories that [`Effect::Watch`] named are watched.
    Watched,
    /// The time of [`Controller::next_wakeup`] has come.
    Wakeup,
    /// The stamp of the service's endpoint file was read; `None` if there is no file.
    Looked { service: String, source: FileSource, result: Result<Option<Stamp>, NoAnswer> },
    /// The stamp of the configuration file was read. `is_due`: the file has settled, so a new
    /// version is to be loaded now.
    LookedAtConfig { is_due: bool, result: Result<Option<Stamp>, NoAnswer> },
    /// An endpoint file was read for the service. Readings are numbered in the order in which they
    /// began. `result` is `None` if the file still has the known version.
    Read {
        service: String,
        source: FileSource,
        begun: u64,
        version: Version<Stamp>,
        result: Option<Result<Contents, SourceError>>,
    },
    /// The loads that an earlier daemon had learnt were read; they could not be read at the start.
    LearntRead(LearntFile),
    /// Storing files for later starts has ended.
    Stored(StoreFailures),
    /// The assignments of the service's list are computed: what each client task uses of it.
    Computed { service: String, contents: Contents },
    /// A configuration and all its files were read.
    Loaded(Box<Loaded>),
    /// A retry of clients that could not be started has ended.
    Opened(Box<Tried>),
    /// A wait for readers has ended: every program that was running when it began has ended, unless
    /// the wait failed.
    ReadersGone(Result<(), DatapathError>),
    /// Flow records were compared with the kernel's lists of sockets.
    Reclaimed(Pass, Suspects),
    /// A search for the network namespaces of clients has ended.
    NamespacesFound(Vec<NamespaceFound>),
    /// A process sent a query, on the socket or the port for metrics.
    Asked(ControllerQuery),
    /// The health of a backend changed, as probes or reports show it.
    Heard,
    /// An operator requests a reload by SIGHUP.
    Hangup,
}

pub enum Effect {
    /// Watch these directories for changes, and watch for these cgroups to appear; watch nothing
    /// else. [`Event::Watched`] follows.
    Watch { cgroups: Vec<PathBuf>, directories: BTreeSet<PathBuf> },
    /// Notify the service manager.
    Notify(Notice),
    /// Run this beside the loop.
    Work(Box<BackgroundWork>),
}

/// Work that takes time and runs beside the loop. Its result is an event.
pub enum BackgroundWork {
    /// Read the stamp of an endpoint file, and watch its directory.
    Look {
        service: String,
        source: FileSource,
    },
    /// Read the stamp of the configuration file, and watch its directory.
    LookAtConfig {
        is_due: bool,
    },
    /// Read an endpoint file unless it is the `known` version.
    Read {
        service: String,
        source: FileSource,
        begun: u64,
        known: Option<Option<Stamp>>,
        purpose: ListPurpose,
    },
    /// Read the loads that an earlier daemon had learnt.
    ReadLearnt,
    /// Store files for later starts.
    Store(StateFiles),
    /// Compute which endpoints of a list these client tasks use.
    Compute {
        service: String,
        contents: Contents,
        consumers: Vec<Consumer>,
    },
    /// Read a configuration and the files that it names, and open its clients.
    Load(Box<LoadRequest>),
    Open(Box<OpenRequest>),
    /// Wait until every program that is running now has ended.
    WaitForReaders,
    /// Compare flow records with the kernel's lists of sockets.
    Reclaim {
        targets: Vec<ReclaimTarget>,
        suspects: Suspects,
        now: Instant,
        interval: Duration,
    },
    /// Search for the network namespaces of clients; each search comes with the client's name.
    SearchNamespaces(Vec<(String, Search)>),
}

impl From<BackgroundWork> for Effect {
    fn from(work: BackgroundWork) -> Self {
        Self::Work(Box::new(work))
    }
}

/// A notification to the service manager.
#[derive(Debug, PartialEq, Eq)]
pub enum Notice {
    /// The daemon is ready; the text is its status line.
    Ready(String),
    /// A new status line.
    Status(String),
    Reloading,
}

/// The constants of a controller, which it receives at its start.
#[derive(Clone)]
pub struct Environment {
    pub kernel: Arc<dyn Kernel>,
    pub features: Features,
    pub clock: Clock,
    pub host: String,
    /// The process id of the daemon.
    pub pid: u32,
    /// How many file descriptors this process may have.
    pub descriptors: u64,
    /// Why cgroups may be invisible to the daemon; `None` if they are visible.
    pub namespace_warning: Option<String>,
    /// How much later the first look begins on this host, in 256ths of the longest jitter. Differs
    /// from host to host.
    pub jitter: u8,
    /// How many clients are opened at the same time.
    pub threads: usize,
    /// Whether the daemon is stopping and no longer waits for clients that are being opened.
    pub stopping: Arc<AtomicBool>,
}

pub struct Controller {
    environment: Environment,
    /// The wall clock at the last event.
    wall: SystemTime,
    started: SystemTime,
    /// Whether the first configuration is in force. Before that the controller has no client and
    /// answers no query.
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
    /// How much later the first look begins on this host.
    first_look_jitter: Duration,
    effects: Vec<Effect>,
}

impl Controller {
    /// The new controller has no client yet; clients come with the first configuration that is
    /// loaded. `version` is the version of the configuration file that was read.
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
    /// Returns an error if the daemon cannot start. Once it is ready, it never fails.
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
                // A backend that returns while it is ejected becomes the next connect's trial, even
                // if it was ejected after the last tick.
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

    /// When [`Event::Wakeup`] has to come at the latest.
    pub fn next_wakeup(&self, now: Instant) -> Option<Instant> {
        let settling = self.clients.is_settling.then_some(now);
        self.next_due().into_iter().chain(self.next_tick).chain(settling).min()
    }

    /// Does one thing that is due; a further wake-up does the next, so that other events of the
    /// loop get their turn.
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

    /// Whether the daemon answers queries. Commands that wait for the daemon also wait for the end
    /// of the first look.
    pub fn is_open(&self) -> bool {
        self.is_ready && self.next_end_of_first_look().is_none()
    }

    /// The earliest time at which a changed file is to be read or a first look ends, if there is
    /// any.
    fn next_due(&self) -> Option<Instant> {
        let files = self.sources.files.values().map(|file| &file.feed.progress);
        let due = files.chain([self.reload.progress()]).filter_map(Progress::due);
        due.chain(self.next_end_of_first_look()).min()
    }

    fn changed(&mut self, changes: &BTreeSet<PathBuf>, now: Instant) {
        // Directories of cgroups are watched even when files are not, and may contain such files.
        if self.config.daemon.watch {
            self.files_changed(changes, now);
            self.reload.changed(changes, now);
        }
        // A change of a parent directory counts as well: the directory may be new, with everything
        // below it.
        let concerns =
            |client_task: &ClientTask| changes.iter().any(|path| client_task.path().starts_with(path));
        let mut any = false;
        for client_task in self.clients.tasks.iter_mut().filter(|client_task| concerns(client_task)) {
            client_task.cgroup_changed();
            // If this cannot be determined now, the next tick checks again.
            any |= !client_task.is_effective().unwrap_or(true);
        }
        if any {
            self.watch();
            self.follow_cgroups(now);
        }
    }

    /// Requests watches on the directories where cgroups appear and where files lie. A cgroup that
    /// appears before the watch exists is found by the check after [`Event::Watched`]; one that
    /// appears later is reported as a change.
    fn watch(&mut self) {
        let cgroups = self.clients.tasks.iter().map(|client_task| client_task.path().to_owned());
        let directories = if self.config.daemon.watch { self.directories() } else { BTreeSet::new() };
        self.effects.push(Effect::Watch { cgroups: cgroups.collect(), directories });
    }

    fn tick(&mut self, now: Instant) {
        // Before the first configuration is in force there is nothing to check.
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
        // Retries a wait that failed.
        self.wait_for_readers();
        let status = self.summary();
        self.effects.push(Effect::Notify(Notice::Status(status)));
    }
}
