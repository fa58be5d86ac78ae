//! The kernel of a host, as the daemon's controller uses it: cgroups, pinned clients, and the maps
//! of the host. [`ClientKernel`] is the part for one running client task.
//!
//! [`Linux`] is the implementation for the real kernel. `lb-fake` contains an implementation in
//! memory, so that tests of the daemon's decisions need no privileges.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::client::detach::{detach, is_retired, retire};
use crate::client::{ClientKernel, PinnedClient, links, maps::open_flows, tables::Tables};
use crate::error::DatapathError;
use crate::host::cgroup::{self, Cgroup};
use crate::host::maps::HostMaps;
use crate::host::pins::{Lock, Pins};
use crate::read::namespaces::SocketSearch;
use crate::read::reclaim::{FlowKernel, ReclaimTarget};
use crate::read::{holders, records::Records};
use crate::sys::{clock::monotonic_ns, readers::wait_for_readers};

/// The kernel of a host.
pub trait Kernel: FlowKernel {
    /// The time of the programs' clock, in nanoseconds.
    fn now_ns(&self) -> u64;

    /// The mount point of cgroup2.
    ///
    /// # Errors
    /// If the mount point cannot be found.
    fn mount(&self) -> Result<PathBuf, DatapathError>;

    /// The cgroup at a full path.
    ///
    /// # Errors
    /// The errors of [`ClientKernel::cgroup`].
    fn cgroup(&self, path: &Path) -> Result<Cgroup, DatapathError>;

    /// The pins of all clients below `pins`, of any ABI version, sorted by name and version.
    ///
    /// # Errors
    /// If the directory exists and cannot be read.
    fn clients(&self, pins: &Path) -> Result<Vec<Pins>, DatapathError>;

    /// Locks the pins of a client. Does not open the maps.
    ///
    /// # Errors
    /// If another process has locked the pins, or they cannot be locked.
    fn client(&self, pins: Pins) -> Result<Box<dyn ClientKernel>, DatapathError>;

    /// Opens the maps of a client for reading.
    ///
    /// # Errors
    /// If a map is missing or cannot be opened.
    fn tables(&self, pins: &Pins) -> Result<Tables, DatapathError>;

    /// Locks the pins of a client against other writers; `None` if this implementation has no lock.
    ///
    /// # Errors
    /// If another process holds the lock, or the lock cannot be acquired.
    fn lock(&self, pins: &Pins) -> Result<Option<Lock>, DatapathError>;

    /// Whether a client was retired. No new flow of a retired client begins, but the programs track
    /// its open flows until the flows end.
    ///
    /// # Errors
    /// If the pins cannot be read.
    fn is_retired(&self, pins: &Pins) -> Result<bool, DatapathError>;

    /// Retires a client: no new flow of the client begins, but the programs track its open flows
    /// until the flows end.
    ///
    /// # Errors
    /// If a link cannot be removed.
    fn retire(&self, pins: &Pins) -> Result<(), DatapathError>;

    /// The ids of the cgroups in which a client's flows begin.
    ///
    /// # Errors
    /// If the links cannot be read.
    fn begins_at(&self, pins: &Pins) -> Result<Vec<u64>, DatapathError>;

    /// The number of open flows of a leaving client of any ABI version.
    ///
    /// # Errors
    /// If the flows cannot be counted.
    fn open_flows(&self, pins: &Pins) -> Result<u64, DatapathError>;

    /// Removes a client from the kernel.
    ///
    /// # Errors
    /// If a pin cannot be removed.
    fn detach(&self, pins: &Pins) -> Result<(), DatapathError>;

    /// Opens the maps that all clients below `pins` share, and creates missing ones.
    ///
    /// # Errors
    /// The errors of [`HostMaps::open`].
    fn host_maps(&self, pins: &Path) -> Result<HostMaps, DatapathError>;
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
            // If no links are pinned, a start was interrupted before it created the map, so there
            // are no flows. If links are pinned, the map existed: it was removed, or the other
            // version uses another name for it, so the flows cannot be counted.
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
}

impl FlowKernel for Linux {
    fn records(&self, pins: &Pins) -> Result<Records, DatapathError> {
        Records::open(pins)
    }

    fn search(&self, target: &ReclaimTarget, turn: usize) -> Box<dyn SocketSearch> {
        Box::new(target.namespaces(turn))
    }

    fn in_use(&self, wanted: &BTreeSet<u64>) -> Result<BTreeSet<u64>, DatapathError> {
        holders::in_use(wanted)
    }

    fn wait_for_readers(&self) -> Result<(), DatapathError> {
        wait_for_readers()
    }
}
