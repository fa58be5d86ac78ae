//! sendmsg(2) with a destination address. An existing flow of the socket to the service continues
//! until its backend may no longer be chosen, or until `rebind` requires a new choice. If no flow
//! continues, a backend is chosen as in connect, and the flow is recorded.
//!
//! Each call counts exactly one outcome.

use lb_common::abi::{BackendAddress, Flow, NOT_A_SERVICE, Phase};
use lb_common::net::Address;

use crate::decide::decision::Decision;
use crate::decide::service::{Dialled, service_at};
use crate::decide::verdict::Verdict;
use crate::flow::{datagrams, record, tally};
use crate::kernel::atomic::Instructions;
use crate::kernel::clock;
use crate::kernel::context::Dial;
use crate::rows;

#[inline(always)]
pub fn sendmsg4<I: Instructions>(dial: &Dial) -> i32 {
    balance::<I>(dial, service_at(dial, Address::mapped(dial.ip4()))).apply_v4(dial)
}

/// Kernel fact: for a v4-mapped address the kernel calls [`sendmsg4`] and not this hook, and this
/// hook may not write a v4-mapped address.
#[inline(always)]
pub fn sendmsg6<I: Instructions>(dial: &Dial) -> i32 {
    balance::<I>(dial, service_at(dial, dial.ip6())).apply_v6(dial)
}

#[inline(always)]
fn balance<I: Instructions>(dial: &Dial, service: Dialled) -> Verdict {
    if !service.is_service() {
        tally::outcome(NOT_A_SERVICE, |outcomes| &raw mut outcomes.not_a_service);
        return Verdict::Proceed;
    }
    let index = service.index;
    let cookie = dial.known_cookie();
    // A connected socket receives only from its peer. So if the process sends to the service of the
    // connected flow, only that flow's backend can answer, regardless of the backend's state.
    if dial.is_connected()
        && let Some(backend) = connected_to(cookie, index)
    {
        tally::outcome(index, |outcomes| &raw mut outcomes.reused);
        return Verdict::Forward(backend);
    }
    // A null pointer replaces an `Option`: without CAP_PERFMON the verifier also follows impossible
    // paths to the end, and rejects reads of values that only some paths have written.
    let before = datagrams::of(cookie, index).unwrap_or(core::ptr::null());
    let mut is_due = false;
    if !before.is_null() {
        is_due = is_rebind_due(before, index);
        if !is_due
            && let Some(backend) = usable(before)
            && is_lame_duck(before) == 0
        {
            tally::outcome(index, |outcomes| &raw mut outcomes.reused);
            return Verdict::Forward(backend);
        }
    }
    // Datagrams never eject a backend, so no datagram is a trial.
    let decision = Decision::make::<I>(service, None, false);
    let Some(backend) = decision.backend() else {
        // The record of an existing flow remains, because answers may be in flight. If the flow's
        // backend is usable and only `rebind` required the choice, the flow continues.
        if !before.is_null()
            && is_due
            && let Some(backend) = usable(before)
        {
            tally::outcome(index, |outcomes| &raw mut outcomes.reused);
            return Verdict::Forward(backend);
        }
        return decision.refuse(dial);
    };
    // If no backend may be chosen, each call chooses the fallback: a flow to the fallback
    // continues.
    if !before.is_null() && !is_due && goes_to(before, decision.slot, rows::address_of(backend)) {
        tally::outcome(index, |outcomes| &raw mut outcomes.reused);
        return Verdict::Forward(rows::address_of(backend));
    }
    tally::chosen(backend);
    let tracked =
        datagrams::begin(cookie, backend, &decision.flow(dial, backend, dial.namespace(), Phase::Datagrams));
    decision.count(tracked);
    Verdict::Forward(rows::address_of(backend))
}

/// The backend of a connected socket, if it belongs to the service.
#[inline(always)]
fn connected_to(cookie: u64, index: u32) -> Option<*const BackendAddress> {
    let flow = record::of(cookie)?.flow();
    if flow.phase != Phase::Datagrams as u8 || u32::from(flow.service) != index {
        return None;
    }
    rows::address(flow.slot)
}

/// Whether `rebind` requires a new choice for the flow.
#[inline(always)]
fn is_rebind_due(flow: *const Flow, index: u32) -> bool {
    let rebind = rows::rebind(index);
    // SAFETY: the socket's own entry.
    rebind != 0 && clock::is_past(unsafe { (*flow).start_ns }, rebind)
}

/// The backend of a flow, if it is still in the flow's slot and may be chosen.
#[inline(always)]
fn usable(flow: *const Flow) -> Option<*const BackendAddress> {
    // SAFETY: the socket's own entry.
    let (slot, generation) = unsafe { ((*flow).slot, (*flow).generation) };
    let backend = rows::backend(slot)?;
    let address = rows::address_of(backend);
    // SAFETY: a live map value.
    let is_usable = rows::state(backend).is_usable()
        && unsafe { (&raw const (*address).generation).read_volatile() } == generation;
    if is_usable { Some(address) } else { None }
}

/// Whether the backend of a flow is a lame duck by its own report: 1 or 0.
#[inline(always)]
fn is_lame_duck(flow: *const Flow) -> u32 {
    // SAFETY: the socket's own entry.
    lame_duck_in(unsafe { (*flow).slot })
}

/// Whether the backend in a slot is a lame duck by its own report: 1 or 0. (This is a global
/// function, so that the verifier does not follow the rest of the program once per path.)
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn lame_duck_in(slot: u32) -> u32 {
    match rows::backend(slot) {
        Some(backend) => u32::from(rows::is_lame(backend, clock::now_ns())),
        None => 0,
    }
}

/// Whether the choice is the backend of the existing flow.
#[inline(always)]
fn goes_to(flow: *const Flow, slot: u32, backend: *const BackendAddress) -> bool {
    // SAFETY: the socket's own entry, and a live map value.
    unsafe {
        (*flow).slot == slot && (*flow).generation == (&raw const (*backend).generation).read_volatile()
    }
}
