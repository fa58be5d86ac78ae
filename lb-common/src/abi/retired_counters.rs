//! The counters of backends that no longer have a slot. Only the daemon uses them, no program does.

use bytemuck::{Pod, Zeroable};

use super::{NAME_BYTES, SlotCounters};
use crate::net::{Address, Be16};

/// The identity of a backend, independent of its slot: its service and its address.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct BackendName {
    /// Name of its service, padded with zeros.
    pub service: [u8; NAME_BYTES],
    /// Its address.
    pub address: Address,
    /// Its port.
    pub port: Be16,
    /// Zero.
    pub _reserved: u16,
}
const _: () = assert!(size_of::<BackendName>() == 84);

/// The counters of a backend when it left its slot. They continue if it returns. Written and read
/// by the daemon only; they are in a map so that they outlive the daemon and end together with the
/// other counters.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct RetiredCounters {
    /// Sums over all CPUs.
    pub counts: SlotCounters,
    /// Flows that were reclaimed.
    pub reclaimed: u64,
    /// When it left, by `CLOCK_MONOTONIC`: if the map is full, the entry of the backend that left
    /// first is removed.
    pub left_ns: u64,
}
const _: () = assert!(size_of::<RetiredCounters>() == 584);
