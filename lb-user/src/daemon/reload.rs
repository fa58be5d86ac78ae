//! Another configuration while running: read and checked beside the loop, decided in one turn of it, and carried out one client per turn.
//!
//! What a reload does is what a restart would do, without one: clients get their configuration and all lists anew, and
//! what the kernel holds is brought to it step by step. A configuration with a fault changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use lb_core::feed::{Progress, ReadFailure, ReadTurn};
use tracing::{info, warn};

use super::changes::changes;
use super::file_io::{NoAnswer, PATIENCE};
use super::files::{Look, WatchedFile};
use super::loader::{Load, Loaded, Loader, Reading};
use super::opening::Opened;
use super::{Daemon, Event, Reread, fixed};
use crate::assignments::Assignments;
use crate::config::Config;
use crate::configured::configured;
use crate::source::{FileSource, Stamp, directory_of};

/// The state of the configuration file.
pub struct Reload {
    file: PathBuf,
    progress: Progress<Stamp>,
    reread: Reread,
    /// Whether it is being read, and whether an operator asked for that by SIGHUP.
    pub turn: ReadTurn,
    /// How often, since the start, a configuration was taken on, and how often one could not be used.
    pub taken_on: u64,
    pub refused: u64,
    /// Since when the configuration in force is.
    pub in_force_since: SystemTime,
    /// What the configuration in force changes, until the maps of all clients follow it.
    following: Option<String>,
    /// Why the file cannot be used, if it cannot.
    pub error: Option<String>,
    /// What the file says and cannot change while running.
    pub unchangeable: Vec<String>,
}

impl Reload {
    /// Of a file that had `stamp` when it was read, and that is in force since `now`.
    pub fn new(file: &Path, stamp: Option<Stamp>, reread: Reread, now: SystemTime) -> Self {
        Self {
            file: file.to_owned(),
            progress: Progress::of(Stamp::version(stamp)),
            reread,
            turn: ReadTurn::Idle,
            taken_on: 0,
            refused: 0,
            in_force_since: now,
            following: None,
            error: None,
            unchangeable: Vec::new(),
        }
    }

    pub fn progress(&self) -> &Progress<Stamp> {
        &self.progress
    }

    pub fn changed(&mut self, changes: &BTreeSet<PathBuf>, now: Instant) {
        // Endpoint files lie beside it and change often: only the file itself counts, or its directory. A changed link
        // on the way to it is seen by the tick.
        if changes.contains(&self.file) || changes.contains(&directory_of(&self.file)) {
            self.progress.changed(now);
        }
    }
}

impl Daemon {
    /// SIGHUP: reads at once, whether or not the file has changed, because the files that it names may have.
    pub fn reload_now(&mut self, now: Instant) {
        self.request(true, now);
    }

    /// Has the file read: at once, or after the reading that is under way.
    fn request(&mut self, is_asked: bool, now: Instant) {
        if self.reload.turn.request(is_asked) {
            self.load(Load::File, is_asked, now);
        }
    }

    /// Looks whether the configuration file is another one: beside the loop, for it may not answer.
    pub fn look_at_config(&mut self) {
        if self.config.daemon.watch && self.reload.progress.begin_look() {
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
        let (io, watcher) = (self.sources.lists.io.clone(), self.watching.watch.watcher());
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
                let directory = directory_of(&self.reload.file);
                self.report_unwatched(&directory, look.unwatched);
                let is_another = self.reload.progress.looked(look.stamp);
                if is_another && is_due {
                    // No look is due while it is read.
                    self.reload.progress.begin_look();
                    self.request(false, now);
                } else if is_another {
                    self.reload.progress.changed(now);
                }
            }
            Err(silent) => self.config_fell_silent(silent.to_string(), false),
        }
    }

    fn config_fell_silent(&mut self, error: String, is_asked: bool) {
        let is_new = self.reload.progress.fell_silent();
        if is_asked || is_new {
            warn!(%error, "the configuration cannot be used; what was in force stays");
        }
        self.reload.error = Some(error);
    }

    /// Begins the start with the configuration that it was given.
    pub fn load_given(&mut self, config: Config, now: Instant) {
        if self.reload.turn.request(false) {
            self.load(Load::Given(Box::new(config)), false, now);
        }
    }

    /// Reads a configuration, and the files that it names, and opens its clients, all beside the loop.
    fn load(&mut self, load: Load, is_asked: bool, now: Instant) {
        if self.is_ready {
            self.notifier.reloading();
        }
        self.sources.readings += 1;
        let loader = Loader {
            file: self.reload.file.clone(),
            reread: self.reload.reread.clone(),
            lists: self.sources.lists.clone(),
            begun: self.sources.readings,
            running: self.config.clone(),
            is_asked,
            opener: self.opener(now),
            there: self.there(),
            before: self.in_force(),
            statics: self.sources.statics.clone(),
        };
        let events = self.events.clone();
        tokio::spawn(async move {
            let loaded = loader.load(load).await;
            let _ = events.send(Event::Loaded(Box::new(loaded))).await;
        });
    }

    pub fn loaded(&mut self, loaded: Loaded, now: Instant) {
        let (is_asked, again) = self.reload.turn.ended();
        let is_first = loaded.stamp.is_none();
        if let Some(stamp) = loaded.stamp {
            self.reload.progress.done(Stamp::version(stamp));
        }
        match loaded.config {
            // A file that was only touched, or read before its stamp could tell versions apart, or corrected to what it
            // was.
            Ok(config) if config == self.config && !is_asked && !is_first => {
                if self.reload.error.take().is_some() {
                    info!("the configuration is good again, and as it was");
                }
                self.reload.unchangeable.clear();
            }
            Ok(config) => {
                self.sources.statics = loaded.statics;
                loaded.learnt.into_iter().for_each(|file| self.learnt.take(file));
                let changed = (!is_first).then(|| changes(&configured(&self.config), &configured(&config)));
                self.take_on(config, loaded.begun, loaded.files, loaded.opened, is_first, now);
                if let Some(changed) = changed {
                    self.reload.taken_on += 1;
                    self.reload.in_force_since = SystemTime::now();
                    self.reload.following = Some(changed);
                }
            }
            Err(ReadFailure::Silent(silent)) => {
                self.reload.refused += 1;
                self.config_fell_silent(silent, is_asked);
            }
            Err(ReadFailure::Unread(error)) => {
                self.reload.progress.found_nothing();
                // Counted and logged once, however often it is tried again.
                if self.reload.error.as_ref() != Some(&error) {
                    self.reload.refused += 1;
                    let next = if self.config.daemon.watch { "retrying" } else { "waiting for SIGHUP" };
                    warn!(%error, "the configuration cannot be read; {next}");
                }
                self.reload.error = Some(error);
            }
            Err(ReadFailure::Faulty(error)) => {
                self.reload.refused += 1;
                // Logged once per fault, not once per look; but an operator who asks gets an answer.
                if is_asked || self.reload.error.as_ref() != Some(&error) {
                    warn!(%error, "the configuration cannot be used; what was in force stays");
                }
                self.reload.error = Some(error);
            }
        }
        // At the start readiness is told later, once the socket accepts.
        let is_following = self.reload.following.is_some() && self.clients.is_settling;
        if !is_first && !is_following {
            self.reloaded();
        }
        if let Some(is_asked) = again {
            self.request(is_asked, now);
        }
    }

    /// The maps of all clients follow what is known.
    pub fn all_settled(&mut self, now: Instant) {
        self.follow_cgroups(now);
        self.leave_other_cgroups(now);
        self.try_returned(now);
        if self.reload.following.is_some() {
            self.reloaded();
        }
    }

    /// A configuration is in force, or was refused.
    fn reloaded(&mut self) {
        if let Some(changed) = self.reload.following.take() {
            let (clients, files) = (self.config.clients.len(), self.sources.files.len());
            info!(clients, files, changed, "configuration taken on");
        }
        // A reload that is under way tells it.
        if !self.reload.turn.is_reading() {
            self.notify_ready();
        }
    }

    fn take_on(
        &mut self,
        mut config: Config,
        begun: u64,
        read: Vec<Reading>,
        opened: Vec<Opened>,
        is_first: bool,
        now: Instant,
    ) {
        self.reload.error = None;
        let (running, wanted) = (configured(&self.config).host, configured(&config).host);
        let pins = &self.config.paths.pins;
        let unchangeable = fixed::unchangeable(&running, &wanted, pins, &self.names());
        for what in unchangeable.iter().filter(|what| !self.reload.unchangeable.contains(what)) {
            warn!("{what}");
        }
        self.reload.unchangeable = unchangeable;
        fixed::keep(&self.config, &mut config);
        let gone = self.drop_clients(&config);
        let mut unstarted = Vec::new();
        for client in &config.clients {
            if let Some(client_task) = self.clients.task_mut(&client.name)
                && let Err(error) = client_task.reconfigure(client.clone(), now)
            {
                unstarted.push((client.clone(), crate::error::chain(&error)));
            }
            self.make_controls(&client.name, now);
        }
        // A client that was dropped and has come back while this was read is not in `opened`: it is tried again.
        for client in &config.clients {
            let is_there = self.clients.task(&client.name).is_some();
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
        if is_first {
            self.settle_all(now);
        } else {
            self.settle(now);
        }
        self.watch_cgroups();
        self.look_at_files();
        self.look_at_config();
        // Those that leave are still attached: where a client only got another name, or two changed places, their cgroups
        // are balanced all the time.
        self.clients.leaving.extend(gone);
        if is_first {
            self.begin_first_looks(now);
        }
        self.follow_cgroups(now);
        self.leave_other_cgroups(now);
        self.start_unstarted(now);
    }

    /// The newest lists of all files, with what is known of them.
    pub fn in_force(&self) -> BTreeMap<String, (FileSource, Assignments)> {
        let newest = |(service, file): (&String, &WatchedFile)| {
            Some((service.clone(), (file.source.clone(), file.feed.newest()?.assignments.clone())))
        };
        self.sources.files.iter().filter_map(newest).collect()
    }

    /// Gives every client the lists of its services, as at a start.
    fn deliver_all(&mut self, begun: u64, read: Vec<Reading>, now: Instant) {
        for client_task in &mut self.clients.tasks {
            if let Err(refused) = client_task.deliver_static(&self.sources.statics, now) {
                warn!(client = %client_task.client.name, error = %refused, "endpoint list refused");
            }
        }
        let mut before = std::mem::take(&mut self.sources.files);
        for reading in read {
            let same = before.remove(&reading.service);
            self.take_reloaded(reading, begun, same, now);
        }
    }
}
