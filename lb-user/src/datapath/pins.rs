//! The directory in bpffs that holds a client task's maps and links, and its lock, which keeps a second writer out.
//!
//! `<pins>/v<ABI>/<client>/maps/<map>` and `.../links/<hook>@<cgroup id>`. What lies there *is* the state: programs and
//! tables go on working while no daemon runs. Directories of other ABI versions lie beside: what an upgrade has left to
//! its last flows, or what another build of socklb made.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use lb_common::abi::ABI_VERSION;
use rustix::fs::FlockOperation;

use super::error::DatapathError;
use super::sys;

/// The directory of one client, locked while this is held.
#[derive(Debug)]
pub struct Lock {
    directory: File,
}

/// The directory of all clients of an ABI version.
fn root(pins: &Path, version: u32) -> PathBuf {
    pins.join(format!("v{version}"))
}

/// The ABI versions that have a directory, ours or not.
fn versions(pins: &Path) -> Result<Vec<u32>, DatapathError> {
    let of = |name: &String| name.strip_prefix('v').and_then(|version| version.parse().ok());
    Ok(names(pins)?.iter().filter_map(of).collect())
}

/// Removes the directories of all clients if nothing is left in them; that something is, is no failure.
pub fn remove_roots(pins: &Path) {
    for version in versions(pins).unwrap_or_default() {
        let _ = fs::remove_dir(root(pins, version));
    }
    // It may be the mount itself.
    let _ = fs::remove_dir(pins);
}

/// Creates a directory on bpffs.
fn create(directory: &Path) -> Result<(), DatapathError> {
    // The nearest ancestor that exists tells the file system; without this check the directories would be made on
    // whatever lies there, and pinning would fail with an error that names neither.
    let existing = directory.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(Path::new("/"));
    if !on_bpffs(existing) {
        return Err(DatapathError::NoBpffs(directory.to_owned()));
    }
    // Not for everybody: whoever can open the directory can hold its lock.
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o750)
        .create(directory)
        .map_err(|source| DatapathError::PinDirectory { path: directory.to_owned(), source })
}

pub fn on_bpffs(path: &Path) -> bool {
    /// `BPF_FS_MAGIC`
    const MAGIC: i64 = 0xcafe_4a11;
    rustix::fs::statfs(path).is_ok_and(|stat| stat.f_type == MAGIC)
}

/// The pins of one client task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pins {
    /// Its name.
    pub client: String,
    /// The ABI version of the socklb that made them.
    pub version: u32,
    directory: PathBuf,
}

impl Pins {
    /// The pins of a client below `pins`.
    pub fn of(pins: &Path, client: &str) -> Self {
        Self::of_version(pins, client, ABI_VERSION)
    }

    fn of_version(pins: &Path, client: &str, version: u32) -> Self {
        Self { client: client.to_owned(), version, directory: root(pins, version).join(client) }
    }

    /// Every client that has pins of any ABI version, by name and version.
    ///
    /// # Errors
    /// If the directory exists and cannot be read.
    pub fn all_versions(pins: &Path) -> Result<Vec<Self>, DatapathError> {
        let mut clients = Vec::new();
        for version in versions(pins)? {
            for name in names(&root(pins, version))? {
                clients.push(Self::of_version(pins, &name, version));
            }
        }
        clients.sort_by(|a, b| (&a.client, a.version).cmp(&(&b.client, b.version)));
        Ok(clients)
    }

    /// Whether we know the maps and links in it.
    pub fn is_of_this_version(&self) -> bool {
        self.version == ABI_VERSION
    }

    /// Creates the client's directory and locks it against other writers.
    ///
    /// # Errors
    /// If it is not on bpffs, cannot be made, or is locked.
    pub fn lock(&self) -> Result<Lock, DatapathError> {
        create(&self.directory)?;
        let fail = |source| DatapathError::PinDirectory { path: self.directory.clone(), source };
        let directory = File::open(&self.directory).map_err(fail)?;
        match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Lock { directory }),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(DatapathError::Locked(self.directory.clone())),
            Err(error) => Err(fail(error.into())),
        }
    }

    /// Creates the directories.
    ///
    /// # Errors
    /// If they are not on bpffs or cannot be made.
    pub fn create(&self) -> Result<(), DatapathError> {
        create(&self.maps())?;
        create(&self.links())
    }

    /// Where the maps are.
    pub fn maps(&self) -> PathBuf {
        self.directory.join("maps")
    }

    /// Where the links are.
    pub fn links(&self) -> PathBuf {
        self.directory.join("links")
    }

    /// Whether the client's directory is the one that was locked: neither removed nor made anew since.
    ///
    /// # Errors
    /// If that cannot be seen, most likely for want of permission.
    pub fn are_locked_by(&self, lock: &Lock) -> Result<bool, DatapathError> {
        let fail = |source| DatapathError::PinDirectory { path: self.directory.clone(), source };
        let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
        let locked = lock.directory.metadata().map(identity).map_err(fail)?;
        match fs::metadata(&self.directory) {
            Ok(found) => Ok(identity(found) == locked),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(fail(error)),
        }
    }

    /// Names of what is pinned as maps and as links.
    ///
    /// # Errors
    /// If a directory exists and cannot be read.
    pub fn contents(&self) -> Result<(Vec<String>, Vec<String>), DatapathError> {
        Ok((names(&self.maps())?, names(&self.links())?))
    }

    /// Names of what is pinned as links.
    ///
    /// # Errors
    /// If the directory exists and cannot be read.
    pub fn link_names(&self) -> Result<Vec<String>, DatapathError> {
        names(&self.links())
    }

    /// Removes the links that `first` picks, which are those that begin flows.
    ///
    /// # Errors
    /// If one cannot be removed.
    pub fn remove_links(&self, first: impl Fn(&str) -> bool) -> Result<(), DatapathError> {
        for name in self.link_names()?.iter().filter(|name| first(name)) {
            detach(&self.links().join(name))?;
        }
        Ok(())
    }

    /// Removes everything that is ours: first the links that `first` picks, then the others, then the maps.
    ///
    /// # Errors
    /// If something cannot be removed, or something is left that is not ours; what was removed before stays removed.
    pub fn remove(
        &self,
        ours: impl Fn(&str) -> bool,
        first: impl Fn(&str) -> bool,
    ) -> Result<(), DatapathError> {
        self.remove_links(|name| ours(name) && first(name))?;
        self.remove_links(&ours)?;
        let (maps, _) = self.contents()?;
        for name in maps.iter().filter(|name| ours(name)) {
            unlink(&self.maps().join(name))?;
        }
        for directory in [self.links(), self.maps(), self.directory.clone()] {
            match fs::remove_dir(&directory) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(source) => return Err(DatapathError::Unpin { path: directory, source }),
            }
        }
        Ok(())
    }
}

/// Detaches a link and removes its pin.
///
/// Detached first: when its last name goes, the kernel detaches a link some milliseconds later, in the background. Until
/// then connects would go on being balanced, and links would go in any order.
pub fn detach(path: &Path) -> Result<(), DatapathError> {
    if let Ok(link) = sys::open_pin(path) {
        // Should it fail, the kernel does it with the pin.
        let _ = sys::link_detach(link.as_fd());
    }
    unlink(path)
}

/// Removes one pin; that it is gone already is no failure.
pub fn unlink(path: &Path) -> Result<(), DatapathError> {
    match fs::remove_file(path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(DatapathError::Unpin { path: path.to_owned(), source }),
    }
}

fn names(directory: &Path) -> Result<Vec<String>, DatapathError> {
    let fail = |source| DatapathError::PinDirectory { path: directory.to_owned(), source };
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(fail(error)),
    };
    let mut names = Vec::new();
    for entry in entries {
        names.push(entry.map_err(fail)?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever follows the README finds the maps.
    #[test]
    fn the_readme_speaks_of_this_version() {
        let text = include_str!("../../../README.md");
        let versions: Vec<&str> =
            text.split("socklb/v").skip(1).filter_map(|rest| rest.split('/').next()).collect();
        assert!(!versions.is_empty());
        assert!(versions.iter().all(|version| *version == ABI_VERSION.to_string()), "{versions:?}");
    }
}
