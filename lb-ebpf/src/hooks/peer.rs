//! getpeername(2) and the source of a datagram: a process sees the address that it dialed, not the
//! backend's.
//!
//! The kernel is about to report the peer. It is replaced only if it is, or for datagrams was, the
//! backend of one of the socket's flows: a socket may have been connected elsewhere since, and
//! accepted sockets pass here too.

use lb_common::abi::Service;
use lb_common::net::{Address, Be16};

use crate::flow::datagrams;
use crate::flow::record;
use crate::kernel::context::Dial;
use crate::rows;

#[inline(always)]
pub fn getpeername4(dial: &Dial) {
    show4(dial, dialled(dial, Address::mapped(dial.ip4()), dial.port()));
}

#[inline(always)]
pub fn getpeername6(dial: &Dial) {
    show6(dial, dialled(dial, dial.ip6(), dial.port()));
}

#[inline(always)]
pub fn recvmsg4(dial: &Dial) {
    show4(dial, asked(dial, Address::mapped(dial.ip4()), dial.port()));
}

/// Also for answers to datagrams that an IPv6 socket sent to a v4-mapped address, which passed
/// `sendmsg4`.
#[inline(always)]
pub fn recvmsg6(dial: &Dial) {
    show6(dial, asked(dial, dial.ip6(), dial.port()));
}

#[inline(always)]
fn show4(dial: &Dial, service: Option<*const Service>) {
    if let Some(service) = service {
        // SAFETY: a live map value; a service's address stays while flows refer to it.
        unsafe {
            let [_, _, _, v4] = (*service).address.words;
            dial.redirect4(v4, (*service).port);
        }
    }
}

#[inline(always)]
fn show6(dial: &Dial, service: Option<*const Service>) {
    if let Some(service) = service {
        // SAFETY: as above. The address of an IPv4 service is stored v4-mapped, which is the dialed
        // form.
        unsafe { dial.redirect6((*service).address, (*service).port) };
    }
}

/// The service that answers from this peer.
#[inline(always)]
fn asked(dial: &Dial, peer: Address, port: Be16) -> Option<*const Service> {
    match dialled(dial, peer, port) {
        Some(service) => Some(service),
        None => rows::service(u32::from(datagrams::service_at(dial.cookie_if_any(), peer, port)?)),
    }
}

/// The service that the socket dialed, if its flow goes to this peer.
#[inline(always)]
fn dialled(dial: &Dial, peer: Address, port: Be16) -> Option<*const Service> {
    let backend = rows::address(record::of(dial.cookie_if_any())?.slot())?;
    // SAFETY: a live map value; a slot keeps its backend while flows refer to it.
    let (address, its_port, service) = unsafe { ((*backend).address, (*backend).port, (*backend).service) };
    if address != peer || its_port != port {
        return None;
    }
    rows::service(u32::from(service))
}
