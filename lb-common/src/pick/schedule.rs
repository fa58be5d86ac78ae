//! The policies `round-robin`, `weighted-round-robin` and `random`, which pick the schedule's entry
//! at the sample. This module also contains, for all policies, the search for another backend if
//! the backend of an entry is not eligible.
//!
//! The three policies differ in the schedule and in the sample. In the schedule, all backends have
//! the same number of entries, or numbers in proportion to their weights. The sample is the next
//! number, or a random one.

use super::survey::{PART, PARTS, of_group, of_groups};
use super::view::{at_limit, slot_at};
use super::{CORRUPT, NONE_USABLE, Tables, mixed};
use crate::abi::{MAX_SUBSET, NO_SLOT, TableRef};
use crate::load::smaller;

/// Maximum number of entries that one [`redraw`] examines.
pub(super) const MAX_LOOKS: u32 = 64;

/// Number of entries that one part of a search examines. A longer search consists of several parts,
/// as in `survey`.
const LOOKS_OF_PART: u32 = 8;

/// The slot of the first of `looks` entries (at most 64) with an eligible backend; [`NO_SLOT`] if
/// all usable backends there are at the limit, and `NONE_USABLE` if no backend there may be chosen.
///
/// The entries are scattered over the table. In an interleaved schedule the entries that follow
/// those of one backend belong mostly to one other backend. If consecutive entries were examined,
/// this other backend would get all connects of an ineligible backend. `part(place, first)` must
/// return the result of [`redraw_part`].
#[inline(always)]
pub fn redraw(sample: u32, looks: u32, part: impl Fn(u32, u32) -> u64) -> u32 {
    const { assert!(MAX_LOOKS == 8 * LOOKS_OF_PART) };
    let more = |(before, place): (u32, u32), number: u32| {
        let first = number * LOOKS_OF_PART;
        if before != NO_SLOT && before != NONE_USABLE || first >= looks {
            return (before, place);
        }
        let (found, place) = from_word(part(place, first));
        // `NO_SLOT` (all usable backends are at the limit) takes precedence over `NONE_USABLE`.
        (if found == NONE_USABLE { before } else { found }, place)
    };
    // The calls are not in a loop, because without CAP_PERFMON the verifier cannot prove that a
    // loop with a call in it ends.
    let first = more((NONE_USABLE, sample), 0);
    more(more(more(more(more(more(more(first, 1), 2), 3), 4), 5), 6), 7).0
}

/// A result (lower half) and the last examined position of the table (upper half), in one word.
#[inline(always)]
pub(super) fn to_word(found: u32, place: u32) -> u64 {
    u64::from(place) << 32 | u64::from(found)
}

#[inline(always)]
pub(super) fn from_word(word: u64) -> (u32, u32) {
    #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
    let halves = (word as u32, (word >> 32) as u32);
    halves
}

/// Examines some of the `looks` entries for [`redraw`], beginning with entry number `first`.
/// `place` is the last examined position of the table, or the sample if there is none. Returns the
/// result in the lower half of a word, and the last examined position in the upper half.
#[inline(always)]
pub fn redraw_part<T: Tables>(
    tables: &T,
    table: TableRef,
    place: u32,
    first: u32,
    looks: u32,
    active_limit: u32,
) -> u64 {
    let mut any_usable = 0;
    let mut place = place;
    // Bound: LOOKS_OF_PART entries.
    for number in 0..LOOKS_OF_PART {
        let look = first.wrapping_add(number);
        if look >= looks {
            break;
        }
        place = mixed(place.wrapping_add(look));
        let Some(slot) = slot_at(tables, table, place) else { return to_word(CORRUPT, place) };
        let Some(backend) = tables.backend(slot) else {
            if slot == NO_SLOT {
                continue;
            }
            return to_word(CORRUPT, place);
        };
        let usable = u64::from(tables.state(backend).may_be_chosen());
        // One number combines two conditions, so that the verifier has one path through an
        // iteration.
        if usable & !at_limit(tables, backend, active_limit) != 0 {
            return to_word(slot, place);
        }
        any_usable |= usable;
    }
    to_word(if any_usable == 0 { NONE_USABLE } else { NO_SLOT }, place)
}

const SLOT_BITS: u32 = 16;
const UNUSABLE_BIT: u32 = 62;
/// The result of [`usable_part`] for a part without members: larger than the number of any member.
pub const NO_MEMBER: u64 = u64::MAX >> 1;

/// The slot of the first member that may be chosen, beginning with a random member; `NONE_USABLE`
/// if there is none. This function is called if no examined entry of the schedule has a backend
/// that may be chosen. `group(number)` must return the result of [`usable_group`].
#[inline(always)]
pub fn usable_member(group: impl Fn(u32) -> u64) -> u32 {
    let first = of_groups(group, smaller);
    #[expect(clippy::cast_possible_truncation, reason = "the low bits are the slot")]
    let slot = first as u32 & NO_SLOT;
    if first >> UNUSABLE_BIT == 0 { slot } else { NONE_USABLE }
}

/// Examines one group of parts for [`usable_member`]. `part(number)` must return the result of
/// [`usable_part`].
#[inline(always)]
pub fn usable_group(number: u32, part: impl Fn(u32) -> u64) -> u64 {
    of_group(number, part, smaller)
}

/// Examines one part of the members for [`usable_member`]. Returns the smallest number of any
/// member in this part. The low bits of a member's number are its slot. The member with the
/// smallest number of all parts is the result of the search.
#[inline(always)]
pub fn usable_part<T: Tables>(tables: &T, members: T::Members, part: u32, sample: u32) -> u64 {
    let Some((count, ..)) = tables.list(members) else { return NO_MEMBER };
    if count == 0 || count > MAX_SUBSET {
        return NO_MEMBER;
    }
    let begin = (part & (PARTS - 1)) * PART;
    if begin >= count {
        return NO_MEMBER;
    }
    let Some(mut position) = tables.position(members, begin) else { return NO_MEMBER };
    // Modulo MAX_SUBSET, so that members before the start come after all members that follow the
    // start.
    let distance_of_first = begin.wrapping_sub(mixed(sample) % count);
    let left = count.wrapping_sub(begin);
    let mut first = NO_MEMBER;
    // Bound: PART members. Arithmetic replaces branches, because the verifier follows each path
    // through each iteration.
    for offset in 0..PART {
        if offset >= left {
            break;
        }
        let (slot, following) = tables.member(position);
        position = following;
        let Some(backend) = tables.backend(slot) else { break };
        let distance = distance_of_first.wrapping_add(offset) & (MAX_SUBSET - 1);
        let theirs = u64::from(tables.state(backend).may_be_chosen() ^ 1) << UNUSABLE_BIT
            | u64::from(distance) << SLOT_BITS
            | u64::from(slot);
        first = smaller(first, theirs);
    }
    first
}
