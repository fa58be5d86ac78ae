//! The policies' queries of the tables: the slot at a position, and whether its backend may be
//! chosen.
//!
//! All policies use this module; it must not depend on any policy.

use super::{CORRUPT, Tables};
use crate::abi::{NO_SLOT, Rules, TableRef};
use crate::load::sign_mask_in_register;

/// The input of one choice.
pub struct View<'t, T> {
    pub tables: &'t T,
    pub table: TableRef,
    pub rules: Rules,
    pub now: u32,
}

impl<T: Tables> View<'_, T> {
    /// The slot at a position if its backend is eligible; else [`NO_SLOT`], or `CORRUPT` if the
    /// tables contradict each other.
    #[inline(always)]
    pub fn eligible_at(&self, position: u32) -> u32 {
        let Some(slot) = slot_at(self.tables, self.table, position) else { return CORRUPT };
        self.if_eligible(slot)
    }

    /// `slot` if its backend is eligible; else [`NO_SLOT`], or `CORRUPT` if there is no such
    /// slot.
    #[inline(always)]
    pub fn if_eligible(&self, slot: u32) -> u32 {
        if slot == NO_SLOT {
            return NO_SLOT;
        }
        let Some(backend) = self.tables.backend(slot) else { return CORRUPT };
        if self.is_eligible(backend) { slot } else { NO_SLOT }
    }

    /// Whether a backend is eligible: it may be chosen and is below the limit of open flows.
    #[inline(always)]
    pub fn is_eligible(&self, backend: T::Backend) -> bool {
        let at_limit = at_limit(self.tables, backend, self.rules.active_limit);
        self.tables.state(backend).is_usable() && at_limit == 0
    }

    /// Whether a backend is eligible and not ejected. The fast path checks this condition, which
    /// takes fewer instructions than [`View::is_eligible`], and leaves all other cases to the slow
    /// path.
    #[inline(always)]
    pub fn is_eligible_and_not_ejected(&self, backend: T::Backend) -> bool {
        let limit = self.rules.active_limit;
        self.tables.state(backend).is_usable_and_not_ejected()
            && (limit == 0 || self.tables.flows(backend) < limit)
    }

    /// The load of the backend in a slot: its open flows plus its recent errors.
    #[inline(always)]
    pub fn load(&self, slot: u32, backend: T::Backend) -> u64 {
        let flows = u64::from(self.tables.flows(backend));
        if !self.tables.has_errors(backend) {
            return flows;
        }
        flows + u64::from(self.tables.remaining_errors(slot, self.rules, self.now))
    }
}

/// The slot at a position of a table. Positions wrap around at the end of the table.
#[inline(always)]
pub fn slot_at<T: Tables>(tables: &T, table: TableRef, position: u32) -> Option<u32> {
    let mask = (1u32 << (table.length_log2 & 31)) - 1;
    tables.entry(table.base.wrapping_add(position & mask))
}

/// 1 if a backend is at the limit of open flows, else 0.
#[inline(always)]
pub fn at_limit<T: Tables>(tables: &T, backend: T::Backend, active_limit: u32) -> u64 {
    // Without a limit (0) this is 2^32 - 1, and no backend exceeds this number of flows.
    let most = active_limit.wrapping_sub(1);
    sign_mask_in_register(u64::from(most).wrapping_sub(u64::from(tables.flows(backend)))) & 1
}
