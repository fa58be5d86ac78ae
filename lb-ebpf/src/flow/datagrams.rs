//! The backends to which unconnected datagram sockets last sent: one entry per socket, with one
//! position per service.
//!
//! Kernel fact: the kernel runs the programs of sendmsg, recvmsg and connect under the socket lock,
//! and runs the program of release after the last of these calls. So no two programs change a
//! socket's entry at the same time, and the program that removes the entry counts the ends of all
//! its flows.

use lb_common::abi::{Backend, Datagrams, Flow, FlowBucket, MAX_DATAGRAM_FLOWS, NO_SLOT, Peer};
use lb_common::ending::Ending;
use lb_common::net::{Address, Be16};

use crate::flow::record::{self, NEW};
use crate::flow::tally::{self, TrafficTotals};
use crate::maps::{DATAGRAMS, EMPTY};
use crate::rows;

#[inline(always)]
fn entry(cookie: u64) -> Option<*mut Datagrams> {
    if record::may_have_datagrams(cookie) { DATAGRAMS.get_ptr_mut(cookie) } else { None }
}

/// The flow of a socket to a service, if the socket has one.
#[inline(always)]
pub fn of(cookie: u64, service: u32) -> Option<*const Flow> {
    let entry = entry(cookie)?;
    // Bound: MAX_DATAGRAM_FLOWS positions.
    for position in 0..MAX_DATAGRAM_FLOWS {
        // SAFETY: the socket's own entry; within the array by the bound.
        let (phase, its) = unsafe {
            let flow = (&raw const (*entry).flows).cast::<Flow>().add(position);
            ((*flow).phase, (*flow).service)
        };
        if phase == 0 {
            return None;
        }
        if u32::from(its) == service {
            // SAFETY: the socket's own entry; `opaque_to_verifier` masks the position.
            return Some(unsafe { flow_at(entry, opaque_to_verifier(entry, position)) });
        }
    }
    None
}

/// Returns `position` as a number whose value the verifier does not know. If the verifier knew the
/// value, it would follow the rest of the program once for each position; and without CAP_PERFMON
/// it rejects arithmetic with offsets that differ by path.
///
/// # Safety
/// `entry` must be a live map value.
#[inline(always)]
unsafe fn opaque_to_verifier(entry: *const Datagrams, position: usize) -> usize {
    const { assert!(MAX_DATAGRAM_FLOWS.is_power_of_two()) };
    // SAFETY: guaranteed by the caller. The reserved word is always 0, which the verifier does not
    // know.
    let nothing = unsafe { (&raw const (*entry)._reserved).read_volatile() };
    position.wrapping_add(nothing as usize) & (MAX_DATAGRAM_FLOWS - 1)
}

/// The flow at a position that is unknown to the verifier.
///
/// # Safety
/// `entry` must be a live map value.
#[inline(always)]
unsafe fn flow_at(entry: *const Datagrams, position: usize) -> *mut Flow {
    // SAFETY: guaranteed by the caller; within the array by the mask.
    unsafe { (&raw const (*entry).flows).cast::<Flow>().cast_mut().add(position) }
}

/// Records `flow` as the flow of a socket to the flow's service, in place of a previous flow to
/// this service. Returns false if there is no room for the socket's entry.
#[inline(always)]
pub fn begin(cookie: u64, backend: *const Backend, flow: &Flow) -> bool {
    let entry = match entry(cookie) {
        Some(entry) => entry,
        None => {
            let empty: &Datagrams = &EMPTY;
            if DATAGRAMS.insert(cookie, empty, NEW).is_err() {
                return false;
            }
            record::note_datagrams(cookie, FlowBucket::IN_DATAGRAMS);
            match DATAGRAMS.get_ptr_mut(cookie) {
                Some(entry) => entry,
                None => return false,
            }
        }
    };
    put(entry, cookie, flow);
    tally::opened(backend);
    true
}

/// The position for a flow to a service: the position of the current flow to this service, or a
/// free position, or the position of the flow that was chosen first. This is a global function, so
/// that the verifier does not follow the rest of the program once for each position.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn position_for(cookie: u64, service: u32) -> u32 {
    let Some(entry) = DATAGRAMS.get_ptr(cookie) else { return 0 };
    let (mut oldest, mut age) = (0, 0);
    // Bound: MAX_DATAGRAM_FLOWS positions.
    for position in 0..MAX_DATAGRAM_FLOWS {
        // SAFETY: the socket's own entry; within the arrays by the bound.
        let (phase, its, order) = unsafe {
            let flow = (&raw const (*entry).flows).cast::<Flow>().add(position);
            ((*flow).phase, (*flow).service, *(&raw const (*entry).order).cast::<u32>().add(position))
        };
        if phase == 0 || u32::from(its) == service {
            return position as u32;
        }
        // SAFETY: the socket's own entry. The counter wraps around, and so does the difference.
        let since = unsafe { (*entry).chosen }.wrapping_sub(order);
        if since > age {
            (oldest, age) = (position as u32, since);
        }
    }
    oldest
}

#[inline(always)]
fn put(entry: *mut Datagrams, cookie: u64, flow: &Flow) {
    let position = position_for(cookie, u32::from(flow.service));
    // SAFETY: the socket's own entry; within the arrays by the mask.
    unsafe {
        // This also hides the position from the compiler, which could compute the range of the
        // function's result and remove the mask.
        let position = opaque_to_verifier(entry, position as usize);
        let at = flow_at(entry, position);
        if (&raw const (*at).phase).read_volatile() != 0 {
            leave_position(cookie, position as u32, u32::from(flow.service), flow.slot);
        }
        at.write_volatile(*flow);
        let chosen = (*entry).chosen;
        (&raw mut (*entry).order).cast::<u32>().add(position).write_volatile(chosen);
        (&raw mut (*entry).chosen).write_volatile(chosen.wrapping_add(1));
    }
}

/// Ends the flow at a position, before a flow of `service` to `slot` replaces it. Returns 0.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn leave_position(cookie: u64, position: u32, service: u32, slot: u32) -> u32 {
    let Some(entry) = DATAGRAMS.get_ptr_mut(cookie) else { return 0 };
    // SAFETY: the socket's own entry; within the arrays by the mask.
    unsafe {
        let position = opaque_to_verifier(entry, position as usize);
        let before = (&raw mut (*entry).before).cast::<Peer>().add(position);
        let old = flow_at(entry, position).read_volatile();
        if u32::from(old.service) != service {
            before.write_volatile(Peer::NONE);
        } else if old.slot != slot
            && let Some(backend) = rows::address(old.slot)
        {
            let (address, port) = ((*backend).address, (*backend).port);
            before.write_volatile(Peer { address, port, _reserved: 0 });
        }
        tally::ended(old.slot, old.start_ns, Ending::Closed as u32, TrafficTotals::NONE);
    }
    0
}

/// The service of the socket's flow that has `peer` as its current or its previous backend.
#[inline(always)]
pub fn service_at(cookie: u64, peer: Address, port: Be16) -> Option<u16> {
    let entry = entry(cookie)?;
    // Bound: MAX_DATAGRAM_FLOWS positions in each of the two loops.
    for position in 0..MAX_DATAGRAM_FLOWS {
        // SAFETY: the socket's own entry; within the array by the bound.
        let flow = unsafe { (&raw const (*entry).flows).cast::<Flow>().add(position) };
        // SAFETY: the socket's own entry; within the array by the bound.
        let (phase, slot, service) = unsafe { ((*flow).phase, (*flow).slot, (*flow).service) };
        if phase == 0 {
            break;
        }
        let backend = rows::address(slot)?;
        // SAFETY: a live map value; a slot retains its backend while flows refer to it.
        if unsafe { (*backend).address == peer && (*backend).port == port } {
            return Some(service);
        }
    }
    for position in 0..MAX_DATAGRAM_FLOWS {
        // SAFETY: the socket's own entry; within the arrays by the bound.
        unsafe {
            let before = (&raw const (*entry).before).cast::<Peer>().add(position);
            let flow = (&raw const (*entry).flows).cast::<Flow>().add(position);
            if (*flow).phase == 0 {
                break;
            }
            if (*before).port == port && (*before).address == peer {
                return Some((*flow).service);
            }
        }
    }
    None
}

/// A value in place of a slot: the position has no flow.
const FREE: u16 = NO_SLOT as u16;

/// Removes a socket's entry, if it has one, and counts the ends of all its flows.
#[inline(always)]
pub fn end(cookie: u64) {
    end_datagrams(cookie);
}

/// The body of [`end`]. It is a global function so that its arrays are not on the stack of the hook
/// while the hook calls other functions (the limit of 512 bytes includes callees). Returns 0.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn end_datagrams(cookie: u64) -> u32 {
    let Some(entry) = entry(cookie) else { return 0 };
    // All data for the ends of the flows is read before the entry is removed, because afterwards
    // its memory may belong to another socket. Two arrays occupy less stack than one array of
    // pairs.
    let (mut starts, mut slots) = ([0u64; MAX_DATAGRAM_FLOWS], [FREE; MAX_DATAGRAM_FLOWS]);
    for (position, (start, slot)) in starts.iter_mut().zip(&mut slots).enumerate() {
        // SAFETY: the socket's own entry; within the array by the bound.
        let flow = unsafe { (&raw const (*entry).flows).cast::<Flow>().add(position) };
        // SAFETY: the socket's own entry; within the array by the bound.
        let (start_ns, its_slot, phase) = unsafe { ((*flow).start_ns, (*flow).slot, (*flow).phase) };
        *start = start_ns;
        *slot = if phase == 0 { FREE } else { its_slot as u16 };
    }
    if !record::is_removed(|| DATAGRAMS.remove(cookie)) {
        record::anomaly(|anomalies| &raw mut anomalies.ended_twice);
        return 0;
    }
    record::note_datagrams(cookie, FlowBucket::IN_DATAGRAMS.wrapping_neg());
    for (start_ns, slot) in starts.into_iter().zip(slots) {
        if slot == FREE {
            break;
        }
        end_one(u32::from(slot), start_ns);
    }
    0
}

/// Counts the end of one flow. If this function were inlined, its code would be repeated for each
/// position. Returns 0.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn end_one(slot: u32, start_ns: u64) -> u32 {
    tally::ended(slot, start_ns, Ending::Closed as u32, TrafficTotals::NONE);
    0
}
