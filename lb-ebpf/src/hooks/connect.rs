//! connect(2): looks up the address, decides on a backend, records the flow, and rewrites the
//! destination.
//!
//! Each call counts exactly one outcome. If any data is unknown or contradictory, the call proceeds
//! unchanged. A call is refused only if its address is a known service and that service has no
//! usable backend, or all of its backends are at the limit.

use lb_common::abi::{NOT_A_SERVICE, Phase};
use lb_common::net::{Address, IPPROTO_TCP, IPPROTO_UDP};

use crate::decide::decision::Decision;
use crate::decide::service::{Dialled, service_at};
use crate::decide::verdict::Verdict;
use crate::flow::record::{self, Place};
use crate::flow::tally;
use crate::kernel::atomic::Instructions;
use crate::kernel::context::{Dial, Opener};
use crate::maps::CPU_SERVICES;
use crate::rows;

#[inline(always)]
pub fn connect4<I: Instructions>(dial: &Dial) -> i32 {
    balance::<I>(dial, service_at(dial, Address::mapped(dial.ip4()))).apply_v4(dial)
}

/// This hook also handles v4-mapped addresses, with which IPv6 sockets dial IPv4 services: the
/// addresses of backends are also stored v4-mapped.
#[inline(always)]
pub fn connect6<I: Instructions>(dial: &Dial) -> i32 {
    balance::<I>(dial, service_at(dial, dial.ip6())).apply_v6(dial)
}

/// Picks a backend for a call to a service, records the flow, and counts the outcome of the call.
#[inline(always)]
fn balance<I: Instructions>(dial: &Dial, service: Dialled) -> Verdict {
    let is_tcp = service.protocol == IPPROTO_TCP;
    if !service.is_service() {
        // The socket may have dialled a service before, without success. Now it dials another
        // address, so its flow to that service ends here.
        if is_tcp || service.protocol == IPPROTO_UDP {
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
    let Some(on_cpu) = CPU_SERVICES.get_ptr_mut(service.index) else { return Verdict::Proceed };
    // An untracked flow cannot report the result of a trial, so such a flow must not be a trial.
    let decision = Decision::make::<I>(service, Some(on_cpu), opener != Opener::Mptcp);
    let Some(backend) = decision.backend() else {
        // A datagram socket whose connect is refused remains connected to its previous peer, so it
        // retains its record.
        if is_tcp {
            record::leave::<I>(dial.cookie_if_any());
        }
        return decision.refuse(dial);
    };
    if is_tcp {
        dial.set_syn_retries(decision.syn_retries);
    }
    // The flow is untracked if the flow tables are full, or if no program could detect the flow's
    // end.
    let place = if opener == Opener::Mptcp { Place::NOWHERE } else { record::begin::<I>(dial.cookie()) };
    // The choice is counted before the flow is open, so that there are never more open flows than
    // choices.
    tally::chosen(backend);
    decision.count(place.is_there());
    let phase = if is_tcp { Phase::Chosen } else { Phase::Datagrams };
    place.open::<I>(backend, || decision.flow(dial, backend, dial.namespace(), phase));
    Verdict::Forward(rows::address_of(backend))
}
