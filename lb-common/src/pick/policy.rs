//! The part of a choice that all policies share: if the picked backend may not be chosen or is at
//! the limit, other entries are examined. If no backend is found, the service's rules and its
//! fallback decide.

use super::least_loaded::{Least, Scan, Standing};
use super::schedule::MAX_LOOKS;
use super::view::{View, slot_at};
use super::{CORRUPT, How, NONE_USABLE, Pick, Tables, mixed, p2c};
use crate::abi::{
    MAX_REDRAWS, MAX_SCHEDULE_LOG2, MAX_SUBSET, MIN_SCHEDULE_LOG2, NO_MEMBERS, NO_SLOT, Overflow, Policy,
    Rules, TableRef,
};

/// The pick for a sample if a backend at the sample's positions in the schedule is not eligible or
/// is ejected, or if the table is invalid or missing.
#[inline(always)]
pub fn slow_path<T: Tables>(tables: &T, table: TableRef, rules: Rules, sample: u32, now: u32) -> Pick {
    View { tables, table, rules, now }.slow_path(sample)
}

impl<T: Tables> View<'_, T> {
    /// The pick by a policy that uses the schedule: examines the sample's entry, or two entries for
    /// `p2c`. If a backend there is not eligible or is ejected, the slow path follows, which is a
    /// method of the tables, so that the kernel programs can compile it as a separate function.
    #[inline(always)]
    pub fn by_schedule(&self, sample: u32) -> Pick {
        let slot = if !self.is_in_order() {
            NO_SLOT
        } else if self.rules.policy == Policy::P2c as u8 {
            p2c::better_of_eligible(self, sample)
        } else {
            self.eligible_and_not_ejected_at(sample)
        };
        if slot < NO_SLOT {
            return Pick { how: How::Picked, slot };
        }
        self.tables.slow_path(self.table, self.rules, sample, self.now)
    }

    /// The slot at a position if its backend is eligible and not ejected, else [`NO_SLOT`].
    #[inline(always)]
    fn eligible_and_not_ejected_at(&self, position: u32) -> u32 {
        let Some(slot) = slot_at(self.tables, self.table, position) else { return NO_SLOT };
        match self.tables.backend(slot) {
            Some(backend) if self.is_eligible_and_not_ejected(backend) => {
                self.tables.note_picked(backend);
                slot
            }
            _ => NO_SLOT,
        }
    }

    /// Whether the length of the schedule is valid.
    #[inline(always)]
    fn is_in_order(&self) -> bool {
        // One comparison checks both bounds.
        self.table.length_log2.wrapping_sub(MIN_SCHEDULE_LOG2) <= MAX_SCHEDULE_LOG2 - MIN_SCHEDULE_LOG2
    }

    #[inline(always)]
    fn slow_path(&self, sample: u32) -> Pick {
        if self.table.is_empty() {
            return self.fallback();
        }
        if !self.is_in_order() {
            return Pick::BROKEN;
        }
        if self.table.members == NO_MEMBERS
            && let Some(slot) = self.trial_at(sample)
        {
            return Pick { how: How::Trial, slot };
        }
        let slot = if self.rules.policy == Policy::P2c as u8 {
            p2c::better(self, sample)
        } else {
            self.eligible_at(sample)
        };
        if slot == NO_SLOT { self.elsewhere(sample) } else { picked(slot) }
    }

    /// The slot at the sample, if its backend is ejected and this choice becomes the backend's
    /// trial.
    #[inline(always)]
    fn trial_at(&self, sample: u32) -> Option<u32> {
        let slot = slot_at(self.tables, self.table, sample)?;
        let state = self.tables.state(self.tables.backend(slot)?);
        if state.is_held_back() != 0 && self.tables.begin_trial(slot, self.now) { Some(slot) } else { None }
    }

    /// The pick if no backend at the sample is eligible. If the service has a limit of open flows,
    /// this method examines a few scattered entries, and then scans all members for the least
    /// loaded one. Without a limit, it examines [`MAX_LOOKS`] scattered entries, which nearly
    /// always include a backend that may be chosen; if they include none, the method examines the
    /// members.
    #[inline(always)]
    fn elsewhere(&self, sample: u32) -> Pick {
        let has_limit = self.rules.active_limit != 0;
        let looks = if has_limit { MAX_REDRAWS } else { MAX_LOOKS };
        let slot = self.tables.redraw(self.table, sample, looks, self.rules.active_limit);
        if slot != NO_SLOT && slot != NONE_USABLE {
            return picked(slot);
        }
        if has_limit {
            return match self.tables.scanned(self.table) {
                Some(members) => self.scan(members, sample).0,
                None => self.by_long_schedule(sample),
            };
        }
        let slot = match self.tables.members(self.table) {
            Some(members) => self.tables.usable_member(members, sample),
            None => self.far_away(sample),
        };
        if slot == NONE_USABLE || slot == NO_SLOT { self.fallback() } else { picked(slot) }
    }

    /// The pick by a scan of all members for the least loaded one. Also returns by how many members
    /// the round robin must advance.
    #[inline(always)]
    pub fn scan(&self, members: T::Members, sample: u32) -> (Pick, u32) {
        let Rules { active_limit, error_half_life, overflow, .. } = self.tables.all_rules(self.rules);
        let scan = Scan { sample, now: self.now, active_limit, error_half_life };
        let least = Least::from_word(self.tables.least(members, scan));
        let pick = match least.standing() {
            Standing::BelowLimit => picked(least.slot()),
            Standing::AtLimit if overflow == Overflow::Refuse as u8 => Pick::no_slot(How::Limited),
            Standing::AtLimit => Pick { how: How::Overflowed, slot: least.slot() },
            Standing::NoneUsable => self.fallback(),
            Standing::Corrupt => Pick::BROKEN,
        };
        (pick, least.steps())
    }

    /// The pick in place of [`View::scan`], if the members are not listed.
    #[inline(always)]
    fn by_long_schedule(&self, sample: u32) -> Pick {
        let slot = self.far_away(sample);
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

    /// The slot of an eligible backend from [`MAX_SUBSET`] further scattered entries; [`NO_SLOT`]
    /// if all usable backends there are at the limit, and [`NONE_USABLE`] if no backend there may
    /// be chosen.
    #[inline(always)]
    fn far_away(&self, sample: u32) -> u32 {
        const { assert!(MAX_SUBSET / MAX_LOOKS == 4) };
        // `NO_SLOT` (all usable backends are at the limit) takes precedence over `NONE_USABLE`.
        let look = |found, round| {
            if found != NO_SLOT && found != NONE_USABLE {
                return found;
            }
            let sample = mixed(sample.wrapping_add(round));
            let slot = self.tables.redraw(self.table, sample, MAX_LOOKS, self.rules.active_limit);
            if slot == NONE_USABLE { found } else { slot }
        };
        // The calls are not in a loop, because without CAP_PERFMON the verifier cannot prove that a
        // loop with a call in it ends.
        look(look(look(look(NONE_USABLE, 1), 2), 3), 4)
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

/// The pick for the result of a search, which must not be [`NO_SLOT`] or [`NONE_USABLE`].
#[inline(always)]
fn picked(slot: u32) -> Pick {
    if slot == CORRUPT { Pick::BROKEN } else { Pick { how: How::Picked, slot } }
}
