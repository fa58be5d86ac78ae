//! The last close(2) of a socket. Flows whose end no other program sees end here: those of datagrams, connections of
//! which no SYN left, and connections that are not followed.

use lb_common::abi::{Flow, Phase};
use lb_common::ending::{Ending, SocketSnapshot, at_release};

use crate::ejection;
use crate::flow::datagrams;
use crate::flow::record;
use crate::flow::tally::{self, TrafficTotals};
use crate::globals::FULL_ACCOUNTING;
use crate::kernel::atomic::Instructions;
use crate::kernel::context::Socket;
use crate::rows;

#[inline(always)]
pub fn release<I: Instructions>(socket: &Socket) {
    let cookie = socket.cookie_if_any();
    if cookie == 0 {
        return;
    }
    if socket.is_udp() {
        datagrams::end(cookie);
    }
    let Some(record) = record::of(cookie) else { return };
    let mut flow = record.flow();
    let is_datagram = flow.phase == Phase::Datagrams as u8;
    if FULL_ACCOUNTING.load() != 0 && !is_datagram && flow.phase != Phase::Chosen as u8 {
        // The flow ends when the connection does, which may be long after this; but if another program has taken our
        // request for changes of state away, that would never be seen. Kernel fact: a change of state is announced
        // before it is made, so a socket that is closed already has had its end.
        let is_closed = socket.is_closed();
        if !is_closed && socket.announces_states() {
            return;
        }
        if is_closed {
            record::anomaly(|anomalies| &raw mut anomalies.release_out_of_turn);
        }
    } else if socket.is_connected() && !rows::is_backend(flow.slot, socket.peer()) {
        tally::count(flow.slot, |counts| &raw mut counts.diverted);
    }
    let mut ending = Ending::Closed;
    let mut totals = TrafficTotals::NONE;
    if !is_datagram {
        let snapshot = socket.snapshot();
        ending = ending_of(socket, &flow, snapshot);
        if snapshot.is_readable && snapshot.was_established {
            if flow.phase != Phase::Established as u8 {
                tally::count(flow.slot, |counts| &raw mut counts.established);
                flow.phase = Phase::Established as u8;
                ejection::report_established::<I>(flow.slot, u32::from(flow.service), flow.why, judges());
            }
            totals = TrafficTotals {
                bytes_received: socket.bytes_received(),
                // The SYN counts as a byte.
                bytes_sent: socket.bytes_sent().saturating_sub(1),
                retransmits: socket.retransmits(),
            };
        }
    }
    record::end::<I>(cookie, record, &flow, ending, totals, judges());
}

/// Whether backends are judged here: only where connections are not followed. Where they are, what ends here was not followed to
/// its end, and says little.
#[inline(always)]
fn judges() -> bool {
    FULL_ACCOUNTING.load() == 0
}

#[inline(always)]
fn ending_of(socket: &Socket, flow: &Flow, snapshot: SocketSnapshot) -> Ending {
    let ending = at_release(snapshot);
    // Where connections are followed, a connection of which no SYN was seen did not begin: the first packet of a
    // connect that is put off (`TCP_FASTOPEN_CONNECT`) leaves with its data.
    let is_unsent = FULL_ACCOUNTING.load() != 0 && flow.phase == Phase::Chosen as u8;
    match ending {
        Ending::GaveUp | Ending::Other | Ending::Unknown if is_unsent => Ending::NotSent,
        Ending::GaveUp => record::given_up(flow, socket.soft_error(), socket.retransmits()),
        ending => ending,
    }
}
