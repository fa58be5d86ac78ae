//! Work that takes long and therefore runs outside of the event loop. Each result becomes an event.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

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
use crate::controller::{BackgroundWork, NamespaceFound, Search, WorkResult};
use crate::source::{NoAnswer, Stamp, directory_of};

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
                let stored = files::read_stored(&self.lists, &self.state, kinds, &dns).await;
                WorkResult::StoredRead(Box::new(stored))
            }
            BackgroundWork::Store(files) => {
                WorkResult::Stored(files::store(&self.lists.io, &self.state, files).await)
            }
            BackgroundWork::WriteEnvoyFiles(changes) => {
                WorkResult::EnvoyFilesWritten(files::write_envoy_files(&self.lists.io, changes).await)
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
}

/// Runs `work`, which may block, on a separate thread.
pub async fn beside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    spawn_blocking(work).await.expect("the task does not panic")
}
