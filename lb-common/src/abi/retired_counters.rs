//! The counters of backends that no longer have a slot. No kernel program uses them.

use bytemuck::{Pod, Zeroable};

use super::{NAME_BYTES, SlotCounters};
use crate::net::{Address, Be16};

/// The identity of a backend, independent of its slot: its service and its address.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct BackendName {
    /// The name of the backend's service, padded with zeros.
    pub service: [u8; NAME_BYTES],
    /// The backend's address.
    pub address: Address,
    /// The backend's port.
    pub port: Be16,
    /// Zero.
    pub _reserved: u16,
}
const _: () = assert!(size_of::<BackendName>() == 84);

/// The counters that a backend had when it left its slot. If the backend returns, its counters
/// continue from these. Only the daemon reads and writes them. They are in a kernel map so that
/// they outlive the daemon, and so that they are removed together with the other counters.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct RetiredCounters {
    /// Sums over all CPUs.
    pub counts: SlotCounters,
    /// The number of the backend's flows that were reclaimed.
    pub reclaimed: u64,
    /// When the backend left, in nanoseconds of `CLOCK_MONOTONIC`. If the map is full, the daemon
    /// removes the entries of the backends that left first.
    pub left_ns: u64,
}
const _: () = assert!(size_of::<RetiredCounters>() == 584);
