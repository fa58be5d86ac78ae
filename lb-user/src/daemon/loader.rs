//! Reads a configuration and all files that it names, and opens its clients. This runs outside of
//! the event loop, which then applies all results in one turn.
//!
//! The loader waits only a limited time for each file. If a file cannot be used, the loader reports
//! this, and the file's earlier content stays in force.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use lb_core::feed::{ReadFailure, Version};
use tokio::task::{JoinSet, spawn_blocking};

use super::file_io::PATIENCE;
use super::lists::ListReader;
use super::{Reread, work};
use crate::assignments::{self, AssignmentsByService};
use crate::config::Config;
use crate::config::addresses::KnownAddresses;
use crate::controller::{
    self, ConfigLoad, ListInForce, ListPurpose, LoadRequest, Loaded, Reading, StoredKinds,
};
use crate::source::{ListSource, NO_VERSION, Stamp};

pub struct Loader {
    pub file: PathBuf,
    pub reread: Reread,
    pub lists: ListReader,
}

impl Loader {
    pub async fn load(self, request: LoadRequest) -> Loaded {
        /// How long a start waits for a file before it uses the stored last good list.
        const AT_A_START: Duration = Duration::from_secs(2);
        let LoadRequest { load, begun, running, known, before, statics, is_requested, opener, there } =
            request;
        let is_start = matches!(load, ConfigLoad::Given(_));
        let patience = if is_start { AT_A_START } else { PATIENCE };
        let is_wanted = is_requested || is_start;
        let (version, config) = match load {
            ConfigLoad::Given(config) => (None, Ok(*config)),
            ConfigLoad::File => self.reread(known).await,
        };
        let mut loaded = Loaded {
            version,
            config,
            files: Vec::new(),
            begun,
            statics: AssignmentsByService::new(),
            opened: Vec::new(),
            stored: if is_start {
                Some(
                    work::read_stored(&self.lists, &running.paths.state, StoredKinds::ALL, &running.dns)
                        .await,
                )
            } else {
                None
            },
            envoy_files: if is_start {
                work::read_envoy_places(&self.lists, &running.paths.state).await
            } else {
                Vec::new()
            },
        };
        // A configuration that equals the running one is applied only at a start or on request. If
        // only the file's stamp has changed, a client without pins is not opened again, because an
        // operator has removed the pins.
        if let Ok(config) = &loaded.config
            && (is_wanted || *config != running)
        {
            // The directory in which lists are stored cannot change while the daemon runs.
            let config = Config { paths: running.paths.clone(), ..config.clone() };
            loaded.files = self.read_files(&config, &before, patience).await;
            let open = move || {
                let statics = assignments::statics(&config.clients, &statics);
                // Opening a client takes tens of milliseconds, because its programs are loaded.
                let absent = config.clients.into_iter().filter(|client| !there.contains(&client.name));
                (statics, opener.open_all(absent))
            };
            (loaded.statics, loaded.opened) = spawn_blocking(open).await.expect("the task does not panic");
        }
        loaded
    }

    async fn reread(&self, known: KnownAddresses) -> (Option<Version<Stamp>>, Result<Config, ReadFailure>) {
        /// This is longer than `PATIENCE`, because a large configuration takes longer to parse than
        /// to read.
        const TO_READ: Duration = Duration::from_secs(10);
        let reread = self.reread.clone();
        // The version is taken before the file is read, so that any later change is detected.
        let version = self.lists.version(&self.file, PATIENCE).await;
        let config = match &version {
            Ok(_) => self.lists.io.run(&self.file, TO_READ, move || reread(&known)).await,
            Err(no_answer) => Err(no_answer.clone()),
        };
        let config = match config {
            Ok(config) => config,
            Err(no_answer) => Err(ReadFailure::Hung(no_answer.to_string())),
        };
        (Some(version.unwrap_or(NO_VERSION)), config)
    }

    /// Reads all files that a configuration names. The files are read at the same time, so that a
    /// file that does not answer does not delay the others.
    async fn read_files(
        &self,
        config: &Config,
        before: &BTreeMap<String, ListInForce>,
        patience: Duration,
    ) -> Vec<Reading> {
        let mut readings = JoinSet::new();
        for (service, source) in controller::sources(config) {
            let consumers = assignments::consumers(&config.clients, &service);
            let before = before.get(&service).filter(|before| before.source.service == source.service);
            let same = before.filter(|before| before.source.origin == source.origin);
            let purpose = ListPurpose {
                consumers,
                before: before.map(|before| before.assignments.clone()),
                guard: same.and_then(|same| same.guard.clone()),
                suspension: same.and_then(|same| same.suspension),
                seen: None,
                dns: config.dns.clone(),
            };
            readings.spawn(read(self.lists.clone(), service, source, purpose, patience));
        }
        let mut readings = readings.join_all().await;
        readings.sort_by(|a, b| a.service.cmp(&b.service));
        readings
    }
}

/// Reads the list of one service, and computes its assignments.
async fn read(
    lists: ListReader,
    service: String,
    source: ListSource,
    purpose: ListPurpose,
    patience: Duration,
) -> Reading {
    // A list in force is newer than the stored last good list.
    let wants_last_good = purpose.before.is_none();
    let first = lists.read_first(&source, purpose.clone(), wants_last_good, patience).await;
    let mut in_force = None;
    if let (Err(_), Some(mut assignments)) = (&first.result, purpose.before) {
        let complete = move || {
            assignments.complete(&purpose.consumers);
            assignments
        };
        in_force = Some(spawn_blocking(complete).await.expect("the task does not panic"));
    }
    Reading { service, source, first, in_force }
}
