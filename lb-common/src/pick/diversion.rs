//! Diversion: if the chosen backend is a lame duck by its own report, another backend of the same
//! table replaces it.
//!
//! A choice examines several backends. Connect checks only whether the chosen backend is a lame
//! duck, because a check of every examined backend would take too much time and stack. So policies
//! treat lame ducks like other backends, and under every policy the replacement comes from the
//! schedule. The module must not depend on reports, and reads no clock.

use super::schedule::{from_word, to_word};
use super::view::{at_limit, slot_at};
use super::{How, Pick, Tables, mixed};
use crate::abi::{NO_SLOT, Rules, TableRef};

/// Number of entries that a diversion examines. Each further entry would add about ten nanoseconds
/// to a connect that has chosen a lame duck.
///
/// The entries of the first half are scattered over the table, because the entries that follow a
/// lame duck's entries belong mostly to one other backend, which would get all of the lame duck's
/// connects. The entries of the second half are those directly after the last scattered entry.
/// Consecutive entries of an interleaved schedule mostly belong to different backends. So if there
/// are only a few backends, and all but one of them are lame ducks, the second half certainly
/// contains the remaining backend.
pub const LOOKS: u32 = 16;

/// The slot of an eligible backend that is no lame duck, from [`LOOKS`] entries of the table. If
/// there is none, the result is the chosen slot `first`, because a lame duck still serves.
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

/// The result of [`other_than_lame`], computed with a function `part` that examines entries. The
/// function must return the result of [`diversion_part`]; its arguments are a position of the
/// table, and whether the entries are scattered.
#[inline(always)]
pub fn divert(sample: u32, first: u32, part: impl Fn(u32, bool) -> u64) -> u32 {
    // The sample is inverted, because the entries for the sample itself may have led to the lame
    // duck: a choice examines them if a backend is not eligible.
    let (found, place) = from_word(part(!sample, true));
    if found != NO_SLOT {
        return found;
    }
    let (found, _) = from_word(part(place, false));
    if found == NO_SLOT { first } else { found }
}

/// Examines half of the entries for [`divert`]: either scattered entries, beginning with a number
/// derived from `place`, or consecutive entries after `place`. The lower half of the result is the
/// slot of an eligible backend that is no lame duck, or [`NO_SLOT`] if there is none; the upper
/// half is the last examined position.
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
        // One number combines two conditions, so that the verifier has fewer paths through an
        // iteration.
        let usable = u64::from(tables.state(backend).may_be_chosen());
        if usable & !at_limit(tables, backend, active_limit) != 0 && !is_lame(backend) {
            return to_word(slot, place);
        }
    }
    to_word(NO_SLOT, place)
}

/// The limit of open flows for a diversion. If every backend is at the limit, the result is 0,
/// which means no limit, because the flow exceeds the limit with any backend.
#[inline(always)]
pub const fn limit_of_diversion(how: How, rules: Rules) -> u32 {
    if matches!(how, How::Overflowed) { 0 } else { rules.active_limit }
}

/// The pick after a diversion to the backend in `slot`, which may be the slot of the pick itself.
#[inline(always)]
pub const fn diverted(pick: Pick, slot: u32) -> Pick {
    if slot == pick.slot {
        return pick;
    }
    Pick { how: if matches!(pick.how, How::Overflowed) { How::Overflowed } else { How::Diverted }, slot }
}
