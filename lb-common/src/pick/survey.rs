//! A look at all members of a table, because one is to be ejected, or an ejected one to be tried: how many are ejected and how
//! many are not, and who is to be tried next.
//!
//! Counting anew each time, instead of keeping a count, leaves nothing that could drift. It is rare: failures and trials, never
//! a connect that goes well.

use super::Tables;
use super::mixed;
use super::view::slot_at;
use crate::abi::{EjectionRules, MAX_LISTED, NO_SLOT, TableRef};
use crate::ejection::{self, EJECTION_BITS};
use crate::load::{in_one_register, sign_mask_in_register, smaller, without_bounds};

/// What was seen, as one word, which is what a function of a kernel program can return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Survey {
    word: u64,
}

// From low to high: members that may be chosen, members that are ejected, whether any that may be chosen is well; then who is to be
// tried, in how many ticks, and whether nobody is: the smaller these together, the sooner.
const COUNT_BITS: u32 = 9;
const EJECTED_BIT: u32 = COUNT_BITS;
const WELL_BIT: u32 = 2 * COUNT_BITS;
const SLOT_BIT: u32 = WELL_BIT + 1;
const LEFT_BIT: u32 = SLOT_BIT + 16;
const NOBODY_BIT: u32 = LEFT_BIT + EJECTION_BITS;
const _: () = assert!(MAX_LISTED < 1 << COUNT_BITS && NOBODY_BIT < u64::BITS - 1);

/// Members that are looked at together. A look at all is as many looks at parts, each of which is a function of a kernel program
/// that the verifier follows once: through a loop over all it would go turn by turn.
pub const PART: u32 = 12;
/// Parts of all members that may be listed. Of a table whose members are not listed as many entries are looked at.
pub const PARTS: u32 = 32;
/// Parts that one function looks at: the calls of all would not fit on its stack.
const GROUP: u32 = 4;
const _: () = assert!(PART * PARTS == MAX_LISTED);

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

    /// What was seen in two parts.
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

    /// Whether one more may be ejected: it is not the last that is available. (That so many fail that it may be this host's fault is
    /// for the daemon to judge, which knows more of it.)
    #[inline(always)]
    pub const fn has_room(self) -> bool {
        self.available() >= 2
    }

    /// Members that are available: they may be chosen, and are not ejected.
    #[inline(always)]
    pub const fn available(self) -> u16 {
        #[expect(clippy::cast_possible_truncation, reason = "9 bits")]
        let available = self.bits(0, COUNT_BITS) as u16;
        available
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

/// Puts together what is seen in the groups of parts of a table's members, or, where they are not listed, of scattered entries, and
/// the backup, which is available if no member is. `group` gives what [`survey_group`] does.
#[inline(always)]
pub fn survey<T: Tables>(tables: &T, rules: EjectionRules, group: impl Fn(u32) -> u64) -> Survey {
    let seen = of_groups(|number| Survey::from_word(group(number)), Survey::with);
    seen.with(survey_backup(tables, rules))
}

/// The fallback of a service with its slot, and 1 if it is a backup, else 0: outside the table, the daemon lets no policy choose it.
#[inline(always)]
fn backup<T: Tables>(tables: &T) -> Option<(u32, T::Backend, u32)> {
    let slot = tables.fallback();
    if slot >= NO_SLOT {
        return None;
    }
    let backend = tables.backend(slot)?;
    Some((slot, backend, tables.state(backend).is_backup()))
}

/// Looks at the backup.
#[inline(always)]
fn survey_backup<T: Tables>(tables: &T, rules: EjectionRules) -> Survey {
    let Some((_, backend, is_backup)) = backup(tables) else { return Survey::NOBODY };
    let is_backup = u64::from(is_backup);
    let run = u64::from(tables.ejection(backend).run);
    let is_below = sign_mask_in_register(run.wrapping_sub(u64::from(rules.failures)));
    Survey { word: Survey::NOBODY.word | is_backup | (is_backup & is_below) << WELL_BIT }
}

/// Puts together what is seen in the parts of a group. `part` gives the word of each.
#[inline(always)]
pub fn survey_group(number: u32, part: impl Fn(u32) -> u64) -> u64 {
    of_group(number, |number| Survey::from_word(part(number)), Survey::with).to_word()
}

/// Puts all groups together. (Without a loop: the verifier finds none to end that has a call in it, without CAP_PERFMON. And one
/// after another: what waits meanwhile lies on the stack, which the kernel's functions share.)
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

/// Puts all parts of a group together.
#[inline(always)]
pub(super) fn of_group<P>(number: u32, part: impl Fn(u32) -> P, with: impl Fn(P, P) -> P) -> P {
    const { assert!(GROUP == 4) };
    let first = number.wrapping_mul(GROUP);
    let seen = with(part(first), part(first.wrapping_add(1)));
    let seen = with(seen, part(first.wrapping_add(2)));
    with(seen, part(first.wrapping_add(3)))
}

/// Looks at one part of the members of a table, and of those that others stand in for. Returns the word of a [`Survey`].
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

/// As [`survey_members`], of a table whose members are not listed: looks at scattered entries, as if each were a member.
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

/// Entries at which [`usable_other`] looks.
const LOOKS: u32 = 2;

/// The slot of a backend that may be chosen and is not that in `slot`, at some scattered entry of a table; that of the backup if there is
/// none; or [`NO_SLOT`].
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

/// What was seen so far.
struct Seen {
    counts: u64,
    /// Who is to be tried next, at the bits where a survey has it; the smaller, the sooner.
    next: u64,
}

impl Seen {
    const NOTHING: Self = Self { counts: 0, next: 1 << NOBODY_BIT };

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
        let theirs = (is_held_back ^ 1) << NOBODY_BIT
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
