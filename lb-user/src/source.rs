//! Where endpoint lists come from: a file is always read, checked and delivered whole, never as a
//! difference.
//!
//! The directory of a file is watched, so that a file that is renamed into place is found. A file
//! that cannot be used is reported and changes nothing. The last good list is also stored on disk,
//! for a start without the file.

pub mod last_good;

use std::fs::{self, File};
use std::io::{self, Read};
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use lb_config::ListFile;
use lb_config::endpoints::{self, ListContext, Parsed};
use lb_core::feed::{List, ReadFailure, Version};
use lb_core::service::Service;
use lb_core::subset::Algorithm;
use lb_host::regular_file;
use lb_kernel::trust::Untrusted;
use thiserror::Error;

use crate::assignments::Assignments;
use lb_document::diagnostic::Diagnostics;

/// The size in bytes of the largest file that is read.
pub const MAX_BYTES: u64 = endpoints::MAX_FILE_BYTES as u64;

/// The most threads that files may hold at the same time: one for each of 256 services, and 64 for
/// files of an earlier configuration, the configuration itself, and stored lists.
pub const MAX_THREADS: usize = 320;

/// Why a call on a file returned no result in time.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NoAnswer {
    /// The file's file system holds a thread.
    #[error("{} does not answer: its file system hangs or is very slow; looked at again as soon as it answers", .0.display())]
    Silent(PathBuf),
    /// Other files hold all threads.
    #[error("{} is not looked at: {MAX_THREADS} other files do not answer", .0.display())]
    NoThread(PathBuf),
}

/// Why reading a file gave no list.
#[derive(Debug, Error)]
pub enum SourceError {
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is larger than {} MiB, more than anything that is valid there needs", .0.display(), .1 >> 20)]
    TooLarge(PathBuf, u64),
    #[error("{} kept changing while it was read: write it to another name and rename it into place", .0.display())]
    KeptChanging(PathBuf),
    #[error("{} is cut off: it does not end as a list that was kept whole does", .0.display())]
    CutOff(PathBuf),
    #[error(transparent)]
    Untrusted(#[from] Untrusted),
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
    #[error(transparent)]
    Invalid(#[from] Diagnostics),
}

impl SourceError {
    /// The failure as the feed handles it. After an error of reading, such as a lack of descriptors
    /// or memory, the same version of the file is retried. A missing file is found when it appears.
    pub fn into_failure(self) -> ReadFailure {
        let text = crate::error::chain(&self);
        match self {
            Self::NoAnswer(silent) => ReadFailure::Silent(silent.to_string()),
            Self::Read { source, .. } if source.kind() != io::ErrorKind::NotFound => {
                ReadFailure::Unread(text)
            }
            Self::Read { .. }
            | Self::TooLarge(..)
            | Self::KeptChanging(_)
            | Self::CutOff(_)
            | Self::Untrusted(_)
            | Self::Invalid(_) => ReadFailure::Faulty(text),
        }
    }
}

/// Distinguishes two versions of a file without reading it.
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

    /// Whether any later change of the file would give it another stamp. Kernels before 6.13 stamp
    /// files with the time of the last tick, so two changes within one tick look alike.
    pub fn is_settled(self) -> bool {
        /// Two ticks of the slowest clock, 100 Hz.
        const TICKS: Duration = Duration::from_millis(20);
        let changed = Duration::from_secs(self.changed.0.cast_unsigned())
            + Duration::from_nanos(self.changed.1.cast_unsigned());
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        // A clock that was set back must not make the file look unsettled for ever.
        now.checked_sub(changed).is_none_or(|age| age >= TICKS)
    }

    /// The version of a file that has this stamp now.
    pub fn version(stamp: Option<Self>) -> Version<Self> {
        Version { stamp, is_settled: stamp.is_none_or(Self::is_settled) }
    }

    /// A stamp that differs for each number.
    #[cfg(test)]
    pub fn numbered(number: u64) -> Self {
        Self { device: 0, inode: number, bytes: 0, modified: (0, 0), changed: (0, 0) }
    }

    /// The stamp of the file at a path; `None` if no file is found there.
    pub fn at(path: &Path) -> Option<Self> {
        fs::metadata(path).ok().as_ref().map(Self::of)
    }
}

/// The version of a file that could not be read.
pub const NO_VERSION: Version<Stamp> = Version { stamp: None, is_settled: true };

/// Opens a file to find out whether its file system answers, and returns the version of the file.
pub fn answers(path: &Path) -> Version<Stamp> {
    let version = Stamp::version(Stamp::at(path));
    // Without this flag, opening a pipe would wait for a writer.
    drop(File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path));
    version
}

/// A file, and the service whose endpoints it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSource {
    pub file: ListFile,
    /// The service's address.
    pub service: SocketAddr,
    /// The addresses of all services.
    pub services: Vec<SocketAddr>,
    /// The algorithm for which the list must have indexes, if it must.
    pub needs_indexes: Option<Algorithm>,
    /// Where the last good list is stored.
    pub last_good: PathBuf,
}

impl FileSource {
    /// The source of a service, which stores its last good list in the directory `state`. No
    /// endpoint may have one of the addresses `services`, which are those of all services.
    pub fn new(service: &Service, file: ListFile, services: &[SocketAddr], state: &Path) -> Self {
        // The ending distinguishes the files of two services. JSON and YAML are usually recognized
        // by their text.
        let kept = format!("{}.{}", service.name, endpoints::format_of(&file.path));
        let last_good = state.join("last-good").join(kept);
        Self {
            file,
            service: service.address,
            services: services.to_vec(),
            needs_indexes: service.subset.needs_indexes(),
            last_good,
        }
    }

    /// Reads the file; changes nothing. May take as long as its file system does.
    ///
    /// # Errors
    /// If it cannot be read whole or is not a valid list.
    pub fn read(&self) -> Result<Contents, SourceError> {
        self.parse(&self.file.path, read_whole(&self.file.path)?)
    }

    /// Reads the last good list; changes nothing.
    ///
    /// # Errors
    /// As [`FileSource::read`], and if another user may write to the directory of the state.
    pub fn stored(&self) -> Result<Contents, SourceError> {
        self.parse(&self.last_good, last_good::read(&self.last_good)?)
    }

    /// The list in a text that was read from `path`: the file, or its last good list.
    ///
    /// # Errors
    /// If it is not valid under this configuration, or the last good list is not whole.
    pub fn parse(&self, path: &Path, text: Vec<u8>) -> Result<Contents, SourceError> {
        if path == self.last_good && !last_good::is_whole(&text) {
            return Err(SourceError::CutOff(path.to_owned()));
        }
        let port_name = self.file.port_name.as_deref();
        let reading = ListContext { path, port_name, service: Some(self.service), services: &self.services };
        let Parsed { list, notes } = endpoints::parse(&text, &reading)?;
        endpoints::check_indexes(&list, self.needs_indexes, path)?;
        Ok(Contents { assignments: Assignments::new(list), notes: notes.into(), text: text.into() })
    }
}

/// The content of a valid file: its list, without any task's assignment yet, and the text that it
/// was read from.
#[derive(Clone, Debug)]
pub struct Contents {
    pub assignments: Assignments,
    /// What is ignored in the text, and why.
    pub notes: Arc<[String]>,
    /// The text of the file; empty once it is stored.
    pub text: Arc<[u8]>,
}

impl List for Contents {
    fn says_the_same(&self, other: &Self) -> bool {
        self.assignments.list() == other.assignments.list()
    }

    fn is_of_the_same_reading(&self, other: &Self) -> bool {
        self.assignments.is_of_the_same_reading(&other.assignments)
    }

    fn take_over(&mut self, other: &Self) {
        self.assignments.take_over(&other.assignments);
    }
}

/// Reads the list of a file. `service` is the address of the file's service, if it is known;
/// `services` are the addresses of all services.
///
/// # Errors
/// If the file cannot be read whole or is not a valid list.
pub fn read_list(
    file: &ListFile,
    service: Option<SocketAddr>,
    services: &[SocketAddr],
) -> Result<Parsed, SourceError> {
    Ok(file.parse(&read_whole(&file.path)?, service, services)?)
}

/// Reads a file whole, and reads it again if it changes during the reading.
///
/// # Errors
/// If it cannot be read, is too large, changes during each reading, or is no regular file.
pub fn read_whole(path: &Path) -> Result<Vec<u8>, SourceError> {
    read_at_most(path, MAX_BYTES)
}

/// As [`read_whole`], for a file of at most `most` bytes.
fn read_at_most(path: &Path, most: u64) -> Result<Vec<u8>, SourceError> {
    /// A writer that needs longer than this many readings does not rename into place.
    const ATTEMPTS: usize = 3;
    let fail = |source| SourceError::Read { path: path.to_owned(), source };
    for _ in 0..ATTEMPTS {
        let (mut file, before) = regular_file::open(path).map_err(fail)?;
        if before.size() > most {
            return Err(SourceError::TooLarge(path.to_owned(), most));
        }
        let mut text = Vec::new();
        // One byte more than allowed, so that a file that grows during the reading is detected
        // rather than cut.
        file.by_ref().take(most + 1).read_to_end(&mut text).map_err(fail)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_longer_than_any_list_is_not_read() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(MAX_BYTES).unwrap();
        assert_eq!(read_whole(file.path()).unwrap().len() as u64, MAX_BYTES);
        file.as_file().set_len(MAX_BYTES + 1).unwrap();
        let error = read_whole(file.path()).unwrap_err().to_string();
        assert!(error.contains("is larger than 4 MiB"), "{error}");
    }
}
