//! Another configuration while running: read and checked beside the loop, then taken on in one turn of it.
//!
//! What a reload does is what a restart would do, without one: clients get their configuration and all lists anew, and
//! what the kernel holds is brought to it step by step. A configuration with a fault changes nothing.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Result;
use tracing::{info, warn};

use super::leaving::Leaving;
use super::{Daemon, Event, Reread, files};
use crate::agent::Agent;
use crate::config::{Client, Config, Limits, Paths};
use crate::datapath::{self, Pins};
use crate::source::{FileSource, FirstRead, Progress, Stamp, directory_of};

/// How the configuration file fares.
pub struct Reload {
    file: PathBuf,
    progress: Progress,
    reread: Reread,
    reading: bool,
    /// Somebody asked for it by SIGHUP.
    asked: bool,
    /// ... or while it was being read.
    again: bool,
    /// Why the file cannot be used, if it cannot.
    pub error: Option<String>,
    /// What the file says and cannot change while running.
    pub unchangeable: Vec<String>,
}

/// The configuration and the files that it names, as they were read.
pub struct Loaded {
    stamp: Option<Stamp>,
    config: std::result::Result<Config, String>,
    files: Vec<(String, FileSource, FirstRead)>,
}

impl Reload {
    /// Of a file of which `stamp` was read.
    pub fn new(file: &Path, stamp: Option<Stamp>, reread: Reread) -> Self {
        Self {
            file: file.to_owned(),
            progress: Progress::of(stamp),
            reread,
            reading: false,
            asked: false,
            again: false,
            error: None,
            unchangeable: Vec::new(),
        }
    }

    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    pub fn changed(&mut self, path: &Path, now: Instant) {
        let directory = directory_of(&self.file);
        // Endpoint files lie beside it and change often: only the file itself counts, or links on the way to it, which
        // the tick sees.
        if path == self.file || path == directory {
            self.progress.changed(now);
        }
    }

    pub fn look(&mut self, now: Instant) {
        self.progress.look(&self.file, now);
    }
}

impl Daemon {
    /// SIGHUP: at once, and whether or not the file has changed, for the files that it names may have.
    pub fn reload_now(&mut self) {
        self.reload.asked = true;
        self.load(Stamp::at(&self.reload.file));
    }

    /// Reads the configuration if it has changed and settled.
    pub fn start_reload(&mut self, now: Instant) {
        if let Some(stamp) = self.reload.progress.begin(&self.reload.file, now) {
            self.load(stamp);
        }
    }

    fn load(&mut self, stamp: Option<Stamp>) {
        if self.reload.reading {
            self.reload.again = true;
            return;
        }
        self.reload.reading = true;
        self.notifier.reloading();
        let (reread, events) = (self.reload.reread.clone(), self.events.clone());
        let running = self.config.paths.clone();
        tokio::task::spawn_blocking(move || {
            let config = reread();
            let mut read = Vec::new();
            if let Ok(config) = &config {
                // Where lists are kept cannot change while running.
                let config = Config { paths: running, ..config.clone() };
                for (service, source) in files::sources(&config) {
                    let first = source.read_first();
                    read.push((service, source, first));
                }
            }
            let _ = events.blocking_send(Event::Loaded(Box::new(Loaded { stamp, config, files: read })));
        });
    }

    pub fn loaded(&mut self, loaded: Loaded, now: Instant) {
        self.reload.reading = false;
        self.reload.progress.done(loaded.stamp);
        match loaded.config {
            // A file that was only touched, or read before its stamp could tell versions apart.
            Ok(config) if config == self.config && !self.reload.asked => self.reload.error = None,
            Ok(config) => self.take_on(config, loaded.files, now),
            Err(error) => {
                // Said once per fault, not once per look.
                if self.reload.error.as_ref() != Some(&error) {
                    warn!(%error, "the configuration cannot be used; what was in force stays");
                }
                self.reload.error = Some(error);
            }
        }
        self.reload.asked = false;
        self.notify_ready();
        if std::mem::take(&mut self.reload.again) {
            self.load(Stamp::at(&self.reload.file));
        }
    }

    fn take_on(&mut self, mut config: Config, read: Vec<(String, FileSource, FirstRead)>, now: Instant) {
        self.reload.error = None;
        self.reload.unchangeable = unchangeable(&self.config, &config);
        for what in &self.reload.unchangeable {
            warn!("{what}");
        }
        config.paths = self.config.paths.clone();
        config.limits = self.config.limits;
        let mut gone = self.drop_clients(&config);
        self.unstarted.clear();
        for client in config.clients.clone() {
            match self.agents.iter_mut().find(|agent| agent.client.name == client.name) {
                Some(agent) => {
                    let name = client.name.clone();
                    if let Err(error) = agent.reconfigure(client.clone()) {
                        warn!(client = %name, error = %crate::chain(&error), "cannot change the client");
                        self.unstarted.push((client, crate::chain(&error)));
                    }
                }
                None => gone.extend(self.start_client(client)),
            }
        }
        self.config = config;
        self.deliver_all(read, now);
        self.settle();
        self.watch_everything();
        // Newcomers first: where a client only got another name, its cgroup is balanced all the time.
        self.follow_cgroups();
        self.leaving.extend(gone);
        self.retire_leaving();
        info!(clients = self.config.clients.len(), files = self.files.len(), "configuration taken on");
    }

    /// Takes out the clients that the configuration no longer has. They are still attached.
    fn drop_clients(&mut self, config: &Config) -> Vec<Leaving> {
        let stays = |agent: &Agent| config.clients.iter().any(|client| client.name == agent.client.name);
        let (stay, gone): (Vec<Agent>, Vec<Agent>) =
            std::mem::take(&mut self.agents).into_iter().partition(stays);
        self.agents = stay;
        let mut leaving = Vec::new();
        for agent in gone {
            let pins = agent.pins.clone();
            // Its lock goes with it.
            drop(agent);
            match Leaving::new(pins.clone()) {
                Ok(one) => leaving.push(one),
                Err(error) => warn!(client = %pins.client, error = %crate::chain(&error), "cannot remove it"),
            }
        }
        leaving
    }

    /// Opens a client that was not there; it is attached with all others. Returns what other versions have of it.
    fn start_client(&mut self, client: Client) -> Vec<Leaving> {
        let pins = Pins::of(&self.config.paths.pins, &client.name);
        // One that was leaving has come back.
        self.leaving.retain(|leaving| leaving.pins != pins);
        match self.open_client(client.clone(), pins) {
            Ok((agent, others)) => {
                self.agents.push(agent);
                others
            }
            Err(error) => {
                warn!(client = %client.name, error = %format!("{error:#}"), "cannot start the client");
                self.unstarted.push((client, format!("{error:#}")));
                Vec::new()
            }
        }
    }

    fn open_client(&self, client: Client, pins: Pins) -> Result<(Agent, Vec<Leaving>)> {
        let others = self.lock_other_versions(&client.name)?;
        let agent = Agent::open(client, pins, self.config.limits, self.features)?;
        // As at a start: what an earlier daemon left may be read just now. Tens of milliseconds, once.
        if !agent.datapath().applied().services.is_empty() {
            datapath::wait_for_readers()?;
        }
        Ok((agent, others))
    }

    /// Gives every client the lists of its services, as at a start.
    fn deliver_all(&mut self, read: Vec<(String, FileSource, FirstRead)>, now: Instant) {
        for agent in &mut self.agents {
            if let Err(refused) = agent.deliver_static() {
                warn!(client = %agent.client.name, error = %refused, "endpoint list refused");
            }
        }
        let mut before = std::mem::take(&mut self.files);
        for (service, source, mut first) in read {
            let same = before.remove(&service).filter(|before| before.source.service == source.service);
            // A list that is in force is better than one of an earlier run.
            let in_force = match (&first.result, same.and_then(|before| before.contents)) {
                (Err(_), Some(contents)) => {
                    first.instead = None;
                    Some(contents)
                }
                _ => None,
            };
            self.take_first(&service, source, first, now);
            if let Some(contents) = in_force {
                self.deliver(&service, contents);
            }
        }
    }

    /// Tries clients again that could not be started, with all that belongs to it: by a reload.
    pub fn start_unstarted(&mut self) {
        if !self.unstarted.is_empty() {
            self.reload_now();
        }
    }
}

/// What differs and is fixed when the daemon starts.
fn unchangeable(running: &Config, wanted: &Config) -> Vec<String> {
    let Paths { pins, run, state } = &wanted.paths;
    let Limits { schedule_entries, flow_records, slots } = wanted.limits;
    let changed = [
        ("paths.pins", *pins != running.paths.pins),
        ("paths.run", *run != running.paths.run),
        ("paths.state", *state != running.paths.state),
        ("limits.schedule_entries", schedule_entries != running.limits.schedule_entries),
        ("limits.flow_records", flow_records != running.limits.flow_records),
        ("limits.slots", slots != running.limits.slots),
    ];
    let changed = changed.into_iter().filter(|(_, changed)| *changed);
    changed
        .map(|(name, _)| format!("{name} cannot change while running; restart socklb to apply it"))
        .collect()
}
