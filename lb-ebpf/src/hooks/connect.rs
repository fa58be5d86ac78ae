//! connect(2): looks up the address, decides on a backend, records the flow, and rewrites the
//! destination.
//!
//! Each call counts exactly one outcome. If anything is unknown or contradictory, the call goes
//! through unchanged. Only a call to a known service is refused, if it has no usable backend or all
//! of them are at the limit.

use lb_common::abi::NOT_A_SERVICE;
use lb_common::net::{Address, IPPROTO_TCP, IPPROTO_UDP};

use crate::decide::decision::Decision;
use crate::decide::service::{Dialled, service_at};
use crate::decide::verdict::Verdict;
use crate::flow::record::{self, Place};
use crate::flow::tally;
use crate::kernel::atomic::Instructions;
use crate::kernel::context::{Dial, Opener};
use crate::rows;

#[inline(always)]
pub fn connect4<I: Instructions>(dial: &Dial) -> i32 {
    balance::<I>(dial, service_at(dial, Address::mapped(dial.ip4()))).apply_v4(dial)
}

/// Also for a v4-mapped address: it dials an IPv4 service, whose backends are stored v4-mapped.
#[inline(always)]
pub fn connect6<I: Instructions>(dial: &Dial) -> i32 {
    balance::<I>(dial, service_at(dial, dial.ip6())).apply_v6(dial)
}

/// Picks a backend for a call to a service, records the flow, and counts the one outcome.
#[inline(always)]
fn balance<I: Instructions>(dial: &Dial, service: Dialled) -> Verdict {
    let is_tcp = dial.protocol() == Some(IPPROTO_TCP);
    if !service.is_service() {
        // The flow of a socket ends if the socket failed to reach a service and now dials
        // elsewhere.
        if is_tcp || dial.protocol() == Some(IPPROTO_UDP) {
            record::leave::<I>(dial.cookie_if_any());
        }
        tally::outcome(NOT_A_SERVICE, |outcomes| &raw mut outcomes.not_a_service);
        return Verdict::Proceed;
    }
    let opener = if is_tcp { dial.opener() } else { Opener::Process };
    if opener == Opener::Kernel {
        tally::outcome(NOT_A_SERVICE, |outcomes| &raw mut outcomes.not_a_service);
        return Verdict::Proceed;
    }
    // An untracked flow cannot report the result of a trial, so it must not be one.
    let decision = Decision::make::<I>(service, opener != Opener::Mptcp);
    let Some(backend) = decision.backend() else {
        // A datagram socket whose connect is refused stays connected to its previous peer.
        if is_tcp {
            record::leave::<I>(dial.cookie_if_any());
        }
        return decision.refuse(dial);
    };
    if is_tcp {
        dial.set_syn_retries(decision.syn_retries);
    }
    // Counted before the flow is open, so that open flows are always part of those that were
    // chosen.
    tally::chosen(decision.slot);
    // Untracked if the flow tables are full, or if the end of the flow cannot be seen.
    let place = if opener == Opener::Mptcp { Place::NOWHERE } else { record::begin::<I>(dial.cookie()) };
    decision.count(place.is_there());
    place.open::<I>(backend, || decision.flow(dial, backend, dial.namespace()));
    Verdict::Forward(rows::address_of(backend))
}
