//! The verdicts of backends, as the kernel programs read them: the pinned verdict array, mapped
//! into memory.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result};
use aya::maps::MapData;
use lb_common::abi::host::{LastReport, REPORT_IDS, ReportBase, Sender, SenderName, map};
use lb_common::net::Be16;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use stage::Setup;

use super::load::now_ns;

const LENGTH: usize = REPORT_IDS as usize * size_of::<u64>();

/// The mapped verdict array.
pub struct Verdicts {
    words: NonNull<AtomicU64>,
    backends: Vec<SocketAddr>,
    /// The report ids of the backends.
    ids: Vec<u32>,
    _map: MapData,
}

/// The state that reports change.
#[derive(Debug, PartialEq)]
pub struct State {
    /// All words that are not 0, with their ids.
    words: Vec<(u32, u64)>,
    /// The number of the last accepted report about each backend.
    bases: Vec<ReportBase>,
}

// SAFETY: the array is only read, by atomic loads.
unsafe impl Sync for Verdicts {}
// SAFETY: the array is only read, by atomic loads, and the mapping belongs to the process.
unsafe impl Send for Verdicts {}

impl Verdicts {
    /// Maps the array of a host with these backends.
    pub fn open(setup: &Setup, backends: &[SocketAddr]) -> Result<Self> {
        let ids = backends.iter().map(|backend| Ok(registered(setup, *backend)?.0)).collect::<Result<_>>()?;
        let map = MapData::from_pin(setup.host_map(map::VERDICTS))?;
        // SAFETY: a new mapping of the whole array, at an address that the kernel chooses.
        let words = unsafe {
            mmap(std::ptr::null_mut(), LENGTH, ProtFlags::READ, MapFlags::SHARED, map.fd().as_fd(), 0)
        }?;
        let words = NonNull::new(words.cast()).context("the mapping has no address")?;
        Ok(Self { words, backends: backends.to_vec(), ids, _map: map })
    }

    /// The word of a report id: the time until which the backend is a lame duck; 0 if the backend
    /// is not a lame duck.
    fn word(&self, id: u32) -> u64 {
        assert!(id < REPORT_IDS, "the report id is below `REPORT_IDS`");
        // SAFETY: the id is inside the mapping, which exists as long as `self`. The words are whole
        // and aligned.
        unsafe { self.words.add(id as usize).as_ref() }.load(Ordering::Acquire)
    }

    /// Returns whether the backend with this number is a lame duck.
    pub fn is_lame(&self, number: usize) -> bool {
        self.word(self.ids[number]) > now_ns()
    }

    /// The number of backends that are lame ducks.
    pub fn lame(&self) -> usize {
        (0..self.ids.len()).filter(|number| self.is_lame(*number)).count()
    }

    pub fn state(&self, setup: &Setup) -> Result<State> {
        let words = (0..REPORT_IDS).map(|id| (id, self.word(id))).filter(|(_, word)| *word != 0).collect();
        let bases = self.backends.iter().map(|backend| Ok(registered(setup, *backend)?.1));
        Ok(State { words, bases: bases.collect::<Result<_>>()? })
    }
}

impl Drop for Verdicts {
    fn drop(&mut self) {
        // SAFETY: `open` has mapped this range, and nothing refers to it any more.
        let _ = unsafe { munmap(self.words.as_ptr().cast(), LENGTH) };
    }
}

/// A backend's report id, and the number of the last accepted report about the backend, from the
/// maps of a host.
fn registered(setup: &Setup, backend: SocketAddr) -> Result<(u32, ReportBase)> {
    let name = SenderName {
        address: backend.ip().into(),
        port: Be16::from_host(backend.port()),
        protocol: 6,
        _reserved: 0,
    };
    let senders = stage::maps::hash::<SenderName, Sender>(&setup.host_map(map::SENDERS));
    let sender =
        senders.get(&stage::maps::Raw(name), 0).with_context(|| format!("{backend} is not registered"))?;
    let id = sender.0.id;
    let last = stage::maps::array::<LastReport>(&setup.host_map(map::LAST_REPORTS)).get(&id, 0)?;
    Ok((id, last.0.base))
}
