//! Reads a configuration and all that it names, and opens its clients: beside the loop, which takes all of it on in one
//! turn.
//!
//! A file that does not answer is given up after a while. A file that cannot be used is reported, and what was in force
//! goes on.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use lb_core::feed::ReadFailure;
use tokio::task::{JoinSet, spawn_blocking};

use super::file_io::PATIENCE;
use super::learnt::{self, LearntFile};
use super::lists::{FirstRead, ListReader, Purpose};
use super::opening::{Opened, Opener};
use super::{Reread, files};
use crate::assignments::{self, Assignments, AssignmentsByService};
use crate::config::Config;
use crate::source::{self, FileSource, Stamp};

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
    pub stamp: Option<Option<Stamp>>,
    pub config: Result<Config, ReadFailure>,
    pub files: Vec<Reading>,
    /// The number of this reading, the same for all of the files.
    pub begun: u64,
    /// The lists that the configuration holds.
    pub statics: AssignmentsByService,
    /// Clients that did not run yet, opened.
    pub opened: Vec<Opened>,
    /// What an earlier daemon had learnt of loads; read at a start alone.
    pub learnt: Option<LearntFile>,
}

/// A file that a configuration names, as it was read.
pub struct Reading {
    pub service: String,
    pub source: FileSource,
    pub first: FirstRead,
    /// What was in force when the reading began, for the tasks of the new configuration; only if the file cannot be used.
    pub in_force: Option<Assignments>,
}

/// Reads a configuration and all that it names, beside the loop.
pub struct Loader {
    pub file: PathBuf,
    pub reread: Reread,
    pub lists: ListReader,
    pub begun: u64,
    /// The configuration that was in force when the reading began.
    pub running: Config,
    pub before: BTreeMap<String, (FileSource, Assignments)>,
    pub statics: AssignmentsByService,
    /// Whether an operator asked for it.
    pub is_asked: bool,
    pub opener: Opener,
    /// Clients that need not be opened.
    pub there: BTreeSet<String>,
}

impl Loader {
    pub async fn load(self, load: Load) -> Loaded {
        /// At a start a file is waited for so long before the list of an earlier run is used.
        const AT_A_START: Duration = Duration::from_secs(2);
        let patience = if matches!(load, Load::Given(_)) { AT_A_START } else { PATIENCE };
        let is_start = matches!(load, Load::Given(_));
        let is_wanted = self.is_asked || matches!(load, Load::Given(_));
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
            learnt: if is_start {
                Some(learnt::read(&self.lists.io, &self.running.paths.state).await)
            } else {
                None
            },
        };
        // An equal configuration is not taken on, and opens no client whose pins were removed by hand.
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

    async fn reread(&self) -> (Option<Option<Stamp>>, Result<Config, ReadFailure>) {
        /// A large configuration takes longer to be understood than to be read.
        const TO_READ: Duration = Duration::from_secs(10);
        let (file, reread) = (self.file.clone(), self.reread.clone());
        // Taken before the file is read, so that a change from here on is seen as a change.
        let stamp = self.lists.io.run(&self.file, PATIENCE, move || source::answers(&file)).await;
        let config = match &stamp {
            Ok(_) => self.lists.io.run(&self.file, TO_READ, move || reread()).await,
            Err(silent) => Err(silent.clone()),
        };
        let config = match config {
            Ok(config) => config,
            Err(silent) => Err(ReadFailure::Silent(silent.to_string())),
        };
        (Some(stamp.ok().flatten()), config)
    }

    /// Reads the files that a configuration names, all at the same time: one that does not answer delays no other.
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
