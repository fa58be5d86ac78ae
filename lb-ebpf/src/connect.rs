//! connect(2): look the address up, pick a backend, remember the flow, rewrite the destination.
//!
//! Each call counts exactly one outcome. Whatever is unknown or contradictory lets the call through unchanged; only a
//! known service without a usable backend is refused.

use lb_common::abi::{
    Backend, ENTRIES_PER_CELL, Flow, NOT_A_SERVICE, Outcomes, ScheduleCell, Service, ServiceKey4,
    ServiceKey6, StateWord, TableRef, Walk,
};
use lb_common::pick::{Pick, Tables, pick};

use crate::atomic::{self, Instructions};
use crate::context::{Dial, TCP};
use crate::maps::{
    BACKENDS, CHOSEN, HAS_SET_RETVAL, OUTCOMES, SCHEDULE, SERVICES, SERVICES_V4, SERVICES_V6, WALKS,
};
use crate::{PROCEED, flow};

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
    let Some(protocol) = dial.protocol() else { return pass_by::<I>(dial, 0) };
    let key = ServiceKey4 { address: dial.ip4(), port: dial.port(), protocol, _reserved: 0 };
    // SAFETY: the value is read at once; a service's index never changes while its key exists.
    let Some(index) = (unsafe { SERVICES_V4.get(key) }) else { return pass_by::<I>(dial, protocol) };
    match choose::<I>(dial, index.service) {
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
    let Some(protocol) = dial.protocol() else { return pass_by::<I>(dial, 0) };
    let (address, port) = (dial.ip6(), dial.port());
    // A v4-mapped address dials an IPv4 service, whose backends are IPv4, which are kept v4-mapped.
    let index = match address.as_mapped() {
        Some(v4) => {
            let key = ServiceKey4 { address: v4, port, protocol, _reserved: 0 };
            // SAFETY: the value is read at once; a service's index never changes while its key exists.
            unsafe { SERVICES_V4.get(key) }
        }
        None => {
            let key = ServiceKey6 { address, port, protocol, _reserved: 0 };
            // SAFETY: as above.
            unsafe { SERVICES_V6.get(key) }
        }
    };
    let Some(index) = index else { return pass_by::<I>(dial, protocol) };
    match choose::<I>(dial, index.service) {
        Verdict::Forward(backend) => {
            // SAFETY: a live map value; only its state word changes while something refers to the slot.
            unsafe { dial.redirect6((*backend).address, (*backend).port) };
            PROCEED
        }
        Verdict::Proceed => PROCEED,
        Verdict::Refuse => REFUSE,
    }
}

/// The address is not a service. A socket that failed to reach a service and now dials elsewhere is no flow any more.
#[inline(always)]
fn pass_by<I: Instructions>(dial: &Dial, protocol: u8) -> i32 {
    if protocol == TCP {
        flow::end::<I>(dial.cookie());
    }
    tally(NOT_A_SERVICE, |outcomes| &raw mut outcomes.not_a_service);
    PROCEED
}

/// Picks a backend for a call to the service at `index`, records the flow and counts the outcome.
#[inline(always)]
fn choose<I: Instructions>(dial: &Dial, index: u32) -> Verdict {
    let (Some(service), Some(walk)) = (SERVICES.get_ptr(index), WALKS.get_ptr_mut(index)) else {
        return broken(index);
    };
    // SAFETY: live map values. The table is one word and is loaded in one piece.
    let (table, walk): (TableRef, Walk) = unsafe {
        (TableRef::from_word((&raw const (*service).table).cast::<u64>().read_volatile()), I::step(walk))
    };
    match pick(&Kernel { service }, table, walk) {
        Pick::Scheduled(slot, backend) => {
            let tracked = record::<I>(dial, slot, backend);
            tally(index, |o| if tracked { &raw mut o.forwarded } else { &raw mut o.untracked });
            Verdict::Forward(backend)
        }
        Pick::Fallback(slot, backend) => {
            let tracked = record::<I>(dial, slot, backend);
            tally(index, |o| if tracked { &raw mut o.fallback } else { &raw mut o.untracked });
            Verdict::Forward(backend)
        }
        Pick::Refused => {
            flow::end::<I>(dial.cookie());
            tally(index, |outcomes| &raw mut outcomes.refused);
            if HAS_SET_RETVAL.load() != 0 {
                // SAFETY: a live map value.
                dial.set_errno(unsafe { (&raw const (*service).errno).read_volatile() });
            }
            Verdict::Refuse
        }
        Pick::Broken => broken(index),
    }
}

#[inline(always)]
fn broken(index: u32) -> Verdict {
    tally(index, |outcomes| &raw mut outcomes.passed);
    Verdict::Proceed
}

/// Counts the choice and records the flow. Returns whether the flow table had room.
#[inline(always)]
fn record<I: Instructions>(dial: &Dial, slot: u32, backend: *const Backend) -> bool {
    if let Some(chosen) = CHOSEN.get_ptr_mut(slot) {
        // SAFETY: a live map value.
        unsafe { atomic::add(&raw mut (*chosen).connects, 1) };
    }
    // SAFETY: a live map value.
    let generation = unsafe { (&raw const (*backend).generation).read_volatile() };
    flow::begin::<I>(dial.cookie(), Flow { slot, generation })
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
    type Backend = *const Backend;

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
    fn backend(&self, slot: u32) -> Option<*const Backend> {
        BACKENDS.get_ptr(slot)
    }

    #[inline(always)]
    fn is_usable(&self, backend: *const Backend) -> bool {
        // SAFETY: a live map value; the state word changes at any time, hence one volatile load.
        StateWord::is_usable(unsafe { (&raw const (*backend).state).cast::<u32>().read_volatile() })
    }

    #[inline(always)]
    fn fallback(&self) -> u32 {
        // SAFETY: a live map value.
        unsafe { (&raw const (*self.service).fallback).read_volatile() }
    }
}
