//! The files of a host. System calls on them run on separate threads, because the file system of a
//! file may not answer.
//!
//! If an NFS or FUSE server does not answer, a system call on its files, even stat(2), may block
//! the calling thread for an unlimited time, and the daemon cannot end this thread. Therefore the
//! number of threads is at most one per file, and [`MAX_THREADS`] in all. A caller stops waiting
//! after a time limit, and calls on other files are not delayed.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lb_core::feed::Version;
use lb_host::store::{StateDirectory, StoreError};
use tokio::sync::{Mutex as Turn, OwnedMutexGuard, Semaphore};

use crate::source::{self, MAX_THREADS, NoAnswer, SourceError, Stamp, last_good};

/// How long callers wait for a call on a file.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// The files of a host. Each call blocks until the file system answers.
pub trait Files: Send + Sync {
    /// The stamp of the file at a path; `None` if there is no file.
    fn stamp(&self, path: &Path) -> Option<Stamp>;

    /// Whether there is anything at a path.
    ///
    /// # Errors
    /// If the file system cannot determine this.
    fn exists(&self, path: &Path) -> io::Result<bool>;

    /// The version of the file at a path. Also opens the file, because some network file systems
    /// answer stat(2) from a cache even while their server does not answer.
    fn version(&self, path: &Path) -> Version<Stamp>;

    /// Reads an endpoint file.
    ///
    /// # Errors
    /// See [`source::read_whole`].
    fn read(&self, path: &Path) -> Result<Vec<u8>, SourceError>;

    /// Reads a file that an earlier daemon stored, if it has at most `most` bytes.
    ///
    /// # Errors
    /// See [`last_good::read_at_most`].
    fn read_stored(&self, path: &Path, most: u64) -> Result<Vec<u8>, SourceError>;

    /// # Errors
    /// If the file cannot be renamed. Its path is then unchanged.
    fn rename_stored(&self, path: &Path, to: &Path) -> Result<(), StoreError>;

    /// Removes a file that was stored, if it exists.
    ///
    /// # Errors
    /// See [`StateDirectory::remove`].
    fn remove_stored(&self, path: &Path) -> Result<(), StoreError>;

    /// # Errors
    /// See [`last_good::save`].
    fn store(&self, path: &Path, text: &[u8]) -> Result<(), StoreError>;

    /// Replaces a file that other programs read: writes a new file and renames it over the old one,
    /// unless the old content equals `text`. `name` is the file's path below `directory`.
    ///
    /// # Errors
    /// See [`StateDirectory::write`].
    fn publish(&self, directory: &Path, name: &Path, text: &[u8]) -> Result<(), StoreError>;

    /// Removes a published file, if it exists.
    ///
    /// # Errors
    /// See [`StateDirectory::remove`].
    fn withdraw(&self, directory: &Path, name: &Path) -> Result<(), StoreError>;
}

/// The files of this host.
pub struct HostFiles;

impl Files for HostFiles {
    fn stamp(&self, path: &Path) -> Option<Stamp> {
        Stamp::at(path)
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        match std::fs::symlink_metadata(path) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn version(&self, path: &Path) -> Version<Stamp> {
        source::answers(path)
    }

    fn read(&self, path: &Path) -> Result<Vec<u8>, SourceError> {
        source::read_whole(path)
    }

    fn read_stored(&self, path: &Path, most: u64) -> Result<Vec<u8>, SourceError> {
        last_good::read_at_most(path, most)
    }

    fn rename_stored(&self, path: &Path, to: &Path) -> Result<(), StoreError> {
        let (store, name) = last_good::place(path);
        store.rename(name, to)
    }

    fn remove_stored(&self, path: &Path) -> Result<(), StoreError> {
        let (store, name) = last_good::place(path);
        store.remove(name)
    }

    fn store(&self, path: &Path, text: &[u8]) -> Result<(), StoreError> {
        last_good::save(path, text)
    }

    fn publish(&self, directory: &Path, name: &Path, text: &[u8]) -> Result<(), StoreError> {
        let published = StateDirectory::public(directory);
        // Envoy reads a file again whenever the file is replaced, so a file that already has this
        // content is not replaced. The read fails if the file is longer than `text`; in this case,
        // the content differs.
        if published.read(name, text.len() as u64).is_ok_and(|before| before.as_deref() == Some(text)) {
            return Ok(());
        }
        published.write(name, &[text])
    }

    fn withdraw(&self, directory: &Path, name: &Path) -> Result<(), StoreError> {
        StateDirectory::public(directory).remove(name)
    }
}

/// Cheap to clone.
#[derive(Clone)]
pub struct FileIo {
    files: Arc<dyn Files>,
    threads: Arc<Semaphore>,
    /// A lock for each file. The thread that makes a call on the file holds the lock.
    turns: Arc<Mutex<BTreeMap<PathBuf, Arc<Turn<()>>>>>,
}

impl FileIo {
    pub fn new(files: Arc<dyn Files>) -> Self {
        Self { files, threads: Arc::new(Semaphore::new(MAX_THREADS)), turns: Arc::default() }
    }

    /// Runs `work` on a file that may not answer, and waits at most `patience` for it. Work that
    /// takes longer continues, and until it ends, no other work on the file begins.
    ///
    /// # Errors
    /// If the work takes longer than `patience`.
    pub async fn run<T: Send + 'static>(
        &self,
        file: &Path,
        patience: Duration,
        work: impl FnOnce(&dyn Files) -> T + Send + 'static,
    ) -> Result<T, NoAnswer> {
        let (turn, files) = (self.turn(file), Arc::clone(&self.files));
        let done = async {
            let turn: OwnedMutexGuard<()> = turn.clone().lock_owned().await;
            let thread = self.threads.clone().acquire_owned().await.expect("the semaphore is never closed");
            let work = move || {
                let result = work(&*files);
                drop((turn, thread));
                result
            };
            beside(work).await
        };
        match tokio::time::timeout(patience, done).await {
            Ok(result) => Ok(result),
            // No thread makes a call on this file, so `work` has only waited for a free thread.
            Err(_) if turn.try_lock().is_ok() && self.threads.available_permits() == 0 => {
                Err(NoAnswer::NoThread(file.to_owned()))
            }
            Err(_) => Err(NoAnswer::Hung(file.to_owned())),
        }
    }

    fn turn(&self, file: &Path) -> Arc<Turn<()>> {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        // Removes the locks that no caller holds or waits for.
        turns.retain(|_, turn| Arc::strong_count(turn) > 1);
        turns.entry(file.to_owned()).or_default().clone()
    }
}

/// Runs `work`, which may block, on a separate thread.
pub async fn beside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.expect("the task does not panic")
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn a_hung_file_delays_no_other_file() {
        let io = FileIo::new(Arc::new(HostFiles));
        let (hung, other) = (Path::new("/hung"), Path::new("/other"));
        let (answer, query) = mpsc::channel::<()>();
        let work = move |_: &dyn Files| query.recv().is_ok();
        let short = Duration::from_millis(20);
        assert_eq!(io.run(hung, short, work).await, Err(NoAnswer::Hung(hung.to_owned())));
        assert_eq!(io.run(other, PATIENCE, |_| 1).await, Ok(1));
        // While the first call hangs, no other call is made on the file.
        assert_eq!(io.run(hung, short, |_| true).await, Err(NoAnswer::Hung(hung.to_owned())));
        answer.send(()).unwrap();
        assert_eq!(io.run(hung, PATIENCE, |_| 2).await, Ok(2));
        // The thread releases the lock a moment before it drops its reference to the lock.
        let gone = async {
            while io.turns.lock().unwrap().contains_key(hung) {
                io.turn(other);
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), gone).await.expect("the lock is removed");
    }

    #[tokio::test]
    async fn hung_files_hold_a_bounded_number_of_threads() {
        let io = FileIo::new(Arc::new(HostFiles));
        let short = Duration::from_millis(20);
        let (answer, query) = mpsc::channel::<()>();
        let query = Arc::new(Mutex::new(query));
        let mut held = tokio::task::JoinSet::new();
        for number in 0..MAX_THREADS {
            let (io, query) = (io.clone(), query.clone());
            held.spawn(async move {
                let file = PathBuf::from(format!("/hung/{number}"));
                io.run(&file, Duration::from_secs(60), move |_| {
                    // One thread waits in `recv`, the others wait for the lock.
                    query.lock().unwrap().recv().is_ok()
                })
                .await
            });
        }
        while io.threads.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        let one_more = Path::new("/one-more");
        assert_eq!(io.run(one_more, short, |_| ()).await, Err(NoAnswer::NoThread(one_more.to_owned())));
        for _ in 0..MAX_THREADS {
            answer.send(()).unwrap();
        }
        assert_eq!(io.run(one_more, PATIENCE, |_| 3).await, Ok(3));
        while let Some(done) = held.join_next().await {
            assert_eq!(done.unwrap(), Ok(true));
        }
    }
}
