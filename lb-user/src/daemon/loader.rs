//! Reads a configuration and all files that it names, and opens its clients. This runs beside the
//! loop, which applies all of it in one turn.
//!
//! A file that does not answer is given up after a while. A file that cannot be used is reported,
//! and its earlier content stays in force.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use lb_core::feed::{ReadFailure, Version};
use tokio::task::{JoinSet, spawn_blocking};

use super::file_io::PATIENCE;
use super::lists::ListReader;
use super::{Reread, work};
use crate::assignments::{self, Assignments, AssignmentsByService};
use crate::config::Config;
use crate::controller::{self, ConfigLoad, ListPurpose, LoadRequest, Loaded, Reading};
use crate::source::{FileSource, NO_VERSION, Stamp};

pub struct Loader {
    pub file: PathBuf,
    pub reread: Reread,
    pub lists: ListReader,
}

impl Loader {
    pub async fn load(self, request: LoadRequest) -> Loaded {
        /// How long a start waits for a file before it uses the list of an earlier run.
        const AT_A_START: Duration = Duration::from_secs(2);
        let LoadRequest { load, begun, running, before, statics, is_asked, opener, there } = request;
        let is_start = matches!(load, ConfigLoad::Given(_));
        let patience = if is_start { AT_A_START } else { PATIENCE };
        let is_wanted = is_asked || is_start;
        let (version, config) = match load {
            ConfigLoad::Given(config) => (None, Ok(*config)),
            ConfigLoad::File => self.reread().await,
        };
        let mut loaded = Loaded {
            version,
            config,
            files: Vec::new(),
            begun,
            statics: AssignmentsByService::new(),
            opened: Vec::new(),
            learnt: if is_start {
                Some(work::read_learnt(&self.lists, &running.paths.state).await)
            } else {
                None
            },
        };
        // An equal configuration is not applied, and opens no client whose pins were removed by
        // hand.
        if let Ok(config) = &loaded.config
            && (is_wanted || *config != running)
        {
            // The directory where lists are stored cannot change while running.
            let config = Config { paths: running.paths.clone(), ..config.clone() };
            loaded.files = self.read_files(&config, &before, patience).await;
            let open = move || {
                let statics = assignments::statics(&config.clients, &statics);
                // Loading programs takes tens of milliseconds per client.
                let absent = config.clients.into_iter().filter(|client| !there.contains(&client.name));
                (statics, opener.open_all(absent))
            };
            (loaded.statics, loaded.opened) = spawn_blocking(open).await.expect("a panic ends the process");
        }
        loaded
    }

    async fn reread(&self) -> (Option<Version<Stamp>>, Result<Config, ReadFailure>) {
        /// A large configuration takes longer to parse than to read.
        const TO_READ: Duration = Duration::from_secs(10);
        let reread = self.reread.clone();
        // Taken before the file is read, so that a change from here on is detected.
        let version = self.lists.version(&self.file, PATIENCE).await;
        let config = match &version {
            Ok(_) => self.lists.io.run(&self.file, TO_READ, move || reread()).await,
            Err(silent) => Err(silent.clone()),
        };
        let config = match config {
            Ok(config) => config,
            Err(silent) => Err(ReadFailure::Silent(silent.to_string())),
        };
        (Some(version.unwrap_or(NO_VERSION)), config)
    }

    /// Reads the files that a configuration names, all at the same time: one that does not answer
    /// delays no other.
    async fn read_files(
        &self,
        config: &Config,
        before: &BTreeMap<String, (FileSource, Assignments)>,
        patience: Duration,
    ) -> Vec<Reading> {
        let mut readings = JoinSet::new();
        for (service, source) in controller::sources(config) {
            let consumers = assignments::consumers(&config.clients, &service);
            let before = before.get(&service).filter(|(before, _)| before.service == source.service);
            let purpose =
                ListPurpose { consumers, before: before.map(|(_, assignments)| assignments.clone()) };
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
    purpose: ListPurpose,
    patience: Duration,
) -> Reading {
    // A list in force is better than one of an earlier run.
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
