//! Which backend each open socket was last sent to, and how many sockets that makes per backend.
//!
//! A record lies in the flow table at the socket's cookie modulo the table's length; if another socket holds that
//! place, in the overflow table. Whoever takes a record out (one compare-and-swap, or one delete) gives its count back,
//! so no count is given back twice. Nothing here fails a call: a flow that finds no room is simply not counted.

use lb_common::abi::{Flow, FlowRecord};

use crate::atomic::{self, Instructions};
use crate::maps::{ACTIVE, FLOW_MASK, FLOW_OVERFLOW, FLOWS};

/// `BPF_NOEXIST`.
const NEW: u64 = 1;

/// Where a socket's record is.
enum Place {
    /// In the flow table.
    Table(*mut FlowRecord),
    /// In the overflow table; the record of the flow table that counts it.
    Overflow(*mut FlowRecord, *mut Flow),
    /// Nowhere; the record of the flow table that it may claim, if the cookie has one.
    Nowhere(Option<*mut FlowRecord>),
}

#[inline(always)]
fn find(cookie: u64) -> Place {
    let Some(record) = FLOWS.get_ptr_mut(cookie as u32 & FLOW_MASK.load()) else {
        return Place::Nowhere(None);
    };
    // SAFETY: `record` is a live map value. Another socket may claim or free it meanwhile, hence volatile; only this
    // socket's own calls, which the socket lock puts in order, can make it equal to `cookie`.
    unsafe {
        if (&raw const (*record).cookie).read_volatile() == cookie {
            return Place::Table(record);
        }
        if (&raw const (*record).overflowed).read_volatile() != 0
            && let Some(flow) = FLOW_OVERFLOW.get_ptr_mut(cookie)
        {
            return Place::Overflow(record, flow);
        }
    }
    Place::Nowhere(Some(record))
}

/// The flow of a socket, if it has one.
#[inline(always)]
pub fn of(cookie: u64) -> Option<Flow> {
    match find(cookie) {
        // SAFETY: `find` returned live map values that belong to this socket.
        Place::Table(record) => Some(unsafe { (&raw const (*record).flow).read_volatile() }),
        // SAFETY: as above.
        Place::Overflow(_, flow) => Some(unsafe { flow.read_volatile() }),
        Place::Nowhere(_) => None,
    }
}

/// Records that a socket is sent to `flow`, in place of wherever it was sent before. Returns whether there was room.
#[inline(always)]
pub fn begin<I: Instructions>(cookie: u64, flow: Flow) -> bool {
    match find(cookie) {
        // SAFETY: `find` returned a live map value that belongs to this socket.
        Place::Table(record) => unsafe { redirect(&raw mut (*record).flow, flow) },
        // SAFETY: as above.
        Place::Overflow(_, old) => unsafe { redirect(old, flow) },
        Place::Nowhere(Some(record)) => {
            if !claim::<I>(record, cookie, flow) {
                return false;
            }
        }
        Place::Nowhere(None) => return false,
    }
    count(flow.slot, 1);
    true
}

/// # Safety
/// `place` is a live map value that belongs to the calling socket.
#[inline(always)]
unsafe fn redirect(place: *mut Flow, flow: Flow) {
    // SAFETY: see above.
    unsafe {
        count((&raw const (*place).slot).read_volatile(), -1);
        place.write_volatile(flow);
    }
}

#[inline(always)]
fn claim<I: Instructions>(record: *mut FlowRecord, cookie: u64, flow: Flow) -> bool {
    // SAFETY: `record` is a live map value; the swap decides between sockets that want it at the same time.
    unsafe {
        if I::replace(&raw mut (*record).cookie, 0, cookie) {
            (&raw mut (*record).flow).write_volatile(flow);
            return true;
        }
        if FLOW_OVERFLOW.insert(cookie, flow, NEW).is_err() {
            return false;
        }
        atomic::add(&raw mut (*record).overflowed, 1);
    }
    true
}

/// Forgets a socket's flow, if it has one: the socket is gone, or goes elsewhere.
#[inline(always)]
pub fn end<I: Instructions>(cookie: u64) {
    match find(cookie) {
        Place::Table(record) => {
            // SAFETY: `find` returned a live map value that belongs to this socket; the flow is read before the place
            // is given up.
            unsafe {
                let slot = (&raw const (*record).flow.slot).read_volatile();
                if I::replace(&raw mut (*record).cookie, cookie, 0) {
                    count(slot, -1);
                }
            }
        }
        Place::Overflow(record, flow) => {
            // SAFETY: as above.
            unsafe {
                let slot = (&raw const (*flow).slot).read_volatile();
                if forget(cookie) {
                    atomic::add(&raw mut (*record).overflowed, u64::MAX);
                    count(slot, -1);
                }
            }
        }
        Place::Nowhere(_) => {}
    }
}

/// Takes a record out of the overflow table. Kernel fact: from 5.11 to 6.0 a hash refuses a change (EBUSY) while this CPU
/// is inside another change of the same bucket, which it is for an instant only.
#[inline(always)]
fn forget(cookie: u64) -> bool {
    const EBUSY: i32 = -16;
    // Bound: four attempts.
    for _ in 0..4 {
        match FLOW_OVERFLOW.remove(cookie) {
            Ok(()) => return true,
            Err(EBUSY) => {}
            Err(_) => return false,
        }
    }
    false
}

/// Adds to a backend's active count.
#[inline(always)]
fn count(slot: u32, change: i64) {
    if let Some(active) = ACTIVE.get_ptr_mut(slot) {
        // SAFETY: `active` is a live map value. Adding -1 in two's complement takes one away.
        unsafe { atomic::add(&raw mut (*active).flows, change as u64) };
    }
}
