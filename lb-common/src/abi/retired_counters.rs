//! What was counted of backends that have no slot any more. The daemon's own: no program uses it.

use bytemuck::{Pod, Zeroable};

use super::{NAME_BYTES, SlotCounters};
use crate::net::{Address, Be16};

/// What a backend is known by, whatever slot it has: its service and its address.
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

/// What was counted of a backend until it left its slot. It goes on with that if it returns. Written and read by the
/// daemon only; in a map so that it outlives the daemon, and ends with the counts of the others.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct RetiredCounters {
    /// Over all CPUs.
    pub counts: SlotCounters,
    /// Flows that were reclaimed.
    pub reclaimed: u64,
    /// When it left, by `CLOCK_MONOTONIC`: where there is no room, those that left first are forgotten.
    pub left_ns: u64,
}
const _: () = assert!(size_of::<RetiredCounters>() == 584);
