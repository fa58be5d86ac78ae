//! Another configuration while running: read and checked beside the loop, then taken on in one turn of it.
//!
//! What a reload does is what a restart would do, without one: clients get their configuration and all lists anew, and
//! what the kernel holds is brought to it step by step. A configuration with a fault changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Result, anyhow, ensure};
use lb_kernel::{Features, Pins};
use tokio::task::{JoinSet, spawn_blocking};
use tracing::{info, warn};

use super::changes::changes;
use super::file_io::{NoAnswer, PATIENCE};
use super::files::{Look, WatchedFile};
use super::leaving::Leaving;
use super::lists::{FirstRead, ListReader, Purpose};
use super::{Daemon, Event, Reread, files, fixed, leaving, tell};
use lb_core::limits::Limits;

use crate::assignments::{self, Assignments, AssignmentsByService};
use crate::config::{Client, Config};
use crate::daemon::client_task::{ClientTask, ClientTaskError, Followed};
use crate::source::{self, FileSource, Progress, Stamp, directory_of};

/// How the configuration file fares.
pub struct Reload {
    file: PathBuf,
    progress: Progress,
    /// Whether its file system does not answer. Once it does, the file is read whatever its version.
    is_silent: bool,
    reread: Reread,
    reading: bool,
    /// Somebody asked by SIGHUP for what is being read.
    asked: bool,
    /// It is to be read once more; ... and somebody asked for that.
    again: bool,
    asked_again: bool,
    /// How often a configuration was taken on, and could not be used, since the start.
    pub taken_on: u64,
    pub refused: u64,
    /// Since when the configuration in force is.
    pub in_force_since: SystemTime,
    /// Why the file cannot be used, if it cannot.
    pub error: Option<String>,
    /// What the file says and cannot change while running.
    pub unchangeable: Vec<String>,
}

/// Which configuration is to be taken on.
pub enum Load {
    /// The one that the daemon starts with.
    Given(Box<Config>),
    /// What the file says.
    File,
}

/// The configuration and the files that it names, as they were read.
pub struct Loaded {
    /// The version of the configuration file, if it was read.
    stamp: Option<Option<Stamp>>,
    config: std::result::Result<Config, Unusable>,
    files: Vec<Reading>,
    /// The number of the reading of all of them.
    begun: u64,
    /// The lists in it.
    statics: AssignmentsByService,
    /// Clients that were not there, opened.
    pub opened: Vec<Opened>,
}

/// Why a configuration cannot be used.
#[derive(Debug)]
pub enum Unusable {
    /// It is wrong, or gone: nothing changes before the file does.
    Faulty(String),
    /// It cannot be read now, for want of a descriptor or of memory: that may change while the file does not.
    Unread(String),
    /// Its file system does not answer.
    Silent(NoAnswer),
}

/// A file that a configuration names, as it was read.
struct Reading {
    service: String,
    source: FileSource,
    first: FirstRead,
    /// What was in force when the reading began, for the tasks of the new configuration; only if the file cannot be used.
    in_force: Option<Assignments>,
}

/// Clients that could not be started, tried again.
pub struct Tried {
    /// All that were tried.
    clients: Vec<Client>,
    /// Those of them that were not there, opened.
    opened: Vec<Opened>,
    /// The lists that were in force when it began, for all of them.
    by_service: AssignmentsByService,
}

/// A client that was opened beside the loop, with what other versions have of it; or why it could not be.
pub struct Opened {
    /// As it is configured.
    pub client: Client,
    /// What came of it.
    pub result: Result<(ClientTask, Vec<Leaving>)>,
}

impl Reload {
    /// Of a file of which `stamp` was read, and which is in force since then.
    pub fn new(file: &Path, stamp: Option<Stamp>, reread: Reread, now: SystemTime) -> Self {
        Self {
            file: file.to_owned(),
            progress: Progress::of(stamp),
            is_silent: false,
            reread,
            reading: false,
            asked: false,
            again: false,
            asked_again: false,
            taken_on: 0,
            refused: 0,
            in_force_since: now,
            error: None,
            unchangeable: Vec::new(),
        }
    }

    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    pub fn changed(&mut self, changes: &BTreeSet<PathBuf>, now: Instant) {
        // Endpoint files lie beside it and change often: only the file itself counts, or its directory. Links on the way to
        // it are seen by the tick.
        if changes.contains(&self.file) || changes.contains(&directory_of(&self.file)) {
            self.progress.changed(now);
        }
    }
}

impl Daemon {
    /// SIGHUP: at once, and whether or not the file has changed, for the files that it names may have.
    pub fn reload_now(&mut self, now: Instant) {
        self.reload.asked_again = true;
        self.load(Load::File, now);
    }

    /// Looks whether the configuration file is another one: beside the loop, for it may not answer.
    pub fn look_at_config(&mut self) {
        if self.reload.progress.begin_look() {
            self.spawn_look_at_config(false);
        }
    }

    /// Looks at the configuration file once it has settled, to take it on if it is another one.
    pub fn look_at_due_config(&mut self, now: Instant) {
        if self.reload.progress.begin(now).is_some() {
            self.spawn_look_at_config(true);
        }
    }

    fn spawn_look_at_config(&self, is_due: bool) {
        let (path, events) = (self.reload.file.clone(), self.events.clone());
        let (io, watcher) = (self.lists.io.clone(), self.watch.watcher());
        tokio::spawn(async move {
            let file = path.clone();
            let result = io.run(&path, PATIENCE, move || Look::at(&file, watcher.as_ref())).await;
            let _ = events.send(Event::LookedAtConfig { is_due, result }).await;
        });
    }

    /// A look at the configuration file has ended.
    pub fn looked_at_config(&mut self, is_due: bool, result: Result<Look, NoAnswer>, now: Instant) {
        match result {
            Ok(look) => {
                self.reload.is_silent = false;
                let directory = directory_of(&self.reload.file);
                self.tell_unwatched(&directory, look.unwatched);
                let is_another = self.reload.progress.looked(look.stamp);
                if is_another && is_due {
                    // Nobody has to look while it is read.
                    self.reload.progress.begin_look();
                    self.load(Load::File, now);
                } else if is_another {
                    self.reload.progress.changed(now);
                }
            }
            Err(silent) => self.config_fell_silent(&silent),
        }
    }

    fn config_fell_silent(&mut self, silent: &NoAnswer) {
        self.reload.progress.found_nothing();
        if self.reload.asked || !self.reload.is_silent {
            warn!(error = %silent, "the configuration cannot be used; what was in force stays");
        }
        self.reload.is_silent = true;
        self.reload.error = Some(silent.to_string());
    }

    /// Reads a configuration, and the files that it names, and opens its clients, all beside the loop.
    pub fn load(&mut self, load: Load, now: Instant) {
        if self.reload.reading {
            self.reload.again = true;
            return;
        }
        self.reload.reading = true;
        self.reload.asked = std::mem::take(&mut self.reload.asked_again);
        if self.is_ready {
            self.notifier.reloading();
        }
        self.readings += 1;
        let loader = Loader {
            file: self.reload.file.clone(),
            reread: self.reload.reread.clone(),
            lists: self.lists.clone(),
            begun: self.readings,
            running: self.config.clone(),
            asked: self.reload.asked,
            opener: self.opener(now),
            there: self.there(),
            before: self.in_force(),
            statics: self.statics.clone(),
        };
        let events = self.events.clone();
        tokio::spawn(async move {
            let loaded = loader.load(load).await;
            let _ = events.send(Event::Loaded(Box::new(loaded))).await;
        });
    }

    pub fn loaded(&mut self, loaded: Loaded, now: Instant) {
        self.reload.reading = false;
        let is_first = loaded.stamp.is_none();
        if let Some(stamp) = loaded.stamp {
            self.reload.progress.done(stamp);
        }
        match loaded.config {
            // A file that was only touched, or read before its stamp could tell versions apart, or put right as it was.
            Ok(config) if config == self.config && !self.reload.asked && !is_first => {
                if self.reload.error.take().is_some() {
                    info!("the configuration is good again, and as it was");
                }
                self.reload.unchangeable.clear();
            }
            Ok(config) => {
                self.statics = loaded.statics;
                let changed = (!is_first).then(|| changes(&self.config, &config));
                self.take_on(config, loaded.begun, loaded.files, loaded.opened, now);
                if let Some(changed) = changed {
                    self.reload.taken_on += 1;
                    self.reload.in_force_since = SystemTime::now();
                    let (clients, files) = (self.config.clients.len(), self.files.len());
                    info!(clients, files, changed, "configuration taken on");
                }
            }
            Err(Unusable::Silent(silent)) => {
                self.reload.refused += 1;
                self.config_fell_silent(&silent);
            }
            Err(Unusable::Unread(error)) => {
                self.reload.progress.found_nothing();
                // One fault, however often it is tried again.
                if self.reload.error.as_ref() != Some(&error) {
                    self.reload.refused += 1;
                    warn!(%error, "the configuration cannot be read; trying again");
                }
                self.reload.error = Some(error);
            }
            Err(Unusable::Faulty(error)) => {
                self.reload.refused += 1;
                // Said once per fault, not once per look; but who asks gets an answer.
                if self.reload.asked || self.reload.error.as_ref() != Some(&error) {
                    warn!(%error, "the configuration cannot be used; what was in force stays");
                }
                self.reload.error = Some(error);
            }
        }
        // At the start only once others can ask.
        if !is_first {
            self.notify_ready();
        }
        if std::mem::take(&mut self.reload.again) {
            self.load(Load::File, now);
        }
    }

    fn take_on(
        &mut self,
        mut config: Config,
        begun: u64,
        read: Vec<Reading>,
        opened: Vec<Opened>,
        now: Instant,
    ) {
        self.reload.error = None;
        let unchangeable = fixed::unchangeable(&self.config, &config, &self.names());
        for what in unchangeable.iter().filter(|what| !self.reload.unchangeable.contains(what)) {
            warn!("{what}");
        }
        self.reload.unchangeable = unchangeable;
        fixed::keep(&self.config, &mut config);
        let gone = self.drop_clients(&config);
        let mut unstarted = Vec::new();
        for client in &config.clients {
            if let Some(client_task) =
                self.client_tasks.iter_mut().find(|client_task| client_task.client.name == client.name)
                && let Err(error) = client_task.reconfigure(client.clone(), now)
            {
                unstarted.push((client.clone(), crate::error::chain(&error)));
            }
        }
        // A client that was dropped and has come back while this was read is not among them: it is tried again.
        for client in &config.clients {
            let is_there = self.client_tasks.iter().any(|client_task| client_task.client.name == client.name);
            if !is_there && !opened.iter().any(|opened| opened.client.name == client.name) {
                unstarted.push((client.clone(), "it is being started".to_owned()));
            }
        }
        self.config = config;
        for Opened { client, result } in opened {
            match result {
                Ok((client_task, others)) => self.take_in(client_task, others, now),
                Err(error) => unstarted.push((client, format!("{error:#}"))),
            }
        }
        self.set_unstarted(unstarted);
        self.deliver_all(begun, read, now);
        self.settle(now);
        self.watch_cgroups();
        self.look_at_files();
        self.look_at_config();
        // Those that leave are still attached: where a client only got another name, or two changed places, their cgroups
        // are balanced all the time.
        self.leaving.extend(gone);
        self.follow_cgroups(now);
        self.leave_other_cgroups(now);
        self.start_unstarted(now);
    }

    /// Takes in a client that was opened, in place of one whose pins were removed if there is such a one.
    fn take_in(&mut self, mut client_task: ClientTask, others: Vec<Leaving>, now: Instant) {
        // What connects count from here on is of the last minute.
        if let Err((error, _)) = client_task.sample(now) {
            warn!(client = %client_task.client.name, error = %crate::error::chain(&error), "cannot read counters");
        }
        if !client_task.path().exists() {
            // A path that is mistyped looks the same.
            warn!(client = %client_task.client.name, cgroup = %client_task.client.cgroup.display(), "there is no such cgroup; waiting for it");
        }
        match self.client_tasks.iter_mut().find(|before| before.client.name == client_task.client.name) {
            Some(before) => *before = client_task,
            None => self.client_tasks.push(client_task),
        }
        self.leaving.extend(others);
    }

    /// The clients that need not be opened: those whose pins were removed by hand are opened anew.
    fn there(&mut self) -> BTreeSet<String> {
        let mut there = BTreeSet::new();
        for client_task in &mut self.client_tasks {
            let was_unpinned = client_task.is_unpinned();
            // What cannot be seen is left alone.
            if client_task.look_for_pins().unwrap_or(true) {
                there.insert(client_task.client.name.clone());
            } else if !was_unpinned {
                tell(client_task, Followed::Unpinned);
            }
        }
        there
    }

    fn names(&self) -> Vec<&str> {
        self.client_tasks.iter().map(|client_task| client_task.client.name.as_str()).collect()
    }

    /// Remembers which clients could not be started; each error is said once.
    fn set_unstarted(&mut self, unstarted: Vec<(Client, String)>) {
        for (client, error) in &unstarted {
            let known = |(other, before): &(Client, String)| other.name == client.name && before == error;
            if !self.unstarted.iter().any(known) {
                warn!(client = %client.name, %error, "cannot start the client, or change it");
            }
        }
        self.unstarted = unstarted;
    }

    /// Takes out the clients that the configuration no longer has. They are still attached.
    fn drop_clients(&mut self, config: &Config) -> Vec<Leaving> {
        let stays = |client_task: &ClientTask| {
            config.clients.iter().any(|client| client.name == client_task.client.name)
        };
        let (stay, gone): (Vec<ClientTask>, Vec<ClientTask>) =
            std::mem::take(&mut self.client_tasks).into_iter().partition(stays);
        self.client_tasks = stay;
        gone.into_iter().map(Leaving::of).collect()
    }

    /// What it takes to open clients beside the loop.
    pub fn opener(&self, now: Instant) -> Opener {
        Opener {
            pins: self.config.paths.pins.clone(),
            limits: self.config.limits,
            features: self.features,
            leaving: self.leaving.iter().map(|leaving| leaving.pins.clone()).collect(),
            stopping: self.stopping.clone(),
            now,
        }
    }

    /// The newest lists of all files, with what is known of them.
    fn in_force(&self) -> BTreeMap<String, (FileSource, Assignments)> {
        let newest = |(service, file): (&String, &WatchedFile)| {
            Some((service.clone(), (file.source.clone(), file.newest()?.assignments.clone())))
        };
        self.files.iter().filter_map(newest).collect()
    }

    /// Gives every client the lists of its services, as at a start.
    fn deliver_all(&mut self, begun: u64, read: Vec<Reading>, now: Instant) {
        for client_task in &mut self.client_tasks {
            if let Err(refused) = client_task.deliver_static(&self.statics, now) {
                warn!(client = %client_task.client.name, error = %refused, "endpoint list refused");
            }
        }
        let mut before = std::mem::take(&mut self.files);
        for Reading { service, source, mut first, in_force } in read {
            let same = before.remove(&service).filter(|before| before.source.service == source.service);
            // The same file may have been read again meanwhile, and then says something newer.
            let is_old =
                same.as_ref().is_some_and(|same| same.source == source && same.was_read_after(begun));
            let newest = same.as_ref().and_then(WatchedFile::newest);
            let kept = newest.filter(|_| is_old || first.result.is_err()).cloned();
            if kept.is_some() {
                // A list that is in force is better than one of an earlier run.
                first.instead = None;
            }
            match same {
                Some(same) if is_old => {
                    self.files.insert(service.clone(), same.carried_over());
                }
                same => self.take_first(&service, source, begun, first, same.as_ref(), now),
            }
            if let Some(mut contents) = kept {
                if let Some(computed) = &in_force {
                    contents.assignments.take_over(computed);
                    // Another list may have come while the configuration was read. Clients that are new begin with the one
                    // before, rather than with none.
                    self.deliver_assignments(&service, computed, now);
                }
                self.deliver(&service, contents, now);
            }
        }
    }

    /// Tries clients again that could not be started.
    pub fn start_unstarted(&mut self, now: Instant) {
        if self.unstarted.is_empty() || self.opening || self.reload.reading {
            return;
        }
        // One that was to leave has come back: its lock is ours to give up.
        let clients: Vec<Client> = self.unstarted.iter().map(|(client, _)| client.clone()).collect();
        let names: BTreeSet<String> = clients.iter().map(|client| client.name.clone()).collect();
        self.leaving
            .retain(|leaving| !leaving.pins.is_of_this_version() || !names.contains(&leaving.pins.client));
        // Those that are there run with an earlier configuration.
        let there = self.there();
        self.opening = true;
        let (opener, events, in_force) = (self.opener(now), self.events.clone(), self.in_force());
        let statics = self.statics.clone();
        spawn_blocking(move || {
            let mut by_service = assignments::statics(&clients, &statics);
            for (service, (_, mut assignments)) in in_force {
                assignments.complete(&assignments::consumers(&clients, &service));
                by_service.entry(service).or_insert(assignments);
            }
            let absent = clients.iter().filter(|client| !there.contains(&client.name));
            let opened = opener.open_all(absent.cloned());
            let _ = events.blocking_send(Event::Opened(Box::new(Tried { clients, opened, by_service })));
        });
    }

    pub fn opened(&mut self, tried: Tried, now: Instant) {
        self.opening = false;
        let Tried { clients, opened, by_service } = tried;
        let mut unstarted = self.unstarted.clone();
        for client in clients {
            // A reload may have changed or dropped it meanwhile.
            let Some(at) = unstarted.iter().position(|(other, _)| *other == client) else { continue };
            let Some(client_task) =
                self.client_tasks.iter_mut().find(|client_task| client_task.client.name == client.name)
            else {
                continue;
            };
            if !client_task.is_unpinned() && client_task.reconfigure(client.clone(), now).is_ok() {
                unstarted.remove(at);
                self.deliver_to(&client.name, &by_service, now);
            }
        }
        for Opened { client, result } in opened {
            let Some(at) = unstarted.iter().position(|(other, _)| *other == client) else { continue };
            match result {
                Ok((client_task, others)) => {
                    unstarted.remove(at);
                    self.take_in(client_task, others, now);
                    self.deliver_to(&client.name, &by_service, now);
                }
                Err(error) => unstarted[at].1 = format!("{error:#}"),
            }
        }
        self.set_unstarted(unstarted);
        self.settle(now);
        self.watch_cgroups();
        self.follow_cgroups(now);
        self.leave_other_cgroups(now);
    }

    /// Gives one client the lists that are in force: at first those for which its part was computed, then those that have
    /// come since.
    fn deliver_to(&mut self, client: &str, by_service: &AssignmentsByService, now: Instant) {
        let Some(client_task) =
            self.client_tasks.iter_mut().find(|client_task| client_task.client.name == client)
        else {
            return;
        };
        if let Err(refused) = client_task.deliver_static(by_service, now) {
            warn!(client, error = %refused, "endpoint list refused");
        }
        let mut later = Vec::new();
        let names = client_task.client.services.iter().map(|configured| configured.service.name.clone());
        for (position, service) in names.collect::<Vec<_>>().into_iter().enumerate() {
            let Some(file) = self.files.get_mut(&service) else { continue };
            if let Some(assignments) = by_service.get(&service) {
                if let Err(refused) = client_task.deliver(position, assignments, now) {
                    warn!(client, service, error = %refused, "endpoint list refused");
                }
                file.take_over(assignments);
            }
            let newest = file.newest().filter(|newest| {
                by_service
                    .get(&service)
                    .is_none_or(|assignments| assignments.list() != newest.assignments.list())
            });
            later.extend(newest.map(|newest| (service, newest.clone())));
        }
        for (service, newest) in later {
            self.deliver(&service, newest, now);
        }
    }
}

/// Reads a configuration and all that it names, beside the loop.
struct Loader {
    file: PathBuf,
    reread: Reread,
    lists: ListReader,
    begun: u64,
    /// What was in force when it began.
    running: Config,
    before: BTreeMap<String, (FileSource, Assignments)>,
    statics: AssignmentsByService,
    /// Whether somebody asked for it.
    asked: bool,
    opener: Opener,
    /// Clients that need not be opened.
    there: BTreeSet<String>,
}

impl Loader {
    async fn load(self, load: Load) -> Loaded {
        /// At a start a file is waited for so long before the list of an earlier run is used.
        const AT_A_START: Duration = Duration::from_secs(2);
        let patience = if matches!(load, Load::Given(_)) { AT_A_START } else { PATIENCE };
        let is_wanted = self.asked || matches!(load, Load::Given(_));
        let (stamp, config) = match load {
            Load::Given(config) => (None, Ok(*config)),
            Load::File => self.reread().await,
        };
        let mut loaded = Loaded {
            stamp,
            config,
            files: Vec::new(),
            begun: self.begun,
            statics: AssignmentsByService::new(),
            opened: Vec::new(),
        };
        // What says the same again is not taken on, and opens nobody who was wanted gone.
        if let Ok(config) = &loaded.config
            && (is_wanted || *config != self.running)
        {
            // Where lists are kept cannot change while running.
            let config = Config { paths: self.running.paths.clone(), ..config.clone() };
            loaded.files = self.read_files(&config, patience).await;
            let Self { opener, there, statics, .. } = self;
            let open = move || {
                let statics = assignments::statics(&config.clients, &statics);
                // Loading programs takes tens of milliseconds for each.
                let absent = config.clients.into_iter().filter(|client| !there.contains(&client.name));
                (statics, opener.open_all(absent))
            };
            (loaded.statics, loaded.opened) = spawn_blocking(open).await.expect("a panic ends the process");
        }
        loaded
    }

    async fn reread(&self) -> (Option<Option<Stamp>>, std::result::Result<Config, Unusable>) {
        /// A large configuration takes longer to be understood than to be read.
        const TO_READ: Duration = Duration::from_secs(10);
        let (file, reread) = (self.file.clone(), self.reread.clone());
        // Before it is read: what changes from here on is seen as a change.
        let stamp = self.lists.io.run(&self.file, PATIENCE, move || source::answers(&file)).await;
        let config = match &stamp {
            Ok(_) => self.lists.io.run(&self.file, TO_READ, move || reread()).await,
            Err(silent) => Err(silent.clone()),
        };
        let config = match config {
            Ok(config) => config,
            Err(silent) => Err(Unusable::Silent(silent)),
        };
        (Some(stamp.ok().flatten()), config)
    }

    /// Reads the files that a configuration names, all at the same time: one that does not answer holds up nobody.
    async fn read_files(&self, config: &Config, patience: Duration) -> Vec<Reading> {
        let mut readings = JoinSet::new();
        for (service, source) in files::sources(config) {
            let consumers = assignments::consumers(&config.clients, &service);
            let before = self.before.get(&service).filter(|(before, _)| before.service == source.service);
            let purpose = Purpose { consumers, before: before.map(|(_, assignments)| assignments.clone()) };
            readings.spawn(read(self.lists.clone(), service, source, purpose, patience));
        }
        let mut readings = readings.join_all().await;
        readings.sort_by(|a, b| a.service.cmp(&b.service));
        readings
    }
}

/// Reads a file that a configuration names, and computes what its clients use of the list.
async fn read(
    lists: ListReader,
    service: String,
    source: FileSource,
    purpose: Purpose,
    patience: Duration,
) -> Reading {
    // A list that is in force is better than one of an earlier run.
    let wants_last_good = purpose.before.is_none();
    let first = lists.read_first(&source, purpose.clone(), wants_last_good, patience).await;
    let mut in_force = None;
    if let (Err(_), Some(mut assignments)) = (&first.result, purpose.before) {
        let complete = move || {
            assignments.complete(&purpose.consumers);
            assignments
        };
        in_force = Some(spawn_blocking(complete).await.expect("a panic ends the process"));
    }
    Reading { service, source, first, in_force }
}

/// Opens clients, on whatever thread.
pub struct Opener {
    pins: PathBuf,
    limits: Limits,
    features: Features,
    /// What leaves already is locked by us.
    leaving: Vec<Pins>,
    /// Whether nobody waits for them any more.
    stopping: Arc<AtomicBool>,
    /// When it began.
    now: Instant,
}

impl Opener {
    /// Opens a client, and locks what other versions have of it.
    fn open(&self, client: Client) -> Result<(ClientTask, Vec<Leaving>)> {
        // The locks of those that are open already are wanted by somebody else.
        ensure!(!self.stopping.load(Ordering::Relaxed), "the daemon is stopping");
        // Locked before anything is changed: another socklb of another version may be running.
        let others = leaving::lock_other_versions(&self.pins, &client.name, &self.leaving)?;
        let pins = Pins::of(&self.pins, &client.name);
        match ClientTask::open(client, pins, self.limits, self.features, self.now) {
            Ok(client_task) => Ok((client_task, others)),
            // Its kind tells what to do about it.
            Err(ClientTaskError::Datapath(error)) => Err(error.into()),
            Err(error) => Err(error.into()),
        }
    }

    /// Opens several; may block for tens of milliseconds each.
    fn open_all(&self, clients: impl IntoIterator<Item = Client>) -> Vec<Opened> {
        let open = |client: Client| Opened { result: self.open(client.clone()), client };
        let mut opened: Vec<Opened> = clients.into_iter().map(open).collect();
        let mut adopted = Vec::new();
        for Opened { client, result } in &mut opened {
            if let Ok((client_task, _)) = result
                && !client_task.datapath().applied().services.is_empty()
            {
                client_task.before_wait();
                adopted.push(client.name.clone());
            }
        }
        if adopted.is_empty() {
            return opened;
        }
        // A daemon that was killed may have replaced tables just now: what it left must not be written over while a program
        // reads it.
        let waited = lb_kernel::wait_for_readers().map_err(|error| crate::error::chain(&error));
        for Opened { client, result } in &mut opened {
            let (true, Ok((client_task, _))) = (adopted.contains(&client.name), &mut *result) else {
                continue;
            };
            match &waited {
                Ok(()) => {
                    client_task.after_wait();
                    // Before lists come in: they may need the slots of backends whose last flow ended meanwhile.
                    client_task.free_idle(self.now);
                }
                Err(error) => *result = Err(anyhow!(error.clone())),
            }
        }
        opened
    }
}
