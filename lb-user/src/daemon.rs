//! The one event loop: everything that can wake the daemon, and what it does then.
//!
//! The only place that reads the clock, spawns tasks and handles signals. Between events it sleeps; nothing it does or
//! fails to do can fail a connect.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use lb_core::endpoint::EndpointList;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tracing::{error, info, warn};

use crate::agent::{Agent, AgentError};
use crate::api::{self, Question};
use crate::config::{Config, Source};
use crate::datapath::{self, DatapathError, Features, Pins};
use crate::explain;
use crate::source::{Contents, FileSource, SourceError, Stamp, Watch, directory_of};
use crate::status::{self, Overlay, Status};

/// A file is read this long after the first change of a burst.
const SETTLE: Duration = Duration::from_millis(200);
/// Files are looked at, and idle slots freed, this often: a watch can be lost without a word.
const TICK: Duration = Duration::from_secs(1);
/// Every how many ticks the counters are sampled for shares over the last minute.
const SAMPLE_TICKS: u32 = 5;

/// Everything that can wake the daemon.
enum Event {
    /// Something changed in a directory that holds an endpoint file.
    Changed(PathBuf),
    /// A file that changed has had time to settle.
    Due,
    /// A file was read.
    Read { service: String, stamp: Option<Stamp>, result: Result<Contents, SourceError> },
    /// Every program that was running when the wait began has ended.
    ReadersGone(Result<(), DatapathError>),
    /// Somebody asks.
    Asked(Question),
    /// Time passes.
    Tick,
    /// SIGHUP.
    Reload,
    /// SIGTERM or SIGINT.
    Stop,
}

/// A file that endpoints come from, and how it fares.
struct Watched {
    source: FileSource,
    /// The version that was read last, if it could be found, and whether its stamp tells it from a later one.
    seen: Option<Stamp>,
    settled: bool,
    /// The list in force.
    list: Option<EndpointList>,
    /// A list that was refused for want of room, to be offered again when something gets free.
    refused: Option<Contents>,
    /// When it is to be read.
    due: Option<Instant>,
    reading: bool,
    good_since: Option<Instant>,
    error: Option<String>,
    failures: u64,
}

struct Daemon {
    config: Config,
    features: Features,
    agents: Vec<Agent>,
    /// By service name.
    files: BTreeMap<String, Watched>,
    watch: Watch,
    waiting_for_readers: bool,
    ticks: u32,
    events: mpsc::Sender<Event>,
}

/// Runs until SIGTERM or SIGINT. What it has put into the kernel stays there.
///
/// # Errors
/// If it cannot start; once it runs, it runs.
pub fn run(config: Config) -> Result<()> {
    // Two threads: one for the loop, one for what may block beside it.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let result = runtime.block_on(start(config));
    // A file system that does not answer must not keep the daemon from ending.
    runtime.shutdown_timeout(TICK);
    result
}

async fn start(config: Config) -> Result<()> {
    // Before anything is changed: a signal during the start must not leave it half done.
    let mut stop =
        Stop { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? };
    let mut hangup = signal(SignalKind::hangup())?;
    let features = datapath::probe()?;
    let socket = api::socket(&config.paths.run);
    let bound =
        api::bind(&config.paths.run).with_context(|| format!("create the socket {}", socket.display()))?;
    let (events, mut inbox) = mpsc::channel(64);
    let (questions, mut asked) = mpsc::channel(8);
    let watch = Watch::new().context("watch directories for changes (inotify)")?;
    let files = files(&config);
    let mut daemon = Daemon {
        config,
        features,
        agents: Vec::new(),
        files,
        watch,
        waiting_for_readers: false,
        ticks: 0,
        events,
    };
    daemon.open()?;
    let listener = bound.show().with_context(|| format!("create the socket {}", socket.display()))?;
    let server = tokio::spawn(api::serve(listener, questions));
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let due = daemon.next_due();
        let event = tokio::select! {
            () = stop.asked() => Event::Stop,
            _ = hangup.recv() => Event::Reload,
            Some(event) = inbox.recv() => event,
            Some(question) = asked.recv() => Event::Asked(question),
            Some(directory) = daemon.watch.changed() => Event::Changed(directory),
            () = tokio::time::sleep_until(due.into()) => Event::Due,
            _ = tick.tick() => Event::Tick,
        };
        if !daemon.handle(event) {
            break;
        }
    }
    server.abort();
    let _ = std::fs::remove_file(&socket);
    info!("stopped; connects go on with the tables as they are");
    Ok(())
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

/// One source per service that some client uses.
fn files(config: &Config) -> BTreeMap<String, Watched> {
    let mut files = BTreeMap::new();
    for configured in config.clients.iter().flat_map(|client| &client.services) {
        let Source::File(path) = &configured.source else { continue };
        files.entry(configured.service.name.clone()).or_insert_with(|| Watched {
            source: FileSource::new(&configured.service, path.clone(), config),
            seen: None,
            settled: false,
            list: None,
            refused: None,
            due: None,
            reading: false,
            good_since: None,
            error: None,
            failures: 0,
        });
    }
    files
}

impl Daemon {
    /// Opens every client, fills its tables, and only then attaches: no connect meets an empty table that need not be.
    fn open(&mut self) -> Result<()> {
        self.warn_of_strangers();
        for client in self.config.clients.clone() {
            let name = client.name.clone();
            let agent = Agent::open(client, &self.config, self.features);
            self.agents.push(agent.with_context(|| format!("start client {name}"))?);
        }
        // A daemon that was killed may have replaced tables just now: what it left must not be written over while a
        // program reads it.
        if self.agents.iter().any(|agent| !agent.datapath().applied().services.is_empty()) {
            datapath::wait_for_readers()?;
        }
        self.deliver_static()?;
        let services: Vec<String> = self.files.keys().cloned().collect();
        for service in &services {
            self.watch_file(service);
            self.first_read(service);
        }
        for agent in &mut self.agents {
            let name = agent.client.name.clone();
            agent.settle().with_context(|| format!("fill the tables of client {name}"))?;
            agent.attach().with_context(|| format!("start client {name}"))?;
            info!(
                client = %name, cgroup = %agent.cgroup_path().display(), index = agent.client.task.index,
                count = agent.client.task.count, services = agent.client.services.len(), "client attached"
            );
        }
        let Features { fetching_atomics, set_retval, knows_mptcp } = self.features;
        let pins = self.config.paths.pins.display();
        let socket = api::socket(&self.config.paths.run);
        info!(%pins, socket = %socket.display(), fetching_atomics, set_retval, knows_mptcp, "running");
        self.wait_for_readers();
        Ok(())
    }

    /// Clients that are attached and not configured any more stay as they are, but not unnoticed.
    fn warn_of_strangers(&self) {
        for stranger in self.strangers() {
            warn!(client = %stranger, "attached, but not configured; remove it with `socklb detach {stranger}`");
        }
    }

    fn strangers(&self) -> Vec<String> {
        let pinned = Pins::all(&self.config.paths.pins).unwrap_or_default();
        let configured = |name: &String| self.config.clients.iter().any(|client| client.name == *name);
        pinned.into_iter().map(|pins| pins.client).filter(|name| !configured(name)).collect()
    }

    fn deliver_static(&mut self) -> Result<(), AgentError> {
        for agent in &mut self.agents {
            for position in 0..agent.client.services.len() {
                if let Source::Static(list) = &agent.client.services[position].source {
                    let list = list.clone();
                    agent.deliver(position, list)?;
                }
            }
        }
        Ok(())
    }

    /// Watches the directory of a service's file; if that fails, the tick looks at the file all the same.
    fn watch_file(&mut self, service: &str) {
        let path = self.files[service].source.path.clone();
        if let Err(error) = self.watch.add(&path) {
            warn!(directory = %directory_of(&path).display(), %error, "cannot watch; looking once a second instead");
        }
    }

    /// The first read happens before anything is attached. A file that cannot be used is replaced by the last good
    /// one; without that, whatever the kernel holds stays, and on a first start connects get the service's errno.
    fn first_read(&mut self, service: &str) {
        let file = &self.files[service];
        let stamp = Stamp::at(&file.source.path);
        let result = file.source.read();
        let failed = result.is_err();
        self.read(service, stamp, result);
        if !failed {
            return;
        }
        match self.files[service].source.read_last_good() {
            Ok(contents) => {
                warn!(service, "using the last good endpoint list of an earlier run");
                self.deliver(service, contents);
            }
            Err(SourceError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => {
                warn!(service, error = %crate::chain(&error), "the last good list cannot be used either");
            }
        }
    }

    /// Handles one event. Returns whether to go on.
    fn handle(&mut self, event: Event) -> bool {
        match event {
            Event::Changed(directory) => self.changed(&directory),
            Event::Due => self.start_reading(),
            Event::Read { service, stamp, result } => {
                self.read(&service, stamp, result);
                self.settle();
            }
            Event::ReadersGone(result) => self.readers_gone(result),
            Event::Asked(question) => self.answer(question),
            Event::Tick => self.tick(),
            Event::Reload => warn!(
                "SIGHUP: the configuration is read at start only; restart to apply it (no connect fails meanwhile)"
            ),
            Event::Stop => return false,
        }
        true
    }

    fn next_due(&self) -> Instant {
        let due = self.files.values().filter(|file| !file.reading).filter_map(|file| file.due).min();
        // Far enough away to mean "never": the tick comes first.
        due.unwrap_or_else(|| Instant::now() + 10 * TICK)
    }

    fn changed(&mut self, directory: &Path) {
        let now = Instant::now();
        for file in self.files.values_mut() {
            // The first change of a burst sets the time; later ones do not move it.
            if directory_of(&file.source.path) == directory || file.source.path == directory {
                file.due.get_or_insert(now + SETTLE);
            }
        }
    }

    /// Starts reading every file that has settled. What changes from here on starts the next period.
    fn start_reading(&mut self) {
        let now = Instant::now();
        for (service, file) in &mut self.files {
            if file.reading || file.due.is_none_or(|due| due > now) {
                continue;
            }
            file.due = None;
            let stamp = Stamp::at(&file.source.path);
            if file.settled && stamp == file.seen {
                continue;
            }
            file.reading = true;
            let (service, source, events) = (service.clone(), file.source.clone(), self.events.clone());
            tokio::task::spawn_blocking(move || {
                let result = source.read();
                // The loop is gone only when the daemon stops.
                let _ = events.blocking_send(Event::Read { service, stamp, result });
            });
        }
    }

    fn read(&mut self, service: &str, stamp: Option<Stamp>, result: Result<Contents, SourceError>) {
        let file = self.files.get_mut(service).expect("a file is read for a service that has one");
        file.reading = false;
        file.seen = stamp;
        file.settled = stamp.is_none_or(Stamp::is_settled);
        match result {
            Ok(contents) => {
                let was_bad = file.error.take().is_some();
                file.good_since = Some(Instant::now());
                if file.list.as_ref() != Some(&contents.list) {
                    info!(service, endpoints = contents.list.as_slice().len(), "endpoint list read");
                    self.deliver(service, contents);
                } else if was_bad {
                    info!(service, path = %file.source.path.display(), "endpoint file is good again");
                }
            }
            Err(error) => {
                let error = crate::chain(&error);
                // Said once per version of the file, not once per look.
                if file.error.as_ref() != Some(&error) {
                    warn!(service, %error, "endpoint file cannot be used; what was in force stays");
                }
                file.failures += 1;
                file.error = Some(error);
            }
        }
    }

    /// Gives a list to every client that uses the service. It is kept for later starts once all of them took it.
    fn deliver(&mut self, service: &str, contents: Contents) {
        let mut refusal = None;
        for agent in &mut self.agents {
            let mut services = agent.client.services.iter();
            let Some(position) = services.position(|configured| configured.service.name == service) else {
                continue;
            };
            if let Err(refused) = agent.deliver(position, contents.list.clone()) {
                warn!(client = %agent.client.name, service, error = %refused, "endpoint list refused");
                refusal = Some(format!("client {}: {refused}", agent.client.name));
            }
        }
        let file = self.files.get_mut(service).expect("delivered from its file");
        match refusal {
            None => {
                if let Err(error) = file.source.keep(&contents) {
                    let path = file.source.last_good.display();
                    warn!(%path, %error, "cannot keep the last good endpoint list");
                }
                file.list = Some(contents.list);
                file.refused = None;
            }
            Some(refusal) => {
                file.error = Some(refusal);
                file.failures += 1;
                file.refused = Some(contents);
            }
        }
    }

    /// Offers lists again that found no room, now that there is some.
    fn offer_again(&mut self) {
        let refused: Vec<(String, Contents)> = self
            .files
            .iter_mut()
            .filter_map(|(service, file)| file.refused.take().map(|contents| (service.clone(), contents)))
            .collect();
        for (service, contents) in refused {
            self.deliver(&service, contents);
            let file = self.files.get_mut(&service).expect("one of its keys");
            if file.refused.is_none() {
                file.error = None;
                info!(service, "endpoint list that was refused is in force");
            }
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

    fn tick(&mut self) {
        self.ticks = self.ticks.wrapping_add(1);
        let now = Instant::now();
        for service in self.files.keys().cloned().collect::<Vec<_>>() {
            self.watch_file_again(&service);
            let file = self.files.get_mut(&service).expect("one of its keys");
            if !file.reading && (!file.settled || Stamp::at(&file.source.path) != file.seen) {
                file.due.get_or_insert(now + SETTLE);
            }
        }
        let mut freed = false;
        for agent in &mut self.agents {
            freed |= agent.free_idle();
            match agent.follow_cgroup() {
                Ok(false) => {}
                Ok(true) => {
                    info!(client = %agent.client.name, "attached again: the cgroup was made anew, or links were removed");
                }
                Err(error) => {
                    warn!(client = %agent.client.name, error = %crate::chain(&error), "cannot attach to the new cgroup");
                }
            }
            if let Err(error) = agent.remove_old_links() {
                warn!(client = %agent.client.name, error = %crate::chain(&error), "cannot detach from an old cgroup");
            }
            if self.ticks % SAMPLE_TICKS == 1
                && let Err(error) = agent.sample(now)
            {
                warn!(client = %agent.client.name, error = %crate::chain(&error), "cannot read counters");
            }
        }
        if freed {
            self.offer_again();
        }
        if freed || self.agents.iter().any(|agent| agent.trouble().is_some()) {
            self.settle();
        }
        // A wait that failed is tried again.
        self.wait_for_readers();
    }

    /// A directory that did not exist may exist by now.
    fn watch_file_again(&mut self, service: &str) {
        let path = self.files[service].source.path.clone();
        let _ = self.watch.add(&path);
    }

    fn answer(&self, question: Question) {
        match question {
            Question::Status(answer) => {
                let _ = answer.send(self.status());
            }
            Question::Explain { service, client, answer } => {
                let mut explanations = Vec::new();
                for agent in &self.agents {
                    if client.as_ref().is_none_or(|client| *client == agent.client.name) {
                        explanations.extend(explain::explain(
                            &agent.client,
                            agent.balancer(),
                            Some(&service),
                            true,
                        ));
                    }
                }
                let _ = answer.send(explanations);
            }
        }
    }

    fn status(&self) -> Status {
        let mut clients = Vec::new();
        let mut degraded = Vec::new();
        for agent in &self.agents {
            let overlay = Overlay { before: agent.a_window_ago(), sources: self.sources(agent) };
            match status::of_client(&agent.pins, agent.datapath().tables(), Some(&overlay)) {
                Ok(client) => clients.push(client),
                Err(error) => {
                    degraded.push(format!("client {}: {}", agent.client.name, crate::chain(&error)));
                }
            }
            if !agent.is_effective() {
                let path = agent.client.cgroup.display();
                degraded.push(format!(
                    "client {}: the programs are not attached to the cgroup at {path}: it, or their links, were removed",
                    agent.client.name
                ));
            }
            if let Some(trouble) = agent.trouble() {
                degraded.push(format!("client {}: {trouble}", agent.client.name));
            }
        }
        for stranger in self.strangers() {
            degraded
                .push(format!("client {stranger}: attached, but not configured; `socklb detach {stranger}`"));
        }
        degraded.extend(status::faults(&clients));
        let daemon = status::Daemon {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            config: self.config.path.clone(),
            features: self.features,
        };
        Status { schema: status::SCHEMA, daemon: Some(daemon), degraded, clients }
    }

    fn sources(&self, agent: &Agent) -> BTreeMap<String, status::Source> {
        let services = agent.client.services.iter();
        let source = |name: &String| match self.files.get(name) {
            None => status::Source { file: None, good_for_s: None, error: None, failures: 0 },
            Some(file) => status::Source {
                file: Some(file.source.path.clone()),
                good_for_s: file.good_since.map(|since| since.elapsed().as_secs()),
                error: file.error.clone(),
                failures: file.failures,
            },
        };
        services.map(|configured| &configured.service.name).map(|name| (name.clone(), source(name))).collect()
    }
}
