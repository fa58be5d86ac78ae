//! The policy `p2c`, power of two choices: of two random backends, the policy picks the one with
//! the lower load for its weight.
//!
//! Both backends are random entries of the schedule, so that a backend takes part in comparisons in
//! proportion to its weight. The load is divided by the weight: if a backend should get half as
//! much traffic as another one, the two are equally loaded when the first one has half as many
//! flows (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing"; Twitter's
//! deterministic aperture compares in the same way).
//!
//! Like Twitter's aperture, and unlike Mitzenmacher's analysis, the policy samples without
//! replacement, because two entries of the same backend would leave no choice.

use super::view::{View, slot_at};
use super::{CORRUPT, Tables, mixed};
use crate::abi::{MAX_SCHEDULE_LOG2, NO_SLOT, TableRef};

/// Splits one random number into two positions of the schedule.
#[inline(always)]
pub fn points(sample: u32) -> (u32, u32) {
    (sample & 0xffff, sample >> 16)
}
const _: () = assert!(MAX_SCHEDULE_LOG2 <= 16);

/// Number of entries beside the third position that are searched for another backend. Five
/// consecutive entries of an interleaved schedule contain two different backends unless one backend
/// has more than four fifths of all entries.
const BESIDE: u32 = 4;

/// The slots at the two positions of a sample. If both positions have the same slot, the second
/// slot is replaced by another one, see [`other_than`].
#[inline(always)]
fn pair<T: Tables>(view: &View<'_, T>, sample: u32) -> Option<(u32, u32)> {
    let (first, second) = points(sample);
    let first = slot_at(view.tables, view.table, first)?;
    let second = slot_at(view.tables, view.table, second)?;
    if second != first {
        return Some((first, second));
    }
    Some((first, view.tables.other_entry(view.table, first, sample)))
}

/// The slot of the backend with the lower load for its weight, of the two backends at the positions
/// of a sample; the first one if the loads are equal. [`NO_SLOT`] unless both are eligible and not
/// ejected.
#[inline(always)]
pub fn better_of_eligible<T: Tables>(view: &View<'_, T>, sample: u32) -> u32 {
    let Some((first, second)) = pair(view, sample) else { return NO_SLOT };
    let (Some(a), Some(b)) = (view.tables.backend(first), view.tables.backend(second)) else {
        return NO_SLOT;
    };
    if !view.is_eligible_and_not_ejected(a) || !view.is_eligible_and_not_ejected(b) {
        return NO_SLOT;
    }
    if is_lower(view, (first, a), (second, b)) {
        view.tables.note_picked(a);
        return first;
    }
    view.tables.note_picked(b);
    second
}

/// Like [`better_of_eligible`], but if only one of the two backends is eligible, the result is its
/// slot.
#[inline(always)]
pub fn better<T: Tables>(view: &View<'_, T>, sample: u32) -> u32 {
    let Some((first, second)) = pair(view, sample) else { return CORRUPT };
    let (one, other) = (view.if_eligible(first), view.if_eligible(second));
    if one == NO_SLOT || other == CORRUPT {
        return other;
    }
    if other == NO_SLOT || one == CORRUPT {
        return one;
    }
    let (Some(a), Some(b)) = (view.tables.backend(one), view.tables.backend(other)) else { return CORRUPT };
    if is_lower(view, (one, a), (other, b)) { one } else { other }
}

/// Whether the load of the backend `a` for its weight is at most that of `b`. Each argument is a
/// slot and its backend.
#[inline(always)]
fn is_lower<T: Tables>(
    view: &View<'_, T>,
    (first, a): (u32, T::Backend),
    (second, b): (u32, T::Backend),
) -> bool {
    // a / entries(a) <= b / entries(b), without a division: loads have 33 bits and entries at most
    // 17.
    let left = view.load(first, a) * u64::from(view.tables.entries(b));
    let right = view.load(second, b) * u64::from(view.tables.entries(a));
    left <= right
}

/// A slot other than `first`, at a third random position or beside that position. If `first` has
/// nearly all entries of the table, the result may be `first`.
///
/// The search beside the third position begins at a random entry and goes in a random direction. If
/// it always began at the same entry, backends that are neighbours in the schedule would be
/// compared with each other more often than with other backends.
#[inline(always)]
pub fn other_than<T: Tables>(tables: &T, table: TableRef, first: u32, sample: u32) -> u32 {
    let third = mixed(sample);
    let slot = slot_at(tables, table, third).unwrap_or(CORRUPT);
    if slot != first {
        return slot;
    }
    let is_before = third >> 16 & 1;
    let offset = third >> 17;
    // Bound: BESIDE entries.
    for step in 0..BESIDE {
        let distance = (offset.wrapping_add(step) & (BESIDE - 1)) + 1;
        // If the search goes backward, this adds the negative distance in two's complement.
        let position = third.wrapping_add((distance ^ is_before.wrapping_neg()).wrapping_add(is_before));
        let slot = slot_at(tables, table, position).unwrap_or(CORRUPT);
        if slot != first {
            return slot;
        }
    }
    first
}
const _: () = assert!(BESIDE.is_power_of_two());
