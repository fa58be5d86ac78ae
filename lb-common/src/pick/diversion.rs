//! What is taken in place of a choice that fell on a lame duck by its own report: another backend of the same table.
//!
//! Only whom the choice fell on is asked for its verdict, not everybody who is looked at on the way: connect has neither time nor
//! stack for more. So lame ducks are no worse to a policy than others, and whoever is taken instead comes from the schedule,
//! whatever the policy. It knows nothing of reports, and reads no clock.

use super::schedule::{from_word, to_word};
use super::view::{at_limit, slot_at};
use super::{How, Pick, Tables, mixed};
use crate::abi::{NO_SLOT, Rules, TableRef};

/// Entries that are looked at. A further one costs a lame duck's connect some ten nanoseconds.
///
/// Half of them are scattered: entries behind a lame duck's are mostly those of one other backend, which would get all that is
/// taken from it. The rest lie in a row behind the last of these: in an interleaved schedule they are nearly all different backends,
/// so of a few backends the one that is no lame duck is found for certain.
pub const LOOKS: u32 = 16;

/// The slot of a backend that is eligible and no lame duck among [`LOOKS`] entries of the table; if there is none, `first`, on which
/// the choice fell: a lame duck serves.
pub fn other_than_lame<T: Tables>(
    tables: &T,
    table: TableRef,
    sample: u32,
    active_limit: u32,
    first: u32,
    is_lame: impl Fn(T::Backend) -> bool,
) -> u32 {
    divert(sample, first, |place, is_scattered| {
        diversion_part(tables, table, place, is_scattered, active_limit, &is_lame)
    })
}

/// As [`other_than_lame`]. `part` gives what [`diversion_part`] does, of a place and of whether its entries are scattered.
#[inline(always)]
pub fn divert(sample: u32, first: u32, part: impl Fn(u32, bool) -> u64) -> u32 {
    // Other entries than a choice draws in place of one that is not eligible: those have led to the lame duck.
    let (found, place) = from_word(part(!sample, true));
    if found != NO_SLOT {
        return found;
    }
    let (found, _) = from_word(part(place, false));
    if found == NO_SLOT { first } else { found }
}

/// Looks at half of the entries for [`divert`]: scattered ones, or those in a row behind a place. Returns the slot of one that
/// is eligible and no lame duck, [`NO_SLOT`] if there is none, and in the upper half the place of the last look.
#[inline(always)]
pub fn diversion_part<T: Tables>(
    tables: &T,
    table: TableRef,
    place: u32,
    is_scattered: bool,
    active_limit: u32,
    is_lame: impl Fn(T::Backend) -> bool,
) -> u64 {
    let mut place = place;
    if table.is_empty() {
        return to_word(NO_SLOT, place);
    }
    // Bound: half of LOOKS entries.
    for look in 0..LOOKS / 2 {
        place = if is_scattered { mixed(place.wrapping_add(look)) } else { place.wrapping_add(1) };
        let Some(slot) = slot_at(tables, table, place) else { break };
        let Some(backend) = tables.backend(slot) else { break };
        // One number in place of two questions, so that the verifier has fewer ways through a turn.
        let usable = u64::from(tables.state(backend).may_be_chosen());
        if usable & !at_limit(tables, backend, active_limit) != 0 && !is_lame(backend) {
            return to_word(slot, place);
        }
    }
    to_word(NO_SLOT, place)
}

/// The limit of open flows that holds where a pick is diverted: none where everybody is at the limit and it is exceeded anyway.
#[inline(always)]
pub const fn limit_of_diversion(how: How, rules: Rules) -> u32 {
    if matches!(how, How::Overflowed) { 0 } else { rules.active_limit }
}

/// A pick in whose place the backend in `slot` was found.
#[inline(always)]
pub const fn diverted(pick: Pick, slot: u32) -> Pick {
    if slot == pick.slot {
        return pick;
    }
    Pick { how: if matches!(pick.how, How::Overflowed) { How::Overflowed } else { How::Diverted }, slot }
}
