//! A look at all members of a table, because one is to be ejected, or an ejected one to be tried: how many are ejected and how
//! many are not, and who is to be tried next.
//!
//! Counting anew each time, instead of keeping a count, leaves nothing that could drift. It is rare: failures and trials, never
//! a connect that goes well.

use super::Tables;
use super::mixed;
use super::view::slot_at;
use crate::abi::{EjectionRules, MAX_LISTED, MAX_SUBSET, NO_SLOT, TableRef};
use crate::ejection::{self, EJECTION_BITS};
use crate::load::{sign_mask_in_register, without_bounds};

/// What was seen, as one word, which is what a function of a kernel program can return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Survey {
    word: u64,
}

// From low to high: members that may be chosen, members that are ejected, whether any that may be chosen is well, whether nobody
// is to be tried; then who is, and in how many ticks.
const COUNT_BITS: u32 = 9;
const EJECTED_BIT: u32 = COUNT_BITS;
const WELL_BIT: u32 = 2 * COUNT_BITS;
const NOBODY_BIT: u32 = WELL_BIT + 1;
const SLOT_BIT: u32 = NOBODY_BIT + 1;
const LEFT_BIT: u32 = SLOT_BIT + 16;
const _: () = assert!(MAX_SUBSET < 1 << COUNT_BITS && LEFT_BIT + EJECTION_BITS <= u64::BITS);

impl Survey {
    /// Nothing was seen.
    pub const NOBODY: Self = Self { word: 1 << NOBODY_BIT };

    /// As a word.
    #[inline(always)]
    pub const fn to_word(self) -> u64 {
        self.word
    }

    /// From the word.
    #[inline(always)]
    pub const fn from_word(word: u64) -> Self {
        Self { word }
    }

    #[inline(always)]
    const fn bits(self, from: u32, count: u32) -> u32 {
        #[expect(clippy::cast_possible_truncation, reason = "at most 28 bits")]
        let low = (self.word >> from) as u32;
        low & ((1 << count) - 1)
    }

    /// Whether one more may be ejected: fewer are than `max_share` percent, and it is not the last that is available. Where there
    /// are two or more, one always may be.
    #[inline(always)]
    pub const fn has_room(self, max_share: u8) -> bool {
        let (available, ejected) = (self.bits(0, COUNT_BITS), self.bits(EJECTED_BIT, COUNT_BITS));
        let allowed = (available + ejected) * max_share as u32 / 100;
        available >= 2 && (ejected < allowed || ejected == 0)
    }

    /// Whether any available member is well: it has not failed as often in a row as ejects.
    #[inline(always)]
    pub const fn any_is_well(self) -> bool {
        self.bits(WELL_BIT, 1) != 0
    }

    /// The ejected backend whose time is over first, or [`NO_SLOT`].
    #[inline(always)]
    pub const fn next_slot(self) -> u32 {
        if self.bits(NOBODY_BIT, 1) != 0 { NO_SLOT } else { self.bits(SLOT_BIT, 16) }
    }

    /// Ticks until then.
    #[inline(always)]
    pub const fn ticks_left(self) -> u32 {
        self.bits(LEFT_BIT, EJECTION_BITS)
    }
}

/// Looks at the members of a table, and at those that others stand in for. Returns the word of a [`Survey`].
#[inline(always)]
pub fn survey<T: Tables>(tables: &T, members: T::Members, rules: EjectionRules, now: u32) -> u64 {
    let mut seen = Seen::NOTHING;
    let Some((count, listed, mut position)) = tables.list(members) else { return seen.word() };
    // Bound: MAX_LISTED members.
    for index in 0..MAX_LISTED {
        if index >= listed {
            break;
        }
        let (slot, following) = tables.member(position);
        position = following;
        let Some(backend) = tables.backend(slot) else { break };
        let is_in_table = sign_mask_in_register(u64::from(index).wrapping_sub(u64::from(count))) & 1;
        seen.look(tables, backend, slot, is_in_table, rules, now);
    }
    seen.word()
}

/// As [`survey`], of a table whose members are not listed: looks at [`MAX_SUBSET`] scattered entries, as if each were a member.
#[inline(always)]
pub fn survey_entries<T: Tables>(tables: &T, table: TableRef, rules: EjectionRules, now: u32) -> u64 {
    let mut seen = Seen::NOTHING;
    // Bound: MAX_SUBSET entries.
    for index in 0..MAX_SUBSET {
        let Some(slot) = slot_at(tables, table, mixed(now.wrapping_add(index))) else { break };
        let Some(backend) = tables.backend(slot) else { break };
        seen.look(tables, backend, slot, 1, rules, now);
    }
    seen.word()
}

/// What was seen so far.
struct Seen {
    counts: u64,
    /// Who is to be tried next, at the bits where a survey has it; the smaller, the sooner.
    next: u64,
}

impl Seen {
    const NOTHING: Self = Self { counts: 0, next: NOBODY_LAST };

    /// Looks at one backend. Arithmetic in place of branches: the verifier follows each way through each turn.
    #[inline(always)]
    fn look<T: Tables>(
        &mut self,
        tables: &T,
        backend: T::Backend,
        slot: u32,
        is_in_table: u64,
        rules: EjectionRules,
        now: u32,
    ) {
        let (state, standing) = (tables.state(backend), tables.ejection(backend));
        let may_be_chosen = u64::from(state.may_be_chosen()) & is_in_table;
        let is_held_back = u64::from(state.is_held_back());
        let is_below = sign_mask_in_register(u64::from(standing.run).wrapping_sub(u64::from(rules.failures)));
        let counted = may_be_chosen + ((is_held_back & is_in_table) << EJECTED_BIT);
        let counts = (self.counts + counted) | (may_be_chosen & is_below) << WELL_BIT;
        // As `ejection::left`; and of one that is ejected and does not know it any more, the time is over.
        let ahead = u64::from(standing.at.wrapping_sub(now));
        let is_over = sign_mask_in_register(u64::from(ejection::longest(rules)).wrapping_sub(ahead));
        let knows = sign_mask_in_register(0u64.wrapping_sub(u64::from(standing.phase)));
        let left = ahead & !is_over & knows;
        let theirs = (is_held_back ^ 1) << NOT_A_CANDIDATE_BIT
            | (left & ((1 << EJECTION_BITS) - 1)) << LEFT_BIT
            | u64::from(slot) << SLOT_BIT;
        // The smaller one.
        let next = self.next ^ (self.next ^ theirs) & sign_mask_in_register(theirs.wrapping_sub(self.next));
        let any = standing.to_word();
        (self.counts, self.next) = (without_bounds(counts, any), without_bounds(next, any));
    }

    #[inline(always)]
    fn word(&self) -> u64 {
        let nobody = self.next >> NOT_A_CANDIDATE_BIT & 1;
        self.counts & ((1 << NOBODY_BIT) - 1) | nobody << NOBODY_BIT | self.next & !(1 << NOT_A_CANDIDATE_BIT)
    }
}

const NOT_A_CANDIDATE_BIT: u32 = 62;
/// More than any candidate.
const NOBODY_LAST: u64 = 1 << NOT_A_CANDIDATE_BIT;
