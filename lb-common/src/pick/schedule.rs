//! `round-robin`, `weighted-round-robin`, `random`: the schedule's entry at the sample, or one of the next.
//!
//! Whether all backends have as many entries or each its part by weight is a matter of the schedule, and whether the sample
//! is the next number or a random one a matter of where it comes from.

use super::view::{View, at_limit, slot_at};
use super::{CORRUPT, NONE_USABLE, Tables};
use crate::abi::{MAX_SKIPS, MAX_SUBSET, NO_SLOT, TableRef};

/// The first of `looks` entries, at most 1 + [`MAX_SKIPS`], whose backend is eligible.
#[inline(always)]
pub fn first_eligible<T: Tables>(view: &View<'_, T>, from: u32, looks: u32) -> u32 {
    // Bound: 1 + MAX_SKIPS entries. An inclusive range keeps a flag besides its counter, on which the verifier sees a
    // path that never ends; it minds only for those without CAP_PERFMON.
    for skipped in 0..MAX_SKIPS + 1 {
        if skipped >= looks {
            break;
        }
        let slot = view.eligible_at(from.wrapping_add(skipped));
        if slot != NO_SLOT {
            return slot;
        }
    }
    NO_SLOT
}

/// The first of [`MAX_SUBSET`] entries whose backend is eligible. An entry that names nobody ends it.
#[inline(always)]
pub fn first_eligible_of_many<T: Tables>(tables: &T, table: TableRef, from: u32, active_limit: u32) -> u32 {
    let mut any_usable = 0;
    // Bound: as many entries as a scan has members.
    for skipped in 0..MAX_SUBSET {
        let Some(slot) = slot_at(tables, table, from.wrapping_add(skipped)) else { return CORRUPT };
        let Some(backend) = tables.backend(slot) else {
            return if slot == NO_SLOT { NO_SLOT } else { CORRUPT };
        };
        let usable = u64::from(tables.state(backend).usable & 1);
        // One number in place of two questions, so that the verifier has one way through a turn.
        if usable & !at_limit(tables, backend, active_limit) != 0 {
            return slot;
        }
        any_usable |= usable;
    }
    if any_usable == 0 { NONE_USABLE } else { NO_SLOT }
}
