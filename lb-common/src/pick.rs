//! Picks the backend of a call. Kernel programs, replays and tests on the host run the same
//! function.
//!
//! A choice depends on the tables, on the service's rules and on one number, the *sample*: a
//! cursor's position or a random number. The same three give the same backend again. This file
//! contains the parts that all policies share. A backend is *eligible* if its state says that it
//! may be chosen and it is below the limit of open flows. If a backend is not eligible, entries are
//! drawn again at scattered places of the table, so that its connects go to all other backends by
//! their shares. If none is eligible, the service's rules and its fallback decide. The module must
//! not know how weights become a schedule, and reads no clock.

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

use crate::abi::{Cursor, EjectionState, NO_SLOT, Policy, RecentErrors, Rules, StateWord, TableRef};
use view::View;

/// The tables of a service, in kernel maps or in memory.
pub trait Tables: Sized {
    /// A reference to a backend.
    type Backend: Copy;
    /// A reference to the members of a table.
    type Members: Copy;
    /// A position in the list of members.
    type Position: Copy;

    /// The slot at an entry of the schedule map, or `None` past its end.
    fn entry(&self, entry: u32) -> Option<u32>;

    /// The backend in a slot, or `None` past the end of the map.
    fn backend(&self, slot: u32) -> Option<Self::Backend>;

    /// The state word of a backend, which says whether it may be chosen.
    fn state(&self, backend: Self::Backend) -> StateWord;

    /// The number of open flows of a backend.
    fn flows(&self, backend: Self::Backend) -> u32;

    /// The recent errors of a backend.
    fn errors(&self, backend: Self::Backend) -> RecentErrors;

    /// The ejection word of a backend: recent failures, and until when it is ejected.
    fn ejection(&self, backend: Self::Backend) -> EjectionState;

    /// Number of entries that a backend has in the service's table.
    fn entries(&self, backend: Self::Backend) -> u32;

    /// The members of a table, if they are listed.
    fn members(&self, table: TableRef) -> Option<Self::Members>;

    /// The members of a table, if they are listed and may be scanned for the least loaded one.
    #[inline(always)]
    fn scanned(&self, table: TableRef) -> Option<Self::Members> {
        self.members(table)
    }

    /// The number of members, at most [`MAX_SUBSET`](crate::abi::MAX_SUBSET); the number including
    /// those that were replaced, at most [`MAX_LISTED`](crate::abi::MAX_LISTED); and the position
    /// before the first.
    fn list(&self, members: Self::Members) -> Option<(u32, u32, Self::Position)>;

    /// The position before the member with this number, which is below
    /// [`MAX_LISTED`](crate::abi::MAX_LISTED).
    fn position(&self, members: Self::Members, number: u32) -> Option<Self::Position>;

    /// The slot at the position after this one, and that position. It may be called at most
    /// [`MAX_LISTED`](crate::abi::MAX_LISTED) times. (The list has no index, because the verifier
    /// requires CAP_PERFMON to add a number to a pointer that differs in each iteration.)
    fn member(&self, position: Self::Position) -> (u32, Self::Position);

    /// The least loaded member, as a word of the scan. Long loops are methods, so that the kernel
    /// programs can compile them as separate functions, which the verifier follows once and not
    /// once per path that leads to them.
    #[inline(always)]
    fn least(&self, members: Self::Members, scan: Scan) -> u64 {
        let count = self.list(members).map_or(0, |(count, ..)| count);
        least(count, scan.sample, |part| least_of_part(self, members, part, scan))
    }

    /// The slot of the first of `looks` scattered entries with an eligible backend, or a number
    /// that stands for the failure.
    #[inline(always)]
    fn redraw(&self, table: TableRef, sample: u32, looks: u32, active_limit: u32) -> u32 {
        redraw(sample, looks, |place, first| redraw_part(self, table, place, first, looks, active_limit))
    }

    /// The slot of a member that may be chosen, or a number that stands for the failure.
    #[inline(always)]
    fn usable_member(&self, members: Self::Members, sample: u32) -> u32 {
        usable_member(|group| usable_group(group, |part| usable_part(self, members, part, sample)))
    }

    /// Whether this choice becomes the trial of the ejected backend in a slot. Called only if
    /// members are not listed; otherwise the service stores when a trial is due.
    #[inline(always)]
    fn begin_trial(&self, slot: u32, now: u32) -> bool {
        let _ = (slot, now);
        false
    }

    /// The pick for a sample if no backend at its places of the schedule is eligible, or the table
    /// is invalid.
    #[inline(always)]
    fn slow_path(&self, table: TableRef, rules: Rules, sample: u32, now: u32) -> Pick {
        slow_path(self, table, rules, sample, now)
    }

    /// Another slot than `first`, for a sample whose two positions both name `first`.
    #[inline(always)]
    fn other_entry(&self, table: TableRef, first: u32, sample: u32) -> u32 {
        other_than(self, table, first, sample)
    }

    /// The service's fallback word. Read last, because the daemon stores it before the state words
    /// that require it.
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

/// The result of a pick.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum How {
    /// The policy picked a slot.
    Picked,
    /// The slot of an ejected backend; the flow tests whether the backend works again.
    Trial,
    /// Every backend is at the limit; the slot of the least loaded one.
    Overflowed,
    /// No examined backend may be chosen; the slot of the service's fallback.
    Fallback,
    /// The choice was a lame duck; the slot of another backend.
    Diverted,
    /// Every backend is at the limit, and the service's rules refuse the call.
    Limited,
    /// No usable backend.
    Refused,
    /// The tables contradict each other.
    Broken,
}

/// A pick. It is a plain pair in which every part always has a value, because the verifier requires
/// an initialized value in every register, even if no instruction would use it.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pick {
    /// The result.
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

/// A number in place of a slot: the tables contradict each other. ([`NO_SLOT`] means that no
/// backend is eligible.)
const CORRUPT: u32 = u32::MAX;
/// A number in place of a slot: no backend may be chosen at all.
const NONE_USABLE: u32 = u32::MAX - 1;

/// The position in a table of a cursor: its start plus its phase. The caller reduces it modulo the
/// table's length.
#[inline(always)]
pub fn position(cursor: Cursor, length_log2: u8) -> u32 {
    // A start is a fraction of the table, so it keeps its meaning when the length changes.
    cursor.phase.wrapping_add(cursor.start >> ((32 - u32::from(length_log2)) & 31))
}

/// A pseudo-random number: 2^32 steps of a CPU's cursor yield every number once. The kernel's own
/// random numbers need a call of some twenty nanoseconds, and these numbers need not be
/// unpredictable. (The constants are those of Chris Wellons' "lowbias32": flipping one bit of the
/// input flips each bit of the result with a probability very near to a half.)
#[inline(always)]
pub fn scattered(cursor: Cursor) -> u32 {
    mixed(cursor.phase.wrapping_add(cursor.start))
}

/// A number without visible relation to the given one; different inputs give different numbers.
#[inline(always)]
fn mixed(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846c_a68b);
    x ^ x >> 16
}

/// Takes a sample, and picks a backend from `table` at the tick `now`. Also returns the sample,
/// which is recorded with the flow.
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
        // A plain store: a concurrent store by another call on this CPU affects only the order
        // among equally loaded backends.
        cursor.set_phase(at.phase.wrapping_add(steps));
        return (pick, sample);
    }
    let sample = match policy {
        Policy::P2c | Policy::Random => {
            let at = cursor.load();
            // A plain store, as above: two calls that interrupt each other may get the same sample.
            cursor.set_phase(at.phase.wrapping_add(1));
            scattered(at)
        }
        Policy::RoundRobin | Policy::WeightedRoundRobin | Policy::LeastLoaded => {
            position(cursor.step(), table.length_log2)
        }
    };
    (view.by_schedule(sample), sample)
}

/// Picks a backend for a given sample. The same tables, rules, sample and tick give the same result
/// again.
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

/// A cursor in memory, for a CPU of a test or of the planner.
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
