//! The one event loop: everything that can wake the daemon, and what it does then.
//!
//! The only place that reads the clock, spawns tasks and handles signals. Between events it sleeps; nothing it does or
//! fails to do can fail a connect. In reading order: what wakes it (this file), its start, which is its first reload, and
//! its end (`start`), directories that change (`watching`), files that may not answer (`file_io`), endpoint files (`files`),
//! how their lists are read (`lists`) and kept (`keeping`), another configuration (`reload`), how it is read (`loader`) and
//! what it cannot change (`fixed`), one client (`client_task`), all of them (`clients`), how they are opened (`opening`) and
//! leave (`leaving`), flow records whose end no program saw (`flow_records`), what it answers (`report`), and what it knows
//! that the maps do not hold (`facts`).

mod start;

mod watching;

mod file_io;

mod files;

mod lists;

mod keeping;

mod reload;

mod loader;

mod fixed;

mod changes;

mod client_task;

mod clients;

mod opening;

mod leaving;

mod flow_records;

mod facts;

mod report;

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, anyhow};
use lb_core::feed::{Progress, Unusable};
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tracing::{info, warn};

use self::client_task::ClientTask;
use self::clients::Clients;
use self::file_io::MAX_THREADS;
pub use self::file_io::NoAnswer;
use self::files::{Look, Sources};
use self::flow_records::ReclaimPasses;
use self::keeping::Kept;
use self::loader::Loaded;
use self::opening::Tried;
use self::reload::Reload;
use self::report::{Notifier, Waiter};
use self::start::Listeners;
use self::watching::Watching;
use crate::api::Query;
use crate::config::Config;
use crate::source::watch::Watch;
use crate::source::{Contents, FileSource, SourceError, Stamp};
use lb_kernel::{DatapathError, Features, Pass, Suspects};

/// Files and cgroups are looked at, and idle slots freed, this often: a watch can be lost without a word.
const TICK: Duration = Duration::from_secs(1);

/// Every how many ticks clients that could not be started are tried again.
const RETRY_TICKS: u32 = 10;

/// Threads for what may block beside the loop. Each use has a limit of its own, and this is their sum, so that none waits
/// for another: files that may not answer; what client tasks use of a list, one thread for each of 256 services; and 64 for
/// a wait for readers, a look at flow records, clients that are opened, and pages and answers that are written.
const BLOCKING_THREADS: usize = MAX_THREADS + 256 + 64;

/// Reads the configuration again as the command line said to read it.
pub type Reread = Arc<dyn Fn() -> Result<Config, Unusable> + Send + Sync>;

/// Everything that can wake the daemon.
enum Event {
    /// Something changed in directories that are watched.
    Changed(BTreeSet<PathBuf>),
    /// A file that changed has had time to settle.
    Due,
    /// An endpoint file of the service was looked at.
    Looked { service: String, source: FileSource, result: Result<Look, NoAnswer> },
    /// The configuration file was looked at, to take it on if it has settled.
    LookedAtConfig { is_due: bool, result: Result<Look, NoAnswer> },
    /// An endpoint file was read, for the service. Readings are numbered in the order in which they were begun. Without a
    /// result the file was as it is known.
    Read {
        service: String,
        source: FileSource,
        begun: u64,
        stamp: Option<Stamp>,
        result: Option<Result<Contents, SourceError>>,
    },
    /// Lists were kept for later starts.
    Kept(Kept),
    /// What client tasks use of the service's list was computed.
    Computed { service: String, contents: Contents },
    /// The configuration and all its files were read.
    Loaded(Box<Loaded>),
    /// Clients that could not be started were tried again.
    Opened(Box<Tried>),
    /// Every program that was running when the wait began has ended.
    ReadersGone(Result<(), DatapathError>),
    /// Flow records were compared with the kernel's lists of sockets.
    Reclaimed(Pass, Suspects),
    /// A process asks on the socket or the port for metrics.
    Asked(Query),
    /// Time passes.
    Tick,
    /// The service manager wants a sign of life.
    Watchdog,
    /// SIGHUP.
    Hangup,
    /// SIGTERM or SIGINT.
    Stop,
}

struct Daemon {
    started: SystemTime,
    /// Whether the first configuration was taken on. Before that there is no client, and no answer.
    is_ready: bool,
    /// Says to threads beside the loop that the daemon does not wait for them any more.
    stopping: Arc<AtomicBool>,
    /// What is in force.
    config: Config,
    features: Features,
    clients: Clients,
    sources: Sources,
    reload: Reload,
    watching: Watching,
    passes: ReclaimPasses,
    waiters: Vec<Waiter>,
    notifier: Notifier,
    ticks: u32,
    events: mpsc::Sender<Event>,
}

/// Runs until SIGTERM or SIGINT, with a configuration of which `stamp` was read. What it has put into the kernel stays
/// there.
///
/// # Errors
/// If it cannot start; once it runs, it runs.
pub fn run(config: Config, stamp: Option<Stamp>, reread: Reread) -> Result<()> {
    crate::memory::give_back_what_is_freed();
    let runtime = runtime()?;
    // What panics in a thread beside the loop would never report back, and the loop would wait for it: better to start
    // anew, which no connect notices.
    let tell_panic = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tell_panic(panic);
        std::process::abort();
    }));
    let result = runtime.block_on(turn(config, stamp, reread));
    // A file system that does not answer must not keep the daemon from ending.
    runtime.shutdown_timeout(TICK);
    result
}

/// The loop runs in this thread, and one other serves the socket and the port for metrics. What may block runs on further ones.
///
/// # Errors
/// If the kernel refuses a descriptor, or a thread. tokio panics there in part, at what it does once in a process.
fn runtime() -> Result<Runtime> {
    let build = || {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .max_blocking_threads(BLOCKING_THREADS)
            .enable_all()
            .build()
    };
    let tell_panic = std::panic::take_hook();
    // What it says becomes an error.
    std::panic::set_hook(Box::new(|_| {}));
    let built = std::panic::catch_unwind(build);
    std::panic::set_hook(tell_panic);
    let built = built.map_err(|panic| {
        let said = panic.downcast_ref::<String>().map_or("no reason is known", String::as_str);
        anyhow!("{said}")
    });
    built.and_then(|built| Ok(built?)).context("start the event loop")
}

async fn turn(config: Config, stamp: Option<Stamp>, reread: Reread) -> Result<()> {
    // Before anything is changed: a signal during the start must not leave it half done.
    let mut stop =
        Stop { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? };
    let mut hangup = signal(SignalKind::hangup())?;
    let (queries, mut asked) = mpsc::channel(8);
    let (events, mut inbox) = mpsc::channel(64);
    let features = start::check_host(&config)?;
    let mut listeners = Listeners::bind(&config, queries)?;
    let watch = Watch::new().unwrap_or_else(|error| {
        warn!(%error, "directories cannot be watched (inotify); looking once a second instead");
        Watch::none()
    });
    let reload = Reload::new(&config.path, stamp, reread, SystemTime::now());
    let mut daemon = Daemon::new(&config, features, watch, reload, events);
    daemon.begin(config, Instant::now());
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut watchdog = daemon.notifier.watchdog().map(tokio::time::interval);
    let result = loop {
        let due = daemon.next_due();
        let event = tokio::select! {
            () = stop.asked() => Event::Stop,
            _ = hangup.recv() => Event::Hangup,
            Some(event) = inbox.recv() => event,
            Some(query) = asked.recv() => Event::Asked(query),
            changes = daemon.watching.watch.changed() => Event::Changed(changes),
            () = tokio::time::sleep_until(due.into()) => Event::Due,
            _ = tick.tick() => Event::Tick,
            () = next(&mut watchdog) => Event::Watchdog,
        };
        if let ControlFlow::Break(result) = daemon.handle(event, Instant::now()) {
            break result;
        }
        match if daemon.is_ready { listeners.open() } else { Ok(false) } {
            Ok(true) => daemon.notify_ready(),
            Ok(false) => {}
            Err(error) => break Err(error),
        }
    };
    start::stop(daemon, listeners, inbox).await;
    if result.is_ok() {
        info!("stopped; connects go on with the tables as they are");
    }
    result
}

/// The next turn of an interval; never, if there is none.
async fn next(interval: &mut Option<tokio::time::Interval>) {
    match interval {
        Some(interval) => drop(interval.tick().await),
        None => std::future::pending().await,
    }
}

struct Stop {
    terminate: Signal,
    interrupt: Signal,
}

impl Stop {
    async fn asked(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

impl Daemon {
    /// Without any client yet: what is configured comes with the first configuration that is taken on.
    fn new(
        config: &Config,
        features: Features,
        watch: Watch,
        reload: Reload,
        events: mpsc::Sender<Event>,
    ) -> Self {
        Self {
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
            waiters: Vec::new(),
            notifier: Notifier::new(),
            ticks: 0,
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
            }
            Event::Looked { service, source, result } => self.looked(&service, &source, result, now),
            Event::LookedAtConfig { is_due, result } => self.looked_at_config(is_due, result, now),
            Event::Kept(kept) => self.kept(kept, now),
            Event::Read { service, source, begun, stamp, result } => {
                // A reload may have changed where the service's endpoints come from.
                if self.sources.files.get(&service).is_some_and(|file| file.source == source) {
                    self.read(&service, begun, stamp, result, now);
                    self.settle(now);
                }
            }
            Event::Computed { service, contents } => self.computed(&service, &contents, now),
            Event::Opened(tried) => self.opened(*tried, now),
            Event::Loaded(loaded) if self.is_ready => self.loaded(*loaded, now),
            Event::Loaded(loaded) => {
                if let Err(error) = self.first_loaded(*loaded, now) {
                    return ControlFlow::Break(Err(error));
                }
            }
            Event::ReadersGone(result) => self.readers_gone(result, now),
            Event::Reclaimed(pass, suspects) => self.reclaimed(pass, suspects, now),
            Event::Asked(query) => self.answer(query, now),
            Event::Tick => self.tick(now),
            Event::Watchdog => self.notifier.watchdog_fed(),
            Event::Hangup => self.reload_now(now),
            Event::Stop => return ControlFlow::Break(Ok(())),
        }
        self.start_keeping(now);
        ControlFlow::Continue(())
    }

    fn next_due(&self) -> Instant {
        let files = self.sources.files.values().map(|file| &file.feed.progress);
        let due = files.chain([self.reload.progress()]).filter_map(Progress::due).min();
        // Far enough away to mean "never": the tick comes first.
        due.unwrap_or_else(|| Instant::now() + 10 * TICK)
    }

    fn changed(&mut self, changes: &BTreeSet<PathBuf>, now: Instant) {
        self.files_changed(changes, now);
        self.reload.changed(changes, now);
        // Also of a directory above, which may be new with all below it.
        let concerns =
            |client_task: &ClientTask| changes.iter().any(|path| client_task.path().starts_with(path));
        let mut any = false;
        for client_task in self.clients.tasks.iter_mut().filter(|client_task| concerns(client_task)) {
            client_task.cgroup_changed();
            // What cannot be seen is looked at by the tick.
            any |= !client_task.is_effective().unwrap_or(true);
        }
        if any {
            // Before it is looked at: what appears from here on is an event of its own.
            self.watch_cgroups();
            self.follow_cgroups(now);
        }
    }

    fn tick(&mut self, now: Instant) {
        // There is nothing yet to look at.
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
        for client_task in &mut self.clients.tasks {
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
        if freed || self.clients.tasks.iter().any(|client_task| client_task.trouble().is_some()) {
            self.settle(now);
        }
        self.reclaim_flows(now);
        // A wait that failed is tried again.
        self.wait_for_readers();
        self.notify_status();
    }

    // ---- cgroups ---------------------------------------------------------------------------------------------------
}
