//! Deterministic aperture (Twitter, "Deterministic Aperture: A distributed, load balancing
//! algorithm", 2019; Finagle).
//!
//! Clients and backends divide one ring into equal parts. A client's aperture is an arc of whole
//! client parts, wide enough for the wanted size. The client uses each backend in proportion to its
//! overlap with the arc: every point of the ring is covered by the same number of clients, so the
//! load is exactly even. All numbers are whole units of 1 / (M * N) of the ring; Finagle's
//! implementation in floating point has needed six corrections.

use super::Position;
use super::random::{SplitMix64, mix64, shuffle};

/// Distinguishes the permutation's hash from other hashes.
const PERMUTATION: u64 = 0xA9;

/// The arc of a client on the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Arc {
    /// The backend where it begins, before any permutation.
    first: u32,
    /// The number of backends that it overlaps, each counted once.
    length: u32,
    /// First and last unit, the last excluded. `None` if it is the whole ring.
    units: Option<(u64, u64)>,
}

impl Arc {
    fn of(position: Position) -> Self {
        let (m, n) = (u64::from(position.clients), u64::from(position.backends));
        // In client parts, rounded up: only whole parts cover the ring evenly.
        let width = (u64::from(position.wanted()) * m).div_ceil(n.max(1));
        if width >= m {
            return Self { first: 0, length: position.backends, units: None };
        }
        let begin = u64::from(position.client) * n;
        let end = begin + width * n;
        let (first, last) = (begin / m, end.div_ceil(m));
        // An arc of nearly the whole ring may begin and end in the same backend.
        let length = (last - first).min(n);
        let small = |number: u64| u32::try_from(number).expect("at most the number of backends");
        Self { first: small(first), length: small(length), units: Some((begin, end)) }
    }

    /// The overlap with the `offset`-th backend from the first on, in units of 1 / M of a backend.
    fn overlap(self, position: Position, offset: u32) -> u64 {
        let (m, n) = (u64::from(position.clients), u64::from(position.backends));
        let Some((begin, end)) = self.units else { return m };
        // A backend's part, and the same part one turn later.
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

/// The overlaps of the aperture with its backends, in the order of the subset and in units of 1 / M
/// of a backend: the weight of the edge is the overlap divided by `position.clients`.
pub(super) fn overlaps(position: Position) -> impl Iterator<Item = u64> {
    let arc = Arc::of(position);
    (0..arc.length).map(move |offset| arc.overlap(position, offset))
}

/// `aperture`: the arc, and then further clockwise.
pub(super) fn aperture(position: Position) -> impl Iterator<Item = u32> {
    let first = Arc::of(position).first;
    (first..position.backends).chain(0..first)
}

/// `aperture-shuffled`: the same over permuted backends, so that a rolling restart in the order of
/// task numbers does not empty a client's arc (LinkedIn's rest.li does this).
pub(super) fn shuffled(position: Position) -> impl Iterator<Item = u32> {
    let mut permuted: Vec<u32> = (0..position.backends).collect();
    shuffle(&mut permuted, &mut SplitMix64::new(mix64(&[position.seed, PERMUTATION])));
    aperture(position).map(move |offset| permuted[offset as usize])
}
