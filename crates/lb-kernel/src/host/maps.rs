//! The maps that all client tasks of a host share: the verdicts (the time until which each backend
//! is a lame duck according to its own report), the register of backends that send reports, and the
//! last accepted reports. Two further maps belong to the XDP program that receives reports: the
//! addresses at which it receives them, and the counts of its results.
//!
//! The maps are pinned in `<pins>/host-v<host ABI>/`, beside the directories of the clients, and
//! outlive daemons and versions of the clients' ABI. The first process that opens the maps creates
//! them, and the programs of clients use them. The maps are removed with the last client. The
//! receivers of reports determine the content of the maps.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use lb_common::abi::host::RECEPTIONS;
use lb_common::abi::host::{
    self, HOST_ABI_VERSION, LastReport, Listener, MAX_LISTENERS, Receptions, ReportBase, Sender, SenderName,
    Verdict, map,
};
use lb_common::net::Address;
use lb_report::receive::Words;
use rustix::fs::FlockOperation;

use super::loader::{self, Globals, Image};
use super::pins::{self, Directory, Pins};
use super::xdp::is_link;
use crate::error::DatapathError;
use crate::host::loader::objects;
use crate::host::loader::shape::{self, Shape};
use crate::sys::elements::{self, Elements};
use crate::sys::{mapped::Mapped, per_cpu::PerCpuArray};

/// The name of a directory with the host's maps consists of this prefix and the host ABI version.
const PREFIX: &str = "host-v";

/// The directory with the pinned maps and with the links to network interfaces.
pub fn directory(pins: &Path) -> PathBuf {
    pins.join(format!("{PREFIX}{HOST_ABI_VERSION}"))
}

/// The pin of the map of verdicts.
pub fn verdicts_pin(pins: &Path) -> PathBuf {
    directory(pins).join(map::VERDICTS)
}

/// The host's maps. No process removes them while this value exists.
pub struct HostMaps {
    verdicts: Mapped<Verdict>,
    last_reports: Mapped<LastReport>,
    senders: Box<dyn Elements>,
    listeners: Box<dyn Elements>,
    receptions: PerCpuArray<Receptions>,
    path: PathBuf,
    /// `None` if the maps are in memory.
    _lock: Option<File>,
}

/// The host's maps in the memory of this process.
pub struct HostArrays {
    pub verdicts: Mapped<Verdict>,
    pub last_reports: Mapped<LastReport>,
    pub senders: Box<dyn Elements>,
    pub listeners: Box<dyn Elements>,
    pub receptions: PerCpuArray<Receptions>,
}

/// Offsets of the words of [`LastReport`].
const BASE: usize = std::mem::offset_of!(LastReport, base);
const HIGHEST: usize = std::mem::offset_of!(LastReport, highest);
const NONCE: usize = std::mem::offset_of!(LastReport, nonce);

impl HostMaps {
    /// Opens the maps below `pins`, and creates missing ones. Several processes may open the maps
    /// at the same time.
    ///
    /// # Errors
    /// If the directory is not on a bpf file system, cannot be created, is being removed, or
    /// contains other objects; if another user may write to the directory; or if the kernel
    /// refuses.
    pub fn open(pins: &Path) -> Result<Self, DatapathError> {
        let path = directory(pins);
        pins::create(&path)?;
        let lock = lock(&path)?;
        make_missing(&path)?;
        let shapes = shape::declared(objects::HOST);
        let opened = |name: &str| open_checked(&path.join(name), shapes[name]);
        opened(map::VERDICTS)?;
        opened(map::LAST_REPORTS)?;
        opened(map::RECEPTIONS)?;
        let (senders, listeners) = (opened(map::SENDERS)?, opened(map::LISTENERS)?);
        let verdicts = Mapped::open(&path.join(map::VERDICTS), true)?;
        let last_reports = Mapped::open(&path.join(map::LAST_REPORTS), true)?;
        let receptions = PerCpuArray::open(&path.join(map::RECEPTIONS))?;
        let (senders, listeners) = (Box::new(senders), Box::new(listeners));
        Ok(Self { verdicts, last_reports, senders, listeners, receptions, path, _lock: Some(lock) })
    }

    pub fn over(arrays: HostArrays, pins: &Path) -> Self {
        let HostArrays { verdicts, last_reports, senders, listeners, receptions } = arrays;
        Self { verdicts, last_reports, senders, listeners, receptions, path: directory(pins), _lock: None }
    }

    /// Takes over the programs that other host ABI versions attached to network interfaces, and
    /// then removes the maps of these versions. A version is skipped while a process has its maps
    /// open. Returns whether a program was taken over. Such a program continues to use the maps of
    /// its version until another program replaces it.
    ///
    /// # Errors
    /// If the pins cannot be read, moved or removed.
    pub fn take_over(&self) -> Result<bool, DatapathError> {
        let pins = self.path.parent().expect("the path has a parent directory");
        let Some(base) = Directory::open(pins)? else { return Ok(false) };
        let mut has_taken = false;
        let is_other = |name: &String| name.starts_with(PREFIX) && !self.path.ends_with(name.as_str());
        for name in base.names()?.into_iter().filter(is_other) {
            let Some(other) = base.within(&name)? else { continue };
            if !other.lock()? {
                continue;
            }
            for pin in other.names()? {
                let (from, to) = (pins.join(&name).join(&pin), self.path.join(&pin));
                if is_link(&pin) && !to.exists() {
                    fs::rename(&from, &to).map_err(|source| DatapathError::Pin { path: to, source })?;
                    has_taken = true;
                } else {
                    other.detach(&pin)?;
                }
            }
            base.remove_directory(&name)?;
        }
        Ok(has_taken)
    }

    /// The directory of the pins.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Stores the time until which the backend with this report id is a lame duck, in nanoseconds
    /// of `CLOCK_MONOTONIC`. The next connect already uses the new value.
    ///
    /// # Panics
    /// If `id` is out of range, or is [`NO_REPORT`](host::NO_REPORT).
    pub fn set_lame_until_ns(&self, id: u32, ns: u64) {
        self.verdicts.store_atomic64(index_of(id), 0, ns);
    }

    /// Stores the number of the last report of a backend, unless the stored number is no longer
    /// `before`, because another process or a program has replaced it. Returns whether the number
    /// was stored. If the number was stored, the function also clears the nonce, so that answers to
    /// earlier requests are no longer accepted: they may be older than the stored report.
    ///
    /// # Panics
    /// If `id` is out of range, or is [`NO_REPORT`](host::NO_REPORT).
    pub fn replace_base(&self, id: u32, before: ReportBase, base: ReportBase) -> bool {
        let index = index_of(id);
        let [nonce, highest] = [NONCE, HIGHEST].map(|offset| self.last_reports.load64(index, offset));
        if !self.last_reports.replace64(index, BASE, before.to_word(), base.to_word()) {
            return false;
        }
        self.last_reports.replace64(index, HIGHEST, highest, highest.max(base.to_word()));
        // A nonce that was drawn after the load above is not cleared.
        self.last_reports.replace64(index, NONCE, nonce, 0);
        true
    }

    /// Clears the last report, the nonce and the verdict of a backend.
    ///
    /// # Panics
    /// If `id` is out of range, or is [`NO_REPORT`](host::NO_REPORT).
    pub fn forget(&self, id: u32) {
        let index = index_of(id);
        for offset in [NONCE, BASE, HIGHEST] {
            self.last_reports.store_atomic64(index, offset, 0);
        }
        self.set_lame_until_ns(id, 0);
    }

    /// Stores the nonce of a request to a backend, which identifies the answer; 0 if no answer is
    /// expected.
    ///
    /// # Panics
    /// If `id` is out of range, or is [`NO_REPORT`](host::NO_REPORT).
    pub fn set_nonce(&self, id: u32, nonce: u64) {
        self.last_reports.store_atomic64(index_of(id), NONCE, nonce);
    }

    /// Makes programs process datagrams to the daemon's port at these addresses only. Returns the
    /// number of addresses at the end of the list that do not fit into the map.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set_listeners(
        &self,
        addresses: &[std::net::IpAddr],
        listener: Listener,
    ) -> Result<usize, DatapathError> {
        let wanted: Vec<Address> =
            addresses.iter().take(MAX_LISTENERS as usize).map(|ip| Address::from(*ip)).collect();
        elements::have_keys(&*self.listeners, &wanted, &listener)
            .map_err(|error| self.fail(map::LISTENERS, "write", error))?;
        Ok(addresses.len() - wanted.len())
    }

    /// The number of datagrams that programs have processed, for each result in the order of
    /// [`NAMES`](lb_report::receive::Reception::NAMES).
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn receptions(&self) -> Result<[u64; RECEPTIONS], DatapathError> {
        let sums = self.receptions.get(0).map_err(|error| self.fail(map::RECEPTIONS, "read", error))?;
        Ok(sums.counts)
    }

    /// The entries of all backends that have a report id.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn senders(&self) -> Result<Vec<(SenderName, Sender)>, DatapathError> {
        elements::entries(&*self.senders).map_err(|error| self.fail(map::SENDERS, "read", error))
    }

    /// The entry of a backend, if it has a report id.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn sender(&self, name: &SenderName) -> Result<Option<Sender>, DatapathError> {
        elements::get(&*self.senders, name).map_err(|error| self.fail(map::SENDERS, "read", error))
    }

    /// Registers a backend, or replaces its entry.
    ///
    /// # Errors
    /// If the kernel refuses, usually because there are [`MAX_SENDERS`](host::MAX_SENDERS) already.
    pub fn set_sender(&self, name: &SenderName, sender: &Sender) -> Result<(), DatapathError> {
        let set = self.senders.set(bytemuck::bytes_of(name), bytemuck::bytes_of(sender));
        set.map_err(|error| self.fail(map::SENDERS, "write", error))
    }

    /// Removes a backend from the register. Returns whether the backend was registered.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn remove_sender(&self, name: &SenderName) -> Result<bool, DatapathError> {
        self.senders.remove(bytemuck::bytes_of(name)).map_err(|error| self.fail(map::SENDERS, "write", error))
    }

    fn fail(&self, map: &str, operation: &'static str, source: io::Error) -> DatapathError {
        DatapathError::Map { path: self.path.join(map), operation, source }
    }
}

/// The words of a backend's [`LastReport`], which a kernel program also writes.
///
/// # Panics
/// If `id` is out of range, or is [`NO_REPORT`](host::NO_REPORT).
impl Words for HostMaps {
    fn base(&self, id: u32) -> ReportBase {
        ReportBase::from_word(self.last_reports.load64(id as usize, BASE))
    }

    fn lame_until_ns(&self, id: u32) -> u64 {
        self.verdicts.load64(id as usize, 0)
    }

    fn replace_lame_until_ns(&self, id: u32, before: u64, after: u64) -> bool {
        self.verdicts.replace64(index_of(id), 0, before, after)
    }
}

fn index_of(id: u32) -> usize {
    assert!(id != host::NO_REPORT, "report id 0 belongs to no backend");
    id as usize
}

/// The map of verdicts, for reading. The map does not exist if all clients of the host have an
/// older ABI.
pub struct Verdicts {
    map: Option<Mapped<Verdict>>,
}

impl Verdicts {
    /// Opens the verdicts below `pins`, if they exist.
    ///
    /// # Errors
    /// If the verdicts exist and cannot be opened.
    pub fn open(pins: &Path) -> Result<Self, DatapathError> {
        match Mapped::open(&verdicts_pin(pins), false) {
            Ok(map) => Ok(Self { map: Some(map) }),
            Err(error) if error.is_missing() => Ok(Self { map: None }),
            Err(error) => Err(error),
        }
    }

    pub fn over(map: Mapped<Verdict>) -> Self {
        Self { map: Some(map) }
    }

    /// The time until which the backend with this report id is a lame duck, in nanoseconds of
    /// `CLOCK_MONOTONIC`; 0 if the backend is not a lame duck, or if `id` is out of range.
    pub fn lame_until_ns(&self, id: u32) -> u64 {
        let map = self.map.as_ref().filter(|map| (id as usize) < map.length());
        map.map_or(0, |map| map.load64(id as usize, 0))
    }
}

/// Removes the host's maps if no client is left, and then the directories of all ABI versions and
/// `pins` itself if they are empty.
///
/// # Errors
/// If the host's maps cannot be removed.
pub fn remove_roots(pins: &Path) -> Result<(), DatapathError> {
    remove(pins)?;
    pins::remove_empty(pins);
    Ok(())
}

/// Removes the host's maps of all versions if no client is left and no process has them open.
fn remove(pins: &Path) -> Result<(), DatapathError> {
    let Some(base) = Directory::open(pins)? else { return Ok(()) };
    for name in base.names()?.iter().filter(|name| name.starts_with(PREFIX)) {
        let Some(host) = base.within(name)? else { continue };
        // The lock must be taken before the check for clients: a process that opens the maps for a
        // client has created the client's directory before it takes the lock.
        if !host.lock()? || !Pins::all_versions(pins)?.is_empty() {
            return Ok(());
        }
        // Links are removed first, because the programs of existing links use these maps to process
        // packets.
        let (links, maps): (Vec<_>, Vec<_>) = host.names()?.into_iter().partition(|pin| is_link(pin));
        for link in links {
            host.detach(&link)?;
        }
        for pin in maps {
            host.unlink(&pin)?;
        }
        base.remove_directory(name)?;
    }
    Ok(())
}

/// Takes a shared lock on the directory, which prevents the removal of the maps.
fn lock(path: &Path) -> Result<File, DatapathError> {
    let fail = |source| DatapathError::PinDirectory { path: path.to_owned(), source };
    let directory = File::open(path).map_err(fail)?;
    match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(directory),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(DatapathError::Locked(path.to_owned())),
        Err(error) => Err(fail(error.into())),
    }
}

/// The name and the pin of each map.
pub fn map_pins(directory: &Path) -> impl Iterator<Item = (&'static str, PathBuf)> {
    map::ALL.into_iter().map(|name| (name, directory.join(name)))
}

/// Creates the maps that are not pinned. If another process pins a map at the same time, the other
/// process's map is used.
fn make_missing(path: &Path) -> Result<(), DatapathError> {
    // Several attempts are needed: an attempt fails if another process pins a missing map first.
    for _ in map::ALL {
        if map_pins(path).all(|(_, pin)| pin.exists()) {
            break;
        }
        match loader::load_pinned(&Image::new(objects::HOST, Globals::new(), &[], None)?, &[], map_pins(path))
        {
            Err(error) if !error.is_caused_by(io::ErrorKind::AlreadyExists) => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

fn open_checked(path: &Path, wanted: Shape) -> Result<OwnedFd, DatapathError> {
    let (fd, found) = shape::pinned(path)?;
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
        let shapes = shape::declared(objects::HOST);
        let found: Vec<_> = shapes.iter().map(|(name, shape)| (name.as_str(), shape.sizes())).collect();
        let expected = [
            (map::LAST_REPORTS, (4, size_of::<LastReport>(), REPORT_IDS)),
            (map::LISTENERS, (size_of::<Address>(), size_of::<Listener>(), MAX_LISTENERS)),
            (map::RECEPTIONS, (4, size_of::<Receptions>(), 1)),
            (map::SENDERS, (size_of::<SenderName>(), size_of::<Sender>(), MAX_SENDERS)),
            (map::VERDICTS, (4, size_of::<Verdict>(), REPORT_IDS)),
        ];
        assert_eq!(found, expected);
        // The loader replaces the clients' declaration of this map with the host's map.
        assert_eq!(shape::declared(objects::CLIENT)[map::VERDICTS], shapes[map::VERDICTS]);
    }
}
