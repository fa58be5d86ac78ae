//! Decides which of the files that Envoy reads must be written, and when.
//! [`crate::output::envoy`] renders their content.
//!
//! At each tick, the controller compares the wanted content of each file with the content that was
//! written last. So a file is written at most once per second, and only if its content has changed.
//! Files are written outside of the event loop. If a file cannot be written, the controller reports
//! a fault and retries after a growing pause.
//!
//! When the daemon stops, the files remain, and Envoy continues to use the last backends. The
//! controller stores a list of the files, so that a later daemon can remove files that its
//! configuration no longer needs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use lb_view::fault::{Fault, FaultCode};
use lb_view::text::counted;
use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use crate::backoff::Backoff;
use crate::controller::{BackgroundWork, Controller};
use crate::output::envoy::{self, EnvoyLbEndpoint};

/// The maximum number of files in one `BackgroundWork::WriteEnvoyFiles`, which must end within the
/// time limit for calls on a file system.
const BATCH: usize = 64;

/// A file that Envoy reads.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct EnvoyFile {
    /// The configured directory.
    pub directory: PathBuf,
    pub client: String,
    pub service: String,
}

impl EnvoyFile {
    /// The path of the file below the configured directory. Each client has its own subdirectory,
    /// because two clients may have different backends of one service.
    pub fn name(&self) -> PathBuf {
        PathBuf::from(&self.client).join(format!("{}.json", self.service))
    }

    /// The files in the stored list with this text. If the list cannot be read or parsed, there are
    /// none, and so no file of an earlier daemon is removed.
    pub fn stored(text: Option<Vec<u8>>) -> Vec<Self> {
        text.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
    }
}

/// The path of the stored list of all files for Envoy. `state` is the state directory.
pub fn path(state: &Path) -> PathBuf {
    state.join("envoy").join("files.json")
}

/// Files with their new content; `None` if the file is to be removed.
pub type EnvoyChanges = BTreeMap<EnvoyFile, Option<Arc<[EnvoyLbEndpoint]>>>;

/// The result for each file of one `BackgroundWork::WriteEnvoyFiles`: why the file could not be
/// written or removed; `None` after success.
pub type EnvoyResults = BTreeMap<EnvoyFile, Option<String>>;

#[derive(Default)]
pub struct EnvoyFiles {
    known: BTreeMap<EnvoyFile, KnownFile>,
    /// The files in the list that was stored last.
    stored: BTreeSet<EnvoyFile>,
    /// Whether files are being written.
    is_busy: bool,
}

#[derive(Default)]
struct KnownFile {
    /// The content that the file should have; `None` if the file should not exist.
    wanted: Option<Arc<[EnvoyLbEndpoint]>>,
    /// Whether an earlier daemon has written the file, so that its content is not known.
    is_adopted: bool,
    /// Whether the content was written, or is being written.
    is_sent: bool,
    retry: Backoff,
}

impl EnvoyFiles {
    fn set(&mut self, file: EnvoyFile, wanted: Option<Vec<EnvoyLbEndpoint>>) {
        let known = self.known.entry(file).or_default();
        if known.is_adopted || known.wanted.as_deref() != wanted.as_deref() {
            known.is_adopted = false;
            known.wanted = wanted.map(Arc::from);
            known.is_sent = false;
        }
    }

    /// Takes over the files of an earlier daemon. A file remains unchanged until its service has a
    /// list. Files that the configuration does not need are removed.
    pub fn adopt(&mut self, files: Vec<EnvoyFile>) {
        for file in files {
            self.stored.insert(file.clone());
            self.known.entry(file).or_insert(KnownFile {
                is_adopted: true,
                is_sent: true,
                ..KnownFile::default()
            });
        }
    }

    /// The list of all files as JSON, if it has changed since it was last stored.
    fn changed_places(&mut self) -> Option<Arc<[u8]>> {
        if self.known.keys().eq(&self.stored) {
            return None;
        }
        self.stored = self.known.keys().cloned().collect();
        Some(serde_json::to_vec(&self.stored).expect("file names can be written as JSON").into())
    }

    /// The next files to write or remove, at most [`BATCH`].
    fn take_due(&mut self, now: Instant) -> EnvoyChanges {
        let due = self.known.iter_mut().filter(|(_, known)| !known.is_sent && known.retry.is_due(now));
        due.take(BATCH)
            .map(|(file, known)| {
                known.is_sent = true;
                (file.clone(), known.wanted.clone())
            })
            .collect()
    }

    pub fn fault(&self) -> Option<Fault> {
        let mut errors = self.known.values().filter_map(|known| known.retry.error());
        let first = errors.next()?;
        let files = counted(1 + errors.count() as u64, "file");
        let text = format!(
            "cannot update {files} for Envoy, so Envoy may still use earlier backends and weights; retrying: \
             {first}"
        );
        Some(Fault::of_host(FaultCode::EnvoyFiles, text))
    }
}

impl Controller {
    /// Compares the wanted files with the written ones, and starts to write those that differ.
    pub fn follow_envoy_files(&mut self, now: Instant) {
        let mut configured = BTreeSet::new();
        if let Some(directory) = &self.config.envoy {
            for client in &self.config.clients {
                // A client task that could not apply its new configuration still has the services
                // of an earlier one.
                let task = self.clients.task(&client.name).filter(|task| task.client == *client);
                for (position, service) in client.services.iter().enumerate() {
                    let file = EnvoyFile {
                        directory: directory.clone(),
                        client: client.name.clone(),
                        service: service.service.name.clone(),
                    };
                    let endpoints = task.and_then(|task| envoy::endpoints(task.balancer(), position));
                    // Until the service has a list, the file of an earlier daemon remains.
                    if endpoints.is_some() {
                        self.envoy_files.set(file.clone(), endpoints);
                    }
                    configured.insert(file);
                }
            }
        }
        let gone: Vec<EnvoyFile> =
            self.envoy_files.known.keys().filter(|file| !configured.contains(file)).cloned().collect();
        for file in gone {
            self.envoy_files.set(file, None);
        }
        if let Some(places) = self.envoy_files.changed_places() {
            self.sources.files_to_store.add(path(&self.config.paths.state), places);
        }
        self.write_envoy_files(now);
    }

    fn write_envoy_files(&mut self, now: Instant) {
        if self.envoy_files.is_busy {
            return;
        }
        let due = self.envoy_files.take_due(now);
        if !due.is_empty() {
            self.envoy_files.is_busy = true;
            self.effects.push(BackgroundWork::WriteEnvoyFiles(due).into());
        }
    }

    /// Handles the end of an attempt to write files.
    pub fn envoy_files_written(&mut self, results: EnvoyResults, now: Instant) {
        self.envoy_files.is_busy = false;
        for (file, error) in results {
            let Some(known) = self.envoy_files.known.get_mut(&file) else { continue };
            match error {
                Some(error) => {
                    known.is_sent = false;
                    if known.retry.failed(now, &error) {
                        warn!(
                            client = %file.client, service = %file.service, error,
                            "cannot update the file for Envoy; retrying after a growing pause"
                        );
                    }
                }
                None => {
                    if known.retry.error().is_some() {
                        info!(client = %file.client, service = %file.service, "the file for Envoy was updated");
                    }
                    known.retry.succeeded();
                    if known.wanted.is_none() && known.is_sent {
                        self.envoy_files.known.remove(&file);
                    }
                }
            }
        }
        self.write_envoy_files(now);
    }
}
