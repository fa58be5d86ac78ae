//! What all policies have in common: whoever may not be chosen or is at the limit is skipped, and if nobody is left the
//! service's rules and its fallback decide.

use super::least_loaded::{Least, Scan, Standing};
use super::{CORRUPT, How, NONE_USABLE, Pick, Tables, p2c, schedule};
use crate::abi::{
    MAX_SCHEDULE_LOG2, MAX_SKIPS, MIN_SCHEDULE_LOG2, NO_SLOT, Overflow, Policy, Rules, TableRef,
};
use crate::load::{self, HalfLife, sign_mask_in_register};

/// What one choice sees.
pub struct View<'t, T> {
    pub tables: &'t T,
    pub table: TableRef,
    pub rules: Rules,
    pub now: u32,
}

impl<T: Tables> View<'_, T> {
    /// Looks at a few entries of the schedule from the sample on, and at everybody only if these are at the limit.
    #[inline(always)]
    pub fn by_schedule(&self, sample: u32) -> Pick {
        if self.table.is_empty() {
            return self.fallback();
        }
        if self.table.length_log2 < MIN_SCHEDULE_LOG2 || self.table.length_log2 > MAX_SCHEDULE_LOG2 {
            return Pick::BROKEN;
        }
        let slot = self.look(sample);
        if slot != NO_SLOT {
            return picked(slot);
        }
        // Without a limit whoever was skipped is not usable, and what the fallback is for.
        if self.rules.active_limit == 0 {
            return self.fallback();
        }
        match self.tables.members(self.table) {
            Some(members) => self.scan(members, sample).0,
            None => self.by_long_schedule(sample.wrapping_add(MAX_SKIPS + 1)),
        }
    }

    /// At most 1 + [`MAX_SKIPS`] entries are looked at.
    #[inline(always)]
    fn look(&self, sample: u32) -> u32 {
        let (mut from, mut looks) = (sample, MAX_SKIPS + 1);
        if self.rules.policy == Policy::P2c as u8 {
            let slot = p2c::better(self, sample);
            if slot != NO_SLOT {
                return slot;
            }
            let (_, second) = p2c::points(sample);
            (from, looks) = (second.wrapping_add(1), MAX_SKIPS - 1);
        }
        schedule::first_free(self, from, looks)
    }

    /// Looks at all members. Returns as well by how many of them the round robin moves on.
    #[inline(always)]
    pub fn scan(&self, members: T::Members, sample: u32) -> (Pick, u32) {
        let Rules { active_limit, error_half_life, .. } = self.rules;
        let scan = Scan { sample, now: self.now, active_limit, error_half_life };
        let least = Least::from_word(self.tables.least(members, scan));
        let pick = match least.standing() {
            Standing::BelowLimit => picked(least.slot()),
            Standing::AtLimit if self.rules.overflow == Overflow::Refuse as u8 => Pick::no_slot(How::Limited),
            Standing::AtLimit => Pick { how: How::Overflowed, slot: least.slot() },
            Standing::NoneUsable => self.fallback(),
            Standing::Corrupt => Pick::BROKEN,
        };
        (pick, least.steps())
    }

    /// In place of [`View::scan`] where members are too many to be listed.
    #[inline(always)]
    fn by_long_schedule(&self, from: u32) -> Pick {
        let slot = self.tables.first_free(self.table, from, self.rules.active_limit);
        if slot == NONE_USABLE {
            self.fallback()
        } else if slot != NO_SLOT {
            picked(slot)
        } else if self.rules.overflow == Overflow::Refuse as u8 {
            Pick::no_slot(How::Limited)
        } else {
            self.fallback()
        }
    }

    #[inline(always)]
    fn fallback(&self) -> Pick {
        let slot = self.tables.fallback();
        if slot == NO_SLOT {
            return Pick::no_slot(How::Refused);
        }
        if self.tables.backend(slot).is_some() { Pick { how: How::Fallback, slot } } else { Pick::BROKEN }
    }

    /// The slot at a position, if its backend may be chosen and is below the limit.
    #[inline(always)]
    pub fn free_at(&self, position: u32) -> u32 {
        let Some(slot) = slot_at(self.tables, self.table, position) else { return CORRUPT };
        self.if_free(slot)
    }

    /// The slot itself, if its backend may be chosen and is below the limit; [`NO_SLOT`] if not.
    #[inline(always)]
    pub fn if_free(&self, slot: u32) -> u32 {
        if slot == NO_SLOT {
            return NO_SLOT;
        }
        let Some(backend) = self.tables.backend(slot) else { return CORRUPT };
        if self.is_free(backend) { slot } else { NO_SLOT }
    }

    /// Whether a backend may be chosen and is below the limit.
    #[inline(always)]
    fn is_free(&self, backend: T::Backend) -> bool {
        let at_limit = at_limit(self.tables, backend, self.rules.active_limit);
        self.tables.state(backend).is_usable() && at_limit == 0
    }

    /// Open flows, and errors of late as if they were some.
    #[inline(always)]
    pub fn load(&self, backend: T::Backend) -> u64 {
        let errors = self.tables.errors(backend);
        let flows = u64::from(self.tables.flows(backend));
        if errors.count == 0 {
            return flows;
        }
        flows + u64::from(load::decayed(errors, self.now, HalfLife::new(self.rules.error_half_life)))
    }
}

/// What a look at the schedule has found, if it is not nobody.
#[inline(always)]
fn picked(slot: u32) -> Pick {
    if slot == CORRUPT { Pick::BROKEN } else { Pick { how: How::Picked, slot } }
}

/// The slot at a position of a table, which wraps at its end.
#[inline(always)]
pub fn slot_at<T: Tables>(tables: &T, table: TableRef, position: u32) -> Option<u32> {
    let mask = (1u32 << (table.length_log2 & 31)) - 1;
    tables.entry(table.base.wrapping_add(position & mask))
}

/// 1 if a backend is at the limit, else 0: the sign of what is left.
#[inline(always)]
pub fn at_limit<T: Tables>(tables: &T, backend: T::Backend, active_limit: u32) -> u64 {
    // Without a limit nobody ever has as many flows.
    let most = active_limit.wrapping_sub(1);
    sign_mask_in_register(u64::from(most).wrapping_sub(u64::from(tables.flows(backend)))) & 1
}
