//! Where endpoint lists come from: a file is read whole, checked, and delivered; never a difference.
//!
//! The directory of a file is watched, so that a file that is renamed into place is seen. A file that cannot be used is
//! reported and changes nothing; the last one that could be used is kept on disk as well, for a start without it.

pub mod endpoints;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use lb_core::endpoint::EndpointList;
use lb_core::service::Service;
use notify::event::{AccessKind, AccessMode, EventKind};
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use thiserror::Error;
use tokio::sync::mpsc;

use crate::config::Config;
use crate::diagnostic::Faults;

/// The largest file that is read.
const MAX_BYTES: u64 = endpoints::MAX_FILE_BYTES as u64;

/// Why a file gave no list.
#[derive(Debug, Error)]
pub enum SourceError {
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "{} is larger than {} MiB, more than any valid endpoint list needs",
        .0.display(),
        MAX_BYTES >> 20
    )]
    TooLarge(PathBuf),
    #[error("{} kept changing while it was read: write it to another name and rename it into place", .0.display())]
    KeptChanging(PathBuf),
    #[error(transparent)]
    Invalid(#[from] Faults),
}

/// Tells one version of a file from the next without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    fn of(metadata: &fs::Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Whether a later change of the file would give it another stamp. Kernels before 6.13 stamp files with the time of
    /// the last tick: two changes within one look alike.
    pub fn is_settled(self) -> bool {
        /// Two ticks of the slowest clock, 100 Hz.
        const TICKS: Duration = Duration::from_millis(20);
        let changed = Duration::from_secs(self.changed.0.cast_unsigned())
            + Duration::from_nanos(self.changed.1.cast_unsigned());
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        // A clock that was set back must not make the file look unsettled for ever.
        now.checked_sub(changed).is_none_or(|age| age >= TICKS)
    }

    /// The stamp of what lies at a path now; `None` if nothing can be found there.
    pub fn at(path: &Path) -> Option<Self> {
        fs::metadata(path).ok().as_ref().map(Self::of)
    }
}

/// What a file is read for.
#[derive(Clone, Debug)]
pub struct FileSource {
    /// The file.
    pub path: PathBuf,
    /// The service's address.
    pub service: SocketAddr,
    /// The addresses of all services.
    pub services: Vec<SocketAddr>,
    /// Where the last list that could be used is kept.
    pub last_good: PathBuf,
}

impl FileSource {
    /// The source of a service, keeping its last good list in the state directory.
    pub fn new(service: &Service, path: PathBuf, config: &Config) -> Self {
        // The ending tells the format, and keeps the names of two services apart.
        let format =
            if path.extension().is_some_and(|extension| extension == "json") { "json" } else { "toml" };
        let file = format!("{}.{format}", service.name);
        Self {
            path,
            service: service.address,
            services: config.addresses.clone(),
            last_good: config.paths.state.join("last-good").join(file),
        }
    }

    /// Reads the file; changes nothing.
    ///
    /// # Errors
    /// If it cannot be read whole or is not a valid list.
    pub fn read(&self) -> Result<Contents, SourceError> {
        self.read_from(&self.path)
    }

    /// Reads the last good list that an earlier run kept.
    ///
    /// # Errors
    /// If there is none, or it is not valid under this configuration.
    pub fn read_last_good(&self) -> Result<Contents, SourceError> {
        self.read_from(&self.last_good)
    }

    fn read_from(&self, path: &Path) -> Result<Contents, SourceError> {
        let text = read_whole(path)?;
        let list = endpoints::parse(&text, path, self.service, &self.services)?;
        Ok(Contents { list, text })
    }

    /// Keeps a list for starts without a good file.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn keep(&self, contents: &Contents) -> io::Result<()> {
        keep(&self.last_good, &contents.text)
    }
}

/// A valid file: its list, and the text that it was read from.
#[derive(Debug)]
pub struct Contents {
    /// The list.
    pub list: EndpointList,
    text: Vec<u8>,
}

/// Reads a file that nobody changed meanwhile.
fn read_whole(path: &Path) -> Result<Vec<u8>, SourceError> {
    /// A writer that needs longer than this many readings does not rename into place.
    const ATTEMPTS: usize = 3;
    let fail = |source| SourceError::Read { path: path.to_owned(), source };
    for _ in 0..ATTEMPTS {
        // A pipe would keep us waiting for a writer.
        let mut file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(fail)?;
        let before = file.metadata().map_err(fail)?;
        if !before.is_file() {
            return Err(fail(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")));
        }
        if before.size() > MAX_BYTES {
            return Err(SourceError::TooLarge(path.to_owned()));
        }
        let mut text = Vec::new();
        // One byte more than allowed, so that a file that grows meanwhile is noticed, not cut.
        file.by_ref().take(MAX_BYTES + 1).read_to_end(&mut text).map_err(fail)?;
        let after = file.metadata().map_err(fail)?;
        if Stamp::of(&before) == Stamp::of(&after) && after.size() == text.len() as u64 {
            return Ok(text);
        }
    }
    Err(SourceError::KeptChanging(path.to_owned()))
}

/// Writes a file whole: to another name, then renamed into place.
fn keep(path: &Path, text: &[u8]) -> io::Result<()> {
    if fs::read(path).is_ok_and(|kept| kept == text) {
        return Ok(());
    }
    let directory = path.parent().ok_or_else(|| io::Error::other("it has no directory"))?;
    fs::create_dir_all(directory)?;
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    fs::write(&new, text)?;
    fs::rename(&new, path)
}

/// Tells when something changes in a directory.
pub struct Watch {
    watcher: RecommendedWatcher,
    directories: BTreeSet<PathBuf>,
    changes: mpsc::Receiver<PathBuf>,
}

impl Watch {
    /// A watch of no directory yet.
    ///
    /// # Errors
    /// If the kernel has no inotify instance left.
    pub fn new() -> notify::Result<Self> {
        // More changes than this at once are one change: the directory is read after them in any case.
        let (sender, changes) = mpsc::channel(256);
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            let Ok(event) = event else { return };
            // Reading a file must not look like a change of it.
            let ours =
                matches!(event.kind, EventKind::Access(kind) if kind != AccessKind::Close(AccessMode::Write));
            if ours {
                return;
            }
            for path in event.paths {
                if let Some(directory) = path.parent() {
                    let _ = sender.try_send(directory.to_owned());
                }
                let _ = sender.try_send(path);
            }
        })?;
        Ok(Self { watcher, directories: BTreeSet::new(), changes })
    }

    /// Watches the directory of a file, if it is not watched yet.
    ///
    /// # Errors
    /// If the directory does not exist or no watch is left.
    pub fn add(&mut self, file: &Path) -> notify::Result<()> {
        let directory = directory_of(file);
        if self.directories.contains(&directory) {
            return Ok(());
        }
        self.watcher.watch(&directory, RecursiveMode::NonRecursive)?;
        self.directories.insert(directory);
        Ok(())
    }

    /// Waits for a change and returns the directory in which it was.
    pub async fn changed(&mut self) -> Option<PathBuf> {
        self.changes.recv().await
    }
}

/// The directory that has to be watched for a file.
pub fn directory_of(file: &Path) -> PathBuf {
    match file.parent() {
        Some(directory) if directory != Path::new("") => directory.to_owned(),
        _ => PathBuf::from("."),
    }
}
