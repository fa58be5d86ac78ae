//! Which backend a connect goes to: one function, run by the kernel programs and by the tests on the host.
//!
//! A walk goes over the service's schedule, one entry per connect. An entry whose backend may not be chosen is skipped,
//! at most [`MAX_SKIPS`] times; then the service's fallback is taken. It knows nothing of weights: they are in the
//! schedule already.

use crate::abi::{MAX_SCHEDULE_LOG2, MAX_SKIPS, MIN_SCHEDULE_LOG2, NO_SLOT, TableRef, Walk};

/// The tables as one side sees them.
pub trait Tables {
    /// A reference to a backend.
    type Backend: Copy;

    /// The slot at an entry of the schedule map, or `None` past its end.
    fn entry(&self, entry: u32) -> Option<u32>;

    /// The backend in a slot, or `None` past the end of the map.
    fn backend(&self, slot: u32) -> Option<Self::Backend>;

    /// Whether the backend's state word allows it to be chosen.
    fn is_usable(&self, backend: Self::Backend) -> bool;

    /// The service's fallback word. Asked last: the daemon stores it before the state words that need it.
    fn fallback(&self) -> u32;
}

/// How a pick ended.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pick<B> {
    /// The schedule named this slot and backend.
    Scheduled(u32, B),
    /// Every entry looked at was unusable; this is the service's fallback.
    Fallback(u32, B),
    /// No usable backend.
    Refused,
    /// The tables contradict each other.
    Broken,
}

/// The position in a table that a walk points to: its start, moved on by its phase. The caller masks it by the length.
#[inline(always)]
pub fn position(walk: Walk, length_log2: u8) -> u32 {
    // A start is a fraction of the table, so it keeps its meaning when the length changes.
    walk.phase.wrapping_add(walk.start >> ((32 - u32::from(length_log2)) & 31))
}

/// Picks a backend from `table` for a walk that stands at `walk`.
#[inline(always)]
pub fn pick<T: Tables>(tables: &T, table: TableRef, walk: Walk) -> Pick<T::Backend> {
    if !table.is_empty() {
        if table.length_log2 < MIN_SCHEDULE_LOG2 || table.length_log2 > MAX_SCHEDULE_LOG2 {
            return Pick::Broken;
        }
        let mask = (1u32 << table.length_log2) - 1;
        let first = position(walk, table.length_log2);
        // Bound: 1 + MAX_SKIPS entries.
        for skipped in 0..=MAX_SKIPS {
            let entry = table.base.wrapping_add(first.wrapping_add(skipped) & mask);
            let Some(slot) = tables.entry(entry) else { return Pick::Broken };
            if slot == NO_SLOT {
                continue;
            }
            let Some(backend) = tables.backend(slot) else { return Pick::Broken };
            if tables.is_usable(backend) {
                return Pick::Scheduled(slot, backend);
            }
        }
    }
    let slot = tables.fallback();
    if slot == NO_SLOT {
        return Pick::Refused;
    }
    match tables.backend(slot) {
        Some(backend) => Pick::Fallback(slot, backend),
        None => Pick::Broken,
    }
}
