//! Creates and enters cgroups with paths that another process has chosen. The paths are opened
//! relative to the descriptor of the cgroup2 mount, and symbolic links are not followed.
//!
//! `socklb exec` may run as root, while the daemon, which determines the path of a client's cgroup,
//! may run as another user. So a path is never opened directly. The kernel resolves the path
//! relative to the descriptor of the mount, so the path can lead only to a cgroup.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::error::DatapathError;
use crate::host::cgroup::{cgroup2_mount, is_cgroup2, ours_and_above};
use crate::sys::BELOW;

/// The open cgroup2 mount.
#[derive(Debug)]
pub struct CgroupTree {
    mount: PathBuf,
    root: OwnedFd,
}

impl CgroupTree {
    /// Opens the mount.
    ///
    /// # Errors
    /// If cgroup2 is not mounted, or another file system is at its mount point.
    pub fn open() -> Result<Self, DatapathError> {
        let mount = cgroup2_mount()?;
        let fail = |source: Errno| DatapathError::OpenCgroup { path: mount.clone(), source: source.into() };
        let root = rustix::fs::open(&mount, DIRECTORY, Mode::empty()).map_err(fail)?;
        if !is_cgroup2(&root) {
            return Err(DatapathError::OutsideCgroup2(mount));
        }
        Ok(Self { mount, root })
    }

    /// Whether there is a cgroup at a full path.
    ///
    /// # Errors
    /// If the path cannot be opened, or leads out of the mount.
    pub fn has(&self, path: &Path) -> Result<bool, DatapathError> {
        match self.directory(path) {
            Ok(_) => Ok(true),
            Err(DatapathError::NoCgroup(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Creates the cgroup at a full path. Its parent must exist. Returns `false` if the cgroup
    /// existed before.
    ///
    /// # Errors
    /// If the kernel refuses, or the path leads out of the mount.
    pub fn make(&self, path: &Path) -> Result<bool, DatapathError> {
        let outside = || DatapathError::OutsideCgroup2(path.to_owned());
        let name = path.file_name().ok_or_else(outside)?;
        let above = self.directory(path.parent().ok_or_else(outside)?)?;
        match rustix::fs::mkdirat(&above, name, Mode::from_raw_mode(0o755)) {
            Ok(()) => Ok(true),
            Err(Errno::EXIST) => Ok(false),
            Err(error) => Err(DatapathError::MakeCgroup { path: path.to_owned(), source: error.into() }),
        }
    }

    /// Moves this process to the cgroup at a full path.
    ///
    /// # Errors
    /// If the kernel refuses, the path leads out of the mount, or the process is not in the cgroup
    /// afterwards.
    pub fn enter(&self, path: &Path) -> Result<(), DatapathError> {
        let fail = |source: io::Error| DatapathError::EnterCgroup { path: path.to_owned(), source };
        let cgroup = self.directory(path)?;
        let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let processes = rustix::fs::openat2(&cgroup, "cgroup.procs", flags, Mode::empty(), BELOW);
        // Zero identifies the writing process.
        let written = processes.and_then(|processes| rustix::io::write(processes, b"0"));
        match written {
            Ok(_) => {}
            Err(Errno::BUSY) => return Err(DatapathError::InnerCgroup(path.to_owned())),
            Err(error) => return Err(fail(error.into())),
        }
        let wanted = rustix::fs::fstat(&cgroup).map_err(|error| fail(error.into()))?.st_ino;
        let now = ours_and_above()?.first().copied();
        if now != Some(wanted) {
            return Err(fail(io::Error::other("the process is still in another cgroup")));
        }
        Ok(())
    }

    fn directory(&self, path: &Path) -> Result<OwnedFd, DatapathError> {
        let outside = || DatapathError::OutsideCgroup2(path.to_owned());
        let below = path.strip_prefix(&self.mount).map_err(|_| outside())?;
        // For the mount itself, the relative path is empty.
        let below = if below.as_os_str().is_empty() { Path::new(".") } else { below };
        let opened = rustix::fs::openat2(self.root.as_fd(), below, DIRECTORY, Mode::empty(), BELOW);
        opened.map_err(|error| match error {
            Errno::NOENT | Errno::NOTDIR => DatapathError::NoCgroup(path.to_owned()),
            Errno::XDEV | Errno::LOOP => outside(),
            error => DatapathError::OpenCgroup { path: path.to_owned(), source: error.into() },
        })
    }
}

const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
