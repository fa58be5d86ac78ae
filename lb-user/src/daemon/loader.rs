//! Reads a configuration and all files that it names, and opens its clients. This runs outside of
//! the event loop, which then applies all results in one turn.
//!
//! The loader waits only a limited time for each file. If a file cannot be used, the loader reports
//! this, and the file's earlier content stays in force.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use lb_core::feed::{ReadFailure, Version};
use tokio::task::JoinSet;

use super::file_io::{PATIENCE, beside};
use super::lists::ListReader;
use super::{Reread, files, opener};
use crate::config::Config;
use crate::config::addresses::KnownAddresses;
use crate::controller::{
    self, ConfigLoad, ListInForce, ListPurpose, LoadRequest, Loaded, Reading, StoredKinds,
};
use crate::source::{NO_VERSION, Stamp};

pub struct Loader {
    pub file: PathBuf,
    pub reread: Reread,
    pub lists: ListReader,
}

impl Loader {
    pub async fn load(self, request: LoadRequest) -> Loaded {
        /// The longest duration of each wait of a start: for a call on a file, for the first answer
        /// of a server, or for DNS. [`ListReader::read_first`] has the number of waits.
        const AT_A_START: Duration = Duration::from_secs(2);
        let is_start = request.is_start();
        let (version, config) = match &request.load {
            ConfigLoad::Given(config) => (None, Ok((**config).clone())),
            ConfigLoad::File => self.reread(request.known.clone()).await,
        };
        let mut loaded = Loaded::of(version, config, request.begun);
        if is_start {
            let Config { paths, dns, .. } = &request.running;
            loaded.stored = Some(files::read_stored(&self.lists, &paths.state, StoredKinds::ALL, dns).await);
            loaded.envoy_files = files::read_envoy_places(&self.lists.io, &paths.state).await;
        }
        if let Some(config) = request.to_apply(&loaded.config) {
            let patience = if is_start { AT_A_START } else { PATIENCE };
            loaded.files = self.read_files(&config, &request.before, patience).await;
            let opened = beside(move || opener::open(request.opening(config))).await;
            (loaded.statics, loaded.opened) = (opened.by_service, opened.opened);
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
            Ok(_) => self.lists.io.run(&self.file, TO_READ, move |_| reread(&known)).await,
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
            let purpose = ListPurpose::of_first_read(config, &service, &source, before);
            readings.spawn(self.lists.clone().read_first(service, source, purpose, patience));
        }
        let mut readings = readings.join_all().await;
        readings.sort_by(|a, b| a.service.cmp(&b.service));
        readings
    }
}
