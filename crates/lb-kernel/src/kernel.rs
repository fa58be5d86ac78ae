//! What the controller of a host needs of the kernel beside the client tasks that it runs: cgroups, pinned clients, and the maps of the
//! host.
//!
//! [`Linux`] is the real one. Another implementation lies in memory, so that what the daemon decides is tested without privileges.

use std::path::{Path, PathBuf};

use crate::client::detach::{detach, is_retired, retire};
use crate::client::{ClientKernel, PinnedClient, links, maps::open_flows, tables::Tables};
use crate::error::DatapathError;
use crate::host::cgroup::{self, Cgroup};
use crate::host::maps::HostMaps;
use crate::host::pins::{Lock, Pins};
use crate::sys::{clock::monotonic_ns, readers::wait_for_readers};

/// The kernel of a host.
pub trait Kernel: Send + Sync {
    /// The time by the programs' clock, in nanoseconds.
    fn now_ns(&self) -> u64;

    /// Where cgroup2 is mounted.
    ///
    /// # Errors
    /// If that cannot be found.
    fn mount(&self) -> Result<PathBuf, DatapathError>;

    /// The cgroup at a full path.
    ///
    /// # Errors
    /// As [`ClientKernel::cgroup`].
    fn cgroup(&self, path: &Path) -> Result<Cgroup, DatapathError>;

    /// Every client that is pinned below `pins`, of any ABI version, by name and version.
    ///
    /// # Errors
    /// If the directory exists and cannot be read.
    fn clients(&self, pins: &Path) -> Result<Vec<Pins>, DatapathError>;

    /// Locks the pins of a client, of which nothing is opened yet.
    ///
    /// # Errors
    /// If another process works on them, or they cannot be locked.
    fn client(&self, pins: Pins) -> Result<Box<dyn ClientKernel>, DatapathError>;

    /// Opens the maps of a client, to read them.
    ///
    /// # Errors
    /// If one is missing or cannot be opened.
    fn tables(&self, pins: &Pins) -> Result<Tables, DatapathError>;

    /// Locks the pins of a client against other writers; `None` where there is no lock.
    ///
    /// # Errors
    /// If another process has the lock, or it cannot be taken.
    fn lock(&self, pins: &Pins) -> Result<Option<Lock>, DatapathError>;

    /// Whether a client was retired: its flows still end, and none begins.
    ///
    /// # Errors
    /// If the pins cannot be read.
    fn is_retired(&self, pins: &Pins) -> Result<bool, DatapathError>;

    /// Lets no flow of a client begin any more. Those that are open still end, and are counted until then.
    ///
    /// # Errors
    /// If a link cannot be removed.
    fn retire(&self, pins: &Pins) -> Result<(), DatapathError>;

    /// The cgroups at which a client's flows begin.
    ///
    /// # Errors
    /// If that cannot be seen.
    fn begins_at(&self, pins: &Pins) -> Result<Vec<u64>, DatapathError>;

    /// The open flows of a client of any ABI version that leaves.
    ///
    /// # Errors
    /// If they cannot be counted.
    fn open_flows(&self, pins: &Pins) -> Result<u64, DatapathError>;

    /// Removes a client.
    ///
    /// # Errors
    /// If a pin cannot be removed.
    fn detach(&self, pins: &Pins) -> Result<(), DatapathError>;

    /// Opens the maps that all clients below `pins` share, and makes what is missing.
    ///
    /// # Errors
    /// As [`HostMaps::open`].
    fn host_maps(&self, pins: &Path) -> Result<HostMaps, DatapathError>;

    /// Waits until every program that is running now is done. May block.
    ///
    /// # Errors
    /// If the kernel refuses.
    fn wait_for_readers(&self) -> Result<(), DatapathError>;
}

/// The kernel that this process runs on.
pub struct Linux;

impl Kernel for Linux {
    fn now_ns(&self) -> u64 {
        monotonic_ns()
    }

    fn mount(&self) -> Result<PathBuf, DatapathError> {
        cgroup::cgroup2_mount()
    }

    fn cgroup(&self, path: &Path) -> Result<Cgroup, DatapathError> {
        Cgroup::at(path)
    }

    fn clients(&self, pins: &Path) -> Result<Vec<Pins>, DatapathError> {
        Pins::all_versions(pins)
    }

    fn client(&self, pins: Pins) -> Result<Box<dyn ClientKernel>, DatapathError> {
        Ok(Box::new(PinnedClient::lock(pins)?))
    }

    fn tables(&self, pins: &Pins) -> Result<Tables, DatapathError> {
        Tables::open(pins, false)
    }

    fn lock(&self, pins: &Pins) -> Result<Option<Lock>, DatapathError> {
        pins.lock().map(Some)
    }

    fn is_retired(&self, pins: &Pins) -> Result<bool, DatapathError> {
        is_retired(pins)
    }

    fn retire(&self, pins: &Pins) -> Result<(), DatapathError> {
        retire(pins)
    }

    fn begins_at(&self, pins: &Pins) -> Result<Vec<u64>, DatapathError> {
        links::begins_at(pins)
    }

    fn open_flows(&self, pins: &Pins) -> Result<u64, DatapathError> {
        match open_flows(pins) {
            // A start that was cut off has left no map of counts, and so no flow. Where links are pinned there was such
            // a map: it was removed, or that version has another name for it, so its flows cannot be counted.
            Err(error) if error.is_missing() && pins.link_names()?.is_empty() => Ok(0),
            result => result,
        }
    }

    fn detach(&self, pins: &Pins) -> Result<(), DatapathError> {
        detach(pins)
    }

    fn host_maps(&self, pins: &Path) -> Result<HostMaps, DatapathError> {
        HostMaps::open(pins)
    }

    fn wait_for_readers(&self) -> Result<(), DatapathError> {
        wait_for_readers()
    }
}
