//! Algorithms that sort backends by a hash. The orders do not depend on the number of clients, but
//! chance makes the load uneven.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::Position;
use super::random::mix64;

/// These constants make the hashes of backends differ from the hashes of clients.
const BACKEND: u64 = 0xB0;
const CLIENT: u64 = 0xF0;

/// `rendezvous` (highest random weight, as in gRPC's A68 `random_subsetting`): every client ranks
/// all backends by a hash of client and backend.
pub(super) fn rendezvous(position: Position) -> impl Iterator<Item = u32> {
    let own = mix64(&[position.seed, position.client.into()]);
    ascending(position.backends, move |backend| mix64(&[own, backend]))
}

/// `consistent` (consistent hashing): clients and backends are at hashed points of one ring, and
/// the order goes clockwise from the client.
pub(super) fn consistent(position: Position) -> impl Iterator<Item = u32> {
    let seed = position.seed;
    let from = mix64(&[seed, CLIENT, position.client.into()]);
    ascending(position.backends, move |backend| mix64(&[seed, BACKEND, backend]).wrapping_sub(from))
}

/// All backends in the order of their keys; if keys are equal, in the order of their indexes. The
/// order is lazy: building the heap takes n steps, and each backend takes log n steps.
fn ascending(backends: u32, key: impl Fn(u64) -> u64) -> impl Iterator<Item = u32> {
    let keys: Vec<_> = (0..backends).map(|backend| Reverse((key(backend.into()), backend))).collect();
    let mut heap = BinaryHeap::from(keys);
    std::iter::from_fn(move || heap.pop().map(|Reverse((_, backend))| backend))
}
