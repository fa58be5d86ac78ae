//! The daemon: every event that can wake it, and what it does then.
//!
//! Events come with their time. Between them the daemon sleeps; nothing that it does or fails to do can fail a connect.
//! In reading order: the events (this file), the loop that waits for them (`event_loop`), the start, which is the first
//! reload, and the end (`start`), directories that change (`watching`), files that may not answer (`file_io`), endpoint
//! files (`files`), how lists are read (`lists`), given to clients (`delivering`) and kept (`keeping`), another
//! configuration (`reload`), how it is read (`loader`), what it changes (`changes`) and cannot change (`fixed`), one client
//! (`client_task`), all of them (`clients`), how they are opened (`opening`) and leave (`leaving`), flow records whose end
//! no program saw (`flow_records`), the network namespaces of clients (`namespaces`), which backends are probed and what is heard of it (`probing`), who of them reports (`register`), on which
//! network interfaces the kernel takes reports in by itself (`receiving`), weights that follow load (`control`), what they have learnt for a later start (`learnt`), what the daemon answers (`report`), and what it knows that the maps do not hold
//! (`facts`).

mod event_loop;

mod start;

mod watching;

mod file_io;

mod files;

mod delivering;

mod lists;

mod keeping;

mod reload;

mod loader;

mod first_look;

pub mod fixed;

mod changes;

mod client_task;

mod clock;

mod control;

mod learnt;

mod clients;

mod opening;

mod leaving;

mod flow_records;

mod namespaces;

mod probing;

mod receiving;

mod register;

mod facts;

mod report;

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Result;
use lb_core::feed::{Progress, ReadFailure};
use tokio::sync::mpsc;
use tracing::warn;

use self::client_task::ClientTask;
use self::clients::Clients;
use self::clock::Clock;
pub use self::event_loop::run;
pub use self::file_io::NoAnswer;
use self::files::{Look, Sources};
use self::flow_records::ReclaimPasses;
use self::keeping::Kept;
use self::learnt::{Learnings, LearntFile};
use self::loader::Loaded;
use self::opening::Tried;
use self::probing::Probing;
use self::reload::Reload;
use self::report::Waiter;
use self::watching::Watching;
use crate::api::Query;
use crate::config::Config;
use crate::source::{Contents, FileSource, SourceError, Stamp};
use lb_host::notify::Notifier;
use lb_host::watch::Watch;
use lb_kernel::{DatapathError, Features, Pass, Suspects};

/// Files and cgroups are looked at, and idle slots freed, this often: a watch can be lost without notice.
const TICK: Duration = Duration::from_secs(1);

/// Every how many ticks clients that could not be started are tried again.
const RETRY_TICKS: u32 = 10;

/// Reads the configuration again as the command line said to read it.
pub type Reread = Arc<dyn Fn() -> Result<Config, ReadFailure> + Send + Sync>;

/// Everything that can wake the daemon.
enum Event {
    /// Something changed in directories that are watched.
    Changed(BTreeSet<PathBuf>),
    /// A file that changed has had time to settle.
    Due,
    /// Maps of clients are not what their plans say yet.
    Settle,
    /// An endpoint file of the service was looked at.
    Looked { service: String, source: FileSource, result: Result<Look, NoAnswer> },
    /// The configuration file was looked at, to take it on if it has settled.
    LookedAtConfig { is_due: bool, result: Result<Look, NoAnswer> },
    /// An endpoint file was read, for the service. Readings are numbered in the order in which they were begun.
    /// `result` is `None` if the file is the version that is known.
    Read {
        service: String,
        source: FileSource,
        begun: u64,
        stamp: Option<Stamp>,
        result: Option<Result<Contents, SourceError>>,
    },
    /// What an earlier daemon had learnt was read, which could not be read at the start.
    LearntRead(LearntFile),
    /// Lists were kept for later starts.
    Kept(Kept),
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
    NamespacesFound(Vec<namespaces::Found>),
    /// A process asks on the socket or the port for metrics.
    Asked(Query),
    /// [`TICK`] has passed.
    Tick,
    /// The service manager wants a sign of life.
    Watchdog,
    /// Probes or reports have found somebody otherwise than before.
    Heard,
    /// SIGHUP.
    Hangup,
    /// SIGTERM or SIGINT.
    Stop,
}

struct Daemon {
    clock: Clock,
    started: SystemTime,
    /// Whether the first configuration was taken on. Before that there is no client, and no answer.
    is_ready: bool,
    /// Tells threads beside the loop that the daemon does not wait for them any more.
    stopping: Arc<AtomicBool>,
    /// The configuration in force.
    config: Config,
    features: Features,
    clients: Clients,
    sources: Sources,
    reload: Reload,
    watching: Watching,
    passes: ReclaimPasses,
    probing: Probing,
    learnt: Learnings,
    waiters: Vec<Waiter>,
    notifier: Notifier,
    ticks: u32,
    /// By how much later than at once the first look begins on this host.
    first_look_jitter: Duration,
    events: mpsc::Sender<Event>,
}

impl Daemon {
    /// Without any client yet: what is configured comes with the first configuration that is taken on.
    fn new(
        config: &Config,
        features: Features,
        watch: Watch,
        reload: Reload,
        clock: Clock,
        events: mpsc::Sender<Event>,
    ) -> Self {
        Self {
            clock,
            started: SystemTime::now(),
            is_ready: false,
            stopping: Arc::default(),
            config: Config { clients: Vec::new(), ..config.clone() },
            features,
            clients: Clients::default(),
            sources: Sources::new(),
            reload,
            watching: Watching::new(watch),
            passes: ReclaimPasses::new(),
            probing: Probing::new(),
            learnt: Learnings::default(),
            waiters: Vec::new(),
            notifier: Notifier::new(),
            ticks: 0,
            first_look_jitter: Duration::ZERO,
            events,
        }
    }

    /// Handles one event, and says whether to go on.
    fn handle(&mut self, event: Event, now: Instant) -> ControlFlow<Result<()>> {
        match event {
            Event::Changed(changes) => self.changed(&changes, now),
            Event::Due => {
                self.start_reading(now);
                self.look_at_due_config(now);
                self.end_first_looks(now);
            }
            Event::Settle => self.go_on_settling(now),
            Event::Looked { service, source, result } => self.looked(&service, &source, result, now),
            Event::LookedAtConfig { is_due, result } => self.looked_at_config(is_due, result, now),
            Event::LearntRead(read) => self.take_learnt(read, now),
            Event::Kept(kept) => self.kept(kept, now),
            Event::Read { service, source, begun, stamp, result } => {
                // A reload may have changed where the service's endpoints come from.
                if self.sources.files.get(&service).is_some_and(|file| file.source == source) {
                    self.read(&service, begun, stamp, result, now);
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
                if let Err(error) = self.first_loaded(*loaded, now) {
                    return ControlFlow::Break(Err(error));
                }
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
            Event::Tick => self.tick(now),
            Event::Heard => {
                // What returns is tried if it is ejected: also by an ejection since the last tick.
                self.clients.tasks.iter_mut().for_each(|client_task| client_task.hear_kernel(now));
                self.hear_probes(now);
                self.end_first_looks(now);
            }
            Event::Watchdog => self.notifier.watchdog_fed(),
            Event::Hangup => self.reload_now(now),
            Event::Stop => return ControlFlow::Break(Ok(())),
        }
        self.start_keeping(now);
        self.search_namespaces(now);
        ControlFlow::Continue(())
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
            // Watched before it is looked at, so that what appears from here on is an event of its own.
            self.watch_cgroups();
            self.follow_cgroups(now);
        }
    }

    fn tick(&mut self, now: Instant) {
        // Before the first configuration is taken on there is nothing to look at.
        if !self.is_ready {
            return;
        }
        self.ticks = self.ticks.wrapping_add(1);
        self.watch_cgroups();
        self.look_at_files();
        self.look_at_config();
        if self.ticks.is_multiple_of(RETRY_TICKS) {
            self.start_unstarted(now);
            self.watch_again();
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
        self.notify_status();
    }
}
