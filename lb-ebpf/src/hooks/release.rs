//! The last close(2) of a socket. Flows end here if no other program detects their end: flows of
//! datagrams, connections whose SYN was never sent, and connections of clients without full
//! accounting.

use lb_common::abi::Phase;
use lb_common::ending::{End, Ending, SocketSnapshot, at_release};

use crate::ejection::{self, Judges};
use crate::flow::datagrams;
use crate::flow::record::{self, RecordRef};
use crate::flow::tally;
use crate::globals::{FULL_ACCOUNTING, RELEASED_CALLBACKS, RELEASED_SK_ERR, can_cast};
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
    let is_closed = socket.is_closed();
    // If a load shows the requests, this check takes less time than the lookup of the record.
    let shows_requests = can_cast() && RELEASED_CALLBACKS.load() != 0;
    if shows_requests && ends_later(socket, is_closed) {
        return;
    }
    let Some(record) = record::of(cookie) else { return };
    let (phase, slot) = (record.phase(), record.slot());
    if is_unsent(phase) {
        // If the socket is in the state "closed", it has tried to connect and could not, because
        // there was no route or no port. In any other state, the first packet was deferred until
        // there is data (`TCP_FASTOPEN_CONNECT`).
        let send_failed = RELEASED_SK_ERR.load() != 0 && is_closed;
        let end = End::of(Ending::NotSent, false).send_failed_if(send_failed);
        record::end::<I>(cookie, record, end, 0, Judges::SendFailures, || socket.is_ordinary());
        return;
    }
    let is_datagram = phase == Phase::Datagrams as u8;
    if FULL_ACCOUNTING.load() != 0 && !is_datagram {
        if !shows_requests && ends_later(socket, is_closed) {
            return;
        }
        // Kernel fact: the event precedes the state change, so if the socket is already closed, the
        // event of its end has occurred.
        if is_closed {
            record::anomaly(|anomalies| &raw mut anomalies.release_out_of_turn);
        }
    } else if socket.is_connected() && !rows::is_backend(slot, socket.peer()) {
        tally::count(slot, |counts| &raw mut counts.diverted);
    }
    let mut end = End::OF_DATAGRAMS;
    let mut retransmits = 0;
    if !is_datagram {
        let snapshot = socket.snapshot();
        let ending = record::opaque_to_verifier(ending_of(socket, &record, snapshot), cookie);
        end = End::of(ending, false);
        if snapshot.is_readable && snapshot.was_established {
            if phase != Phase::Established as u8 {
                tally::count(slot, |counts| &raw mut counts.established);
                if FULL_ACCOUNTING.load() == 0 {
                    let (service, why) = (record.service(), record.why());
                    ejection::report_established::<I>(cookie, slot, service, why, || 1);
                }
            }
            end = End::of(ending, true)
                .from_state(snapshot.state)
                .with_acknowledged(socket.bytes_received(), socket.bytes_acknowledged());
            retransmits = socket.retransmits();
        }
    }
    // Backends are judged here only without full accounting. With full accounting, a connection
    // ends here only if the TCP program has missed some of its events, so the evidence is weak.
    let is_followed = FULL_ACCOUNTING.load() != 0;
    let judges = if is_followed { Judges::Nothing } else { Judges::All };
    let is_ordinary = || if is_followed { 0 } else { socket.is_ordinary() };
    record::end::<I>(cookie, record, end, retransmits, judges, is_ordinary);
}

/// Whether accounting is full and the TCP program will detect the end of the socket's connection,
/// which may be long after the release of the socket. It will not if no SYN was sent, because the
/// SYN's event makes the request for events of state changes, or if another program has removed
/// this request.
#[inline(always)]
fn ends_later(socket: &Socket, is_closed: bool) -> bool {
    FULL_ACCOUNTING.load() != 0 && socket.is_tcp() && !is_closed && socket.announces_states()
}

/// Whether accounting is full and the TCP program has received no event of a SYN of the flow. If
/// true, the connection never began.
#[inline(always)]
fn is_unsent(phase: u8) -> bool {
    FULL_ACCOUNTING.load() != 0 && phase == Phase::Chosen as u8
}

#[inline(always)]
fn ending_of(socket: &Socket, record: &RecordRef, snapshot: SocketSnapshot) -> Ending {
    match at_release(snapshot, record::of_error) {
        Ending::GaveUp => record::given_up(record, socket.reported_error(), socket.retransmits()),
        ending => ending,
    }
}
