//! What all policies have in common: whoever may not be chosen or is at the limit is skipped, and if nobody is left the
//! service's rules and its fallback decide.

use super::least_loaded::{Least, Scan, Standing};
use super::view::View;
use super::{CORRUPT, How, NONE_USABLE, Pick, Tables, p2c, schedule};
use crate::abi::{MAX_SCHEDULE_LOG2, MAX_SKIPS, MIN_SCHEDULE_LOG2, NO_SLOT, Overflow, Policy, Rules};

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
        schedule::first_eligible(self, from, looks)
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
        let slot = self.tables.first_eligible(self.table, from, self.rules.active_limit);
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
}

/// What a look at the schedule has found, if it is not nobody.
#[inline(always)]
fn picked(slot: u32) -> Pick {
    if slot == CORRUPT { Pick::BROKEN } else { Pick { how: How::Picked, slot } }
}
