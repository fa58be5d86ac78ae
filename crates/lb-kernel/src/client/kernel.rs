//! The kernel operations of one client task: on the task's maps, its programs, and the links from
//! the programs to cgroups.
//!
//! [`PinnedClient`] is the implementation for the real kernel. `lb-fake` contains an implementation
//! in memory, which runs the code of the kernel programs on the host, so that tests of the daemon's
//! decisions need no privileges.

use std::io;
use std::path::{Path, PathBuf};

use lb_core::limits::Limits;
use lb_diag::SocketLists;

use super::detach::retire;
use super::hooks::Programs;
use super::links;
use super::object::{self, Purpose};
use super::tables::Tables;
use crate::error::DatapathError;
use crate::host::cgroup::{self, Cgroup};
use crate::host::pins::{self, Lock, Pins};
use crate::host::{features::Features, maps::HostMaps};
use crate::sys::{clock::monotonic_ns, cpus::possible_cpus, runs::Runs};

/// The kernel operations that one client task needs.
pub trait ClientKernel: Send + Sync {
    /// Creates or adopts the client's maps, and loads programs for them. Does not attach the
    /// programs.
    ///
    /// # Errors
    /// If existing pins are not socklb's, or have another shape than `limits` requires, or if the
    /// kernel refuses.
    fn open(
        &mut self,
        limits: &Limits,
        features: Features,
        purpose: Purpose,
    ) -> Result<Tables, DatapathError>;

    /// Loads programs for another [`Purpose`]. The next [`ClientKernel::attach`] replaces the
    /// attached programs.
    ///
    /// # Errors
    /// If the kernel refuses; the previous programs remain.
    fn load(&mut self, limits: &Limits, features: Features, purpose: Purpose) -> Result<(), DatapathError>;

    /// The time of the programs' clock, in nanoseconds.
    fn now_ns(&self) -> u64;

    /// The number of CPUs that the kernel may ever run on.
    ///
    /// # Errors
    /// If the kernel does not report the number.
    fn cpus(&self) -> io::Result<u32>;

    /// The cookie of the daemon's network namespace; `None` if the kernel does not report it
    /// (before Linux 5.14).
    fn own_namespace(&self) -> Option<u64>;

    /// The mount point of cgroup2.
    ///
    /// # Errors
    /// If the mount point cannot be found.
    fn mount(&self) -> Result<PathBuf, DatapathError>;

    /// The cgroup at a full path.
    ///
    /// # Errors
    /// [`DatapathError::NoCgroup`] if there is none; other errors if the path does not lead to
    /// cgroup2, or the cgroup cannot be read.
    fn cgroup(&self, path: &Path) -> Result<Cgroup, DatapathError>;

    /// Whether the cgroup with this id is at a full path. This check takes only one system call.
    fn is_cgroup(&self, path: &Path, id: u64) -> bool;

    /// Attaches the programs to the cgroup, in place of older programs of this client. Also
    /// replaces the programs at links to the client's earlier cgroups.
    ///
    /// # Errors
    /// If the kernel refuses; older programs remain attached.
    fn attach(&self, cgroup: &Cgroup) -> Result<(), DatapathError>;

    /// Whether all loaded programs are attached to the cgroup with this id, and no link remains
    /// that the present kind of accounting does not need.
    ///
    /// # Errors
    /// If the links cannot be read.
    fn is_fully_attached(&self, cgroup: u64) -> Result<bool, DatapathError>;

    /// Whether the client's programs, of any build, balance the connects of the cgroup with this
    /// id.
    ///
    /// # Errors
    /// If the links cannot be read.
    fn is_balanced(&self, cgroup: u64) -> Result<bool, DatapathError>;

    /// The ids of the cgroups in which the client's flows begin.
    ///
    /// # Errors
    /// If the links cannot be read.
    fn begins_at(&self) -> Result<Vec<u64>, DatapathError>;

    /// Detaches the programs that begin flows from all cgroups except this one. In those cgroups,
    /// the remaining programs track the open flows until they end.
    ///
    /// # Errors
    /// If a link cannot be removed.
    fn leave_other_cgroups(&self, cgroup: u64) -> Result<(), DatapathError>;

    /// Like [`ClientKernel::leave_other_cgroups`], but for a client without a cgroup at its present
    /// path. A link to a removed cgroup remains, because sockets that were created in that cgroup
    /// can still connect.
    ///
    /// # Errors
    /// If a link cannot be read or removed.
    fn leave_cgroups_elsewhere(&self, path: &Path) -> Result<(), DatapathError>;

    /// Whether links to cgroups other than this one remain. The programs at these links track the
    /// flows of sockets that were created in these cgroups.
    ///
    /// # Errors
    /// If the links cannot be read.
    fn has_old_links(&self, cgroup: u64) -> Result<bool, DatapathError>;

    /// Removes the links to cgroups other than this one. Call this only when no flow is open,
    /// because afterwards no program processes the end of a flow in those cgroups.
    ///
    /// # Errors
    /// If a link cannot be removed.
    fn remove_old_links(&self, cgroup: u64) -> Result<(), DatapathError>;

    /// Whether the client's pins are still those that this value has opened. The result is `false`
    /// if the pins were removed or recreated.
    ///
    /// # Errors
    /// If the pins cannot be read.
    fn is_pinned(&self) -> Result<bool, DatapathError>;

    /// The number and the total time of the programs' runs, for each hook. A hook is omitted if the
    /// kernel does not count its runs.
    ///
    /// # Errors
    /// If the kernel does not report the runs.
    fn runs(&self) -> io::Result<Vec<(&'static str, Runs)>>;

    /// Releases all resources, and returns the lock of the pins if there is one.
    fn into_lock(self: Box<Self>) -> Option<Lock>;
}

/// A client task in the kernel, identified by its pins.
pub struct PinnedClient {
    pins: Pins,
    /// The lock is held while the maps may be written.
    lock: Lock,
    programs: Programs,
}

impl PinnedClient {
    /// Locks the pins of a client. Does not open maps yet.
    ///
    /// # Errors
    /// If another process has locked the pins, or they cannot be locked.
    pub fn lock(pins: Pins) -> Result<Self, DatapathError> {
        Ok(Self { lock: pins.lock()?, pins, programs: Programs::new(Vec::new()) })
    }
}

impl ClientKernel for PinnedClient {
    fn open(
        &mut self,
        limits: &Limits,
        features: Features,
        purpose: Purpose,
    ) -> Result<Tables, DatapathError> {
        self.pins.create()?;
        object::check_pins(&self.pins, limits)?;
        self.load(limits, features, purpose)?;
        Tables::open(&self.pins, true)
    }

    fn load(&mut self, limits: &Limits, features: Features, purpose: Purpose) -> Result<(), DatapathError> {
        // Prevents the removal of the host's maps until the programs refer to them.
        let host = HostMaps::open(self.pins.base())?;
        self.programs = object::load(&self.pins, limits, features, purpose)?;
        drop(host);
        Ok(())
    }

    fn now_ns(&self) -> u64 {
        monotonic_ns()
    }

    fn cpus(&self) -> io::Result<u32> {
        possible_cpus()
    }

    fn own_namespace(&self) -> Option<u64> {
        SocketLists::open().and_then(|lists| lists.namespace()).ok()
    }

    fn mount(&self) -> Result<PathBuf, DatapathError> {
        cgroup::cgroup2_mount()
    }

    fn cgroup(&self, path: &Path) -> Result<Cgroup, DatapathError> {
        Cgroup::at(path)
    }

    fn is_cgroup(&self, path: &Path, id: u64) -> bool {
        cgroup::id_at(path).is_ok_and(|there| there == id)
    }

    fn attach(&self, cgroup: &Cgroup) -> Result<(), DatapathError> {
        // The directories may have been removed together with the links.
        self.pins.create()?;
        links::attach(&self.programs, &self.pins, cgroup)
    }

    fn is_fully_attached(&self, cgroup: u64) -> Result<bool, DatapathError> {
        links::are_fully_attached(&self.programs, &self.pins, cgroup)
    }

    fn is_balanced(&self, cgroup: u64) -> Result<bool, DatapathError> {
        links::is_balanced(&self.pins, cgroup)
    }

    fn begins_at(&self) -> Result<Vec<u64>, DatapathError> {
        links::begins_at(&self.pins)
    }

    fn leave_other_cgroups(&self, cgroup: u64) -> Result<(), DatapathError> {
        links::leave(&self.pins, cgroup)
    }

    fn leave_cgroups_elsewhere(&self, path: &Path) -> Result<(), DatapathError> {
        match links::balanced_cgroup(&self.pins)?.and_then(cgroup::path_of) {
            Some(other) if other != path => retire(&self.pins),
            _ => Ok(()),
        }
    }

    fn has_old_links(&self, cgroup: u64) -> Result<bool, DatapathError> {
        Ok(!links::old_links(&self.pins, cgroup)?.is_empty())
    }

    fn remove_old_links(&self, cgroup: u64) -> Result<(), DatapathError> {
        for name in links::old_links(&self.pins, cgroup)? {
            pins::detach(&self.pins.links().join(name))?;
        }
        Ok(())
    }

    fn is_pinned(&self) -> Result<bool, DatapathError> {
        self.pins.are_locked_by(&self.lock)
    }

    fn runs(&self) -> io::Result<Vec<(&'static str, Runs)>> {
        self.programs.runs()
    }

    fn into_lock(self: Box<Self>) -> Option<Lock> {
        Some(self.lock)
    }
}
