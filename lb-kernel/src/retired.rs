//! What was counted of backends that have left: kept by service and address, whatever slot they had, for when they return.
//!
//! A slot is freed once nothing refers to it, and its next backend begins with counters of its own. A backend that
//! returns may get any slot; it goes on with what is kept here, so that its counts never run backwards.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use lb_common::abi::{BackendName, NAME_BYTES, RetiredCounters, SlotCounters};
use lb_common::net::{Address, Be16};

use super::error::DatapathError;
use super::sys;
use super::sys::elements;
use crate::clock::monotonic_ns;

/// The backends of one client that have left.
pub struct RetiredBackends {
    map: OwnedFd,
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
        Ok(Self { map: sys::open_pin(path).map_err(fail)? })
    }

    /// What is kept of a backend, if anything is.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn of(&self, who: &BackendName) -> io::Result<Option<RetiredCounters>> {
        elements::get(self.map.as_fd(), who)
    }

    /// Keeps what was counted of a backend that leaves. One of which nothing was counted is not worth a place.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn keep(&self, who: &BackendName, counts: SlotCounters, swept: u64) -> io::Result<()> {
        if counts == SlotCounters::default() {
            return self.forget(who);
        }
        let left_ns = monotonic_ns();
        let departed = [RetiredCounters { counts, swept, left_ns }];
        match elements::set(self.map.as_fd(), who, &departed) {
            Err(error) if error.raw_os_error() == Some(libc::E2BIG) => {
                self.make_room()?;
                elements::set(self.map.as_fd(), who, &departed)
            }
            result => result,
        }
    }

    /// Forgets a backend, which is back.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn forget(&self, who: &BackendName) -> io::Result<()> {
        elements::remove(self.map.as_fd(), who).map(drop)
    }

    /// Forgets those that left first: an eighth of them at a time, because it takes a look at all.
    fn make_room(&self) -> io::Result<()> {
        let mut all = Vec::new();
        elements::visit(self.map.as_fd(), |who: &BackendName, departed: &RetiredCounters| {
            all.push((departed.left_ns, *who));
        })?;
        all.sort_unstable_by_key(|(left_ns, _)| *left_ns);
        all.truncate(all.len().div_ceil(8));
        elements::remove_all(self.map.as_fd(), all.into_iter().map(|(_, who)| who).collect())
    }
}
