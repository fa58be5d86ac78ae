//! The one event loop: everything that can wake the daemon, and what it does then.
//!
//! The only place that reads the clock, spawns tasks and handles signals. Between events it sleeps; nothing it does or
//! fails to do can fail a connect. In reading order: how it starts and what wakes it (this file), endpoint files
//! (`files`), another configuration (`reload`) and what it cannot change (`fixed`), clients on their way out (`leaving`),
//! what it tells (`report`), and what metrics cannot read from the maps (`facts`).

mod files;

mod reload;

mod fixed;

mod leaving;

mod facts;

mod report;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tracing::{error, info, warn};

use self::files::Watched;
use self::leaving::Leaving;
use self::reload::{Loaded, Reload, Tried};
use self::report::{Notifier, Waiter};
use crate::agent::{Agent, Followed};
use crate::api::{self, Question};
use crate::config::{Client, Config};
use crate::datapath::{self, DatapathError, Features, Patient, Repair};
use crate::metrics;
use crate::offer::{self, Offer, Offers};
use crate::source::{Contents, FileSource, SourceError, Stamp, Watch};

/// Files and cgroups are looked at, and idle slots freed, this often: a watch can be lost without a word.
const TICK: Duration = Duration::from_secs(1);
/// Every how many ticks flow records are compared with the kernel's lists of sockets.
const REPAIR_TICKS: u32 = 60;

/// Every how many ticks clients that could not be started are tried again.
const RETRY_TICKS: u32 = 10;

/// Reads the configuration again as the command line said to read it.
pub type Reread = Arc<dyn Fn() -> Result<Config, String> + Send + Sync>;

/// What a pass over the flow records found, by client.
type Repaired = Vec<(String, Result<Repair, DatapathError>)>;

/// Everything that can wake the daemon.
enum Event {
    /// Something changed in directories that are watched.
    Changed(BTreeSet<PathBuf>),
    /// A file that changed has had time to settle.
    Due,
    /// An endpoint file was read, for the service. Readings are numbered in the order in which they were begun.
    Read {
        service: String,
        source: FileSource,
        begun: u64,
        stamp: Option<Stamp>,
        result: Result<Contents, SourceError>,
    },
    /// What client tasks use of the service's list was computed.
    Computed { service: String, offer: Offer },
    /// The configuration and all its files were read.
    Loaded(Box<Loaded>),
    /// Clients that could not be started were tried again.
    Opened(Box<Tried>),
    /// Every program that was running when the wait began has ended.
    ReadersGone(Result<(), DatapathError>),
    /// Flow records were compared with the kernel's lists of sockets.
    Repaired(Repaired),
    /// Somebody asks.
    Asked(Question),
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
    config: Config,
    features: Features,
    agents: Vec<Agent>,
    /// Clients that could not be started when the configuration was reloaded, and why. Tried again now and then.
    unstarted: Vec<(Client, String)>,
    opening: bool,
    leaving: Vec<Leaving>,
    /// Lists that the configuration holds.
    statics: Offers,
    /// By service name.
    files: BTreeMap<String, Watched>,
    /// How many readings of files were begun.
    readings: u64,
    reload: Reload,
    watch: Watch,
    waiting_for_readers: bool,
    repairing: bool,
    /// By client: what the last pass over its flow records found, and records taken out since the daemon started.
    repairs: BTreeMap<String, (Repair, u64)>,
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
    // What panics in a thread beside the loop would never report back, and the loop would wait for it: better to start
    // anew, which no connect notices.
    let tell_panic = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tell_panic(panic);
        std::process::abort();
    }));
    // Two threads: one for the loop, one for what may block beside it.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let result = runtime.block_on(start(config, stamp, reread));
    // A file system that does not answer must not keep the daemon from ending.
    runtime.shutdown_timeout(TICK);
    result
}

async fn start(config: Config, stamp: Option<Stamp>, reread: Reread) -> Result<()> {
    // Before anything is changed: a signal during the start must not leave it half done.
    let mut stop =
        Stop { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? };
    let mut hangup = signal(SignalKind::hangup())?;
    let features = datapath::probe()?;
    let socket = api::socket(&config.paths.run);
    let bound =
        api::bind(&config.paths.run).with_context(|| format!("create the socket {}", socket.display()))?;
    let port = config.metrics.listen;
    let port = port.map(|port| {
        metrics::bind(port)
            .with_context(|| format!("listen on {port}, which [metrics] in the configuration names"))
    });
    let port = port.transpose()?;
    let (events, mut inbox) = mpsc::channel(64);
    let (questions, mut asked) = mpsc::channel(8);
    let watch = Watch::new().context("watch directories for changes (inotify)")?;
    let started = SystemTime::now();
    let reload = Reload::new(&config.path, stamp, reread, started);
    let mut daemon = Daemon {
        started,
        config,
        features,
        agents: Vec::new(),
        unstarted: Vec::new(),
        opening: false,
        leaving: Vec::new(),
        statics: Offers::new(),
        files: BTreeMap::new(),
        readings: 0,
        reload,
        watch,
        waiting_for_readers: false,
        repairing: false,
        repairs: BTreeMap::new(),
        waiters: Vec::new(),
        notifier: Notifier::new(),
        ticks: 0,
        events,
    };
    daemon.open()?;
    let listener = bound.show().with_context(|| format!("create the socket {}", socket.display()))?;
    let metrics = metrics::router(questions.clone());
    let port = port.map(|port| tokio::spawn(metrics::serve(port, metrics.clone())));
    let server = tokio::spawn(api::serve(listener, questions, metrics));
    daemon.notify_ready();
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut watchdog = daemon.notifier.watchdog().map(tokio::time::interval);
    loop {
        let due = daemon.next_due();
        let event = tokio::select! {
            () = stop.asked() => Event::Stop,
            _ = hangup.recv() => Event::Hangup,
            Some(event) = inbox.recv() => event,
            Some(question) = asked.recv() => Event::Asked(question),
            changes = daemon.watch.changed() => Event::Changed(changes),
            () = tokio::time::sleep_until(due.into()) => Event::Due,
            _ = tick.tick() => Event::Tick,
            () = next(&mut watchdog) => Event::Watchdog,
        };
        if !daemon.handle(event, Instant::now()) {
            break;
        }
    }
    daemon.notifier.stopping();
    for server in port.iter().chain([&server]) {
        server.abort();
    }
    let _ = std::fs::remove_file(&socket);
    info!("stopped; connects go on with the tables as they are");
    Ok(())
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
    /// Opens every client, fills its tables, and only then attaches: no connect meets an empty table that need not be.
    fn open(&mut self) -> Result<()> {
        if let Some(warning) = datapath::namespace_warning() {
            warn!("{warning}");
        }
        self.check_pins()?;
        self.finish_what_was_begun();
        let opener = self.opener();
        for client in self.config.clients.clone() {
            let name = client.name.clone();
            let (agent, others) = opener.open(client).with_context(|| format!("start client {name}"))?;
            self.agents.push(agent);
            self.leaving.extend(others);
        }
        // A daemon that was killed may have replaced tables just now: what it left must not be written over while a
        // program reads it.
        if self.agents.iter().any(|agent| !agent.datapath().applied().services.is_empty()) {
            datapath::wait_for_readers()?;
        }
        self.statics = offer::statics(&self.config.clients, &Offers::new());
        for agent in &mut self.agents {
            let name = agent.client.name.clone();
            agent.deliver_static(&self.statics).with_context(|| format!("start client {name}"))?;
        }
        for (service, source) in files::sources(&self.config) {
            let mut first = source.read_first();
            let diallers = offer::diallers(&self.config.clients, &service);
            for contents in first.contents_mut() {
                contents.offer.complete(&diallers);
            }
            self.take_first(&service, source, 0, first, None, Instant::now());
        }
        for agent in &mut self.agents {
            let name = agent.client.name.clone();
            agent.settle().with_context(|| format!("fill the tables of client {name}"))?;
        }
        self.watch_everything();
        for agent in &mut self.agents {
            let name = agent.client.name.clone();
            // What connects count from here on is of the last minute.
            agent.sample(Instant::now()).with_context(|| format!("read the counters of client {name}"))?;
            let attached = agent.attach().with_context(|| format!("start client {name}"))?;
            tell(agent, attached, true);
        }
        self.leave_other_cgroups();
        let Features {
            fetching_atomics,
            set_retval,
            knows_mptcp,
            socket_errors,
            outcomes_at_release,
            connect_timeouts,
            knows_kernel_sockets,
            offsets: _,
        } = self.features;
        let pins = self.config.paths.pins.display();
        let socket = api::socket(&self.config.paths.run);
        info!(
            %pins, socket = %socket.display(), fetching_atomics, set_retval, knows_mptcp, socket_errors,
            outcomes_at_release, connect_timeouts, knows_kernel_sockets, "running"
        );
        self.wait_for_readers();
        self.start_repair();
        Ok(())
    }

    /// Watches what can be watched; what cannot is looked at once a second all the same.
    fn watch_everything(&mut self) {
        let mut failed: BTreeMap<PathBuf, notify::Error> = BTreeMap::new();
        let files =
            self.files.values().map(|file| file.source.path.clone()).chain([self.config.path.clone()]);
        for path in files {
            if let Err(error) = self.watch.add(&path) {
                failed.insert(path, error);
            }
        }
        for agent in &self.agents {
            if let Err(error) = self.watch.add_nearest(agent.path()) {
                failed.insert(agent.path().to_owned(), error);
            }
        }
        // Said once: the tick tries again and again.
        if self.ticks == 0 {
            for (path, error) in failed {
                warn!(path = %path.display(), %error, "cannot watch; looking once a second instead");
            }
        }
    }

    /// Handles one event. Returns whether to go on.
    fn handle(&mut self, event: Event, now: Instant) -> bool {
        match event {
            Event::Changed(changes) => self.changed(&changes, now),
            Event::Due => {
                self.start_reading(now);
                self.start_reload(now);
            }
            Event::Read { service, source, begun, stamp, result } => {
                // A reload may have changed where the service's endpoints come from.
                if self.files.get(&service).is_some_and(|file| file.source == source) {
                    self.read(&service, begun, stamp, result, now);
                    self.settle();
                }
            }
            Event::Computed { service, offer } => self.computed(&service, &offer),
            Event::Opened(tried) => self.opened(*tried),
            Event::Loaded(loaded) => self.loaded(*loaded, now),
            Event::ReadersGone(result) => self.readers_gone(result),
            Event::Repaired(repaired) => self.repaired(repaired),
            Event::Asked(question) => self.answer(question, now),
            Event::Tick => self.tick(now),
            Event::Watchdog => self.notifier.watchdog_fed(),
            Event::Hangup => self.reload_now(),
            Event::Stop => return false,
        }
        true
    }

    fn next_due(&self) -> Instant {
        let files = self.files.values().map(|file| &file.progress);
        let due = files.chain([self.reload.progress()]).filter_map(crate::source::Progress::due).min();
        // Far enough away to mean "never": the tick comes first.
        due.unwrap_or_else(|| Instant::now() + 10 * TICK)
    }

    fn changed(&mut self, changes: &BTreeSet<PathBuf>, now: Instant) {
        self.files_changed(changes, now);
        self.reload.changed(changes, now);
        // Also of a directory above, which may be new with all below it.
        let concerns = |agent: &Agent| changes.iter().any(|path| agent.path().starts_with(path));
        if self.agents.iter().any(|agent| concerns(agent) && !agent.is_effective()) {
            // Before it is looked at: what appears from here on is an event of its own.
            self.watch_everything();
            self.follow_cgroups();
        }
    }

    fn settle(&mut self) {
        for agent in &mut self.agents {
            if let Err(error) = agent.settle() {
                error!(client = %agent.client.name, error = %crate::chain(&error), "cannot bring the maps to the plan");
            }
        }
        self.wait_for_readers();
    }

    /// Starts a wait for readers if anybody needs one and none is under way.
    fn wait_for_readers(&mut self) {
        if self.waiting_for_readers || !self.agents.iter().any(Agent::wants_wait) {
            return;
        }
        self.waiting_for_readers = true;
        for agent in &mut self.agents {
            agent.before_wait();
        }
        let events = self.events.clone();
        tokio::task::spawn_blocking(move || {
            // The loop is gone only when the daemon stops.
            let _ = events.blocking_send(Event::ReadersGone(datapath::wait_for_readers()));
        });
    }

    fn readers_gone(&mut self, result: Result<(), DatapathError>) {
        self.waiting_for_readers = false;
        if let Err(error) = result {
            // Nothing is written again that may be in use: tables stay as they are until a wait succeeds.
            error!(error = %crate::chain(&error), "no table can be replaced for now");
            return;
        }
        let mut freed = false;
        for agent in &mut self.agents {
            agent.after_wait();
            freed |= agent.free_idle();
        }
        if freed {
            self.offer_again();
        }
        self.settle();
    }

    fn tick(&mut self, now: Instant) {
        self.ticks = self.ticks.wrapping_add(1);
        self.watch_everything();
        self.look_at_files(now);
        self.reload.look(now);
        if self.ticks.is_multiple_of(RETRY_TICKS) {
            self.start_unstarted();
        }
        self.follow_cgroups();
        let mut freed = false;
        for agent in &mut self.agents {
            freed |= agent.free_idle();
            if let Err(error) = agent.remove_old_links() {
                warn!(client = %agent.client.name, error = %crate::chain(&error), "cannot detach from an old cgroup");
            }
            if let Err(error) = agent.sample(now) {
                warn!(client = %agent.client.name, error = %crate::chain(&error), "cannot read counters");
            }
        }
        self.retire_leaving();
        if freed {
            self.offer_again();
        }
        if freed || self.agents.iter().any(|agent| agent.trouble().is_some()) {
            self.settle();
        }
        if self.ticks.is_multiple_of(REPAIR_TICKS) {
            self.start_repair();
        }
        // A wait that failed is tried again.
        self.wait_for_readers();
        self.notify_status();
    }

    // ---- cgroups ---------------------------------------------------------------------------------------------------

    /// Attaches where a client's cgroup is another one now, or its links are gone.
    fn follow_cgroups(&mut self) {
        let mut moved = false;
        for agent in &mut self.agents {
            let before = agent.attach_error().map(str::to_owned);
            match agent.follow_cgroup() {
                Ok(followed) => {
                    moved |= followed != Followed::Unchanged;
                    tell(agent, followed, false);
                }
                Err(error) => {
                    let error = crate::chain(&error);
                    // Said once, not once per look.
                    if before.as_ref() != Some(&error) {
                        warn!(client = %agent.client.name, %error, "cannot attach to the cgroup");
                    }
                }
            }
        }
        if moved {
            self.leave_other_cgroups();
        }
        self.answer_waiters();
    }

    /// Lets no flow begin where clients were attached before. Only after all of them are attached where they are now: of
    /// two that change places, each takes over before the other goes.
    fn leave_other_cgroups(&mut self) {
        for agent in &self.agents {
            if let Err(error) = agent.leave_other_cgroups() {
                warn!(client = %agent.client.name, error = %crate::chain(&error), "cannot detach from an old cgroup");
            }
        }
        self.retire_leaving();
    }

    // ---- flow records ----------------------------------------------------------------------------------------------

    /// Starts to compare flow records with the kernel's lists of sockets, if any flow is open.
    fn start_repair(&mut self) {
        let open = self.agents.iter().filter(|agent| !agent.is_unpinned() && agent.open_flows() > 0);
        let patient =
            |agent: &Agent| Patient { pins: agent.pins.clone(), cgroup: Some(agent.path().to_owned()) };
        let mut patients: Vec<Patient> = open.map(patient).collect();
        // Those that leave wait for nothing else. Of another version we do not know the records.
        let leaving = self.leaving.iter().filter(|leaving| leaving.pins.is_of_this_version());
        patients.extend(leaving.map(|leaving| Patient { pins: leaving.pins.clone(), cgroup: None }));
        if self.repairing || patients.is_empty() {
            return;
        }
        self.repairing = true;
        let events = self.events.clone();
        tokio::task::spawn_blocking(move || {
            let _ = events.blocking_send(Event::Repaired(datapath::repair(&patients)));
        });
    }

    fn repaired(&mut self, repaired: Repaired) {
        self.repairing = false;
        for (client, result) in repaired {
            match result {
                Ok(repair) => {
                    let Repair { removed, kept_never_listed, kept_elsewhere } = repair;
                    if removed > 0 {
                        warn!(
                            client,
                            removed,
                            kept_never_listed,
                            kept_elsewhere,
                            "flow records of sockets that are gone were removed"
                        );
                    }
                    let (last, total) = self.repairs.entry(client).or_default();
                    *last = repair;
                    *total += removed;
                }
                Err(error) => warn!(client, error = %crate::chain(&error), "flow records were not checked"),
            }
        }
    }
}

/// Tells what became of a client's attachment.
fn tell(agent: &Agent, followed: Followed, starting: bool) {
    let client = &agent.client;
    match (followed, agent.cgroup()) {
        (Followed::Attached, Some(cgroup)) => info!(
            client = %client.name, cgroup = %cgroup.path.display(), id = cgroup.id, index = client.task.index,
            count = client.task.count, services = client.services.len(), "client attached"
        ),
        (Followed::Lost, _) => {
            info!(client = %client.name, cgroup = %client.cgroup.display(), "the cgroup is gone; waiting for it");
        }
        (Followed::Unpinned, _) => warn!(
            client = %client.name,
            "its pins were removed, so its connects go unbalanced; SIGHUP or a restart makes them anew and attaches it"
        ),
        // A path that is mistyped looks the same.
        (Followed::Unchanged | Followed::Attached, None) if starting => {
            warn!(client = %client.name, cgroup = %client.cgroup.display(), "there is no such cgroup; waiting for it");
        }
        (Followed::Unchanged | Followed::Attached, _) => {}
    }
}
