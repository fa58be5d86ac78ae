//! connect(2): look the address up, pick a backend, remember the flow, rewrite the destination.
//!
//! Each call counts exactly one outcome. Whatever is unknown or contradictory lets the call through unchanged; only a
//! known service without a usable backend is refused.

use lb_common::abi::{
    Active, Backend, ENTRIES_PER_CELL, Flow, NOT_A_SERVICE, Outcomes, Phase, ScheduleCell, Service,
    ServiceKey4, ServiceKey6, StateWord, TableRef, Walk,
};
use lb_common::net::{Address, Be32};
use lb_common::pick::{Pick, Tables, pick};

use crate::atomic::{self, Instructions};
use crate::context::{Dial, TCP};
use crate::maps::{
    ACTIVE, BACKENDS, HAS_SET_RETVAL, KNOWS_MPTCP, OUTCOMES, SCHEDULE, SERVICES, SERVICES_V4, SERVICES_V6,
    WALKS,
};
use crate::{PROCEED, clock, flow, tally};

/// The verdict that fails the call.
const REFUSE: i32 = 0;

/// How a call ends, before the socket is touched.
enum Verdict {
    Forward(*const Backend),
    Proceed,
    Refuse,
}

#[inline(always)]
pub fn connect4<I: Instructions>(dial: &Dial) -> i32 {
    match balance::<I>(dial, service4(dial, dial.ip4())) {
        Verdict::Forward(backend) => {
            // SAFETY: a live map value; only its state word changes while something refers to the slot.
            unsafe {
                let [_, _, _, v4] = (*backend).address.words;
                dial.redirect4(v4, (*backend).port);
            }
            PROCEED
        }
        Verdict::Proceed => PROCEED,
        Verdict::Refuse => REFUSE,
    }
}

#[inline(always)]
pub fn connect6<I: Instructions>(dial: &Dial) -> i32 {
    let address = dial.ip6();
    // A v4-mapped address dials an IPv4 service, whose backends are IPv4, which are kept v4-mapped.
    let service = match address.as_mapped() {
        Some(v4) => service4(dial, v4),
        None => service6(dial, address),
    };
    match balance::<I>(dial, service) {
        Verdict::Forward(backend) => {
            // SAFETY: a live map value; only its state word changes while something refers to the slot.
            unsafe { dial.redirect6((*backend).address, (*backend).port) };
            PROCEED
        }
        Verdict::Proceed => PROCEED,
        Verdict::Refuse => REFUSE,
    }
}

/// The place of the service that is dialled at an IPv4 address, if it is one.
#[inline(always)]
fn service4(dial: &Dial, address: Be32) -> Option<u32> {
    let key = ServiceKey4 { address, port: dial.port(), protocol: dial.protocol()?, _reserved: 0 };
    // SAFETY: the value is read at once. While its key exists it changes only from one service at the address to
    // another.
    unsafe { SERVICES_V4.get(key) }.map(|index| index.service)
}

/// As [`service4`] for an IPv6 address.
#[inline(always)]
fn service6(dial: &Dial, address: Address) -> Option<u32> {
    let key = ServiceKey6 { address, port: dial.port(), protocol: dial.protocol()?, _reserved: 0 };
    // SAFETY: as above.
    unsafe { SERVICES_V6.get(key) }.map(|index| index.service)
}

/// Picks a backend for a call to a service, records the flow, and counts the one outcome.
#[inline(always)]
fn balance<I: Instructions>(dial: &Dial, service: Option<u32>) -> Verdict {
    let Some(index) = service else {
        // A socket that failed to reach a service and now dials elsewhere is no flow any more.
        if dial.protocol() == Some(TCP) {
            flow::leave::<I>(dial.cookie());
        }
        tally(NOT_A_SERVICE, |outcomes| &raw mut outcomes.not_a_service);
        return Verdict::Proceed;
    };
    let (Some(service), Some(walk)) = (SERVICES.get_ptr(index), WALKS.get_ptr_mut(index)) else {
        tally(index, |outcomes| &raw mut outcomes.passed);
        return Verdict::Proceed;
    };
    // SAFETY: live map values. The table is one word and is loaded in one piece.
    let (table, walk): (TableRef, Walk) = unsafe {
        (TableRef::from_word((&raw const (*service).table).cast::<u64>().read_volatile()), I::step(walk))
    };
    let (slot, active, scheduled) = match pick(&Kernel { service }, table, walk) {
        Pick::Scheduled(slot, active) => (slot, active, true),
        Pick::Fallback(slot, active) => (slot, active, false),
        refused_or_broken => {
            flow::leave::<I>(dial.cookie());
            if refused_or_broken != Pick::Refused {
                tally(index, |outcomes| &raw mut outcomes.passed);
                return Verdict::Proceed;
            }
            tally(index, |outcomes| &raw mut outcomes.refused);
            if HAS_SET_RETVAL.load() != 0 {
                // SAFETY: a live map value.
                dial.set_errno(unsafe { (&raw const (*service).errno).read_volatile() });
            }
            return Verdict::Refuse;
        }
    };
    let backend: *const Backend = match BACKENDS.get_ptr(slot) {
        Some(backend) => backend,
        None => return Verdict::Proceed,
    };
    tally::count(slot, |counts| &raw mut counts.chosen);
    // SAFETY: live map values.
    let flow = unsafe {
        let share = (&raw const (*active).share).read_volatile();
        Flow {
            start_ns: clock::now_ns(),
            namespace: dial.namespace(),
            slot,
            generation: (&raw const (*backend).generation).read_volatile(),
            process: dial.process(),
            draw: walk.phase,
            table_generation: table.generation,
            share: if share > 0xffff { 0xffff } else { share as u16 },
            service: index as u16,
            why: 1,
            phase: if dial.protocol() == Some(TCP) { Phase::Chosen } else { Phase::Datagrams } as u8,
            unknown: 0,
        }
    };
    let tracked = record::<I>(dial, &flow);
    if !tracked {
        tally::count(slot, |counts| &raw mut counts.untracked);
    }
    // One call per field: a field that is chosen before the addition makes it arithmetic with another offset on each
    // path, which the verifier allows with CAP_PERFMON only.
    if !tracked {
        tally(index, |outcomes| &raw mut outcomes.untracked);
    } else if scheduled {
        tally(index, |outcomes| &raw mut outcomes.forwarded);
    } else {
        tally(index, |outcomes| &raw mut outcomes.fallback);
    }
    Verdict::Forward(backend)
}

/// Records the flow. Returns whether it could: the flow table may be full, or the end of the flow be invisible.
#[inline(always)]
fn record<I: Instructions>(dial: &Dial, flow: &Flow) -> bool {
    if KNOWS_MPTCP.load() != 0 && dial.is_mptcp_path() {
        return false;
    }
    flow::begin::<I>(dial.cookie(), flow)
}

/// Counts the one outcome of a call.
#[inline(always)]
fn tally(row: u32, field: impl FnOnce(&mut Outcomes) -> *mut u64) {
    if let Some(outcomes) = OUTCOMES.get_ptr_mut(row) {
        // SAFETY: this CPU's map value; the closure only takes a field's address.
        unsafe { atomic::add(field(&mut *outcomes), 1) };
    }
}

/// The tables as they lie in this client task's maps.
struct Kernel {
    service: *const Service,
}

impl Tables for Kernel {
    type Backend = *const Active;

    #[inline(always)]
    fn entry(&self, entry: u32) -> Option<u32> {
        let cell: *const ScheduleCell = SCHEDULE.get_ptr(entry / ENTRIES_PER_CELL)?;
        // The cell is loaded as one word and shifted: indexing it would be arithmetic on a map pointer, which the
        // verifier would have to follow.
        // SAFETY: a live map value, aligned to eight bytes.
        let word = unsafe { cell.cast::<u64>().read_volatile() };
        Some((word >> (16 * (entry % ENTRIES_PER_CELL))) as u32 & 0xffff)
    }

    #[inline(always)]
    fn backend(&self, slot: u32) -> Option<*const Active> {
        ACTIVE.get_ptr(slot)
    }

    #[inline(always)]
    fn is_usable(&self, active: *const Active) -> bool {
        // SAFETY: a live map value; the state word changes at any time, hence one volatile load.
        StateWord::is_usable(unsafe { (&raw const (*active).state).cast::<u32>().read_volatile() })
    }

    #[inline(always)]
    fn fallback(&self) -> u32 {
        // SAFETY: a live map value.
        unsafe { (&raw const (*self.service).fallback).read_volatile() }
    }
}
