//! Retired counters: what was counted of backends that have left, kept by service and address for when they return.
//!
//! A slot is freed once nothing refers to it, and its next backend begins with counters of its own. A backend that
//! returns may get any slot; it goes on with what is kept here, so that its counts never run backwards.

use std::io;
use std::net::SocketAddr;
use std::path::Path;

use lb_common::abi::{BackendName, NAME_BYTES, RetiredCounters, SlotCounters};
use lb_common::net::{Address, Be16};

use crate::error::DatapathError;
use crate::sys;
use crate::sys::elements::{self, Elements};

/// The counters of one client's backends that have left.
pub struct RetiredBackends {
    map: Box<dyn Elements>,
}

/// What a backend is known by.
pub fn name(service: &str, address: SocketAddr) -> BackendName {
    let mut name = [0; NAME_BYTES];
    let bytes = service.as_bytes();
    assert!(bytes.len() < NAME_BYTES, "the configuration bounds names");
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
    /// If it cannot be opened.
    pub fn open(path: &Path) -> Result<Self, DatapathError> {
        let fail = |source| DatapathError::Map { path: path.to_owned(), operation: "open", source };
        Ok(Self::over(Box::new(sys::open_pin(path).map_err(fail)?)))
    }

    /// Those that lie in `map`.
    pub fn over(map: Box<dyn Elements>) -> Self {
        Self { map }
    }

    /// What is kept of a backend, if anything is.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn get(&self, name: &BackendName) -> io::Result<Option<RetiredCounters>> {
        elements::get(&*self.map, name)
    }

    /// Keeps what was counted of a backend that leaves. One of which nothing was counted needs no entry.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn keep(
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

    /// Removes what is kept of a backend.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn remove(&self, name: &BackendName) -> io::Result<()> {
        self.map.remove(bytemuck::bytes_of(name)).map(drop)
    }

    /// Removes what is kept of those that left first: an eighth at a time, because all of them have to be read for it.
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
