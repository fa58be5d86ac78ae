//! Removes a client's pins and then the empty directories from bpffs. The module opens each
//! directory relative to the descriptor of its parent, and follows no symbolic link within bpffs.
//!
//! `socklb detach` runs as root on a directory that may belong to the daemon's user. Only pins and
//! directories below this directory may be removed, even if that user has created a symbolic link
//! in the directory that leads elsewhere.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::error::DatapathError;
use crate::sys::{self, BELOW};

/// An open directory of bpffs.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    fd: OwnedFd,
}

impl Directory {
    /// Opens the directory at a path that the caller has chosen; `None` if the directory does not
    /// exist.
    ///
    /// # Errors
    /// If the directory is not on bpffs, or cannot be opened.
    pub fn open(path: &Path) -> Result<Option<Self>, DatapathError> {
        let fd = match rustix::fs::open(path, FLAGS, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return Ok(None),
            // A symbolic link outside bpffs was created by an administrator, so it is followed.
            Err(Errno::NOTDIR | Errno::LOOP) if !may_be_on_bpffs(path) => {
                rustix::fs::open(path, FLAGS.difference(OFlags::NOFOLLOW), Mode::empty())
                    .map_err(|error| fail(path, error))?
            }
            Err(error) => return Err(fail(path, error)),
        };
        if !sys::is_bpffs(&fd) {
            return Err(DatapathError::NoBpffs(path.to_owned()));
        }
        Ok(Some(Self { path: path.to_owned(), fd }))
    }

    /// Opens the subdirectory with this name; `None` if the subdirectory does not exist.
    ///
    /// # Errors
    /// If the object with this name is not a directory, or cannot be opened.
    pub fn within(&self, name: &str) -> Result<Option<Self>, DatapathError> {
        let path = self.path.join(name);
        match rustix::fs::openat2(&self.fd, name, FLAGS, Mode::empty(), BELOW) {
            Ok(fd) => Ok(Some(Self { path, fd })),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(fail(&path, error)),
        }
    }

    /// Locks the directory against other writers. Returns `false` if another process holds the
    /// lock.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn lock(&self) -> Result<bool, DatapathError> {
        match rustix::fs::flock(&self.fd, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(true),
            Err(Errno::WOULDBLOCK) => Ok(false),
            Err(error) => Err(fail(&self.path, error)),
        }
    }

    /// The names in the directory, sorted.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn names(&self) -> Result<Vec<String>, DatapathError> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.fd).map_err(|error| fail(&self.path, error))? {
            let name = entry.map_err(|error| fail(&self.path, error))?.file_name().to_bytes().to_vec();
            if name != b"." && name != b".." {
                names.push(OsString::from_vec(name).to_string_lossy().into_owned());
            }
        }
        names.sort();
        Ok(names)
    }

    /// Detaches a link and removes its pin. A missing pin is not an error.
    ///
    /// The function detaches the link before it removes the pin. If only the pin were removed, the
    /// kernel would detach the link some milliseconds later, in the background: until then connects
    /// would still be balanced, and links would be detached in any order.
    ///
    /// # Errors
    /// If the object with this name is not a pin, or cannot be removed.
    pub fn detach(&self, name: &str) -> Result<(), DatapathError> {
        let Some(pin) = self.pin(name)? else { return Ok(()) };
        // The pin is opened through its descriptor, because the name may now refer to another
        // object. If detaching fails, the removal of the pin detaches the link.
        let path = PathBuf::from(format!("/proc/self/fd/{}", pin.as_raw_fd()));
        if let Ok(link) = sys::open_pin(&path) {
            let _ = sys::link_detach(link.as_fd());
        }
        self.remove(name, AtFlags::empty())
    }

    /// Removes a pin. A missing pin is not an error.
    ///
    /// # Errors
    /// If the object with this name is not a pin, or cannot be removed.
    pub fn unlink(&self, name: &str) -> Result<(), DatapathError> {
        if self.pin(name)?.is_some() { self.remove(name, AtFlags::empty()) } else { Ok(()) }
    }

    /// Removes an empty subdirectory. A missing subdirectory is not an error.
    ///
    /// # Errors
    /// If the subdirectory is not empty, or cannot be removed.
    pub fn remove_directory(&self, name: &str) -> Result<(), DatapathError> {
        self.remove(name, AtFlags::REMOVEDIR)
    }

    /// Opens the pin with this name, without following a symbolic link; `None` if the pin does not
    /// exist.
    fn pin(&self, name: &str) -> Result<Option<OwnedFd>, DatapathError> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = match rustix::fs::openat(&self.fd, name, flags, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(fail(&self.path.join(name), error)),
        };
        let stat = rustix::fs::fstat(&fd).map_err(|error| fail(&self.path.join(name), error))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(DatapathError::Foreign(self.path.join(name)));
        }
        Ok(Some(fd))
    }

    fn remove(&self, name: &str, flags: AtFlags) -> Result<(), DatapathError> {
        match rustix::fs::unlinkat(&self.fd, name, flags) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(DatapathError::Unpin { path: self.path.join(name), source: error.into() }),
        }
    }
}

impl From<Directory> for File {
    fn from(directory: Directory) -> Self {
        directory.fd.into()
    }
}

/// Whether the object at a path, which may itself be a symbolic link, is on bpffs. If this cannot
/// be determined, the result is `true`, so that the link is not followed.
fn may_be_on_bpffs(path: &Path) -> bool {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).map_or(true, |link| sys::is_bpffs(&link))
}

const FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

fn fail(path: &Path, error: Errno) -> DatapathError {
    DatapathError::PinDirectory { path: path.to_owned(), source: io::Error::from(error) }
}
