//! Algorithms that place clients and backends on a ring by their numbers alone and go clockwise
//! from the client.
//!
//! They use no hash and no seed: their balance comes from the spacing. Consecutive numbers lie far
//! apart in the van der Corput forms, and side by side in `round-robin` and `ring`, where subsets
//! are runs of consecutive backends.

use super::Position;
use super::van_der_corput::{clockwise, from_rank, rank, vdc};

/// `round-robin` (the naive deal of the article's Figure 1): each client continues where the
/// previous one ended. Perfectly even, but a change of N or k moves almost all clients.
pub(super) fn round_robin(position: Position) -> impl Iterator<Item = u32> {
    let Position { client, backends, .. } = position;
    let n = u64::from(backends.max(1));
    consecutive(backends, u64::from(client) * u64::from(position.wanted()) % n)
}

/// `ring`: the deterministic aperture's coordinates with whole backends; client m of M begins at
/// m/M of the way around.
pub(super) fn ring(position: Position) -> impl Iterator<Item = u32> {
    let Position { client, clients, backends, .. } = position;
    consecutive(backends, scale(client, clients, backends))
}

/// `ringsteady` (the article's "Ringsteady" before any scaling): clients and backends at their
/// points of the same van der Corput sequence. An added backend takes one point and moves no other.
pub(super) fn ringsteady(position: Position) -> impl Iterator<Item = u32> {
    clockwise(position.backends, vdc(position.client.into()))
}

/// `ringsteady-scaled`: the same order of backends, evenly spaced on the ring. More even, but every
/// added backend moves all others a little.
pub(super) fn scaled(position: Position) -> impl Iterator<Item = u32> {
    from_scaled_point(position.backends, vdc(position.client.into()))
}

/// `ringsteady-both-scaled`: clients evenly spaced as well. Ideally even, but every client moves
/// when M changes.
pub(super) fn both_scaled(position: Position) -> impl Iterator<Item = u32> {
    let Position { client, clients, backends, .. } = position;
    let start = scale(rank(client, clients), clients, backends);
    ranked(backends, start)
}

/// The numbers below `n` in van der Corput order, evenly spaced on a ring, beginning with the first
/// at or after `point` (in units of 2^-64 of the ring).
pub(super) fn from_scaled_point(n: u32, point: u64) -> impl Iterator<Item = u32> {
    let start = (u128::from(point) * u128::from(n)).div_ceil(1 << 64);
    ranked(n, u64::try_from(start).expect("at most n"))
}

/// ceil(`part` * `n` / `whole`): the first of `n` evenly spaced points at or after the `part`-th of
/// `whole`.
fn scale(part: u32, whole: u32, n: u32) -> u64 {
    (u64::from(part) * u64::from(n)).div_ceil(u64::from(whole.max(1)))
}

/// The numbers below `n` in van der Corput order from rank `start` on, which may lie a whole turn
/// ahead.
fn ranked(n: u32, start: u64) -> impl Iterator<Item = u32> {
    from_rank(n, u32::try_from(start % u64::from(n.max(1))).expect("below n"))
}

/// 0 to `n` - 1 from `start` on, once around.
fn consecutive(n: u32, start: u64) -> impl Iterator<Item = u32> {
    let start = u32::try_from(start % u64::from(n.max(1))).expect("below n");
    (start..n).chain(0..start)
}
