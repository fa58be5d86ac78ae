//! `p2c`, power of two choices: of two random entries of the schedule the one whose backend has the lower load for its
//! weight.
//!
//! Drawing from the schedule makes weights and structural shares decide who is compared, and dividing the load by them
//! keeps the comparison fair: a backend that is to get half as much is as loaded with half as many flows (Mitzenmacher,
//! "The Power of Two Choices in Randomized Load Balancing"; Twitter's deterministic aperture compares in the same way).

use super::view::View;
use super::{NONSENSE, Tables};
use crate::abi::{MAX_SCHEDULE_LOG2, NO_SLOT};

/// Two positions out of one random number.
#[inline(always)]
pub fn points(draw: u32) -> (u32, u32) {
    (draw & 0xffff, draw >> 16)
}
const _: () = assert!(MAX_SCHEDULE_LOG2 <= 16);

/// Of those at two positions who may be chosen and are below the limit, the one with the lower load for its weight; of
/// equals the first.
#[inline(always)]
pub fn better<T: Tables>(view: &View<'_, T>, one: u32, other: u32) -> u32 {
    let (one, other) = (view.free_at(one), view.free_at(other));
    if one == NO_SLOT || other == NONSENSE {
        return other;
    }
    if other == NO_SLOT || one == NONSENSE {
        return one;
    }
    let (Some(a), Some(b)) = (view.tables.backend(one), view.tables.backend(other)) else { return NONSENSE };
    // a / share(a) <= b / share(b), without a division: loads have 33 bits and shares at most 17.
    let left = view.load(a) * u64::from(view.tables.share(b));
    let right = view.load(b) * u64::from(view.tables.share(a));
    if left <= right { one } else { other }
}
