//! Follows connections: connecting, established, closed. Runs for every TCP socket of the cgroup, and looks only at
//! those that are flows.

use lb_common::abi::Phase;
use lb_common::ending::{Ending, TCP_CLOSE, TCP_ESTABLISHED, at_close};

use crate::ejection;
use crate::flow::record;
use crate::flow::tally::{self, TrafficTotals};
use crate::kernel::atomic::Instructions;
use crate::kernel::clock;
use crate::kernel::sock_ops::{Event, Ops};
use crate::rows;

#[inline(always)]
pub fn tcp<I: Instructions>(ops: &Ops) {
    match ops.event() {
        Event::Connect => connecting(ops),
        Event::State { to: TCP_ESTABLISHED, .. } => established::<I>(ops),
        Event::State { from, to: TCP_CLOSE } => closed::<I>(ops, from),
        Event::State { .. } | Event::Other => {}
    }
}

/// The first SYN is about to leave.
#[inline(always)]
fn connecting(ops: &Ops) {
    let Some(record) = record::of(ops.cookie_if_any()) else { return };
    record.set_phase(Phase::Connecting);
    let slot = record.slot();
    tally::count(slot, |counts| &raw mut counts.connecting);
    if !rows::is_backend(slot, ops.peer()) {
        tally::count(slot, |counts| &raw mut counts.diverted);
    }
    ops.ask_for_states();
    ejection::trial_begun(record.service(), record.why());
}

#[inline(always)]
fn established<I: Instructions>(ops: &Ops) {
    let Some(record) = record::of(ops.cookie_if_any()) else { return };
    if record.phase() != Phase::Connecting as u8 {
        record::anomaly(|anomalies| &raw mut anomalies.established_out_of_turn);
    }
    record.set_phase(Phase::Established);
    let slot = record.slot();
    tally::count(slot, |counts| &raw mut counts.established);
    let (rtt, start_ns) = (ops.smoothed_rtt_us(), record.start_ns());
    tally::time(slot, rtt, |counts| &mut counts.rtt);
    // Where the first SYN was answered, the handshake is all that the connect took, and the kernel has measured it
    // already. Otherwise it took seconds, of which the kernel's ticks tell enough.
    let took = if ops.retransmits() == 0 { rtt } else { micros(clock::now_ns().wrapping_sub(start_ns)) };
    tally::time(slot, took, |counts| &mut counts.connect);
    ejection::report_established::<I>(slot, record.service(), record.why(), true);
}

#[inline(always)]
fn micros(ns: u64) -> u32 {
    let us = ns / 1000;
    if us > u64::from(u32::MAX) { u32::MAX } else { us as u32 }
}

#[inline(always)]
fn closed<I: Instructions>(ops: &Ops, from: u32) {
    let cookie = ops.cookie_if_any();
    let Some(record) = record::of(cookie) else {
        record::anomaly(|anomalies| &raw mut anomalies.close_without_record);
        return;
    };
    ops.decline_states();
    let flow = record.flow();
    let totals = TrafficTotals {
        bytes_received: ops.bytes_received(),
        // The SYN counts as a byte.
        bytes_sent: ops.bytes_sent().saturating_sub(1),
        retransmits: ops.retransmits(),
    };
    let mut ending = at_close(flow.phase, from, ops.error());
    if ending == Ending::GaveUp {
        ending = record::given_up(&flow, ops.soft_error(), totals.retransmits);
    }
    record::end::<I>(cookie, record, &flow, ending, totals, true);
}
