//! Picks the backend of a call. Kernel programs, replays and tests on the host run the same
//! function.
//!
//! A choice depends on the tables, on the service's rules and on one number, the *sample*: a
//! cursor's position or a random number. The same tables, rules and sample always give the same
//! choice.
//!
//! A backend is *eligible* if its state word permits connects to choose it, and the number of its
//! open flows is below the limit. If the picked backend is not eligible, entries that are scattered
//! over the table are examined. So the connects of the ineligible backend are spread over all other
//! backends in proportion to their shares. If no backend is eligible, the service's rules and its
//! fallback decide.
//!
//! This file contains the parts that all policies share. The module must not depend on how weights
//! become a schedule, and reads no clock.

mod diversion;
mod least_loaded;
mod p2c;
mod policy;
mod schedule;
mod survey;
mod view;

pub use diversion::{
    LOOKS as DIVERSION_LOOKS, diversion_part, divert, diverted, limit_of_diversion, other_than_lame,
};
pub use least_loaded::{Scan, least, least_of_part};
pub use p2c::other_than;
pub use policy::slow_path;
pub use schedule::{NO_MEMBER, redraw, redraw_part, usable_group, usable_member, usable_part};
pub use survey::{Survey, survey, survey_entries, survey_group, survey_members, usable_other};

use crate::abi::{Cursor, EjectionState, NO_SLOT, Policy, Reason, RecentErrors, Rules, StateWord, TableRef};
use crate::load::{self, HalfLife};
use view::View;

/// The tables of a service, in kernel maps or in memory.
pub trait Tables: Sized {
    /// A reference to a backend.
    type Backend: Copy;
    /// A reference to the members of a table.
    type Members: Copy;
    /// A position in the list of members.
    type Position: Copy;

    /// The slot in an entry of the schedule map; `None` past the end of the map.
    fn entry(&self, entry: u32) -> Option<u32>;

    /// The backend in a slot; `None` past the end of the map.
    fn backend(&self, slot: u32) -> Option<Self::Backend>;

    /// Notes that the fast path picks this backend, so that the caller need not look it up again.
    #[inline(always)]
    fn note_picked(&self, backend: Self::Backend) {
        let _ = backend;
    }

    /// The state word of a backend, which determines whether it may be chosen.
    fn state(&self, backend: Self::Backend) -> StateWord;

    /// The number of open flows of a backend.
    fn flows(&self, backend: Self::Backend) -> u32;

    /// The recent errors of a backend.
    fn errors(&self, backend: Self::Backend) -> RecentErrors;

    /// Whether a backend has recent errors.
    #[inline(always)]
    fn has_errors(&self, backend: Self::Backend) -> bool {
        self.errors(backend).count != 0
    }

    /// The number of recent errors that remain at the tick `now`, for the backend in `slot`. The
    /// argument `rules` may have only the rules with which a choice begins, see
    /// [`Tables::all_rules`].
    #[inline(always)]
    fn remaining_errors(&self, slot: u32, rules: Rules, now: u32) -> u32 {
        let half_life = HalfLife::new(self.all_rules(rules).error_half_life);
        self.backend(slot).map_or(0, |backend| load::decayed(self.errors(backend), now, half_life))
    }

    /// All rules of the service. A choice may begin with only the policy and the limit, because the
    /// fast path needs no other rule.
    #[inline(always)]
    fn all_rules(&self, rules: Rules) -> Rules {
        rules
    }

    /// The ejection word of a backend: recent failures, and until when it is ejected.
    fn ejection(&self, backend: Self::Backend) -> EjectionState;

    /// Number of entries that a backend has in the service's table.
    fn entries(&self, backend: Self::Backend) -> u32;

    /// The members of a table, if they are listed.
    fn members(&self, table: TableRef) -> Option<Self::Members>;

    /// The members of a table, if they are listed and may be scanned for the least loaded member.
    #[inline(always)]
    fn scanned(&self, table: TableRef) -> Option<Self::Members> {
        self.members(table)
    }

    /// The number of members in the table, at most [`MAX_SUBSET`](crate::abi::MAX_SUBSET); the
    /// number of listed backends, including replaced ones, at most
    /// [`MAX_LISTED`](crate::abi::MAX_LISTED); and the position before the first backend. `None` if
    /// there is no such list.
    fn list(&self, members: Self::Members) -> Option<(u32, u32, Self::Position)>;

    /// The position before the member with this number, which must be below
    /// [`MAX_LISTED`](crate::abi::MAX_LISTED).
    fn position(&self, members: Self::Members, number: u32) -> Option<Self::Position>;

    /// The slot at the next position, and that position. A caller may advance at most
    /// [`MAX_LISTED`](crate::abi::MAX_LISTED) times from the position before the first backend.
    /// (The list is not accessed by index, because the verifier requires CAP_PERFMON to add a
    /// different number to a pointer in each iteration.)
    fn member(&self, position: Self::Position) -> (u32, Self::Position);

    /// The result of [`least()`] for these members: the least loaded member, as a word. Long loops
    /// are methods, so that the kernel programs can compile them as separate functions, which the
    /// verifier follows once and not once per path that leads to them.
    #[inline(always)]
    fn least(&self, members: Self::Members, scan: Scan) -> u64 {
        let count = self.list(members).map_or(0, |(count, ..)| count);
        least(count, scan.sample, |part| least_of_part(self, members, part, scan))
    }

    /// The result of [`redraw()`]: the slot of the first of `looks` scattered entries with an
    /// eligible backend, or a number above all slots if there is none.
    #[inline(always)]
    fn redraw(&self, table: TableRef, sample: u32, looks: u32, active_limit: u32) -> u32 {
        redraw(sample, looks, |place, first| redraw_part(self, table, place, first, looks, active_limit))
    }

    /// The result of [`usable_member()`]: the slot of a member that may be chosen, or a number
    /// above all slots if there is none.
    #[inline(always)]
    fn usable_member(&self, members: Self::Members, sample: u32) -> u32 {
        usable_member(|group| usable_group(group, |part| usable_part(self, members, part, sample)))
    }

    /// Whether this choice becomes the trial of the ejected backend in a slot. This method is
    /// called only if members are not listed. If they are listed,
    /// [`Service::next_trial`](crate::abi::Service::next_trial) determines the trial before a
    /// choice is made.
    #[inline(always)]
    fn begin_trial(&self, slot: u32, now: u32) -> bool {
        let _ = (slot, now);
        false
    }

    /// The pick for a sample if a backend at the sample's positions in the schedule is not eligible
    /// or is ejected, or if the table is invalid or missing.
    #[inline(always)]
    fn slow_path(&self, table: TableRef, rules: Rules, sample: u32, now: u32) -> Pick {
        slow_path(self, table, rules, sample, now)
    }

    /// The result of [`other_than`]. This method is called if both positions of a sample have the
    /// slot `first`.
    #[inline(always)]
    fn other_entry(&self, table: TableRef, first: u32, sample: u32) -> u32 {
        other_than(self, table, first, sample)
    }

    /// The number of the service's fallback slot, or [`NO_SLOT`]. The fallback must be read after
    /// the state words, because the daemon stores the fallback before the state words that require
    /// it.
    fn fallback(&self) -> u32;
}

/// The source of samples: this CPU's cursor over the service's schedule.
pub trait CpuCursor {
    /// Advances the cursor by one and returns its previous position.
    fn step(&self) -> Cursor;

    /// The current position.
    fn load(&self) -> Cursor;

    /// Sets the phase of the cursor.
    fn set_phase(&self, phase: u32);
}

/// How a pick was made. If the pick has a slot, the number is that of the flow's [`Reason`].
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum How {
    /// The policy picked a slot.
    Picked = Reason::Picked as u8,
    /// The slot is that of an ejected backend; the flow tests whether the backend works again.
    Trial = Reason::Trial as u8,
    /// Every backend is at the limit; the slot is that of the least loaded one.
    Overflowed = Reason::Overflow as u8,
    /// No examined backend may be chosen; the slot is the service's fallback.
    Fallback = Reason::Fallback as u8,
    /// The picked backend is a lame duck by its own report; the slot is that of another backend.
    Diverted = Reason::Diverted as u8,
    /// Every backend is at the limit, and the service's rules refuse the call.
    Limited,
    /// No backend is usable, and there is no fallback.
    Refused,
    /// The tables contradict each other. (The number is not that of a reason, and does not look
    /// like the number of a trial, in which the two lowest bits are set.)
    Broken = 8,
}

/// The result of a choice. It is a plain pair in which both parts always have a value, because the
/// verifier requires an initialized value in every register, even if no instruction would use it.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pick {
    /// How the pick was made.
    pub how: How,
    /// The slot, or [`NO_SLOT`].
    pub slot: u32,
}

impl Pick {
    const BROKEN: Self = Self::no_slot(How::Broken);

    #[inline(always)]
    const fn no_slot(how: How) -> Self {
        Self { how, slot: NO_SLOT }
    }
}

/// A result in place of a slot: the tables contradict each other. (The result [`NO_SLOT`] means
/// that no examined backend is eligible.)
const CORRUPT: u32 = u32::MAX;
/// A result in place of a slot: no examined backend may be chosen, regardless of the limit.
const NONE_USABLE: u32 = u32::MAX - 1;

/// A cursor's position in a table of 2^`length_log2` entries: its start plus its phase. The caller
/// reduces the sum modulo the table's length.
#[inline(always)]
pub fn position(cursor: Cursor, length_log2: u8) -> u32 {
    // The start is a fraction of the table, so it remains valid when the length changes.
    cursor.phase.wrapping_add(cursor.start >> ((32 - u32::from(length_log2)) & 31))
}

/// A pseudo-random number from a CPU's cursor: 2^32 steps of the cursor yield every number once.
/// The numbers need not be unpredictable, and the kernel's own random numbers would require a call,
/// which takes about twenty nanoseconds. (The constants are those of Chris Wellons' "lowbias32":
/// flipping one bit of the input flips each bit of the result with a probability very near to a
/// half.)
#[inline(always)]
pub fn scattered(cursor: Cursor) -> u32 {
    mixed(cursor.phase.wrapping_add(cursor.start))
}

/// Scrambles the bits of a number; different inputs give different results.
#[inline(always)]
fn mixed(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846c_a68b);
    x ^ x >> 16
}

/// Draws a sample from the CPU's cursor, and picks a backend from `table` at the tick `now`. Also
/// returns the sample, which is recorded with the flow.
#[inline(always)]
pub fn pick<T: Tables>(
    tables: &T,
    cursor: &impl CpuCursor,
    table: TableRef,
    rules: Rules,
    now: u32,
) -> (Pick, u32) {
    let Some(policy) = Policy::from_u8(rules.policy) else { return (Pick::BROKEN, 0) };
    let view = View { tables, table, rules, now };
    if matches!(policy, Policy::LeastLoaded)
        && let Some(members) = tables.scanned(table)
    {
        let at = cursor.load();
        let sample = position(at, table.length_log2);
        let (pick, steps) = view.scan(members, sample);
        // A plain store is sufficient: a concurrent store by another call on this CPU affects only
        // the order among equally loaded backends.
        cursor.set_phase(at.phase.wrapping_add(steps));
        return (pick, sample);
    }
    let sample = match policy {
        Policy::P2c | Policy::Random => {
            let at = cursor.load();
            // A plain store is sufficient: two calls that interrupt each other may get the same
            // sample.
            cursor.set_phase(at.phase.wrapping_add(1));
            scattered(at)
        }
        Policy::RoundRobin | Policy::WeightedRoundRobin | Policy::LeastLoaded => {
            position(cursor.step(), table.length_log2)
        }
    };
    (view.by_schedule(sample), sample)
}

/// Picks a backend for a given sample. The same tables, rules, sample and tick always give the same
/// result.
pub fn choose<T: Tables>(tables: &T, table: TableRef, rules: Rules, sample: u32, now: u32) -> Pick {
    let view = View { tables, table, rules, now };
    match Policy::from_u8(rules.policy) {
        None => Pick::BROKEN,
        Some(Policy::LeastLoaded) => match tables.scanned(table) {
            Some(members) => view.scan(members, sample).0,
            None => view.by_schedule(sample),
        },
        Some(_) => view.by_schedule(sample),
    }
}

/// A cursor in memory, for a CPU in a test or in the planner.
impl CpuCursor for core::cell::Cell<Cursor> {
    fn step(&self) -> Cursor {
        let cursor = self.get();
        self.set_phase(cursor.phase.wrapping_add(1));
        cursor
    }

    fn load(&self) -> Cursor {
        self.get()
    }

    fn set_phase(&self, phase: u32) {
        self.set(Cursor { phase, ..self.get() });
    }
}
