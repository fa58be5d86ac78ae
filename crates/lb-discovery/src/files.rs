//! Reads small files, such as tokens and certificates, on a thread outside of the asynchronous
//! runtime.
//!
//! A read from a file system may never return. Therefore a query waits for its files for a limited
//! time, and at most one thread waits for the files of a provider.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lb_host::regular_file;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, timeout_at};

use crate::Failure;

/// The longest time for which a query waits for files.
const PATIENCE: Duration = Duration::from_secs(2);

/// The largest size of a file in bytes. The CA certificates of a distribution are about 0.2 MiB.
const MOST: u64 = 1 << 20;

type Contents = Result<Vec<Vec<u8>>, String>;

#[derive(Debug, Default)]
pub struct FileReader {
    /// The read that is in progress, or that has not ended within [`PATIENCE`].
    pending: Option<JoinHandle<Contents>>,
}

impl FileReader {
    /// Returns the contents of files, in the order of `paths`.
    ///
    /// # Errors
    /// If a file cannot be read, is not a regular file or is too large (the text names the file),
    /// or if the files cannot be read in time.
    pub async fn read(&mut self, paths: &[&Path]) -> Result<Vec<Vec<u8>>, Failure> {
        let deadline = Instant::now() + PATIENCE;
        if self.pending.is_some() {
            // The contents may have changed since the earlier read began, so its result is dropped.
            let _outdated = self.finish(deadline).await?;
        }
        let paths: Vec<PathBuf> = paths.iter().map(|path| path.to_path_buf()).collect();
        self.pending = Some(spawn_blocking(move || paths.iter().map(|path| read(path)).collect()));
        self.finish(deadline).await?.map_err(Failure::Refused)
    }

    async fn finish(&mut self, deadline: Instant) -> Result<Contents, Failure> {
        let pending = self.pending.as_mut().expect("a read is in progress");
        let Ok(contents) = timeout_at(deadline, pending).await else {
            let why = format!("the file system has not returned the files within {PATIENCE:?}");
            return Err(Failure::Unreachable(why));
        };
        self.pending = None;
        Ok(contents.expect("reading a file does not panic"))
    }
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    let name = path.display();
    let cannot = |error: io::Error| format!("cannot read {name}: {error}");
    let (file, _) = regular_file::open(path).map_err(cannot)?;
    let content = regular_file::read(&file, MOST).map_err(cannot)?;
    content.ok_or_else(|| format!("{name} is larger than {MOST} bytes"))
}
