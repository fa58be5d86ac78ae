//! Work that takes long and therefore runs outside of the event loop. Each result becomes an event.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use lb_config::discovery::DnsSettings;
use lb_kernel::{ClientNamespace, Kernel, RecordedProcesses};
use tokio::runtime::Handle;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::file_io::{Files, PATIENCE};
use super::lists::ListReader;
use super::loader::Loader;
use super::watches::Watches;
use super::{Reread, files, opener};
use crate::close_jobs;
use crate::controller::{
    BackgroundWork, EnvoyChanges, EnvoyFile, EnvoyResults, NamespaceFound, OverridesRead, Search, StateFiles,
    StoreFailures, StoredFile, StoredHosts, StoredKinds, StoredOverrides, StoredRead, StoredState,
    WorkResult, envoy_places_path,
};
use crate::source::{MAX_BYTES, NoAnswer, Stamp, directory_of};

/// The longest wait until files are stored. Files are written and synchronized one by one.
const TO_STORE: Duration = Duration::from_secs(10);

/// A search for a client's processes reads the records of flows that began within this time before
/// the search.
const RECENT: Duration = Duration::from_mins(1);

/// Cheap to clone.
#[derive(Clone)]
pub struct Worker {
    lists: ListReader,
    watches: Watches,
    /// The configuration file.
    file: PathBuf,
    reread: Reread,
    /// The directory in which files for the next start of the daemon are stored.
    state: PathBuf,
    kernel: Arc<dyn Kernel>,
    knows_mptcp: bool,
}

impl Worker {
    /// `state` is the directory with the files for the next start of the daemon. `knows_mptcp`:
    /// whether programs recognize the paths of MPTCP sockets, so that these paths have no flow
    /// records.
    pub fn new(
        lists: ListReader,
        file: PathBuf,
        reread: Reread,
        state: PathBuf,
        watches: Watches,
        kernel: Arc<dyn Kernel>,
        knows_mptcp: bool,
    ) -> Self {
        Self { lists, watches, file, reread, state, kernel, knows_mptcp }
    }

    /// Does the work. Calls that may block run on separate threads. If a file does not answer
    /// within a time limit, the part of the work that needs the file ends with an error.
    pub async fn carry_out(self, work: BackgroundWork) -> WorkResult {
        match work {
            BackgroundWork::Look { service, source, path } => {
                let result = self.look(&path).await;
                WorkResult::Looked { service, source, result }
            }
            BackgroundWork::LookAtConfig { is_due } => {
                WorkResult::LookedAtConfig { is_due, result: self.look(&self.file).await }
            }
            BackgroundWork::Read { service, source, begun, known, purpose } => {
                self.lists.read(service, source, begun, known, purpose).await
            }
            BackgroundWork::ReadStored(kinds, dns) => {
                WorkResult::StoredRead(Box::new(read_stored(&self.lists, &self.state, kinds, &dns).await))
            }
            BackgroundWork::Store(files) => WorkResult::Stored(self.store(files).await),
            BackgroundWork::WriteEnvoyFiles(changes) => {
                WorkResult::EnvoyFilesWritten(self.write_envoy_files(changes).await)
            }
            BackgroundWork::Compute { service, mut contents, consumers } => {
                let compute = move || {
                    contents.assignments.complete(&consumers);
                    WorkResult::Computed { service, contents }
                };
                beside(compute).await
            }
            BackgroundWork::Load(request) => {
                let loader = Loader { file: self.file, reread: self.reread, lists: self.lists };
                WorkResult::Loaded(Box::new(loader.load(*request).await))
            }
            BackgroundWork::Open(request) => {
                beside(move || WorkResult::Opened(Box::new(opener::open(*request)))).await
            }
            BackgroundWork::WaitForReaders => {
                beside(move || WorkResult::ReadersGone(self.kernel.wait_for_readers())).await
            }
            BackgroundWork::Reclaim { targets, mut suspects, now, interval } => {
                let reclaim = move || {
                    let pass = lb_kernel::reclaim(&targets, &mut suspects, self.knows_mptcp, now, interval);
                    WorkResult::Reclaimed(pass, suspects)
                };
                beside(reclaim).await
            }
            BackgroundWork::SearchNamespaces(wanted) => {
                let find = |(client, Search { path, known, records }): (String, Search)| {
                    let result = ClientNamespace::find(&path, known);
                    let recorded = records.and_then(|pins| RecordedProcesses::read(&pins, RECENT).ok());
                    NamespaceFound { client, path, result, recorded }
                };
                beside(move || WorkResult::NamespacesFound(wanted.into_iter().map(find).collect())).await
            }
            BackgroundWork::Close(job, mut requester) => {
                let runtime = Handle::current();
                let close = move || {
                    let mut wait =
                        |time| runtime.block_on(async { timeout(time, requester.gone()).await.is_err() });
                    let result = close_jobs::run(&job, &mut wait);
                    WorkResult::FlowsClosed(job.order, result, requester)
                };
                beside(close).await
            }
        }
    }

    /// Reads the stamp of a file, and watches the file's directory.
    async fn look(&self, path: &Path) -> Result<Option<Stamp>, NoAnswer> {
        let (file, watches) = (path.to_owned(), self.watches.clone());
        let look = move |files: &dyn Files| {
            // The watch is added first, so that it reports any change that happens after the stamp
            // was read.
            watches.add(&directory_of(&file));
            files.stamp(&file)
        };
        self.lists.io.run(path, PATIENCE, look).await
    }

    async fn store(&self, files: StateFiles) -> StoreFailures {
        let all = files.clone();
        let directory = self.state.join("last-good");
        let stored = self.lists.io.run(&directory, TO_STORE, move |disk| files::store_all(disk, files)).await;
        stored.unwrap_or_else(|no_answer| StoreFailures { left: all, error: Some(no_answer.to_string()) })
    }

    /// Writes the files of one directory at a time. A directory that does not answer delays the
    /// other directories by at most [`TO_STORE`].
    async fn write_envoy_files(&self, changes: EnvoyChanges) -> EnvoyResults {
        let mut by_directory: BTreeMap<PathBuf, EnvoyChanges> = BTreeMap::new();
        for (file, endpoints) in changes {
            by_directory.entry(file.directory.clone()).or_default().insert(file, endpoints);
        }
        let mut results = EnvoyResults::new();
        for (directory, changes) in by_directory {
            let all: Vec<EnvoyFile> = changes.keys().cloned().collect();
            let write = move |disk: &dyn Files| files::write_envoy_files(disk, changes);
            match self.lists.io.run(&directory, TO_STORE, write).await {
                Ok(written) => results.extend(written),
                Err(hung) => results.extend(all.into_iter().map(|file| (file, Some(hung.to_string())))),
            }
        }
        results
    }
}

/// Reads files that an earlier daemon stored. Lists that are read later use the stored addresses of
/// host names.
pub async fn read_stored(
    lists: &ListReader,
    state: &Path,
    kinds: StoredKinds,
    dns: &DnsSettings,
) -> StoredState {
    let hosts: Option<StoredRead<StoredHosts>> =
        if kinds.hosts { Some(read_one(lists, state).await) } else { None };
    if let Some(StoredRead::Read(stored)) = &hosts {
        lists.servers.adopt(stored.addresses(), dns);
    }
    StoredState {
        hosts,
        loads: if kinds.loads { Some(read_one(lists, state).await) } else { None },
        overrides: if kinds.overrides {
            let file = read_one(lists, state).await;
            Some(OverridesRead::of(file, overrides_aside(lists, state).await))
        } else {
            None
        },
        overrides_aside: if kinds.overrides_aside { overrides_aside(lists, state).await.ok() } else { None },
    }
}

/// The files of overrides that could not be parsed; an error if they are not known now.
async fn overrides_aside(lists: &ListReader, state: &Path) -> Result<Vec<PathBuf>, String> {
    let path = StoredOverrides::path(state);
    let file = path.clone();
    let aside = lists.io.run(&path, PATIENCE, move |disk| files::set_aside(disk, &file)).await;
    let aside = aside.map_err(|no_answer| no_answer.to_string())?;
    aside.map_err(|error| format!("cannot search for files beside {}: {error}", path.display()))
}

async fn read_one<S: StoredFile + Send + 'static>(lists: &ListReader, state: &Path) -> StoredRead<S> {
    let path = S::path(state);
    let file = path.clone();
    lists
        .io
        .run(&path, PATIENCE, move |disk| files::read_stored(disk, &file))
        .await
        .unwrap_or_else(|no_answer| StoredRead::Unread(no_answer.to_string()))
}

/// Reads the names and directories of the files that an earlier daemon wrote for Envoy.
pub async fn read_envoy_places(lists: &ListReader, state: &Path) -> Vec<EnvoyFile> {
    let path = envoy_places_path(state);
    let file = path.clone();
    let read = move |disk: &dyn Files| disk.read_stored(&file, MAX_BYTES).ok();
    EnvoyFile::stored(lists.io.run(&path, PATIENCE, read).await.ok().flatten())
}

/// Runs `work`, which may block, on a separate thread.
pub async fn beside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    spawn_blocking(work).await.expect("the task does not panic")
}
