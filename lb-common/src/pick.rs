//! Which backend a call goes to: one function, run by the kernel programs, by replays and by tests on the host.
//!
//! A choice depends on the tables, on the service's rules and on one number, the *sample*: where a cursor stands, or a
//! random number. The three give the same backend again. What all policies have in common is here: a backend is
//! *eligible* if it may be chosen (its state says so) and is below the limit of open flows; in place of others one is
//! drawn again at scattered places of the table, so that theirs goes to all others by their shares; and if none is eligible,
//! the service's rules and its fallback decide. It knows nothing of how weights become a schedule, and
//! reads no clock.

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

/// The tables as one side sees them.
pub trait Tables: Sized {
    /// A reference to a backend.
    type Backend: Copy;
    /// A reference to the members of a table.
    type Members: Copy;
    /// A position in their list.
    type Position: Copy;

    /// The slot at an entry of the schedule map, or `None` past its end.
    fn entry(&self, entry: u32) -> Option<u32>;

    /// The backend in a slot, or `None` past the end of the map.
    fn backend(&self, slot: u32) -> Option<Self::Backend>;

    /// Whether it may be chosen.
    fn state(&self, backend: Self::Backend) -> StateWord;

    /// Its open flows.
    fn flows(&self, backend: Self::Backend) -> u32;

    /// Its errors of late.
    fn errors(&self, backend: Self::Backend) -> RecentErrors;

    /// How it has done of late, and until when it is ejected.
    fn ejection(&self, backend: Self::Backend) -> EjectionState;

    /// Entries that it has in the service's table.
    fn entries(&self, backend: Self::Backend) -> u32;

    /// The members of a table, if they are listed.
    fn members(&self, table: TableRef) -> Option<Self::Members>;

    /// The members of a table, if they are listed and may be scanned for the least loaded one.
    #[inline(always)]
    fn scanned(&self, table: TableRef) -> Option<Self::Members> {
        self.members(table)
    }

    /// How many there are, at most [`MAX_SUBSET`](crate::abi::MAX_SUBSET); how many with those that were replaced, at most
    /// [`MAX_LISTED`](crate::abi::MAX_LISTED); and the position before the first.
    fn list(&self, members: Self::Members) -> Option<(u32, u32, Self::Position)>;

    /// The position before the member with this number, which is below [`MAX_LISTED`](crate::abi::MAX_LISTED).
    fn position(&self, members: Self::Members, number: u32) -> Option<Self::Position>;

    /// The slot at the position after this one, and that position. To be asked [`MAX_LISTED`](crate::abi::MAX_LISTED) times at most. (Steps in
    /// place of an index: the verifier allows a sum of a pointer and a number that is another one in each turn only with
    /// CAP_PERFMON.)
    fn member(&self, position: Self::Position) -> (u32, Self::Position);

    /// The least loaded member. Long loops are methods, so that the kernel programs can have them as functions of their own,
    /// which the verifier follows once and not for each way that leads to them.
    #[inline(always)]
    fn least(&self, members: Self::Members, scan: Scan) -> u64 {
        let count = self.list(members).map_or(0, |(count, ..)| count);
        least(count, scan.sample, |part| least_of_part(self, members, part, scan))
    }

    /// The first of so many scattered entries whose backend is eligible, or what stands in place of it.
    #[inline(always)]
    fn redraw(&self, table: TableRef, sample: u32, looks: u32, active_limit: u32) -> u32 {
        redraw(sample, looks, |place, first| redraw_part(self, table, place, first, looks, active_limit))
    }

    /// A member that may be chosen, or what stands in place of it.
    #[inline(always)]
    fn usable_member(&self, members: Self::Members, sample: u32) -> u32 {
        usable_member(|group| usable_group(group, |part| usable_part(self, members, part, sample)))
    }

    /// Whether this choice is the trial of the ejected backend in a slot. Asked where members are not listed; where they are,
    /// the service says when a trial is due.
    #[inline(always)]
    fn begin_trial(&self, slot: u32, now: u32) -> bool {
        let _ = (slot, now);
        false
    }

    /// What is picked for a sample where no backend at its places of the schedule is eligible, or the table is odd.
    #[inline(always)]
    fn slow_path(&self, table: TableRef, rules: Rules, sample: u32, now: u32) -> Pick {
        slow_path(self, table, rules, sample, now)
    }

    /// Another slot than `first`, for a sample whose two positions both name that one.
    #[inline(always)]
    fn other_entry(&self, table: TableRef, first: u32, sample: u32) -> u32 {
        other_than(self, table, first, sample)
    }

    /// The service's fallback word. Asked last: the daemon stores it before the state words that need it.
    fn fallback(&self) -> u32;
}

/// Where samples come from: this CPU's cursor over the service's schedule.
pub trait CpuCursor {
    /// Takes the cursor one step on and returns where it stood.
    fn step(&self) -> Cursor;

    /// Where the cursor stands.
    fn load(&self) -> Cursor;

    /// Sets the phase of the cursor.
    fn set_phase(&self, phase: u32);
}

/// How a pick ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum How {
    /// The policy picked a slot.
    Picked,
    /// The slot is that of an ejected backend, to find out whether it is well again.
    Trial,
    /// Every backend is at the limit; the slot is that of the least loaded one.
    Overflowed,
    /// Nobody who was looked at may be chosen; the slot is the service's fallback.
    Fallback,
    /// The slot is another one than that of the lame duck on which the choice fell.
    Diverted,
    /// Every backend is at the limit, and the service refuses then.
    Limited,
    /// No usable backend.
    Refused,
    /// The tables contradict each other.
    Broken,
}

/// A pick. A plain pair, so that no part of it is ever without a value: the verifier wants to see one in every register,
/// also where a processor would not look.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pick {
    /// How it ended.
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

/// In place of a slot, where [`NO_SLOT`] means that no backend is eligible: the tables contradict each other.
const CORRUPT: u32 = u32::MAX;
/// In place of a slot: nobody may be chosen at all.
const NONE_USABLE: u32 = u32::MAX - 1;

/// The position in a table that a cursor points to: its start, moved on by its phase. Whoever uses it takes the remainder of
/// the table's length.
#[inline(always)]
pub fn position(cursor: Cursor, length_log2: u8) -> u32 {
    // A start is a fraction of the table, so it keeps its meaning when the length changes.
    cursor.phase.wrapping_add(cursor.start >> ((32 - u32::from(length_log2)) & 31))
}

/// A number that looks as if it were random: each 2^32 cursor of a CPU have every number once. The kernel's own random
/// numbers are a call of some twenty nanoseconds, and nobody has to be kept from guessing these. (The constants are those of
/// Chris Wellons' "lowbias32": flipping one bit of the input flips each bit of the result with a chance very near to a half.)
#[inline(always)]
pub fn scattered(cursor: Cursor) -> u32 {
    mixed(cursor.phase.wrapping_add(cursor.start))
}

/// A number that looks as if it had nothing to do with the given one; no two numbers have the same.
#[inline(always)]
fn mixed(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846c_a68b);
    x ^ x >> 16
}

/// Takes a sample, and picks a backend from `table` at the tick `now`. Returns the sample as well, for the record.
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
        // A plain store: what another call on this CPU stores in between decides only who comes first among equals.
        cursor.set_phase(at.phase.wrapping_add(steps));
        return (pick, sample);
    }
    let sample = match policy {
        Policy::P2c | Policy::Random => {
            let at = cursor.load();
            // A plain store, as above: two calls that interrupt each other may have the same sample.
            cursor.set_phase(at.phase.wrapping_add(1));
            scattered(at)
        }
        Policy::RoundRobin | Policy::WeightedRoundRobin | Policy::LeastLoaded => {
            position(cursor.step(), table.length_log2)
        }
    };
    (view.by_schedule(sample), sample)
}

/// Picks for a sample: the whole of a choice but for where its sample comes from. The same tables, rules, sample and tick give the
/// same again.
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

/// A cursor in memory, of a CPU that a test or the planner runs on.
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
