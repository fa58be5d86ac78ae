//! Another configuration while running: read and checked beside the loop, then taken on in one turn of it.
//!
//! What a reload does is what a restart would do, without one: clients get their configuration and all lists anew, and
//! what the kernel holds is brought to it step by step. A configuration with a fault changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use anyhow::Result;
use tracing::{info, warn};

use super::files::Watched;
use super::leaving::Leaving;
use super::{Daemon, Event, Reread, files, fixed, leaving, tell};
use crate::agent::{Agent, Followed};
use crate::config::{Client, Config, Limits};
use crate::datapath::{self, Features, Pins};
use crate::offer::{self, Offer, Offers};
use crate::source::{FileSource, FirstRead, Progress, Stamp, directory_of};

/// How the configuration file fares.
pub struct Reload {
    file: PathBuf,
    progress: Progress,
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

/// The configuration and the files that it names, as they were read.
pub struct Loaded {
    stamp: Option<Stamp>,
    config: std::result::Result<Config, String>,
    files: Vec<Reading>,
    /// The number of the reading of all of them.
    begun: u64,
    /// The lists in it.
    statics: Offers,
    /// Clients that were not there, opened.
    opened: Vec<Opened>,
}

/// A file that a configuration names, as it was read.
struct Reading {
    service: String,
    source: FileSource,
    first: FirstRead,
    /// What was in force when the reading began, for the tasks of the new configuration; only if the file cannot be used.
    in_force: Option<Offer>,
}

/// Clients that could not be started, tried again.
pub struct Tried {
    /// All that were tried.
    clients: Vec<Client>,
    /// Those of them that were not there, opened.
    opened: Vec<Opened>,
    /// The lists that were in force when it began, for all of them.
    offers: Offers,
}

/// A client that was opened beside the loop, with what other versions have of it; or why it could not be.
pub struct Opened {
    client: Client,
    result: std::result::Result<(Agent, Vec<Leaving>), String>,
}

impl Reload {
    /// Of a file of which `stamp` was read, and which is in force since then.
    pub fn new(file: &Path, stamp: Option<Stamp>, reread: Reread, now: SystemTime) -> Self {
        Self {
            file: file.to_owned(),
            progress: Progress::of(stamp),
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

    pub fn look(&mut self, now: Instant) {
        self.progress.look(&self.file, now);
    }
}

impl Daemon {
    /// SIGHUP: at once, and whether or not the file has changed, for the files that it names may have.
    pub fn reload_now(&mut self) {
        self.reload.asked_again = true;
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
        self.reload.asked = std::mem::take(&mut self.reload.asked_again);
        self.notifier.reloading();
        let (reread, events) = (self.reload.reread.clone(), self.events.clone());
        self.readings += 1;
        let begun = self.readings;
        let (running, asked) = (self.config.clone(), self.reload.asked);
        let opener = self.opener();
        let there = self.there();
        let (before, statics_before) = (self.in_force(), self.statics.clone());
        tokio::task::spawn_blocking(move || {
            let config = reread();
            let (mut files, mut statics, mut opened) = (Vec::new(), Offers::new(), Vec::new());
            // What says the same again is not taken on, and opens nobody who was wanted gone.
            if let Ok(config) = &config
                && (asked || *config != running)
            {
                // Where lists are kept cannot change while running.
                let config = Config { paths: running.paths, ..config.clone() };
                statics = offer::statics(&config.clients, &statics_before);
                let sources = files::sources(&config).into_iter();
                files = sources.map(|(service, source)| read(service, source, &config, &before)).collect();
                // Loading programs takes tens of milliseconds for each.
                opened = opener
                    .open_all(config.clients.into_iter().filter(|client| !there.contains(&client.name)));
            }
            let loaded = Loaded { stamp, config, files, begun, statics, opened };
            let _ = events.blocking_send(Event::Loaded(Box::new(loaded)));
        });
    }

    pub fn loaded(&mut self, loaded: Loaded, now: Instant) {
        self.reload.reading = false;
        self.reload.progress.done(loaded.stamp);
        match loaded.config {
            // A file that was only touched, or read before its stamp could tell versions apart, or put right as it was.
            Ok(config) if config == self.config && !self.reload.asked => {
                if self.reload.error.take().is_some() {
                    info!("the configuration is good again, and as it was");
                }
                self.reload.unchangeable.clear();
            }
            Ok(config) => {
                self.statics = loaded.statics;
                self.reload.taken_on += 1;
                self.reload.in_force_since = SystemTime::now();
                self.take_on(config, loaded.begun, loaded.files, loaded.opened, now);
            }
            Err(error) => {
                self.reload.refused += 1;
                // Said once per fault, not once per look; but who asks gets an answer.
                if self.reload.asked || self.reload.error.as_ref() != Some(&error) {
                    warn!(%error, "the configuration cannot be used; what was in force stays");
                }
                self.reload.error = Some(error);
            }
        }
        self.notify_ready();
        if std::mem::take(&mut self.reload.again) {
            self.load(Stamp::at(&self.reload.file));
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
            if let Some(agent) = self.agents.iter_mut().find(|agent| agent.client.name == client.name)
                && let Err(error) = agent.reconfigure(client.clone())
            {
                unstarted.push((client.clone(), crate::chain(&error)));
            }
        }
        // A client that was dropped and has come back while this was read is not among them: it is tried again.
        for client in &config.clients {
            let is_there = self.agents.iter().any(|agent| agent.client.name == client.name);
            if !is_there && !opened.iter().any(|opened| opened.client.name == client.name) {
                unstarted.push((client.clone(), "it is being started".to_owned()));
            }
        }
        self.config = config;
        for Opened { client, result } in opened {
            match result {
                Ok((agent, others)) => self.take_in(agent, others),
                Err(error) => unstarted.push((client, error)),
            }
        }
        self.set_unstarted(unstarted);
        self.deliver_all(begun, read, now);
        self.settle();
        self.watch_everything();
        // Those that leave are still attached: where a client only got another name, or two changed places, their cgroups
        // are balanced all the time.
        self.leaving.extend(gone);
        self.follow_cgroups();
        self.leave_other_cgroups();
        info!(clients = self.config.clients.len(), files = self.files.len(), "configuration taken on");
        self.start_unstarted();
    }

    /// Takes in a client that was opened, in place of one whose pins were removed if there is such a one.
    fn take_in(&mut self, agent: Agent, others: Vec<Leaving>) {
        match self.agents.iter_mut().find(|before| before.client.name == agent.client.name) {
            Some(before) => *before = agent,
            None => self.agents.push(agent),
        }
        self.leaving.extend(others);
    }

    /// The clients that need not be opened: those whose pins were removed by hand are opened anew.
    fn there(&mut self) -> BTreeSet<String> {
        let mut there = BTreeSet::new();
        for agent in &mut self.agents {
            let was_unpinned = agent.is_unpinned();
            // What cannot be seen is left alone.
            if agent.look_for_pins().unwrap_or(true) {
                there.insert(agent.client.name.clone());
            } else if !was_unpinned {
                tell(agent, Followed::Unpinned, false);
            }
        }
        there
    }

    fn names(&self) -> Vec<&str> {
        self.agents.iter().map(|agent| agent.client.name.as_str()).collect()
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

    /// What it takes to open clients beside the loop.
    pub fn opener(&self) -> Opener {
        Opener {
            pins: self.config.paths.pins.clone(),
            limits: self.config.limits,
            features: self.features,
            leaving: self.leaving.iter().map(|leaving| leaving.pins.clone()).collect(),
        }
    }

    /// The newest lists of all files, with what is known of them.
    fn in_force(&self) -> BTreeMap<String, (FileSource, Offer)> {
        let newest = |(service, file): (&String, &Watched)| {
            Some((service.clone(), (file.source.clone(), file.newest()?.offer.clone())))
        };
        self.files.iter().filter_map(newest).collect()
    }

    /// Gives every client the lists of its services, as at a start.
    fn deliver_all(&mut self, begun: u64, read: Vec<Reading>, now: Instant) {
        for agent in &mut self.agents {
            if let Err(refused) = agent.deliver_static(&self.statics) {
                warn!(client = %agent.client.name, error = %refused, "endpoint list refused");
            }
        }
        let mut before = std::mem::take(&mut self.files);
        for Reading { service, source, mut first, in_force } in read {
            let same = before.remove(&service).filter(|before| before.source.service == source.service);
            // The same file may have been read again meanwhile, and then says something newer.
            let is_old =
                same.as_ref().is_some_and(|same| same.source == source && same.was_read_after(begun));
            let newest = same.as_ref().and_then(Watched::newest);
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
                    contents.offer.take_over(computed);
                    // Another list may have come while the configuration was read. Clients that are new begin with the one
                    // before, rather than with none.
                    self.deliver_offer(&service, computed);
                }
                self.deliver(&service, contents);
            }
        }
    }

    /// Tries clients again that could not be started.
    pub fn start_unstarted(&mut self) {
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
        let (opener, events, in_force) = (self.opener(), self.events.clone(), self.in_force());
        let statics = self.statics.clone();
        tokio::task::spawn_blocking(move || {
            let mut offers = offer::statics(&clients, &statics);
            for (service, (_, mut offer)) in in_force {
                offer.complete(&offer::diallers(&clients, &service));
                offers.entry(service).or_insert(offer);
            }
            let absent = clients.iter().filter(|client| !there.contains(&client.name));
            let opened = opener.open_all(absent.cloned());
            let _ = events.blocking_send(Event::Opened(Box::new(Tried { clients, opened, offers })));
        });
    }

    pub fn opened(&mut self, tried: Tried) {
        self.opening = false;
        let Tried { clients, opened, offers } = tried;
        let mut unstarted = self.unstarted.clone();
        for client in clients {
            // A reload may have changed or dropped it meanwhile.
            let Some(at) = unstarted.iter().position(|(other, _)| *other == client) else { continue };
            let Some(agent) = self.agents.iter_mut().find(|agent| agent.client.name == client.name) else {
                continue;
            };
            if !agent.is_unpinned() && agent.reconfigure(client.clone()).is_ok() {
                unstarted.remove(at);
                self.deliver_to(&client.name, &offers);
            }
        }
        for Opened { client, result } in opened {
            let Some(at) = unstarted.iter().position(|(other, _)| *other == client) else { continue };
            match result {
                Ok((agent, others)) => {
                    unstarted.remove(at);
                    self.take_in(agent, others);
                    self.deliver_to(&client.name, &offers);
                }
                Err(error) => unstarted[at].1 = error,
            }
        }
        self.set_unstarted(unstarted);
        self.settle();
        self.watch_everything();
        self.follow_cgroups();
        self.leave_other_cgroups();
    }

    /// Gives one client the lists that are in force: at first those for which its part was computed, then those that have
    /// come since.
    fn deliver_to(&mut self, client: &str, offers: &Offers) {
        let Some(agent) = self.agents.iter_mut().find(|agent| agent.client.name == client) else { return };
        if let Err(refused) = agent.deliver_static(offers) {
            warn!(client, error = %refused, "endpoint list refused");
        }
        let mut later = Vec::new();
        let names = agent.client.services.iter().map(|configured| configured.service.name.clone());
        for (position, service) in names.collect::<Vec<_>>().into_iter().enumerate() {
            let Some(file) = self.files.get_mut(&service) else { continue };
            if let Some(offer) = offers.get(&service) {
                if let Err(refused) = agent.deliver(position, offer) {
                    warn!(client, service, error = %refused, "endpoint list refused");
                }
                file.take_over(offer);
            }
            let newest = file.newest().filter(|newest| {
                offers.get(&service).is_none_or(|offer| offer.list() != newest.offer.list())
            });
            later.extend(newest.map(|newest| (service, newest.clone())));
        }
        for (service, newest) in later {
            self.deliver(&service, newest);
        }
    }
}

/// Reads a file that a configuration names, and computes what its clients use of the list.
fn read(
    service: String,
    source: FileSource,
    config: &Config,
    before: &BTreeMap<String, (FileSource, Offer)>,
) -> Reading {
    let mut first = source.read_first();
    let diallers = offer::diallers(&config.clients, &service);
    let before = before.get(&service).filter(|(before, _)| before.service == source.service);
    let before = before.map(|(_, offer)| offer);
    let in_force = before.filter(|_| first.result.is_err()).map(|offer| {
        let mut offer = offer.clone();
        offer.complete(&diallers);
        offer
    });
    if in_force.is_none() {
        for contents in first.contents_mut() {
            files::complete(&mut contents.offer, &diallers, before);
        }
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
}

impl Opener {
    /// Opens a client, and locks what other versions have of it.
    ///
    /// # Errors
    /// If the client cannot be opened, or another socklb has it.
    pub fn open(&self, client: Client) -> Result<(Agent, Vec<Leaving>)> {
        // Locked before anything is changed: another socklb of another version may be running.
        let others = leaving::lock_other_versions(&self.pins, &client.name, &self.leaving)?;
        let pins = Pins::of(&self.pins, &client.name);
        Ok((Agent::open(client, pins, self.limits, self.features)?, others))
    }

    /// Opens several; may block for tens of milliseconds each.
    fn open_all(&self, clients: impl IntoIterator<Item = Client>) -> Vec<Opened> {
        let open = |client: Client| {
            let result = self.open(client.clone()).map_err(|error| format!("{error:#}"));
            Opened { client, result }
        };
        let mut opened: Vec<Opened> = clients.into_iter().map(open).collect();
        // As at a start: what an earlier daemon has left may be read just now.
        let adopted = |opened: &Opened| {
            opened.result.as_ref().is_ok_and(|(agent, _)| !agent.datapath().applied().services.is_empty())
        };
        if opened.iter().any(adopted)
            && let Err(error) = datapath::wait_for_readers()
        {
            for one in opened.iter_mut().filter(|one| adopted(one)) {
                one.result = Err(crate::chain(&error));
            }
        }
        opened
    }
}
