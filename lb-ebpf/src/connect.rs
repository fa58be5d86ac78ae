//! connect(2): look the address up, pick a backend, remember the flow, rewrite the destination.
//!
//! Each call counts exactly one outcome. Whatever is unknown or contradictory lets the call through unchanged; only a
//! known service without a usable backend is refused.

use lb_common::abi::{
    Active, Backend, Flow, NOT_A_SERVICE, Outcomes, Phase, Reason, Service, ServiceKey4, ServiceKey6,
    TableRef,
};
use lb_common::net::{Address, Be32};
use lb_common::pick::{How, pick};

use crate::atomic::{self, Instructions};
use crate::context::{Dial, TCP};
use crate::maps::{
    ACTIVE, BACKENDS, HAS_SET_RETVAL, KNOWS_MPTCP, OUTCOMES, SERVICES, SERVICES_V4, SERVICES_V6, WALKS,
};
use crate::tables::{Kernel, Walking, rules};
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
        flow::leave::<I>(dial.cookie());
        tally(NOT_A_SERVICE, |outcomes| &raw mut outcomes.not_a_service);
        return Verdict::Proceed;
    };
    let (Some(service), Some(walk)) = (SERVICES.get_ptr(index), WALKS.get_ptr_mut(index)) else {
        tally(index, |outcomes| &raw mut outcomes.passed);
        return Verdict::Proceed;
    };
    // SAFETY: a live map value. The table is one word and is loaded in one piece.
    let table = TableRef::from_word(unsafe { (&raw const (*service).table).cast::<u64>().read_volatile() });
    // One look at the clock serves the choice and the flow.
    let now = clock::now_ns();
    let rules = rules(service);
    let (picked, draw) =
        pick(&Kernel { index, service }, &Walking::<I>::new(walk), table, rules, clock::tick(now));
    let slot = picked.slot;
    // Nobody's slot is past the end of both maps.
    let (backend, active): (*const Backend, *const Active) =
        match (BACKENDS.get_ptr(slot), ACTIVE.get_ptr(slot)) {
            (Some(backend), Some(active)) => (backend, active),
            _ => return nobody::<I>(dial, index, service, picked.how),
        };
    let reason = match picked.how {
        How::Overflowed => Reason::Overflow,
        How::Fallback => Reason::Fallback,
        How::Picked | How::Limited | How::Refused | How::Broken => Reason::Picked,
    };
    tally::count(slot, |counts| &raw mut counts.chosen);
    // SAFETY: live map values.
    let flow = unsafe {
        let share = (&raw const (*active).share).read_volatile();
        Flow {
            start_ns: now,
            namespace: dial.namespace(),
            slot,
            generation: (&raw const (*backend).generation).read_volatile(),
            process: dial.process(),
            draw,
            table_generation: table.generation,
            share: if share > 0xffff { 0xffff } else { share as u16 },
            service: index as u16,
            why: rules.policy | (reason as u8) << 4,
            phase: if dial.protocol() == Some(TCP) { Phase::Chosen } else { Phase::Datagrams } as u8,
            unknown: 0,
        }
    };
    if dial.protocol() == Some(TCP) {
        dial.set_syn_retries(rules.syn_retries);
    }
    let tracked = record::<I>(dial, &flow);
    if !tracked {
        tally::count(slot, |counts| &raw mut counts.untracked);
    }
    // One call per field: a field that is chosen before the addition makes it arithmetic with another offset on each
    // path, which the verifier allows with CAP_PERFMON only.
    if !tracked {
        tally(index, |outcomes| &raw mut outcomes.untracked);
    } else {
        match reason {
            Reason::Picked => tally(index, |outcomes| &raw mut outcomes.forwarded),
            Reason::Overflow => tally(index, |outcomes| &raw mut outcomes.overflowed),
            Reason::Fallback => tally(index, |outcomes| &raw mut outcomes.fallback),
        }
    }
    Verdict::Forward(backend)
}

/// The call goes to no backend.
#[inline(always)]
fn nobody<I: Instructions>(dial: &Dial, index: u32, service: *const Service, how: How) -> Verdict {
    flow::leave::<I>(dial.cookie());
    match how {
        How::Limited => tally(index, |outcomes| &raw mut outcomes.limited),
        How::Refused => tally(index, |outcomes| &raw mut outcomes.refused),
        How::Picked | How::Overflowed | How::Fallback | How::Broken => {
            tally(index, |outcomes| &raw mut outcomes.passed);
            return Verdict::Proceed;
        }
    }
    if HAS_SET_RETVAL.load() != 0 {
        // SAFETY: a live map value.
        dial.set_errno(unsafe { (&raw const (*service).errno).read_volatile() });
    }
    Verdict::Refuse
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
