//! The maps that all client tasks of a host share: until when each backend is a lame duck by its own report, and who reports.
//!
//! They are pinned in `<pins>/host-v<host ABI>/`, beside the directories of the clients, and outlive daemons and the clients' ABI.
//! Whoever opens them first makes them; programs of clients are loaded with them. They go with the last client. What is stored
//! in them, and when, is decided by whoever receives reports.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use aya::EbpfLoader;
use aya::maps::Map;
use lb_common::abi::host::{self, HOST_ABI_VERSION, Sender, SenderName, Verdict, map};
use rustix::fs::FlockOperation;

use super::error::DatapathError;
use super::maps::Mapped;
use super::object::{self, Shape, load_error};
use super::pins::{self, Pins};
use super::removal::Directory;
use super::sys::{self, elements};

/// The object as it is committed beside its source.
static OBJECT: &[u8] = aya::include_bytes_aligned!("../../lb-ebpf/object/host.o");

/// What the directories of all host ABI versions are called, before their number.
const PREFIX: &str = "host-v";

/// Where the maps are pinned.
fn directory(pins: &Path) -> PathBuf {
    pins.join(format!("{PREFIX}{HOST_ABI_VERSION}"))
}

/// Where the programs of clients find the verdicts.
pub fn verdicts_pin(pins: &Path) -> PathBuf {
    directory(pins).join(map::VERDICTS)
}

/// The host's maps. While this is held they are not removed.
pub struct HostMaps {
    verdicts: Mapped<Verdict>,
    senders: OwnedFd,
    path: PathBuf,
    _lock: File,
}

impl HostMaps {
    /// Opens the maps below `pins`, and makes what is missing. Several processes may do so at the same time.
    ///
    /// # Errors
    /// If the directory is not on a bpf file system, cannot be made or may be written by another user, is being removed, or holds
    /// something else; or if the kernel refuses.
    pub fn open(pins: &Path) -> Result<Self, DatapathError> {
        let path = directory(pins);
        pins::create(&path)?;
        let lock = lock(&path)?;
        make_missing(&path)?;
        let shapes = object::declared(OBJECT);
        let opened = |name: &str| open_checked(&path.join(name), shapes[name]);
        opened(map::VERDICTS)?;
        let senders = opened(map::SENDERS)?;
        let verdicts = Mapped::open(&path.join(map::VERDICTS), true)?;
        Ok(Self { verdicts, senders, path, _lock: lock })
    }

    /// Until when the backend with this report id is a lame duck, by `CLOCK_MONOTONIC` in nanoseconds; 0 if it is none.
    ///
    /// # Panics
    /// If there is no such id.
    pub fn lame_until_ns(&self, id: u32) -> u64 {
        self.verdicts.load64(id as usize, 0)
    }

    /// Says until when the backend with this report id is a lame duck, with a single store: the next connect heeds it.
    ///
    /// # Panics
    /// If there is no such id, or it is that of backends of which no report is heard.
    pub fn set_lame_until_ns(&self, id: u32, ns: u64) {
        assert!(id != host::NO_REPORT, "no report is about it");
        self.verdicts.store_atomic64(id as usize, 0, ns);
    }

    /// Every backend that has a report id.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn senders(&self) -> Result<Vec<(SenderName, Sender)>, DatapathError> {
        elements::entries(self.senders.as_fd()).map_err(|error| self.fail("read", error))
    }

    /// What is known of a backend, if it has a report id.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn sender(&self, name: &SenderName) -> Result<Option<Sender>, DatapathError> {
        elements::get(self.senders.as_fd(), name).map_err(|error| self.fail("read", error))
    }

    /// Registers a backend, or stores all that is known of it anew. What else is stored there meanwhile is lost.
    ///
    /// # Errors
    /// If the kernel refuses, most likely because there are [`MAX_SENDERS`](host::MAX_SENDERS) already.
    pub fn set_sender(&self, name: &SenderName, sender: &Sender) -> Result<(), DatapathError> {
        let set = elements::set(self.senders.as_fd(), name, std::slice::from_ref(sender));
        set.map_err(|error| self.fail("write", error))
    }

    /// Removes a backend from the register. Returns whether it was there.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn remove_sender(&self, name: &SenderName) -> Result<bool, DatapathError> {
        elements::remove(self.senders.as_fd(), name).map_err(|error| self.fail("write", error))
    }

    fn fail(&self, operation: &'static str, source: io::Error) -> DatapathError {
        DatapathError::Map { path: self.path.join(map::SENDERS), operation, source }
    }
}

/// The verdicts, for reading. A host whose clients are all of an older ABI has none.
pub struct Verdicts {
    map: Option<Mapped<Verdict>>,
}

impl Verdicts {
    /// Opens those below `pins`, if they are there.
    ///
    /// # Errors
    /// If they are and cannot be opened.
    pub fn open(pins: &Path) -> Result<Self, DatapathError> {
        match Mapped::open(&verdicts_pin(pins), false) {
            Ok(map) => Ok(Self { map: Some(map) }),
            Err(error) if error.is_missing() => Ok(Self { map: None }),
            Err(error) => Err(error),
        }
    }

    /// As [`HostMaps::lame_until_ns`]; 0 for an id that does not exist.
    pub fn lame_until_ns(&self, id: u32) -> u64 {
        let map = self.map.as_ref().filter(|map| (id as usize) < map.len());
        map.map_or(0, |map| map.load64(id as usize, 0))
    }
}

/// Removes the host's maps of all versions if no client is left and nobody has them open. Otherwise they stay.
///
/// # Errors
/// If the directories cannot be read, hold what is not a pin, or cannot be removed.
pub fn remove(pins: &Path) -> Result<(), DatapathError> {
    let Some(base) = Directory::open(pins)? else { return Ok(()) };
    for name in base.names()?.iter().filter(|name| name.starts_with(PREFIX)) {
        let Some(host) = base.within(name)? else { continue };
        // Locked first: whoever opens the maps for a client has made the client's directory before.
        if !host.lock()? || !Pins::all_versions(pins)?.is_empty() {
            return Ok(());
        }
        for pin in host.names()? {
            host.unlink(&pin)?;
        }
        base.remove_directory(name)?;
    }
    Ok(())
}

/// Keeps the maps from being removed.
fn lock(path: &Path) -> Result<File, DatapathError> {
    let fail = |source| DatapathError::PinDirectory { path: path.to_owned(), source };
    let directory = File::open(path).map_err(fail)?;
    match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(directory),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(DatapathError::Locked(path.to_owned())),
        Err(error) => Err(fail(error.into())),
    }
}

/// Makes the maps that are not pinned. If another process pins one meanwhile, that is the one.
fn make_missing(path: &Path) -> Result<(), DatapathError> {
    let missing: Vec<&str> = map::ALL.into_iter().filter(|name| !path.join(name).exists()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let made = sys::without_signals(|| EbpfLoader::new().load(OBJECT)).map_err(load_error)?;
    for name in missing {
        let made = made.map(name).expect("the object's maps are checked by a test");
        let (Map::Array(data) | Map::HashMap(data)) = made else {
            unreachable!("the object's maps are checked by a test")
        };
        let pin = path.join(name);
        match sys::pin(data.fd().as_fd(), &pin) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(DatapathError::Pin { path: pin, source: error });
            }
            _ => {}
        }
    }
    Ok(())
}

fn open_checked(path: &Path, wanted: Shape) -> Result<OwnedFd, DatapathError> {
    let (fd, found) = object::pinned(path)?;
    if found == wanted {
        return Ok(fd);
    }
    let (found, wanted) = (found.describe(), wanted.describe());
    Err(DatapathError::HostShape { path: path.to_owned(), found, wanted })
}

#[cfg(test)]
mod tests {
    use lb_common::abi::host::{MAX_SENDERS, REPORT_IDS};

    use super::*;

    #[test]
    fn the_object_declares_the_maps_of_the_host_abi() {
        let shapes = object::declared(OBJECT);
        let found: Vec<_> = shapes.iter().map(|(name, shape)| (name.as_str(), shape.sizes())).collect();
        let expected = [
            (map::SENDERS, (size_of::<SenderName>(), size_of::<Sender>(), MAX_SENDERS)),
            (map::VERDICTS, (4, size_of::<Verdict>(), REPORT_IDS)),
        ];
        assert_eq!(found, expected);
        // Programs of clients are loaded with the host's map in place of their own.
        assert_eq!(object::declared(object::OBJECT)[map::VERDICTS], shapes[map::VERDICTS]);
    }
}
