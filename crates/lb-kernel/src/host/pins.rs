//! The directory in bpffs that contains the pins of a client task's maps and links, and the lock of
//! this directory, which excludes a second writer.
//!
//! The layout is `<pins>/v<ABI>/<client>/maps/<map>` and `.../links/<hook>@<cgroup id>`. Pinned
//! programs and maps remain in the kernel and continue to work while no daemon runs. There may be
//! directories of other ABI versions: of previous versions until their last flows have ended, or of
//! another build of socklb.

mod removal;

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use lb_common::abi::ABI_VERSION;
use lb_host::trust;
use rustix::fs::FlockOperation;

pub use removal::Directory;

use crate::error::DatapathError;
use crate::sys;

/// A lock on the directory of one client. The lock is held until this value is dropped.
#[derive(Debug)]
pub struct Lock {
    directory: File,
}

/// The names of the directories of a client's maps and links.
const MAPS: &str = "maps";
const LINKS: &str = "links";

/// The directory of all clients of an ABI version.
fn root(pins: &Path, version: u32) -> PathBuf {
    pins.join(format!("v{version}"))
}

/// All ABI versions that have a directory.
fn versions(pins: &Path) -> Result<Vec<u32>, DatapathError> {
    let of = |name: &String| name.strip_prefix('v').and_then(|version| version.parse().ok());
    Ok(names(pins)?.iter().filter_map(of).collect())
}

/// Removes the directories of all ABI versions and `pins` itself if they are empty.
pub fn remove_empty(pins: &Path) {
    for version in versions(pins).unwrap_or_default() {
        let _ = fs::remove_dir(root(pins, version));
    }
    // `pins` may be the mount point, which cannot be removed.
    let _ = fs::remove_dir(pins);
}

/// Creates a directory on bpffs to which no other user may write.
pub fn create(directory: &Path) -> Result<(), DatapathError> {
    // The nearest existing ancestor determines the file system. Without this check the directories
    // could be created on another file system, and pinning would fail with an error that does not
    // mention the file system.
    let existing = directory.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(Path::new("/"));
    if !sys::on_bpffs(existing) {
        return Err(DatapathError::NoBpffs(directory.to_owned()));
    }
    // The mode excludes other users, because a process that can open the directory can lock it.
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o750)
        .create(directory)
        .map_err(|source| DatapathError::PinDirectory { path: directory.to_owned(), source })?;
    // An existing directory is also checked, because socklb would mistake other users' pins in it
    // for its own.
    Ok(trust::check_pins(directory)?)
}

pub use lb_common::abi::DEFAULT_PINS;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pins {
    pub client: String,
    /// The ABI version of the socklb that created the pins.
    pub version: u32,
    base: PathBuf,
    directory: PathBuf,
}

impl Pins {
    /// The pins of a client below `pins`.
    pub fn of(pins: &Path, client: &str) -> Self {
        Self::of_version(pins, client, ABI_VERSION)
    }

    fn of_version(pins: &Path, client: &str, version: u32) -> Self {
        let directory = root(pins, version).join(client);
        Self { client: client.to_owned(), version, base: pins.to_owned(), directory }
    }

    /// The pins of all clients, of any ABI version, sorted by name and version.
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

    /// The command that removes these pins.
    pub fn detach_command(&self) -> String {
        detach_command(&self.client, &self.base)
    }

    /// Whether the pins have this socklb's ABI version.
    pub fn is_of_this_version(&self) -> bool {
        self.version == ABI_VERSION
    }

    /// Creates the client's directory and locks it against other writers.
    ///
    /// # Errors
    /// If the directory is not on bpffs, cannot be created, or is locked, or if another user may
    /// write to it.
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

    /// Locks the client's directory before its contents are removed; `None` if the directory does
    /// not exist. Any user may own the directory.
    ///
    /// # Errors
    /// If the directory cannot be opened, or is locked.
    pub fn lock_to_remove(&self) -> Result<Option<Lock>, DatapathError> {
        let Some((_, client)) = self.open()? else { return Ok(None) };
        if client.lock()? {
            Ok(Some(Lock { directory: client.into() }))
        } else {
            Err(DatapathError::Locked(self.directory.clone()))
        }
    }

    /// The parent of the client's directory, and the client's directory; `None` if one of these
    /// directories is missing.
    fn open(&self) -> Result<Option<(Directory, Directory)>, DatapathError> {
        let Some(base) = Directory::open(self.base())? else { return Ok(None) };
        let Some(above) = base.within(&format!("v{}", self.version))? else { return Ok(None) };
        Ok(above.within(&self.client)?.map(|client| (above, client)))
    }

    /// The directory of all pins.
    pub(crate) fn base(&self) -> &Path {
        &self.base
    }

    /// Creates the directories of maps and links.
    ///
    /// # Errors
    /// If the directories are not on bpffs or cannot be created, or if another user may write to
    /// them.
    pub fn create(&self) -> Result<(), DatapathError> {
        create(&self.maps())?;
        create(&self.links())
    }

    /// The directory of the maps.
    pub fn maps(&self) -> PathBuf {
        self.directory.join(MAPS)
    }

    /// The directory of the links.
    pub fn links(&self) -> PathBuf {
        self.directory.join(LINKS)
    }

    /// Whether the client's directory is still the directory that `lock` locks. This is false if
    /// the client's directory was removed or recreated.
    ///
    /// # Errors
    /// If the directory's metadata cannot be read, usually because of a missing permission.
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

    /// Names of the pinned maps, and of the pinned links.
    ///
    /// # Errors
    /// If a directory exists and cannot be read.
    pub fn contents(&self) -> Result<(Vec<String>, Vec<String>), DatapathError> {
        Ok((names(&self.maps())?, names(&self.links())?))
    }

    /// Names of the pinned links.
    ///
    /// # Errors
    /// If the directory exists and cannot be read.
    pub fn link_names(&self) -> Result<Vec<String>, DatapathError> {
        names(&self.links())
    }

    /// Detaches and removes the links for which `first` is true: those at which flows begin.
    ///
    /// # Errors
    /// If a link cannot be removed.
    pub fn remove_links(&self, first: impl Fn(&str) -> bool) -> Result<(), DatapathError> {
        for name in self.link_names()?.iter().filter(|name| first(name)) {
            detach(&self.links().join(name))?;
        }
        Ok(())
    }

    /// Removes all pins for which `ours` is true: first the links for which `first` is true, then
    /// the other links, then the maps; and then the directories.
    ///
    /// # Errors
    /// If a pin cannot be removed, or if a pin for which `ours` is false is left in a directory.
    /// Earlier removals are not undone.
    pub fn remove(
        &self,
        ours: impl Fn(&str) -> bool,
        first: impl Fn(&str) -> bool,
    ) -> Result<(), DatapathError> {
        let Some((above, client)) = self.open()? else { return Ok(()) };
        if let Some(links) = client.within(LINKS)? {
            let ours = links.names()?.into_iter().filter(|name| ours(name));
            let (first, then): (Vec<String>, Vec<String>) = ours.partition(|name| first(name));
            for name in first.iter().chain(&then) {
                links.detach(name)?;
            }
        }
        if let Some(maps) = client.within(MAPS)? {
            for name in maps.names()?.iter().filter(|name| ours(name)) {
                maps.unlink(name)?;
            }
        }
        client.remove_directory(LINKS)?;
        client.remove_directory(MAPS)?;
        above.remove_directory(&self.client)
    }
}

/// Opens a pinned link and reads its properties with `info`. `None` if nothing is pinned at `path`;
/// every other failure is an error.
pub fn look_at_link<I>(
    path: &Path,
    info: impl FnOnce(BorrowedFd<'_>) -> io::Result<I>,
) -> Result<Option<(OwnedFd, I)>, DatapathError> {
    let fail = |source| DatapathError::Link { path: path.to_owned(), source };
    let link = match sys::open_pin(path) {
        Ok(link) => link,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(fail(error)),
    };
    let info = info(link.as_fd()).map_err(fail)?;
    Ok(Some((link, info)))
}

/// Detaches a link and removes its pin. A missing pin is not an error.
///
/// The function detaches the link before it removes the pin, for the reason given at
/// [`Directory::detach`].
///
/// # Errors
/// If the link cannot be opened or detached (the link then remains pinned and attached), or the pin
/// cannot be removed.
pub fn detach(path: &Path) -> Result<(), DatapathError> {
    let fail = |source| DatapathError::Unpin { path: path.to_owned(), source };
    match sys::open_pin(path) {
        Ok(link) => sys::link_detach(link.as_fd()).map_err(fail)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(fail(error)),
    }
    unlink(path)
}

/// Removes one pin. A missing pin is not an error.
pub fn unlink(path: &Path) -> Result<(), DatapathError> {
    match fs::remove_file(path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(DatapathError::Unpin { path: path.to_owned(), source }),
    }
}

/// The sorted names in a directory of pins; empty if there is no such directory.
pub fn names(directory: &Path) -> Result<Vec<String>, DatapathError> {
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

/// The command-line option that selects this directory of pins, after a space; empty for the
/// default directory.
pub fn pins_option(pins: &Path) -> String {
    if pins == Path::new(DEFAULT_PINS) {
        return String::new();
    }
    // Quoted for a shell, because a path may contain any character.
    format!(" --pins '{}'", pins.display().to_string().replace('\'', r"'\''"))
}

/// The command that removes a client with pins below `pins`.
pub fn detach_command(client: &str, pins: &Path) -> String {
    format!("socklb detach {client}{}", pins_option(pins))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_names_this_abi_version() {
        let pages = [
            include_str!("../../../../docs/guide/bpftool.md"),
            include_str!("../../../../docs/reference/files-and-exit-codes.md"),
        ];
        for text in pages {
            let versions: Vec<&str> =
                text.split("socklb/v").skip(1).filter_map(|rest| rest.split('/').next()).collect();
            assert!(!versions.is_empty());
            assert!(versions.iter().all(|version| *version == ABI_VERSION.to_string()), "{versions:?}");
        }
    }
}
