//! connect(2): look the address up, decide for a backend, remember the flow, rewrite the destination.
//!
//! Each call counts exactly one outcome. Whatever is unknown or contradictory lets the call through unchanged; only a
//! call to a known service is refused, if it has no usable backend or all of them are at the limit.

use lb_common::abi::NOT_A_SERVICE;
use lb_common::net::{Address, IPPROTO_TCP, IPPROTO_UDP};

use crate::decide::decision::Decision;
use crate::decide::service::service_at;
use crate::decide::verdict::Verdict;
use crate::flow::record::{self, Recorded};
use crate::flow::tally;
use crate::kernel::atomic::Instructions;
use crate::kernel::context::{Dial, Opener};
use crate::rows;

#[inline(always)]
pub fn connect4<I: Instructions>(dial: &Dial) -> i32 {
    balance::<I>(dial, service_at(dial, Address::mapped(dial.ip4()))).apply_v4(dial)
}

/// Also for a v4-mapped address: it dials an IPv4 service, whose backends are kept v4-mapped.
#[inline(always)]
pub fn connect6<I: Instructions>(dial: &Dial) -> i32 {
    balance::<I>(dial, service_at(dial, dial.ip6())).apply_v6(dial)
}

/// Picks a backend for a call to a service, records the flow, and counts the one outcome.
#[inline(always)]
fn balance<I: Instructions>(dial: &Dial, service: Option<u32>) -> Verdict {
    let is_tcp = dial.protocol() == Some(IPPROTO_TCP);
    let Some(index) = service else {
        // A socket that failed to reach a service and now dials elsewhere is no flow any more.
        if is_tcp || dial.protocol() == Some(IPPROTO_UDP) {
            record::leave::<I>(dial.cookie());
        }
        tally::outcome(NOT_A_SERVICE, |outcomes| &raw mut outcomes.not_a_service);
        return Verdict::Proceed;
    };
    let opener = if is_tcp { dial.opener() } else { Opener::Process };
    if opener == Opener::Kernel {
        tally::outcome(NOT_A_SERVICE, |outcomes| &raw mut outcomes.not_a_service);
        return Verdict::Proceed;
    }
    // Of a flow that cannot be followed nobody would hear what its trial has shown.
    let Some(decision) = Decision::inline::<I>(index, opener != Opener::Mptcp) else {
        tally::outcome(index, |outcomes| &raw mut outcomes.passed);
        return Verdict::Proceed;
    };
    let Some(backend) = decision.backend() else {
        // A datagram socket whose connect is refused stays connected to where it was.
        if is_tcp {
            record::leave::<I>(dial.cookie());
        }
        return decision.refuse(dial);
    };
    if is_tcp {
        dial.set_syn_retries(decision.syn_retries);
    }
    // Counted before the flow is open, so that open flows are always part of those that were chosen.
    tally::chosen(decision.slot);
    let flow = |namespace: Option<u64>| {
        let namespace = match namespace {
            Some(namespace) => namespace,
            None => dial.namespace(),
        };
        decision.flow(dial, backend, namespace)
    };
    // Not tracked if the tables of flows are full, or the end of the flow cannot be seen.
    let recorded = if opener == Opener::Mptcp {
        Recorded::Nowhere
    } else {
        record::begin::<I>(dial.cookie(), decision.slot, flow)
    };
    decision.count(!matches!(recorded, Recorded::Nowhere));
    // Last: nothing has used this line of memory lately, and every atomic instruction after the store would wait for
    // it.
    if let Recorded::Table(record) = recorded {
        // SAFETY: a live map value that belongs to the socket.
        unsafe { record.write(flow(None)) };
    }
    Verdict::Forward(rows::address_of(backend))
}
