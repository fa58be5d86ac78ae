//! Diversion: if a choice is a lame duck by its own report, another backend of the same table is
//! taken in its place.
//!
//! Only the chosen backend's verdict is read, not that of every examined backend, because connect
//! has neither time nor stack for more. So policies treat lame ducks like other backends, and the
//! replacement comes from the schedule under every policy. The module must not know reports, and
//! reads no clock.

use super::schedule::{from_word, to_word};
use super::view::{at_limit, slot_at};
use super::{How, Pick, Tables, mixed};
use crate::abi::{NO_SLOT, Rules, TableRef};

/// Entries that are examined. A further one costs the connect of a lame duck some ten nanoseconds.
///
/// Half of them are scattered: the entries after a lame duck's belong mostly to one other backend,
/// which would get all of the lame duck's connects. The other half lie in a row after the last of
/// these. In an interleaved schedule they are nearly all different backends, so if there are only a
/// few backends, the one that is no lame duck is certainly found.
pub const LOOKS: u32 = 16;

/// The slot of an eligible backend that is no lame duck, among [`LOOKS`] entries of the table. If
/// there is none, the chosen slot `first`, because a lame duck still serves.
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

/// Like [`other_than_lame`]. `part` must return the result of [`diversion_part`] for a place, and
/// for whether its entries are scattered.
#[inline(always)]
pub fn divert(sample: u32, first: u32, part: impl Fn(u32, bool) -> u64) -> u32 {
    // Not the entries that a choice draws in place of ineligible ones, because those have led to
    // the lame duck.
    let (found, place) = from_word(part(!sample, true));
    if found != NO_SLOT {
        return found;
    }
    let (found, _) = from_word(part(place, false));
    if found == NO_SLOT { first } else { found }
}

/// Examines half of the entries for [`divert`]: scattered ones, or those in a row after a place.
/// Returns the slot of an eligible backend that is no lame duck, or [`NO_SLOT`] if there is none,
/// and in the upper half the last examined place.
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
        // One number in place of two conditions, so that the verifier has fewer paths through an
        // iteration.
        let usable = u64::from(tables.state(backend).may_be_chosen());
        if usable & !at_limit(tables, backend, active_limit) != 0 && !is_lame(backend) {
            return to_word(slot, place);
        }
    }
    to_word(NO_SLOT, place)
}

/// The limit of open flows for a diversion: none if every backend is at the limit, which is then
/// exceeded anyway.
#[inline(always)]
pub const fn limit_of_diversion(how: How, rules: Rules) -> u32 {
    if matches!(how, How::Overflowed) { 0 } else { rules.active_limit }
}

/// The pick after a diversion to the backend in `slot`.
#[inline(always)]
pub const fn diverted(pick: Pick, slot: u32) -> Pick {
    if slot == pick.slot {
        return pick;
    }
    Pick { how: if matches!(pick.how, How::Overflowed) { How::Overflowed } else { How::Diverted }, slot }
}
