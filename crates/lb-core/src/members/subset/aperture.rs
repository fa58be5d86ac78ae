//! Deterministic aperture (Twitter, "Deterministic Aperture: A distributed, load balancing
//! algorithm", 2019; Finagle).
//!
//! Clients divide a ring into M equal parts, and backends divide the same ring into N equal parts.
//! A client's aperture is an arc of whole client parts, wide enough for the wanted size. The client
//! uses each backend in proportion to its overlap with the arc. Every point of the ring is in the
//! same number of arcs, so the load is exactly even. All numbers are whole multiples of 1 / (M * N)
//! of the ring, because Finagle's implementation in floating point needed six corrections.

use super::Position;
use super::random::{SplitMix64, mix64, shuffle};

/// Makes the hash of the permutation differ from other hashes of the seed.
const PERMUTATION: u64 = 0xA9;

/// The arc of a client on the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Arc {
    /// The backend in which the arc begins, before any permutation.
    first: u32,
    /// The number of backends that the arc overlaps, each counted once.
    length: u32,
    /// The range of the arc in units of 1 / (M * N) of the ring; the end is excluded. `None` if the
    /// arc is the whole ring.
    units: Option<(u64, u64)>,
}

impl Arc {
    fn of(position: Position) -> Self {
        let (m, n) = (u64::from(position.clients), u64::from(position.backends));
        // The width is in client parts. It is rounded up, because only whole parts cover the ring
        // evenly.
        let width = (u64::from(position.wanted()) * m).div_ceil(n.max(1));
        if width >= m {
            return Self { first: 0, length: position.backends, units: None };
        }
        let begin = u64::from(position.client) * n;
        let end = begin + width * n;
        let (first, last) = (begin / m, end.div_ceil(m));
        // An arc of nearly the whole ring may begin and end in the same backend.
        let length = (last - first).min(n);
        let small =
            |number: u64| u32::try_from(number).expect("the number is at most the number of backends");
        Self { first: small(first), length: small(length), units: Some((begin, end)) }
    }

    /// The overlap with the backend at the distance `offset` after the first one, in units of 1 / M
    /// of a backend.
    fn overlap(self, position: Position, offset: u32) -> u64 {
        let (m, n) = (u64::from(position.clients), u64::from(position.backends));
        let Some((begin, end)) = self.units else { return m };
        // The overlap with the backend's part of the ring, and with the same part one turn later.
        let part = |turn: u64| {
            let from = (u64::from(self.first) + u64::from(offset) + turn * n) * m;
            (from + m).min(end).saturating_sub(from.max(begin))
        };
        part(0) + part(1)
    }
}

/// The number of backends that the aperture of a client overlaps.
pub(super) fn length(position: Position) -> u32 {
    Arc::of(position).length
}

/// The overlap of the aperture with each of its backends, in units of 1 / M of a backend. The order
/// is that of the subset.
pub(super) fn overlaps(position: Position) -> impl Iterator<Item = u64> {
    let arc = Arc::of(position);
    (0..arc.length).map(move |offset| arc.overlap(position, offset))
}

/// `aperture`: the backends of the arc, then the other backends, clockwise.
pub(super) fn aperture(position: Position) -> impl Iterator<Item = u32> {
    let first = Arc::of(position).first;
    (first..position.backends).chain(0..first)
}

/// `aperture-shuffled`: `aperture` over permuted backends, as in LinkedIn's rest.li, so that a
/// rolling restart in the order of task numbers does not stop all backends of a client's arc at
/// once.
pub(super) fn shuffled(position: Position) -> impl Iterator<Item = u32> {
    let mut permuted: Vec<u32> = (0..position.backends).collect();
    shuffle(&mut permuted, &mut SplitMix64::new(mix64(&[position.seed, PERMUTATION])));
    aperture(position).map(move |offset| permuted[offset as usize])
}
