//! The last close(2) of a socket. What no other program sees the end of, ends here: datagram flows, connections of which no
//! SYN left, and, where connections are not followed, all of them.

use lb_common::abi::{Backend, Flow, Phase};
use lb_common::ending::{Ending, Shown, at_release};

use crate::atomic::Instructions;
use crate::context::Socket;
use crate::flow;
use crate::maps::{BACKENDS, FULL_ACCOUNTING};
use crate::tally::{self, Carried};

#[inline(always)]
pub fn release<I: Instructions>(socket: &Socket) {
    let cookie = socket.cookie();
    let Some(flow) = flow::of(cookie) else { return };
    // SAFETY: the socket's own record.
    let flow = unsafe { flow.read_volatile() };
    let is_datagram = flow.phase == Phase::Datagrams as u8;
    let is_followed = FULL_ACCOUNTING.load() != 0 && !is_datagram;
    if is_followed && flow.phase != Phase::Chosen as u8 {
        // It ends when the connection does, which may be long after this. Kernel fact: a change of state is announced
        // before it is made, so a socket that is closed already has had its end.
        if socket.is_closed() {
            flow::anomaly(|anomalies| &raw mut anomalies.release_out_of_turn);
            end_as_shown::<I>(socket, cookie);
        }
        return;
    }
    if socket.is_connected() && !goes_to_its_backend(socket, &flow) {
        tally::count(flow.slot, |counts| &raw mut counts.diverted);
    }
    if is_datagram {
        flow::end::<I>(cookie, |_| Ending::Closed, || None);
    } else {
        end_as_shown::<I>(socket, cookie);
    }
}

#[inline(always)]
fn end_as_shown<I: Instructions>(socket: &Socket, cookie: u64) {
    let shown = socket.shown();
    let ending = |flow: &Flow| {
        let was_counted = flow.phase == Phase::Established as u8;
        if !was_counted && shown.is_some_and(|shown| shown.srtt != 0) {
            tally::count(flow.slot, |counts| &raw mut counts.established);
        }
        match at_release(shown) {
            // Where connections are followed, one of which nothing was seen did not begin.
            Ending::Other | Ending::Unknown
                if FULL_ACCOUNTING.load() != 0 && flow.phase == Phase::Chosen as u8 =>
            {
                Ending::NotSent
            }
            ending => ending,
        }
    };
    flow::end::<I>(cookie, ending, || shown.map(|shown| carried(socket, shown)));
}

#[inline(always)]
fn carried(socket: &Socket, shown: Shown) -> Carried {
    // The SYN counts as a byte.
    let syn = u64::from(shown.srtt != 0);
    Carried {
        bytes_received: socket.bytes_received(),
        bytes_sent: socket.bytes_sent().saturating_sub(syn),
        retransmits: socket.retransmits(),
    }
}

/// Whether the socket is connected to the backend of its flow. Programs that run after ours, on a cgroup above or beside,
/// see the backend as the destination and may write another one.
#[inline(always)]
fn goes_to_its_backend(socket: &Socket, flow: &Flow) -> bool {
    let backend: *const Backend = match BACKENDS.get_ptr(flow.slot) {
        Some(backend) => backend,
        None => return true,
    };
    let (address, port) = socket.peer();
    // SAFETY: a live map value; a slot keeps its backend while flows refer to it.
    unsafe { (*backend).address == address && (*backend).port == port }
}
