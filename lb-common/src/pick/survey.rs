//! A survey of all members of a table, made before a backend is ejected or a trial is scheduled:
//! how many members are available, how many are ejected, and which ejected backend has the next
//! trial.
//!
//! Each survey counts all members again, so that there is no stored count that could become wrong.
//! Surveys are rare: they follow failures and trials, and never an ordinary successful connect.

use super::Tables;
use super::mixed;
use super::view::slot_at;
use crate::abi::{EjectionRules, MAX_LISTED, NO_SLOT, TableRef};
use crate::ejection::{self, EJECTION_BITS};
use crate::load::{in_one_register, sign_mask_in_register, smaller, without_bounds};

/// The result of a survey, as one word, which a function of a kernel program can return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Survey {
    word: u64,
}

// The bits of a survey, from low to high: the number of members that may be chosen, the number of
// ejected members, and 1 if any member that may be chosen works. Above these: the slot of the next
// trial, the ticks until that trial, and 1 if there is no trial. Compared as numbers, the upper
// bits are smaller if the trial comes sooner.
const COUNT_BITS: u32 = 9;
const EJECTED_BIT: u32 = COUNT_BITS;
const WELL_BIT: u32 = 2 * COUNT_BITS;
const SLOT_BIT: u32 = WELL_BIT + 1;
const LEFT_BIT: u32 = SLOT_BIT + 16;
const NO_TRIAL_BIT: u32 = LEFT_BIT + EJECTION_BITS;
const _: () = assert!(MAX_LISTED < 1 << COUNT_BITS && NO_TRIAL_BIT < u64::BITS - 1);

/// Number of members that one part of a survey examines. Each part is a function of a kernel
/// program, and the verifier follows this function only once. The verifier would follow a loop over
/// all members iteration by iteration.
pub const PART: u32 = 12;
/// Number of parts in a list of maximum length. If members are not listed, a survey examines the
/// same number of parts, each of which consists of scattered entries.
pub const PARTS: u32 = 32;
/// Number of parts that one function examines, because the calls of all parts would not fit on its
/// stack.
const GROUP: u32 = 4;
const _: () = assert!(PART * PARTS == MAX_LISTED);

impl Survey {
    /// The survey of a table without members.
    pub const EMPTY: Self = Self { word: 1 << NO_TRIAL_BIT };

    /// The survey as a word.
    #[inline(always)]
    pub const fn to_word(self) -> u64 {
        self.word
    }

    /// The survey in a word.
    #[inline(always)]
    pub const fn from_word(word: u64) -> Self {
        Self { word }
    }

    /// Combines the results of two parts.
    #[inline(always)]
    fn with(self, other: Self) -> Self {
        const COUNTS: u64 = (1 << WELL_BIT) - 1;
        const WELL: u64 = 1 << WELL_BIT;
        let counts = ((self.word & COUNTS) + (other.word & COUNTS)) | ((self.word | other.word) & WELL);
        let (ours, theirs) = (self.word >> SLOT_BIT, other.word >> SLOT_BIT);
        let next = smaller(ours, theirs);
        Self { word: in_one_register(counts | next << SLOT_BIT) }
    }

    #[inline(always)]
    const fn bits(self, from: u32, count: u32) -> u32 {
        #[expect(clippy::cast_possible_truncation, reason = "at most 28 bits")]
        let low = (self.word >> from) as u32;
        low & ((1 << count) - 1)
    }

    /// Whether one more backend may be ejected: at least two are available, so that one remains.
    /// (If very many backends fail, this host may be the cause. The daemon decides whether it is,
    /// because the daemon has more information.)
    #[inline(always)]
    pub const fn has_room(self) -> bool {
        self.available() >= 2
    }

    /// The number of available members: those that may be chosen.
    #[inline(always)]
    pub const fn available(self) -> u16 {
        #[expect(clippy::cast_possible_truncation, reason = "9 bits")]
        let available = self.bits(0, COUNT_BITS) as u16;
        available
    }

    /// Whether any available member works: its run of failures is shorter than the number of
    /// failures in a row that ejects a backend.
    #[inline(always)]
    pub const fn any_is_well(self) -> bool {
        self.bits(WELL_BIT, 1) != 0
    }

    /// The slot of the ejected backend with the earliest end of its ejection, or [`NO_SLOT`] if no
    /// backend is ejected.
    #[inline(always)]
    pub const fn next_slot(self) -> u32 {
        if self.bits(NO_TRIAL_BIT, 1) != 0 { NO_SLOT } else { self.bits(SLOT_BIT, 16) }
    }

    /// The number of ticks until the ejection of the backend in [`Survey::next_slot`] ends.
    #[inline(always)]
    pub const fn ticks_left(self) -> u32 {
        self.bits(LEFT_BIT, EJECTION_BITS)
    }
}

/// Combines the results of all groups and of the service's backup, which counts as available
/// because it serves if no member may be chosen. Groups consist of parts of a table's members, or
/// of scattered entries if the members are not listed. `group(number)` must return the result of
/// [`survey_group`].
#[inline(always)]
pub fn survey<T: Tables>(tables: &T, rules: EjectionRules, group: impl Fn(u32) -> u64) -> Survey {
    let seen = of_groups(|number| Survey::from_word(group(number)), Survey::with);
    seen.with(survey_backup(tables, rules))
}

/// The slot of a service's fallback, the backend in this slot, and 1 if this backend is a backup,
/// else 0. A backup is outside the table: the daemon permits no policy to choose it.
#[inline(always)]
fn backup<T: Tables>(tables: &T) -> Option<(u32, T::Backend, u32)> {
    let slot = tables.fallback();
    if slot >= NO_SLOT {
        return None;
    }
    let backend = tables.backend(slot)?;
    Some((slot, backend, tables.state(backend).is_backup()))
}

/// Examines the backup.
#[inline(always)]
fn survey_backup<T: Tables>(tables: &T, rules: EjectionRules) -> Survey {
    let Some((_, backend, is_backup)) = backup(tables) else { return Survey::EMPTY };
    let is_backup = u64::from(is_backup);
    let run = u64::from(tables.ejection(backend).run);
    let is_below = sign_mask_in_register(run.wrapping_sub(u64::from(rules.failures)));
    Survey { word: Survey::EMPTY.word | is_backup | (is_backup & is_below) << WELL_BIT }
}

/// Combines the results of the parts of a group. `part(number)` must return the word of the part's
/// survey.
#[inline(always)]
pub fn survey_group(number: u32, part: impl Fn(u32) -> u64) -> u64 {
    of_group(number, |number| Survey::from_word(part(number)), Survey::with).to_word()
}

/// Combines the results of all groups. (The function contains no loop, because without CAP_PERFMON
/// the verifier cannot prove that a loop with a call in it ends. The groups are combined one after
/// another, because intermediate results are on the stack, which the functions of a kernel program
/// share.)
#[inline(always)]
pub(super) fn of_groups<P>(group: impl Fn(u32) -> P, with: impl Fn(P, P) -> P) -> P {
    const { assert!(PARTS == 8 * GROUP) };
    let seen = with(group(0), group(1));
    let seen = with(seen, group(2));
    let seen = with(seen, group(3));
    let seen = with(seen, group(4));
    let seen = with(seen, group(5));
    let seen = with(seen, group(6));
    with(seen, group(7))
}

/// Combines the results of all parts of a group.
#[inline(always)]
pub(super) fn of_group<P>(number: u32, part: impl Fn(u32) -> P, with: impl Fn(P, P) -> P) -> P {
    const { assert!(GROUP == 4) };
    let first = number.wrapping_mul(GROUP);
    let seen = with(part(first), part(first.wrapping_add(1)));
    let seen = with(seen, part(first.wrapping_add(2)));
    with(seen, part(first.wrapping_add(3)))
}

/// Examines one part of a table's list of members and replaced backends. Returns the word of a
/// [`Survey`].
#[inline(always)]
pub fn survey_members<T: Tables>(
    tables: &T,
    members: T::Members,
    part: u32,
    rules: EjectionRules,
    now: u32,
) -> u64 {
    let mut seen = Seen::NOTHING;
    let Some((count, listed, _)) = tables.list(members) else { return seen.word() };
    let first = (part & (PARTS - 1)) * PART;
    let Some(mut position) = tables.position(members, first) else { return seen.word() };
    // Bound: PART members.
    for offset in 0..PART {
        let index = first + offset;
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

/// Like [`survey_members`], for a table without a list of members: examines scattered entries, each
/// of which counts as a member.
#[inline(always)]
pub fn survey_entries<T: Tables>(
    tables: &T,
    table: TableRef,
    part: u32,
    rules: EjectionRules,
    now: u32,
) -> u64 {
    let mut seen = Seen::NOTHING;
    // Bound: PART entries.
    for offset in 0..PART {
        let place = mixed(now.wrapping_add(part.wrapping_mul(PART)).wrapping_add(offset));
        let Some(slot) = slot_at(tables, table, place) else { break };
        let Some(backend) = tables.backend(slot) else { break };
        seen.look(tables, backend, slot, 1, rules, now);
    }
    seen.word()
}

/// Number of entries that [`usable_other`] examines.
const LOOKS: u32 = 2;

/// The slot of a backend that may be chosen and is not the one in `slot`, from scattered entries of
/// a table. If there is none, the slot of the backup; if there is no backup, [`NO_SLOT`].
#[inline(always)]
pub fn usable_other<T: Tables>(tables: &T, table: TableRef, slot: u32, seed: u32) -> u32 {
    // Bound: LOOKS entries.
    for look in 0..LOOKS {
        let Some(other) = slot_at(tables, table, mixed(seed.wrapping_add(look))) else { break };
        let Some(backend) = tables.backend(other) else { break };
        if other != slot && tables.state(backend).is_usable() {
            return other;
        }
    }
    match backup(tables) {
        Some((slot, _, 1)) => slot,
        _ => NO_SLOT,
    }
}

/// The result of the members that were examined so far.
struct Seen {
    counts: u64,
    /// The bits of a survey about the next trial. A smaller number means a sooner trial.
    next: u64,
}

impl Seen {
    const NOTHING: Self = Self { counts: 0, next: 1 << NO_TRIAL_BIT };

    /// Examines one backend. Arithmetic replaces branches, because the verifier follows each path
    /// through each iteration.
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
        // This computes the same number as `ejection::left`. If the state byte marks a backend as
        // ejected but its ejection word does not, the ejection's time is over.
        let ahead = u64::from(standing.at.wrapping_sub(now));
        let is_over = sign_mask_in_register(u64::from(ejection::longest(rules)).wrapping_sub(ahead));
        let knows = sign_mask_in_register(0u64.wrapping_sub(u64::from(standing.phase)));
        let left = ahead & !is_over & knows;
        let theirs = (is_held_back ^ 1) << NO_TRIAL_BIT
            | (left & ((1 << EJECTION_BITS) - 1)) << LEFT_BIT
            | u64::from(slot) << SLOT_BIT;
        let next = smaller(self.next, theirs);
        let any = standing.to_word();
        (self.counts, self.next) = (without_bounds(counts, any), without_bounds(next, any));
    }

    #[inline(always)]
    fn word(&self) -> u64 {
        self.counts | self.next
    }
}
