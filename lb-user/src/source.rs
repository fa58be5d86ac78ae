//! Where endpoint lists come from: a file is read whole, checked, and delivered; never a difference.
//!
//! The directory of a file is watched, so that a file that is renamed into place is seen. A file that cannot be used is
//! reported and changes nothing; the last one that could be used is kept on disk as well, for a start without it.

pub mod endpoints;

pub mod last_good;

pub mod watch;

use std::fs::{self, File};
use std::io::{self, Read};
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use lb_core::endpoint::EndpointList;
use lb_core::service::Service;
use lb_kernel::trust::Untrusted;
use thiserror::Error;

use crate::assignments::Assignments;
use crate::daemon::NoAnswer;
use crate::diagnostic::Faults;

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
    #[error("{} is cut off: it does not end as a list that was kept whole does", .0.display())]
    CutOff(PathBuf),
    #[error(transparent)]
    Untrusted(#[from] Untrusted),
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
    #[error(transparent)]
    Invalid(#[from] Faults),
}

impl SourceError {
    /// Whether the same version of the file may be read later: that a descriptor or memory was wanting says nothing of
    /// it. What is missing is seen when it appears.
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::Read { source, .. } if source.kind() != io::ErrorKind::NotFound)
    }
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

/// Whether the file system of a file answers, as far as opening it: the version of what lies there now.
pub fn answers(path: &Path) -> Option<Stamp> {
    let stamp = Stamp::at(path);
    // A pipe would keep us waiting for a writer.
    drop(File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path));
    stamp
}

/// How far a file that may change has been read.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// The version that was read last, if it could be found, and whether its stamp tells it from a later one.
    seen: Option<Stamp>,
    settled: bool,
    /// When it is to be read.
    due: Option<Instant>,
    /// Whether somebody looks at it, or reads it, now.
    busy: bool,
}

impl Progress {
    /// A file of which `stamp` was read.
    pub fn of(stamp: Option<Stamp>) -> Self {
        Self { seen: stamp, settled: stamp.is_none_or(Stamp::is_settled), due: None, busy: false }
    }

    /// Something changed. The first change of a burst sets the time of reading; later ones do not move it.
    pub fn changed(&mut self, now: Instant) {
        self.due.get_or_insert(now + SETTLE);
    }

    /// Whether to look now which version it is: a watch can be lost without a word. What was seen is for
    /// [`Progress::looked`].
    pub fn begin_look(&mut self) -> bool {
        !std::mem::replace(&mut self.busy, true)
    }

    /// A look has found this version. Returns whether it is another one than was read.
    pub fn looked(&mut self, stamp: Option<Stamp>) -> bool {
        self.busy = false;
        !self.settled || stamp != self.seen
    }

    /// A look has found nothing out. Whatever is found next is another version.
    pub fn found_nothing(&mut self) {
        *self = Self { due: self.due, ..Self::default() };
    }

    /// When it is to be read next.
    pub fn due(&self) -> Option<Instant> {
        self.due.filter(|_| !self.busy)
    }

    /// Begins to read if it is time, and returns the version that need not be read again, if it can be told. What changes
    /// from here on starts the next period.
    pub fn begin(&mut self, now: Instant) -> Option<Option<Option<Stamp>>> {
        if self.busy || self.due.is_none_or(|due| due > now) {
            return None;
        }
        self.due = None;
        self.busy = true;
        Some(self.settled.then_some(self.seen))
    }

    /// Reading of a version has ended. Returns whether it is another one than was read before.
    pub fn done(&mut self, stamp: Option<Stamp>) -> bool {
        let is_another = stamp != self.seen;
        *self = Self { due: self.due, ..Self::of(stamp) };
        is_another
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
    /// The source of a service, keeping its last good list in the directory `state`. No endpoint may have one of the
    /// addresses `services`, which are those of all services.
    pub fn new(service: &Service, path: PathBuf, services: &[SocketAddr], state: &Path) -> Self {
        // The ending tells the format, and keeps the names of two services apart.
        let format =
            if path.extension().is_some_and(|extension| extension == "json") { "json" } else { "toml" };
        let file = format!("{}.{format}", service.name);
        Self {
            path,
            service: service.address,
            services: services.to_vec(),
            last_good: state.join("last-good").join(file),
        }
    }

    /// Reads the file; changes nothing. May take as long as its file system likes.
    ///
    /// # Errors
    /// If it cannot be read whole or is not a valid list.
    pub fn read(&self) -> Result<Contents, SourceError> {
        self.parse(&self.path, read_whole(&self.path)?)
    }

    /// The list in a text that was read from `path`, the file or what was kept of it.
    ///
    /// # Errors
    /// If it is not valid under this configuration, or what was kept is not whole.
    pub fn parse(&self, path: &Path, text: Vec<u8>) -> Result<Contents, SourceError> {
        if path == self.last_good && !last_good::is_whole(path, &text) {
            return Err(SourceError::CutOff(path.to_owned()));
        }
        let list = endpoints::parse(&text, path, self.service, &self.services)?;
        Ok(Contents { assignments: Assignments::new(list), text: text.into() })
    }
}

/// A valid file: its list, of which nobody's part is known yet, and the text that it was read from.
#[derive(Clone, Debug)]
pub struct Contents {
    /// The list.
    pub assignments: Assignments,
    /// Until it is kept.
    pub text: Arc<[u8]>,
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
///
/// # Errors
/// If it cannot be read, is too large, or is no regular file.
pub fn read_whole(path: &Path) -> Result<Vec<u8>, SourceError> {
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

/// The directory that has to be watched for a file.
pub fn directory_of(file: &Path) -> PathBuf {
    match file.parent() {
        Some(directory) if directory != Path::new("") => directory.to_owned(),
        _ => PathBuf::from("."),
    }
}
