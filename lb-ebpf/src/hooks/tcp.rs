//! Follows connections through their states: connecting, established, closed. The program runs for
//! every TCP socket of the cgroup, and acts only on sockets with a flow record.

use lb_common::abi::Phase;
use lb_common::ending::{End, Ending, TCP_CLOSE, TCP_ESTABLISHED, TCP_FIN_WAIT2, at_close};

use crate::ejection::{self, Judges};
use crate::flow::record;
use crate::flow::tally;
use crate::kernel::atomic::Instructions;
use crate::kernel::clock;
use crate::kernel::sock_ops::{Event, Ops};
use crate::rows;

#[inline(always)]
pub fn tcp<I: Instructions>(ops: &Ops) {
    match ops.event() {
        Event::Connect => connecting(&ops.with_socket()),
        Event::State { to: TCP_ESTABLISHED, .. } => established::<I>(&ops.with_socket()),
        Event::State { to: TCP_FIN_WAIT2, .. } => fin_acknowledged::<I>(ops),
        Event::State { from, to: TCP_CLOSE } => closed::<I>(&ops.with_socket(), from),
        Event::State { .. } | Event::Other => {}
    }
}

/// The first SYN is about to be sent.
#[inline(always)]
fn connecting(ops: &Ops) {
    let Some(record) = record::of(ops.cookie_if_any()) else { return };
    record.set_phase(Phase::Connecting);
    let slot = record.slot();
    tally::count(slot, |counts| &raw mut counts.connecting);
    if !ops.goes_to(slot) {
        tally::count(slot, |counts| &raw mut counts.diverted);
    }
    ops.request_states();
    ejection::sent(record.service());
    ejection::trial_begun(record.service(), record.why());
}

#[inline(always)]
fn established<I: Instructions>(ops: &Ops) {
    let cookie = ops.cookie_if_any();
    let Some(record) = record::of(cookie) else { return };
    if record.phase() != Phase::Connecting as u8 {
        record::anomaly(|anomalies| &raw mut anomalies.established_out_of_turn);
    }
    record.set_phase(Phase::Established);
    let slot = record.slot();
    // If the first SYN was answered, the connect took as long as the handshake, which the kernel
    // has measured. If the SYN was retransmitted, the connect took seconds, for which the kernel's
    // ticks are precise enough.
    if ops.retransmits() == 0 {
        tally::established_at_once(slot, ops.smoothed_rtt_us());
    } else {
        tally::established_late(slot, micros(clock::now_ns().wrapping_sub(record.start_ns())));
    }
    // The connection may lead to another peer than the backend: if no socket listens, a loopback
    // socket can connect to itself, and programs that run after socklb's program can redirect a
    // socket.
    let reaches_backend = || {
        let (peer, port) = ops.peer();
        let [high, low] = peer.halves();
        u32::from(!ops.is_connected_to_itself())
            & rows::has_address(slot, high, low, port.to_network().into())
    };
    ejection::report_established::<I>(cookie, slot, record.service(), record.why(), reaches_backend);
}

#[inline(always)]
fn micros(ns: u64) -> u32 {
    let us = ns / 1000;
    if us > u64::from(u32::MAX) { u32::MAX } else { us as u32 }
}

/// The backend's kernel has acknowledged the client's FIN. If the backend has sent nothing until
/// now, this counts as a missing answer, because the connection may remain open for long without a
/// further event.
#[inline(always)]
fn fin_acknowledged<I: Instructions>(ops: &Ops) {
    if ops.bytes_received() == 0 && ops.is_orphan() {
        let lack = lack_of_answer(ops.cookie_if_any(), ops.bytes_acknowledged());
        ejection::report::<I>((lack & 0xffff) as u32, (lack >> 16 & 0xffff) as u32, (lack >> 32) as u32);
    }
}

/// The evidence that a backend has sent nothing, or 0 if there is none. The result contains the
/// slot in bits 0 to 15, the service in bits 16 to 31, and the word of the evidence in the upper
/// half.
///
/// The caller reports the evidence, because functions that call each other share 512 bytes of
/// stack.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn lack_of_answer(cookie: u64, acknowledged: u64) -> u64 {
    let Some(record) = record::of(cookie) else { return 0 };
    let (slot, service, phase) = (record.slot(), record.service(), record.phase());
    let end = End::of(Ending::Closed, phase == Phase::Established as u8).with_acknowledged(0, acknowledged);
    if end.lacks_answer() == 0 {
        return 0;
    }
    // The last argument is always 1 (the socket requests no special route), because a single
    // process cannot eject a backend by missing answers.
    let evidence = ejection::evidence_of_end(cookie, end, Judges::All, 1);
    u64::from(evidence) << 32 | u64::from(service & 0xffff) << 16 | u64::from(slot & 0xffff)
}

#[inline(always)]
fn closed<I: Instructions>(ops: &Ops, from: u32) {
    let cookie = ops.cookie_if_any();
    let Some(record) = record::of(cookie) else {
        record::anomaly(|anomalies| &raw mut anomalies.close_without_record);
        return;
    };
    ops.decline_states();
    let (phase, retransmits) = (record.phase(), ops.retransmits());
    let mut ending = at_close(phase, from, ops.error(), record::of_error);
    if ending == Ending::GaveUp {
        ending = record::given_up(&record, ops.reported_error(), retransmits);
    }
    let end = End::of(ending, phase == Phase::Established as u8)
        .from_state(from)
        .with_acknowledged(ops.bytes_received(), ops.bytes_acknowledged());
    record::end::<I>(cookie, record, end, retransmits, Judges::All, || ops.is_ordinary());
}
