//! `round-robin`, `weighted-round-robin`, `random`: the schedule's entry at the sample, and for all policies what is taken in
//! place of an entry whose backend is not eligible.
//!
//! Whether all backends have as many entries or each its part by weight is a matter of the schedule, and whether the sample
//! is the next number or a random one a matter of where it comes from.

use super::survey::{PART, PARTS, of_parts};
use super::view::{at_limit, slot_at};
use super::{CORRUPT, NONE_USABLE, Tables, mixed};
use crate::abi::{MAX_SUBSET, NO_SLOT, TableRef};
use crate::load::smaller;

/// The most entries that are drawn again at a time.
pub(super) const MAX_LOOKS: u32 = 64;

/// The first of `looks` entries, at most 64, whose backend is eligible.
///
/// They are scattered over the table. Schedules are interleaved, so that behind an entry of one backend there are mostly those
/// of one other, which would get all that is taken from it.
#[inline(always)]
pub fn redraw<T: Tables>(tables: &T, table: TableRef, sample: u32, looks: u32, active_limit: u32) -> u32 {
    let mut any_usable = 0;
    let mut place = sample;
    // Bound: MAX_LOOKS entries.
    for look in 0..MAX_LOOKS {
        if look >= looks {
            break;
        }
        place = mixed(place.wrapping_add(look));
        let Some(slot) = slot_at(tables, table, place) else { return CORRUPT };
        let Some(backend) = tables.backend(slot) else {
            return if slot == NO_SLOT { NO_SLOT } else { CORRUPT };
        };
        let usable = u64::from(tables.state(backend).may_be_chosen());
        // One number in place of two questions, so that the verifier has one way through a turn.
        if usable & !at_limit(tables, backend, active_limit) != 0 {
            return slot;
        }
        any_usable |= usable;
    }
    if any_usable == 0 { NONE_USABLE } else { NO_SLOT }
}

const SLOT_BITS: u32 = 16;
const UNUSABLE_BIT: u32 = 62;
/// What [`usable_part`] returns of a part without members: more than of any member.
pub const NO_MEMBER: u64 = u64::MAX >> 1;

/// The first member from a random one on that may be chosen: where so few may be that scattered entries have not met one. `part`
/// gives what [`usable_part`] does.
#[inline(always)]
pub fn usable_member(part: impl Fn(u32) -> u64) -> u32 {
    let first = of_parts(part, smaller);
    #[expect(clippy::cast_possible_truncation, reason = "the low bits are the slot")]
    let slot = first as u32 & NO_SLOT;
    if first >> UNUSABLE_BIT == 0 { slot } else { NONE_USABLE }
}

/// Looks at one part of the members for [`usable_member`]: who comes first, as a number with the slot in its low bits. The smaller
/// it is, the sooner.
#[inline(always)]
pub fn usable_part<T: Tables>(tables: &T, members: T::Members, part: u32, sample: u32) -> u64 {
    let Some((count, ..)) = tables.list(members) else { return NO_MEMBER };
    if count == 0 || count > MAX_SUBSET {
        return NO_MEMBER;
    }
    let start = mixed(sample) % count;
    let begin = (part & (PARTS - 1)) * PART;
    let Some(mut position) = tables.position(members, begin) else { return NO_MEMBER };
    let mut first = NO_MEMBER;
    // Bound: PART members. Arithmetic in place of branches: the verifier follows each way through each turn.
    for offset in 0..PART {
        let index = begin + offset;
        if index >= count {
            break;
        }
        let (slot, following) = tables.member(position);
        position = following;
        let Some(backend) = tables.backend(slot) else { break };
        // Whoever stands before it comes after everybody behind it.
        let distance = index.wrapping_sub(start) & (MAX_SUBSET - 1);
        let theirs = u64::from(tables.state(backend).may_be_chosen() ^ 1) << UNUSABLE_BIT
            | u64::from(distance) << SLOT_BITS
            | u64::from(slot);
        first = smaller(first, theirs);
    }
    first
}
