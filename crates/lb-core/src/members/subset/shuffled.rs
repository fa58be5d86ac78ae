//! Random and deterministic subsetting of the SRE book ("Site Reliability Engineering", chapter
//! 20): random subsetting shuffles the backends once for each client, and deterministic subsetting
//! shuffles them once for each round of clients.
//!
//! *The article* is "Reinventing Backend Subsetting at Google" (ACM Queue 2022).

use super::Position;
use super::random::{SplitMix64, mix64, shuffle};

/// `random` (the book's "random subset"): every client shuffles all backends for itself. Chance
/// makes the load uneven unless there are very many clients. `random` is the reference for
/// comparisons.
pub(super) fn random(position: Position) -> impl Iterator<Item = u32> {
    shuffled((0..position.backends).collect(), position.seed, position.client).into_iter()
}

/// `deterministic-book` (the book's listing): clients are cut into rounds. Each round shuffles the
/// backends, and each of its clients takes a slice. If the number of backends is not a multiple of
/// the slice's length, some backends are left over, and no client of the round uses these.
pub(super) fn deterministic_book(position: Position) -> impl Iterator<Item = u32> {
    let Some(slice) = Slice::of(position) else { return Vec::new().into_iter() };
    let shuffled = shuffled((0..position.backends).collect(), position.seed, slice.round);
    let (slices, leftover) = shuffled.split_at(slice.in_slices as usize);
    slice.order(slices, leftover)
}

/// `deterministic` (the article's "deterministic with leftovers"): like `deterministic-book`, but
/// each round excludes different backends, so that over many rounds all backends are used equally
/// often.
pub(super) fn deterministic(position: Position) -> impl Iterator<Item = u32> {
    let Some(slice) = Slice::of(position) else { return Vec::new().into_iter() };
    let n = position.backends;
    let leftovers = n - slice.in_slices;
    let first = u64::from(slice.round) * u64::from(leftovers) % u64::from(n);
    let first = u32::try_from(first).expect("the remainder is below n");
    let aside: Vec<u32> = (first..n).chain(0..first).take(leftovers as usize).collect();
    // The backends that are left out have consecutive indexes, wrapping around at the end.
    let rest = (0..n).filter(|&backend| (backend + n - first) % n >= leftovers).collect();
    slice.order(&shuffled(rest, position.seed, slice.round), &aside)
}

fn shuffled(mut backends: Vec<u32>, seed: u64, number: u32) -> Vec<u32> {
    shuffle(&mut backends, &mut SplitMix64::new(mix64(&[seed, number.into()])));
    backends
}

/// A client's slice of its round.
struct Slice {
    round: u32,
    /// The slice's first position in the shuffled backends.
    start: usize,
    /// The number of backends in all slices of a round.
    in_slices: u32,
}

impl Slice {
    /// `None` if there are no backends to deal.
    fn of(position: Position) -> Option<Self> {
        let wanted = position.wanted();
        let slices = position.backends.checked_div(wanted)?;
        let start = (position.client % slices * wanted) as usize;
        Some(Self { round: position.client / slices, start, in_slices: slices * wanted })
    }

    /// The client's own slice, then the other slices once around, and then the backends that are
    /// left over.
    fn order(&self, slices: &[u32], leftover: &[u32]) -> std::vec::IntoIter<u32> {
        let (before, from) = slices.split_at(self.start);
        [from, before, leftover].concat().into_iter()
    }
}
