//! Retired counters: the counts of backends that have left, keyed by service and address in case
//! the backends return.
//!
//! A slot is freed when nothing refers to it, and its next backend has other counts. A backend that
//! returns may get any slot. The backend's counts continue from the counts that are stored here, so
//! that its counts never decrease.

use std::io;
use std::net::SocketAddr;
use std::path::Path;

use lb_common::abi::{BackendName, NAME_BYTES, RetiredCounters, SlotCounters};
use lb_common::net::{Address, Be16};

use crate::error::DatapathError;
use crate::sys;
use crate::sys::elements::{self, Elements};

pub struct RetiredBackends {
    map: Box<dyn Elements>,
}

/// The key of a backend in the map of retired counters.
pub fn name(service: &str, address: SocketAddr) -> BackendName {
    let mut name = [0; NAME_BYTES];
    let bytes = service.as_bytes();
    assert!(bytes.len() < NAME_BYTES, "the configuration limits the length of names");
    name[..bytes.len()].copy_from_slice(bytes);
    BackendName {
        service: name,
        address: Address::from(address.ip()),
        port: Be16::from_host(address.port()),
        _reserved: 0,
    }
}

impl RetiredBackends {
    /// Opens the map that is pinned at `path`.
    ///
    /// # Errors
    /// If the map cannot be opened.
    pub fn open(path: &Path) -> Result<Self, DatapathError> {
        let fail = |source| DatapathError::Map { path: path.to_owned(), operation: "open", source };
        Ok(Self::over(Box::new(sys::open_pin(path).map_err(fail)?)))
    }

    pub fn over(map: Box<dyn Elements>) -> Self {
        Self { map }
    }

    /// The stored counters of a backend, if there are any.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn get(&self, name: &BackendName) -> io::Result<Option<RetiredCounters>> {
        elements::get(&*self.map, name)
    }

    /// Stores the counts of a backend that leaves. A backend without any counts needs no entry.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn store(
        &self,
        name: &BackendName,
        counts: SlotCounters,
        reclaimed: u64,
        left_ns: u64,
    ) -> io::Result<()> {
        if counts == SlotCounters::default() {
            return self.remove(name);
        }
        let retired = RetiredCounters { counts, reclaimed, left_ns };
        let set = || self.map.set(bytemuck::bytes_of(name), bytemuck::bytes_of(&retired));
        match set() {
            Err(error) if error.raw_os_error() == Some(libc::E2BIG) => {
                self.make_room()?;
                set()
            }
            result => result,
        }
    }

    /// Removes the stored counters of a backend.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn remove(&self, name: &BackendName) -> io::Result<()> {
        self.map.remove(bytemuck::bytes_of(name)).map(drop)
    }

    /// Removes the entries of the backends that left first. Removes an eighth of all entries at
    /// once, because each call must read all entries.
    fn make_room(&self) -> io::Result<()> {
        let mut all: Vec<(u64, BackendName)> = Vec::new();
        self.map.visit(size_of::<BackendName>(), size_of::<RetiredCounters>(), &mut |name, retired| {
            let retired: &RetiredCounters = bytemuck::from_bytes(retired);
            all.push((retired.left_ns, *bytemuck::from_bytes(name)));
        })?;
        all.sort_unstable_by_key(|(left_ns, _)| *left_ns);
        all.truncate(all.len().div_ceil(8));
        all.iter().try_for_each(|(_, name)| self.remove(name))
    }
}
