//! Algorithms that place clients and backends on a ring by their numbers; an order goes clockwise
//! from the client.
//!
//! They use no hash and no seed: the load is even because the points are evenly spaced. In
//! `round-robin` and `ring`, consecutive numbers are next to each other, so that subsets are runs
//! of consecutive backends. In the algorithms that use the van der Corput sequence, consecutive
//! numbers are far apart.
//!
//! *The article* is "Reinventing Backend Subsetting at Google" (ACM Queue 2022).

use super::Position;
use super::van_der_corput::{clockwise, from_rank, rank, vdc};

/// `round-robin` (Figure 1 of the article): the subset of each client begins where the subset of
/// the previous client ends. The load is perfectly even, but a change of N or k moves almost all
/// clients.
pub(super) fn round_robin(position: Position) -> impl Iterator<Item = u32> {
    let Position { client, backends, .. } = position;
    let n = u64::from(backends.max(1));
    consecutive(backends, u64::from(client) * u64::from(position.wanted()) % n)
}

/// `ring`: the coordinates of the deterministic aperture, but without fractions of backends. Client
/// m of M begins at m/M of the ring.
pub(super) fn ring(position: Position) -> impl Iterator<Item = u32> {
    let Position { client, clients, backends, .. } = position;
    consecutive(backends, scale(client, clients, backends))
}

/// `ringsteady` (the article's "Ringsteady" without scaling): clients and backends are at their
/// points of one van der Corput sequence. An added backend takes a new point and moves no other
/// backend.
pub(super) fn ringsteady(position: Position) -> impl Iterator<Item = u32> {
    clockwise(position.backends, vdc(position.client.into()))
}

/// `ringsteady-scaled`: backends in the order of `ringsteady`, but evenly spaced on the ring. The
/// load is more even, but every added backend moves all other backends a little.
pub(super) fn scaled(position: Position) -> impl Iterator<Item = u32> {
    from_scaled_point(position.backends, vdc(position.client.into()))
}

/// `ringsteady-both-scaled`: backends and clients are evenly spaced. The load is as even as
/// possible, but every client moves when M changes.
pub(super) fn both_scaled(position: Position) -> impl Iterator<Item = u32> {
    let Position { client, clients, backends, .. } = position;
    let start = scale(rank(client, clients), clients, backends);
    ranked(backends, start)
}

/// The numbers below `n`, which are evenly spaced on a ring in van der Corput order. The sequence
/// begins with the first number at or after `point`, which is in units of 2^-64 of the ring.
pub(super) fn from_scaled_point(n: u32, point: u64) -> impl Iterator<Item = u32> {
    let start = (u128::from(point) * u128::from(n)).div_ceil(1 << 64);
    ranked(n, u64::try_from(start).expect("the start is at most n"))
}

/// ceil(`part` * `n` / `whole`): the first of `n` evenly spaced points that is not before point
/// number `part` of `whole` evenly spaced points.
fn scale(part: u32, whole: u32, n: u32) -> u64 {
    (u64::from(part) * u64::from(n)).div_ceil(u64::from(whole.max(1)))
}

/// The numbers below `n` in van der Corput order, beginning with rank `start`. `start` may be `n`
/// or more; it is taken modulo `n`.
fn ranked(n: u32, start: u64) -> impl Iterator<Item = u32> {
    from_rank(n, u32::try_from(start % u64::from(n.max(1))).expect("the remainder is below n"))
}

/// The numbers below `n`, once around, beginning with `start`. `start` is taken modulo `n`.
fn consecutive(n: u32, start: u64) -> impl Iterator<Item = u32> {
    let start = u32::try_from(start % u64::from(n.max(1))).expect("the remainder is below n");
    (start..n).chain(0..start)
}
