//! getpeername(2), and the source of a received datagram: a process receives the address that it
//! dialled, and not the address of the backend.
//!
//! These programs run when the kernel is about to report the peer's address. They replace this
//! address only if it belongs to the backend of one of the socket's flows (for datagrams, also to a
//! previous backend). They leave other addresses unchanged: a socket may have been connected to
//! another destination since, and the kernel also runs these programs for accepted sockets.

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
    show4(dial, service_of_peer(dial, Address::mapped(dial.ip4()), dial.port()));
}

/// This hook also handles answers to datagrams that an IPv6 socket sent to a v4-mapped address; the
/// kernel ran `sendmsg4` for those datagrams.
#[inline(always)]
pub fn recvmsg6(dial: &Dial) {
    show6(dial, service_of_peer(dial, dial.ip6(), dial.port()));
}

#[inline(always)]
fn show4(dial: &Dial, service: Option<*const Service>) {
    if let Some(service) = service {
        // SAFETY: a live map value; a service's address does not change while flows refer to the
        // service.
        unsafe {
            let [_, _, _, v4] = (*service).address.words;
            dial.redirect4(v4, (*service).port);
        }
    }
}

#[inline(always)]
fn show6(dial: &Dial, service: Option<*const Service>) {
    if let Some(service) = service {
        // SAFETY: a live map value, as in `show4`. The address of an IPv4 service is stored
        // v4-mapped, which is the dialled form.
        unsafe { dial.redirect6((*service).address, (*service).port) };
    }
}

/// The service of the flow whose answers come from this peer.
#[inline(always)]
fn service_of_peer(dial: &Dial, peer: Address, port: Be16) -> Option<*const Service> {
    match dialled(dial, peer, port) {
        Some(service) => Some(service),
        None => rows::service(u32::from(datagrams::service_at(dial.cookie_if_any(), peer, port)?)),
    }
}

/// The service that the socket dialled, if the backend of the socket's flow is this peer.
#[inline(always)]
fn dialled(dial: &Dial, peer: Address, port: Be16) -> Option<*const Service> {
    let backend = rows::address(record::of(dial.cookie_if_any())?.slot())?;
    // SAFETY: a live map value; a slot retains its backend while flows refer to it.
    let (address, its_port, service) = unsafe { ((*backend).address, (*backend).port, (*backend).service) };
    if address != peer || its_port != port {
        return None;
    }
    rows::service(u32::from(service))
}
