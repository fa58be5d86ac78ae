//! Which backend each open socket was last sent to: one record per socket, from the choice to the end.
//!
//! A record lies in the flow table at the socket's cookie modulo the table's length; if another socket holds that
//! place, in the overflow table. Whoever takes a record out (one compare-and-swap, or one delete) counts its end, so no
//! end is counted twice. Nothing here fails a call: a flow that finds no room is simply not tracked.

use lb_common::abi::{Anomalies, Flow, FlowRecord, Phase};
use lb_common::ending::Ending;

use crate::atomic::{self, Instructions};
use crate::maps::{ANOMALIES, FLOW_MASK, FLOW_OVERFLOW, FLOWS, FULL_ACCOUNTING};
use crate::tally::{self, Carried};

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

/// The flow of a socket, if it has one. It is the socket's own until somebody takes the record out.
#[inline(always)]
pub fn of(cookie: u64) -> Option<*mut Flow> {
    match find(cookie) {
        // SAFETY: `find` returned a live map value that belongs to this socket.
        Place::Table(record) => Some(unsafe { &raw mut (*record).flow }),
        Place::Overflow(_, flow) => Some(flow),
        Place::Nowhere(_) => None,
    }
}

/// Records that a socket is sent to `flow`, in place of wherever it was sent before. Returns whether there was room.
#[inline(always)]
pub fn begin<I: Instructions>(cookie: u64, flow: &Flow) -> bool {
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
    tally::active(flow.slot, 1);
    true
}

/// # Safety
/// `place` is a live map value that belongs to the calling socket.
#[inline(always)]
unsafe fn redirect(place: *mut Flow, flow: &Flow) {
    // SAFETY: see above.
    unsafe {
        let before = place.read_volatile();
        tally::ended(&before, left_behind(before.phase), None);
        place.write_volatile(*flow);
    }
}

/// How a flow ended whose socket now goes elsewhere.
#[inline(always)]
pub fn left_behind(phase: u8) -> Ending {
    if phase == Phase::Datagrams as u8 {
        Ending::Closed
    } else if phase == Phase::Chosen as u8 && FULL_ACCOUNTING.load() != 0 {
        // Whatever sends a SYN ends at its closing.
        Ending::NotSent
    } else {
        Ending::Unknown
    }
}

#[inline(always)]
fn claim<I: Instructions>(record: *mut FlowRecord, cookie: u64, flow: &Flow) -> bool {
    // SAFETY: `record` is a live map value; the swap decides between sockets that want it at the same time.
    unsafe {
        if I::replace(&raw mut (*record).cookie, 0, cookie) {
            (&raw mut (*record).flow).write_volatile(*flow);
            return true;
        }
        if FLOW_OVERFLOW.insert(cookie, flow, NEW).is_err() {
            return false;
        }
        atomic::add(&raw mut (*record).overflowed, 1);
    }
    true
}

/// Takes a socket's record out, if it has one, and counts its end. What it has carried is asked for only then.
#[inline(always)]
pub fn end<I: Instructions>(
    cookie: u64,
    ending: impl FnOnce(&Flow) -> Ending,
    carried: impl FnOnce() -> Option<Carried>,
) -> bool {
    // The flow is read before the place is given up.
    let (flow, taken) = match find(cookie) {
        // SAFETY: `find` returned a live map value that belongs to this socket.
        Place::Table(record) => unsafe {
            let flow = (&raw const (*record).flow).read_volatile();
            (flow, I::replace(&raw mut (*record).cookie, cookie, 0))
        },
        // SAFETY: as above.
        Place::Overflow(record, flow) => unsafe {
            let flow = flow.read_volatile();
            let taken = forget(cookie);
            if taken {
                atomic::add(&raw mut (*record).overflowed, u64::MAX);
            }
            (flow, taken)
        },
        Place::Nowhere(_) => return false,
    };
    if taken {
        tally::ended(&flow, ending(&flow), carried());
    } else {
        anomaly(|anomalies| &raw mut anomalies.ended_twice);
    }
    taken
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

/// Counts what should not happen.
#[inline(always)]
pub fn anomaly(field: impl FnOnce(&mut Anomalies) -> *mut u64) {
    if let Some(anomalies) = ANOMALIES.get_ptr_mut(0) {
        // SAFETY: this CPU's map value; the closure only takes a field's address.
        unsafe { atomic::add(field(&mut *anomalies), 1) };
    }
}
