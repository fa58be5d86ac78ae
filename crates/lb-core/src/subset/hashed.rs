//! Algorithms that sort backends by a hash: independent of the number of clients, without spacing,
//! uneven by chance.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::Position;
use super::random::mix64;

/// Distinguish the points of backends from those of clients.
const BACKEND: u64 = 0xB0;
const CLIENT: u64 = 0xF0;

/// `rendezvous` (highest random weight; gRPC's A68 `random_subsetting` does this): every client
/// ranks all backends by a hash of both.
pub(super) fn rendezvous(position: Position) -> impl Iterator<Item = u32> {
    let own = mix64(&[position.seed, position.client.into()]);
    ascending(position.backends, move |backend| mix64(&[own, backend]))
}

/// `consistent` (consistent hashing): clients and backends at hashed points of one ring, clockwise
/// from the client.
pub(super) fn consistent(position: Position) -> impl Iterator<Item = u32> {
    let seed = position.seed;
    let from = mix64(&[seed, CLIENT, position.client.into()]);
    ascending(position.backends, move |backend| mix64(&[seed, BACKEND, backend]).wrapping_sub(from))
}

/// All backends by key, ties by index. Lazy: making the heap takes n steps, and each backend log n.
fn ascending(backends: u32, key: impl Fn(u64) -> u64) -> impl Iterator<Item = u32> {
    let keys: Vec<_> = (0..backends).map(|backend| Reverse((key(backend.into()), backend))).collect();
    let mut heap = BinaryHeap::from(keys);
    std::iter::from_fn(move || heap.pop().map(|Reverse((_, backend))| backend))
}
