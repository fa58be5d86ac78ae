//! Reloads. A thread reads and checks a new configuration outside of the event loop. One turn of
//! the loop applies the configuration to the controller's state. Later turns change the kernel's
//! maps, for one client per turn.
//!
//! A reload has the same result as a restart: clients receive their configuration and all lists
//! again, and the kernel's state is changed step by step. A configuration with a fault changes
//! nothing.

pub mod changes;
pub mod fixed;
pub mod start;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use lb_core::feed::{Progress, ReadFailure, ReadTurn, Version};
use tracing::{info, warn};

use self::changes::changes;
use super::lists::reads::{ListInForce, Reading};
use super::lists::sources::WatchedSource;
use super::{
    BackgroundWork, ClientOpener, Controller, Effect, EnvoyFile, Notice, OpenRequest, Opened, StoredState,
};
use crate::config::Config;
use crate::config::addresses::KnownAddresses;
use crate::output::configured::configured;
use crate::source::assignments::AssignmentsByService;
use crate::source::{NoAnswer, Stamp, directory_of};

/// The configuration to load.
pub enum ConfigLoad {
    /// The configuration that the daemon starts with.
    Given(Box<Config>),
    /// The configuration that is in the file now.
    File,
}

/// The request to read a configuration and all files that it names.
pub struct LoadRequest {
    pub load: ConfigLoad,
    /// The number of this read. All reads of the files that the configuration names have this
    /// number.
    pub begun: u64,
    /// The configuration in force when the read began.
    pub running: Config,
    /// The service addresses that servers have sent.
    pub known: KnownAddresses,
    pub before: BTreeMap<String, ListInForce>,
    pub statics: AssignmentsByService,
    /// Whether an operator requested the reload.
    pub is_requested: bool,
    pub opener: ClientOpener,
    /// The names of the running clients, which need not be opened.
    pub there: BTreeSet<String>,
}

impl LoadRequest {
    /// Whether the daemon starts.
    pub fn is_start(&self) -> bool {
        matches!(self.load, ConfigLoad::Given(_))
    }

    /// The configuration whose lists are read and whose clients are opened; `None` if the
    /// configuration that was read has no effect.
    pub fn to_apply(&self, config: &Result<Config, ReadFailure>) -> Option<Config> {
        let is_requested = self.is_requested || self.is_start();
        let config = config.as_ref().ok().filter(|config| has_effect(config, &self.running, is_requested))?;
        // The directory in which lists are stored cannot change while the daemon runs.
        Some(Config { paths: self.running.paths.clone(), ..config.clone() })
    }

    /// The request to open the clients of this configuration. The lists of files and servers are
    /// not in it, because all lists are read again.
    pub fn opening(self, config: Config) -> OpenRequest {
        let Self { there, statics, opener, .. } = self;
        OpenRequest { clients: config.clients, there, statics, in_force: BTreeMap::new(), opener }
    }
}

/// Whether a configuration that was read is applied. A configuration that equals the running one is
/// applied only at a start and if an operator requests it: the file was touched without a change,
/// was read twice because its stamp could not distinguish versions, or was changed back. A client
/// without pins is then not opened again, because an operator has removed the pins.
fn has_effect(config: &Config, running: &Config, is_requested: bool) -> bool {
    is_requested || config != running
}

/// The result of a [`LoadRequest`].
pub struct Loaded {
    /// The version of the configuration file; `None` if the file was not read.
    pub version: Option<Version<Stamp>>,
    pub config: Result<Config, ReadFailure>,
    pub files: Vec<Reading>,
    /// The number of this read.
    pub begun: u64,
    /// The lists in the configuration itself, with assignments.
    pub statics: AssignmentsByService,
    /// The clients that did not run yet, with the results of opening them.
    pub opened: Vec<Opened>,
    /// The files that an earlier daemon stored; read only when the daemon starts.
    pub stored: Option<StoredState>,
    /// The files that an earlier daemon wrote for Envoy; read only when the daemon starts.
    pub envoy_files: Vec<EnvoyFile>,
}

impl Loaded {
    /// A configuration of whose files none is read yet.
    pub fn of(version: Option<Version<Stamp>>, config: Result<Config, ReadFailure>, begun: u64) -> Self {
        let (files, statics, opened, stored, envoy_files) = Default::default();
        Self { version, config, files, begun, statics, opened, stored, envoy_files }
    }
}

/// The state of the configuration file, and of reloads.
pub struct Reload {
    file: PathBuf,
    progress: Progress<Stamp>,
    /// Whether the file is being read, and whether an operator requested this read by SIGHUP.
    pub turn: ReadTurn,
    /// How many configurations were applied since the start. `refused`: how many could not be used.
    pub taken_on: u64,
    pub refused: u64,
    /// When the current configuration came into force.
    pub in_force_since: SystemTime,
    /// The changes that the configuration in force has made, as text; `None` once the maps of all
    /// clients match this configuration.
    following: Option<String>,
    /// Why the file cannot be used; `None` if it can be used.
    pub error: Option<String>,
    /// Changes in the file that cannot be applied while the daemon runs.
    pub unchangeable: Vec<String>,
}

impl Reload {
    /// `version` is the version of the file when it was read. The configuration in this version is
    /// in force since `now`.
    pub fn new(file: &Path, version: Version<Stamp>, now: SystemTime) -> Self {
        Self {
            file: file.to_owned(),
            progress: Progress::of(version),
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
        // Endpoint files may be in the same directory and change often, so only changes of the
        // configuration file itself and of its directory lead to a check. If a link on the path to
        // the file changes, the next tick detects this.
        if changes.contains(&self.file) || changes.contains(&directory_of(&self.file)) {
            self.progress.changed(now);
        }
    }
}

impl Controller {
    /// Handles SIGHUP: reads the file at once, even if it has not changed, because the endpoint
    /// files that it names may have changed.
    pub fn reload_now(&mut self, now: Instant) {
        self.forget_refused_addresses();
        self.request(true, now);
    }

    /// Reads the file because a server has sent a new address of a service: this address is part of
    /// the configuration.
    pub fn reload_changed(&mut self, now: Instant) {
        self.request(false, now);
    }

    /// Requests a read of the file: now, or after the read that is under way, if there is one.
    fn request(&mut self, is_requested: bool, now: Instant) {
        if self.reload.turn.request(is_requested) {
            self.load(ConfigLoad::File, is_requested, now);
        }
    }

    /// Requests a check of whether the configuration file has changed. The check runs outside of
    /// the event loop, because the file system may not answer.
    pub fn look_at_config(&mut self) {
        if self.config.daemon.watch && self.reload.progress.begin_look() {
            self.effects.push(BackgroundWork::LookAtConfig { is_due: false }.into());
        }
    }

    /// Requests a check of the configuration file if it has changed and has then stopped changing.
    /// A changed file is then loaded.
    pub fn look_at_due_config(&mut self, now: Instant) {
        if self.reload.progress.begin(now).is_some() {
            self.effects.push(BackgroundWork::LookAtConfig { is_due: true }.into());
        }
    }

    /// Handles the result of a check of the configuration file.
    pub fn looked_at_config(&mut self, is_due: bool, result: Result<Option<Stamp>, NoAnswer>, now: Instant) {
        match result {
            Ok(stamp) => {
                let is_another = self.reload.progress.looked(stamp);
                if is_another && is_due {
                    // No further check is due while the file is being read.
                    self.reload.progress.begin_look();
                    self.request(false, now);
                } else if is_another {
                    self.reload.progress.changed(now);
                }
            }
            Err(no_answer) => self.mark_config_hung(no_answer.to_string(), false),
        }
    }

    fn mark_config_hung(&mut self, error: String, is_requested: bool) {
        let is_new = self.reload.progress.mark_hung();
        if is_requested || is_new {
            warn!(%error, "the configuration cannot be used; the earlier configuration stays in force");
        }
        self.reload.error = Some(error);
    }

    /// Loads the configuration that was read for the start.
    pub fn load_given(&mut self, config: Config, now: Instant) {
        if self.reload.turn.request(false) {
            self.load(ConfigLoad::Given(Box::new(config)), false, now);
        }
    }

    /// Starts, outside of the event loop, to read a configuration and the files that it names, and
    /// to open its clients.
    fn load(&mut self, load: ConfigLoad, is_requested: bool, now: Instant) {
        if self.is_ready {
            self.effects.push(Effect::Notify(Notice::Reloading));
        }
        self.sources.readings += 1;
        let request = LoadRequest {
            load,
            begun: self.sources.readings,
            running: self.config.clone(),
            known: self.addresses.known.clone(),
            is_requested,
            opener: self.opener(now),
            there: self.there(),
            before: self.in_force(),
            statics: self.sources.statics.clone(),
        };
        self.effects.push(BackgroundWork::Load(Box::new(request)).into());
    }

    pub fn loaded(&mut self, loaded: Loaded, now: Instant) {
        let (is_requested, mut again) = self.reload.turn.ended();
        let is_first = loaded.version.is_none();
        if let Some(version) = loaded.version {
            self.reload.progress.done(version);
        }
        match loaded.config {
            Ok(config) if !has_effect(&config, &self.config, is_requested || is_first) => {
                if self.reload.error.take().is_some() {
                    info!("the configuration can be used again; it is unchanged");
                }
                self.reload.unchangeable.clear();
            }
            // Clients that were opened are not opened a second time.
            Ok(config)
                if !is_first && loaded.opened.is_empty() && self.refuse_addresses(&config, &loaded.files) =>
            {
                again = Some(is_requested || again == Some(true));
            }
            Ok(config) => {
                self.sources.statics = loaded.statics;
                self.envoy_files.adopt(loaded.envoy_files);
                if let Some(stored) = loaded.stored {
                    stored.loads.into_iter().for_each(|file| self.load_store.take(file));
                    stored.hosts.into_iter().for_each(|file| self.sources.hosts.store.take(file));
                    let overrides = stored.overrides.into_iter();
                    overrides.for_each(|file| self.take_overrides(file, &config.clients));
                }
                let changed = (!is_first).then(|| changes(&configured(&self.config), &configured(&config)));
                self.take_on(config, loaded.begun, loaded.files, loaded.opened, is_first, now);
                if let Some(changed) = changed {
                    self.reload.taken_on += 1;
                    self.reload.in_force_since = self.wall;
                    self.reload.following = Some(changed);
                }
            }
            Err(ReadFailure::Hung(no_answer)) => {
                self.reload.refused += 1;
                self.mark_config_hung(no_answer, is_requested);
            }
            Err(ReadFailure::Unread(error)) => {
                self.reload.progress.found_nothing();
                // The error is counted and logged once, not at each retry.
                if self.reload.error.as_ref() != Some(&error) {
                    self.reload.refused += 1;
                    let next = if self.config.daemon.watch { "retrying" } else { "waiting for SIGHUP" };
                    warn!(%error, "the configuration cannot be read; {next}");
                }
                self.reload.error = Some(error);
            }
            Err(ReadFailure::Faulty(error)) => {
                self.reload.refused += 1;
                // Each fault is logged once, not at each check. After a reload that an operator has
                // requested, it is always logged.
                if is_requested || self.reload.error.as_ref() != Some(&error) {
                    warn!(%error, "the configuration cannot be used; the earlier configuration stays in force");
                }
                self.reload.error = Some(error);
            }
        }
        self.query_servers();
        self.resolve_hosts(now);
        // At the start, readiness is reported later, when the socket accepts connections.
        let is_following = self.reload.following.is_some() && self.clients.is_settling;
        if !is_first && !is_following {
            self.reloaded();
        }
        if let Some(is_requested) = again {
            self.request(is_requested, now);
        }
    }

    /// Handles the end of settling: the maps of all clients match their plans.
    pub fn all_settled(&mut self, now: Instant) {
        self.follow_cgroups(now);
        self.leave_other_cgroups(now);
        self.try_returned(now);
        if self.reload.following.is_some() {
            self.reloaded();
        }
    }

    /// Reports that a configuration is in force, or was refused.
    fn reloaded(&mut self) {
        if let Some(changed) = self.reload.following.take() {
            let (clients, files) = (self.config.clients.len(), self.sources.watched.len());
            info!(clients, files, changed, "configuration applied");
        }
        // If another reload is under way, that reload will report its own end.
        if !self.reload.turn.is_reading() {
            let status = self.summary();
            self.effects.push(Effect::Notify(Notice::Ready(status)));
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
        fixed::carry_over(&self.config, &mut config);
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
        // If a client was removed and added again while this configuration was read, `opened` does
        // not contain the client. The client is opened later.
        for client in &config.clients {
            let is_there = self.clients.task(&client.name).is_some();
            if !is_there && !opened.iter().any(|opened| opened.client.name == client.name) {
                unstarted.push((client.clone(), "the client is being started".to_owned()));
            }
        }
        self.config = config;
        self.store_addresses();
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
        self.watch();
        self.look_at_files();
        self.look_at_config();
        // The programs of leaving clients are still attached here. So connects are balanced without
        // a gap if a client was only renamed, or if two clients have swapped cgroups.
        self.clients.leaving.extend(gone);
        if is_first {
            self.begin_first_looks(now);
        }
        self.follow_cgroups(now);
        self.leave_other_cgroups(now);
        self.start_unstarted(now);
    }

    /// The newest lists of all sources, with their assignments.
    pub fn in_force(&self) -> BTreeMap<String, ListInForce> {
        let newest = |(service, watched): (&String, &WatchedSource)| {
            let in_force = ListInForce {
                source: watched.source.clone(),
                assignments: watched.feed.newest()?.assignments.clone(),
                guard: watched.guard(),
                suspension: watched.remote.suspension,
            };
            Some((service.clone(), in_force))
        };
        self.sources.watched.iter().filter_map(newest).collect()
    }

    /// Delivers the lists of all services to all clients, as at a start of the daemon.
    fn deliver_all(&mut self, begun: u64, read: Vec<Reading>, now: Instant) {
        for client_task in &mut self.clients.tasks {
            if let Err(refused) = client_task.deliver_static(&self.sources.statics, now) {
                warn!(client = %client_task.client.name, error = %refused, "endpoint list refused; the earlier list stays in use");
            }
        }
        let mut before = std::mem::take(&mut self.sources.watched);
        for reading in read {
            let same = before.remove(&reading.service);
            self.take_reloaded(reading, begun, same, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::good;

    #[test]
    fn an_unchanged_configuration_has_an_effect_only_on_request() {
        let service = "[[service]]\nname = 'users'\naddress = '10.96.0.1:1'\nbackends = { static = [] }\n";
        let config = |job: &str| good(&format!("[[client]]\njob = '{job}'\ncgroup = 'web'\n{service}"));
        assert!(!has_effect(&config("web"), &config("web"), false));
        assert!(has_effect(&config("web"), &config("web"), true));
        assert!(has_effect(&config("mail"), &config("web"), false));
    }
}
