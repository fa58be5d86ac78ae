//! Where endpoint lists come from: a file is read whole, checked, and delivered; never a difference.
//!
//! The directory of a file is watched, so that a file that is renamed into place is seen. A file that cannot be used is
//! reported and changes nothing; the last one that could be used is kept on disk as well, for a start without it.

pub mod endpoints;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use lb_core::endpoint::EndpointList;
use lb_core::service::Service;
use notify::event::{AccessKind, AccessMode, EventKind};
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use thiserror::Error;
use tokio::sync::mpsc;

use crate::config::Config;
use crate::diagnostic::Faults;
use crate::offer::Offer;

/// A file is read this long after the first change of a burst.
const SETTLE: Duration = Duration::from_millis(200);

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

/// How far a file that may change has been read.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// The version that was read last, if it could be found, and whether its stamp tells it from a later one.
    seen: Option<Stamp>,
    settled: bool,
    /// When it is to be read.
    due: Option<Instant>,
    reading: bool,
}

impl Progress {
    /// A file of which `stamp` was read.
    pub fn of(stamp: Option<Stamp>) -> Self {
        Self { seen: stamp, settled: stamp.is_none_or(Stamp::is_settled), due: None, reading: false }
    }

    /// Something changed. The first change of a burst sets the time of reading; later ones do not move it.
    pub fn changed(&mut self, now: Instant) {
        self.due.get_or_insert(now + SETTLE);
    }

    /// Looks whether the file is another one than was read: a watch can be lost without a word.
    pub fn look(&mut self, path: &Path, now: Instant) {
        if !self.reading && (!self.settled || Stamp::at(path) != self.seen) {
            self.changed(now);
        }
    }

    /// When it is to be read next.
    pub fn due(&self) -> Option<Instant> {
        self.due.filter(|_| !self.reading)
    }

    /// Begins to read, if it is time and there is something new, and returns the version. What changes from here on starts
    /// the next period.
    pub fn begin(&mut self, path: &Path, now: Instant) -> Option<Option<Stamp>> {
        if self.reading || self.due.is_none_or(|due| due > now) {
            return None;
        }
        self.due = None;
        let stamp = Stamp::at(path);
        if self.settled && stamp == self.seen {
            return None;
        }
        self.reading = true;
        Some(stamp)
    }

    /// Reading of a version has ended.
    pub fn done(&mut self, stamp: Option<Stamp>) {
        *self = Self { due: self.due, ..Self::of(stamp) };
    }
}

/// What a file is read for.
#[derive(Clone, Debug, PartialEq, Eq)]
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

    /// Reads the file as a start does: one that cannot be used is replaced by the last good one, if there is one.
    pub fn read_first(&self) -> FirstRead {
        let stamp = Stamp::at(&self.path);
        let result = self.read();
        let instead = match &result {
            Ok(_) => None,
            Err(_) => match self.read_last_good() {
                Err(SourceError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => None,
                instead => Some(instead),
            },
        };
        FirstRead { stamp, result, instead }
    }

    fn read_from(&self, path: &Path) -> Result<Contents, SourceError> {
        let (list, text) = read_list(path, Some(self.service), &self.services)?;
        Ok(Contents { offer: Offer::new(list), text: text.into() })
    }

    /// Keeps a list for starts without a good file.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn keep(&self, contents: &Contents) -> io::Result<()> {
        keep(&self.last_good, &contents.text)
    }
}

/// What the first reading of a file gave.
#[derive(Debug)]
pub struct FirstRead {
    /// The version that was read.
    pub stamp: Option<Stamp>,
    /// The file itself.
    pub result: Result<Contents, SourceError>,
    /// The last good list of an earlier run, if the file cannot be used and there is one.
    pub instead: Option<Result<Contents, SourceError>>,
}

impl FirstRead {
    /// Whatever list was found.
    pub fn contents_mut(&mut self) -> impl Iterator<Item = &mut Contents> {
        let instead = self.instead.iter_mut().flatten();
        self.result.iter_mut().chain(instead)
    }
}

/// A valid file: its list, of which nobody's part is known yet, and the text that it was read from.
#[derive(Clone, Debug)]
pub struct Contents {
    /// The list.
    pub offer: Offer,
    text: Arc<[u8]>,
}

/// Reads the list at `path` and the text that it was read from. `service` is dialled at that address, if it is known;
/// `services` are the addresses of all services.
///
/// # Errors
/// If the file cannot be read whole or is not a valid list.
pub fn read_list(
    path: &Path,
    service: Option<SocketAddr>,
    services: &[SocketAddr],
) -> Result<(EndpointList, Vec<u8>), SourceError> {
    let text = read_whole(path)?;
    Ok((endpoints::parse(&text, path, service, services)?, text))
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

/// More changes than this at once are one change: what is watched is looked at after them in any case.
const MAX_CHANGES: usize = 256;

/// Tells what changes in directories.
pub struct Watch {
    watcher: RecommendedWatcher,
    /// Device and inode of each, by which one that was removed and made again is told apart: its watch is gone.
    directories: BTreeMap<PathBuf, (u64, u64)>,
    changes: mpsc::Receiver<PathBuf>,
}

impl Watch {
    /// A watch of no directory yet.
    ///
    /// # Errors
    /// If the kernel has no inotify instance left.
    pub fn new() -> notify::Result<Self> {
        let (sender, changes) = mpsc::channel(MAX_CHANGES);
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            let Ok(event) = event else { return };
            // Reading a file must not look like a change of it.
            let ours =
                matches!(event.kind, EventKind::Access(kind) if kind != AccessKind::Close(AccessMode::Write));
            if ours {
                return;
            }
            for path in event.paths {
                let _ = sender.try_send(path);
            }
        })?;
        Ok(Self { watcher, directories: BTreeMap::new(), changes })
    }

    /// Watches the directory of a file, if it is not watched yet.
    ///
    /// # Errors
    /// If the directory does not exist or no watch is left.
    pub fn add(&mut self, file: &Path) -> notify::Result<()> {
        self.add_directory(directory_of(file))
    }

    fn add_directory(&mut self, directory: PathBuf) -> notify::Result<()> {
        let metadata = fs::metadata(&directory).map_err(notify::Error::io)?;
        let identity = (metadata.dev(), metadata.ino());
        if self.directories.get(&directory) == Some(&identity) {
            return Ok(());
        }
        if self.directories.remove(&directory).is_some() {
            // The kernel has dropped it with the directory that it was of.
            let _ = self.watcher.unwatch(&directory);
        }
        self.watcher.watch(&directory, RecursiveMode::NonRecursive)?;
        self.directories.insert(directory, identity);
        Ok(())
    }

    /// Watches for a directory to appear at `path`: the nearest directory above that exists. To be called again after
    /// each change on the way.
    ///
    /// # Errors
    /// If no watch is left.
    pub fn add_nearest(&mut self, path: &Path) -> notify::Result<()> {
        match path.ancestors().skip(1).find(|ancestor| ancestor.is_dir()) {
            Some(above) => self.add_directory(above.to_owned()),
            None => Ok(()),
        }
    }

    /// Waits for changes and returns what changed since the last call, each once: directories that are watched, or
    /// something in them. A burst is one answer.
    pub async fn changed(&mut self) -> BTreeSet<PathBuf> {
        let mut changes = Vec::new();
        self.changes.recv_many(&mut changes, MAX_CHANGES).await;
        changes.into_iter().collect()
    }
}

/// The directory that has to be watched for a file.
pub fn directory_of(file: &Path) -> PathBuf {
    match file.parent() {
        Some(directory) if directory != Path::new("") => directory.to_owned(),
        _ => PathBuf::from("."),
    }
}
