//! The inputs of a choice: the tables of a service in this client task's maps, and the CPU's
//! cursor.

use core::arch::asm;
use core::cell::Cell;
use core::marker::PhantomData;

use lb_common::abi::{
    Backend, Cursor, ENTRIES_PER_CELL, EjectionState, Members, NO_SLOT, RecentErrors, Rules, ScheduleCell,
    Service, StateWord, TableRef,
};
use lb_common::load::{self, HalfLife};
use lb_common::pick::{self, CpuCursor, Pick, Scan, Tables};

use super::choose;
use crate::ejection;
use crate::globals::SCANS;
use crate::kernel::atomic::{Instructions, Linux5_10};
use crate::kernel::clock;
use crate::maps::{CPU_SERVICES, MEMBERS, SCHEDULE};
use crate::rows;

/// The tables of one service.
pub struct KernelTables<I> {
    pub index: u32,
    pub service: *const Service,
    /// The backend that the fast path picked; null if it picked none.
    pub picked: Cell<*const Backend>,
    instructions: PhantomData<I>,
}

impl<I> KernelTables<I> {
    #[inline(always)]
    pub const fn new(index: u32, service: *const Service) -> Self {
        Self { index, service, picked: Cell::new(core::ptr::null()), instructions: PhantomData }
    }
}

/// Tables without a service, for functions that only read the maps at given indexes.
#[inline(always)]
fn of_no_service() -> KernelTables<Linux5_10> {
    KernelTables::new(0, core::ptr::null())
}

/// The location of a service's table, loaded as one word.
#[inline(always)]
pub fn table_of(service: *const Service) -> TableRef {
    // SAFETY: a live map value.
    TableRef::from_word(unsafe { (&raw const (*service).table).cast::<u64>().read_volatile() })
}

/// A pseudo-random number from the position of this CPU's cursor over the service's schedule.
#[inline(always)]
pub fn cursor_number(index: u32) -> u32 {
    match CPU_SERVICES.get_ptr(index) {
        // SAFETY: this CPU's map value.
        Some(service) => pick::scattered(unsafe { (&raw const (*service).cursor).read_volatile() }),
        None => 0,
    }
}

/// The rules of a service that a choice needs.
#[inline(always)]
pub fn rules_of(service: *const Service) -> Rules {
    // SAFETY: a live map value.
    rules(service, unsafe { (&raw const (*service).rules.policy).read_volatile() })
}

/// The rules of a service that a choice needs, with a policy that the caller has read. The daemon
/// stores the rules word by word, at any time.
#[inline(always)]
fn rules(service: *const Service, policy: u8) -> Rules {
    // SAFETY: a live map value.
    unsafe {
        let rules = &raw const (*service).rules;
        Rules {
            overflow: (&raw const (*rules).overflow).read_volatile(),
            error_half_life: (&raw const (*rules).error_half_life).read_volatile(),
            ..first_rules(service, policy)
        }
    }
}

/// The rules with which a choice begins, see [`Tables::all_rules`].
#[inline(always)]
pub fn first_rules(service: *const Service, policy: u8) -> Rules {
    let active_limit = if SCANS.load() != 0 {
        // SAFETY: a live map value.
        unsafe { (&raw const (*service).rules.active_limit).read_volatile() }
    } else {
        0
    };
    Rules { policy, active_limit, ..Rules::default() }
}

impl<I: Instructions> Tables for KernelTables<I> {
    type Backend = *const Backend;
    type Members = u32;
    type Position = *const u16;

    #[inline(always)]
    fn entry(&self, entry: u32) -> Option<u32> {
        let cell: *const ScheduleCell = SCHEDULE.get_ptr(entry / ENTRIES_PER_CELL)?;
        // The cell is loaded as one word and shifted. An index into the cell would be arithmetic on
        // a map pointer, which the verifier would have to check.
        // SAFETY: a live map value, aligned to eight bytes.
        let word = unsafe { cell.cast::<u64>().read_volatile() };
        Some((word >> (16 * (entry % ENTRIES_PER_CELL))) as u32 & 0xffff)
    }

    #[inline(always)]
    fn backend(&self, slot: u32) -> Option<*const Backend> {
        rows::backend(slot)
    }

    #[inline(always)]
    fn note_picked(&self, backend: *const Backend) {
        self.picked.set(backend);
    }

    #[inline(always)]
    fn state(&self, backend: *const Backend) -> StateWord {
        rows::state(backend)
    }

    #[inline(always)]
    fn flows(&self, backend: *const Backend) -> u32 {
        // SAFETY: a live map value. The number of flows fits in the low half.
        unsafe { (&raw const (*backend).flows).cast::<u32>().read_volatile() }
    }

    #[inline(always)]
    fn errors(&self, backend: *const Backend) -> RecentErrors {
        // SAFETY: a live map value; the errors are one word.
        RecentErrors::from_word(unsafe { (&raw const (*backend).errors).cast::<u64>().read_volatile() })
    }

    #[inline(always)]
    fn has_errors(&self, backend: *const Backend) -> bool {
        // SAFETY: a live map value.
        unsafe { (&raw const (*backend).errors.count).read_volatile() != 0 }
    }

    #[inline(always)]
    fn remaining_errors(&self, slot: u32, _: Rules, now: u32) -> u32 {
        errors_in_slot(self.index, slot, now)
    }

    #[inline(always)]
    fn all_rules(&self, rules: Rules) -> Rules {
        if self.service.is_null() { rules } else { self::rules(self.service, rules.policy) }
    }

    #[inline(always)]
    fn ejection(&self, backend: *const Backend) -> EjectionState {
        // SAFETY: a live map value; one word.
        EjectionState::from_word(unsafe { (&raw const (*backend).ejection).cast::<u64>().read_volatile() })
    }

    #[inline(always)]
    fn entries(&self, backend: *const Backend) -> u32 {
        // SAFETY: a live map value.
        unsafe { (&raw const (*backend).entries).read_volatile() }
    }

    #[inline(always)]
    fn members(&self, table: TableRef) -> Option<u32> {
        table.members_of(self.index)
    }

    #[inline(always)]
    fn scanned(&self, table: TableRef) -> Option<u32> {
        if SCANS.load() == 0 { None } else { self.members(table) }
    }

    #[inline(always)]
    fn list(&self, members: u32) -> Option<(u32, u32, *const u16)> {
        let members: *const Members = MEMBERS.get_ptr(members)?;
        // The position is before the first slot, so that the last step ends at the last slot and
        // not after it: without CAP_PERFMON no pointer may leave its map's value.
        // SAFETY: a live map value; the slots follow the field `listed`.
        unsafe {
            let count = (&raw const (*members).count).read_volatile();
            let listed = (&raw const (*members).listed).read_volatile();
            Some((count, listed, (&raw const (*members).listed).cast::<u16>().add(1)))
        }
    }

    #[inline(always)]
    fn position(&self, members: u32, number: u32) -> Option<*const u16> {
        let members: *const Members = MEMBERS.get_ptr(members)?;
        // The position is before the member, as in `list`. The caller bounds the number by a mask,
        // which the verifier recognizes.
        // SAFETY: a live map value; the number is that of a member that may be listed.
        unsafe { Some((&raw const (*members).listed).cast::<u16>().add(1).add(number as usize)) }
    }

    #[inline(always)]
    fn member(&self, before: *const u16) -> (u32, *const u16) {
        let mut position = before;
        // This is in assembly, so that the compiler does not replace the pointer with an index that
        // it computes from the pointers of two iterations.
        // SAFETY: the position stays within the slots of a live map value, because callers request
        // at most as many slots as there are; the instruction adds the size of a slot.
        unsafe {
            asm!("{0} += 2", inout(reg) position, options(pure, readonly, nostack, preserves_flags));
            (u32::from(position.read_volatile()), position)
        }
    }

    #[inline(always)]
    fn least(&self, members: u32, scan: Scan) -> u64 {
        least_of_members(members, scan.sample, scan.now, scan.active_limit, scan.error_half_life)
    }

    #[inline(always)]
    fn redraw(&self, table: TableRef, sample: u32, looks: u32, active_limit: u32) -> u32 {
        redraw_entry(table.base, u32::from(table.length_log2), sample, looks, active_limit)
    }

    #[inline(always)]
    fn slow_path(&self, table: TableRef, _: Rules, sample: u32, now: u32) -> Pick {
        choose::slow_path::<I>(self.index, table, sample, now)
    }

    #[inline(always)]
    fn usable_member(&self, _: u32, sample: u32) -> u32 {
        usable_member_of(self.index, sample)
    }

    #[inline(always)]
    fn begin_trial(&self, slot: u32, now: u32) -> bool {
        ejection::begin_trial::<I>(self.index, slot, now) != NO_SLOT
    }

    #[inline(always)]
    fn other_entry(&self, table: TableRef, first: u32, sample: u32) -> u32 {
        other_scheduled_slot(table.base, u32::from(table.length_log2), first, sample)
    }

    #[inline(always)]
    fn fallback(&self) -> u32 {
        // SAFETY: a live map value.
        unsafe { (&raw const (*self.service).fallback).read_volatile() }
    }
}

/// The remaining errors of the backend in a slot of a service, as a global function: few backends
/// have errors, and inlined code would be between the instructions that every connect executes.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn errors_in_slot(index: u32, slot: u32, now: u32) -> u32 {
    let (Some(service), Some(backend)) = (rows::service(index), rows::backend(slot)) else { return 0 };
    let half_life = HalfLife::new(rules_of(service).error_half_life);
    load::decayed(of_no_service().errors(backend), now, half_life)
}

/// The scan for the least loaded member, as a global function: the verifier follows it once, for
/// any arguments, and assumes that its result can be any number.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn least_of_members(
    members: u32,
    sample: u32,
    now: u32,
    active_limit: u32,
    error_half_life: u32,
) -> u64 {
    let count = of_no_service().list(members).map_or(0, |(count, ..)| count);
    let part = |part| least_of_some(members | part << PART_BIT, sample, now, active_limit, error_half_life);
    pick::least(count, sample, part)
}

/// The lowest bit of the part's number in the argument `members` of [`least_of_some`]. The bits
/// below it contain the index of the list of members.
const PART_BIT: u32 = 16;

/// One part of [`least_of_members`]. `members` contains the index of the list, and the part's
/// number from `PART_BIT` on.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn least_of_some(
    members: u32,
    sample: u32,
    now: u32,
    active_limit: u32,
    error_half_life: u32,
) -> u64 {
    let scan = Scan { sample, now, active_limit, error_half_life };
    pick::least_of_part(&of_no_service(), members & ((1 << PART_BIT) - 1), members >> PART_BIT, scan)
}

/// The search of scattered entries, as a global function like [`least_of_members`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn redraw_entry(base: u32, length_log2: u32, sample: u32, looks: u32, active_limit: u32) -> u32 {
    let part = |place, first| {
        // Both numbers are at most 64, so each fits in a byte.
        redraw_entries(base, length_log2 | first << 8 | looks << 16, place, active_limit)
    };
    pick::redraw(sample, looks, part)
}

/// One part of [`redraw_entry`]. `bounds` contains, from the lowest byte on: the binary logarithm
/// of the schedule's length, the number of the first entry of this part, and the number of all
/// entries.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn redraw_entries(base: u32, bounds: u32, place: u32, active_limit: u32) -> u64 {
    let table = TableRef { base, generation: 0, length_log2: bounds as u8, members: 0 };
    let (first, looks) = (bounds >> 8 & 0xff, bounds >> 16);
    pick::redraw_part(&of_no_service(), table, place, first, looks, active_limit)
}

/// The search of a service's members for one that may be chosen, as a global function like
/// [`least_of_members`]. (The argument is the index of the service and not the index of the list,
/// because only some paths compute the index of the list. Without CAP_PERFMON the verifier also
/// follows impossible paths, and if one of them calls the function with an uninitialized argument,
/// it rejects all calls.)
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn usable_member_of(index: u32, sample: u32) -> u32 {
    pick::usable_member(|group| usable_some(index, group, sample))
}

/// One group of parts of [`usable_member_of`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn usable_some(index: u32, group: u32, sample: u32) -> u64 {
    pick::usable_group(group, |part| usable_part(index, part, sample))
}

/// One part of [`usable_member_of`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn usable_part(index: u32, part: u32, sample: u32) -> u64 {
    match members_of(index) {
        Some(members) => pick::usable_part(&of_no_service(), members, part, sample),
        None => pick::NO_MEMBER,
    }
}

/// The index of a service's current list of members, if the members are listed.
#[inline(always)]
fn members_of(index: u32) -> Option<u32> {
    table_of(rows::service(index)?).members_of(index)
}

/// A slot other than `first`, for a sample with the same slot at both points. This is a global
/// function like [`least_of_members`]; if it were inlined, its variables would not fit on the stack
/// of the hooks (512 bytes, including all callees).
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn other_scheduled_slot(base: u32, length_log2: u32, first: u32, sample: u32) -> u32 {
    let table = TableRef { base, generation: 0, length_log2: length_log2 as u8, members: 0 };
    pick::other_than(&of_no_service(), table, first, sample)
}

/// The diversion of a pick whose backend is a lame duck, as a global function like
/// [`errors_in_slot`]. The table and the picks are passed as words.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn divert_from_lame(index: u32, table: u64, sample: u32, picked: u32) -> u32 {
    let pick = choose::from_word(picked);
    let Some(service) = rows::service(index) else { return picked };
    let limit = pick::limit_of_diversion(pick.how, first_rules(service, 0));
    let slot = pick::divert(sample, pick.slot, |place, is_scattered| {
        look_beside_lame(table, place, is_scattered.into(), limit)
    });
    choose::to_word(pick::diverted(pick, slot))
}

/// Examines half of the entries that [`divert_from_lame`] examines, see [`pick::diversion_part`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn look_beside_lame(table: u64, place: u32, is_scattered: u32, active_limit: u32) -> u64 {
    let now_ns = clock::now_ns();
    let is_lame = |backend| rows::is_lame(backend, now_ns);
    let table = TableRef::from_word(table);
    pick::diversion_part(&of_no_service(), table, place, is_scattered != 0, active_limit, is_lame)
}

/// This CPU's cursor over the service's tables.
pub struct KernelCursor<I> {
    cursor: *mut Cursor,
    instructions: PhantomData<I>,
}

impl<I> KernelCursor<I> {
    /// `cursor` must point to this CPU's value of a per-CPU map.
    #[inline(always)]
    pub fn new(cursor: *mut Cursor) -> Self {
        Self { cursor, instructions: PhantomData }
    }
}

impl<I: Instructions> CpuCursor for KernelCursor<I> {
    #[inline(always)]
    fn step(&self) -> Cursor {
        // SAFETY: this CPU's map value, as `new` requires.
        unsafe { I::step(self.cursor) }
    }

    #[inline(always)]
    fn load(&self) -> Cursor {
        // SAFETY: this CPU's map value, as `new` requires.
        unsafe { self.cursor.read_volatile() }
    }

    #[inline(always)]
    fn set_phase(&self, phase: u32) {
        // SAFETY: this CPU's map value, as `new` requires.
        unsafe { (&raw mut (*self.cursor).phase).write_volatile(phase) };
    }
}
