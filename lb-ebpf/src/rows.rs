//! Access to elements ("rows") of the maps, for code that several hooks use. The daemon changes
//! some fields at any time, each with a single store, so each function here reads a field with a
//! single load.

use core::mem::offset_of;

use lb_common::abi::host::{NO_REPORT, Verdict};
use lb_common::abi::{Backend, BackendAddress, Service, StateWord};
use lb_common::net::{Address, Be16, Be32};

use crate::maps::{BACKENDS, SERVICES, VERDICTS};

#[inline(always)]
pub fn service(index: u32) -> Option<*const Service> {
    SERVICES.get_ptr(index)
}

/// The port of a service, in network order, and its protocol in the bits above the port.
///
/// # Safety
/// `service` must be a live map value.
#[inline(always)]
pub unsafe fn port_and_protocol(service: *const Service) -> u32 {
    const {
        let port = offset_of!(Service, port);
        assert!(offset_of!(Service, protocol) == port + 2 && port.is_multiple_of(4));
    }
    // SAFETY: guaranteed by the caller; the next byte also belongs to the service.
    unsafe { (&raw const (*service).port).cast::<u32>().read_volatile() & 0xff_ffff }
}

/// The field [`rebind`](lb_common::abi::Rules::rebind) of a service: ticks after which a new
/// backend is chosen for a flow of datagrams; 0 means never.
#[inline(always)]
pub fn rebind(index: u32) -> u32 {
    match service(index) {
        // SAFETY: a live map value.
        Some(service) => unsafe { (&raw const (*service).rules.rebind).read_volatile() },
        None => 0,
    }
}

/// The field [`unanswered_after`](lb_common::abi::Rules::unanswered_after) of a service: ticks
/// after which the answer to a SYN is overdue; 0 if that is not configured.
#[inline(always)]
pub fn unanswered_after(index: u32) -> u32 {
    match service(index) {
        // SAFETY: a live map value.
        Some(service) => unsafe { (&raw const (*service).rules.unanswered_after).read_volatile() },
        None => 0,
    }
}

#[inline(always)]
pub fn backend(slot: u32) -> Option<*const Backend> {
    BACKENDS.get_ptr(slot)
}

/// The state word of a backend, which determines whether connects may choose the backend.
#[inline(always)]
pub fn state(backend: *const Backend) -> StateWord {
    // SAFETY: a live map value.
    StateWord::from_word(unsafe { (&raw const (*backend).state).cast::<u32>().read_volatile() })
}

/// Whether a backend is a lame duck by its own report. Policies do not check this for the backends
/// that they examine, because the check would not fit on the stack of the hooks.
#[inline(always)]
pub fn is_lame(backend: *const Backend, now_ns: u64) -> bool {
    // SAFETY: a live map value.
    let report = unsafe { (&raw const (*backend).endpoint.report).read_volatile() };
    if u32::from(report) == NO_REPORT {
        return false;
    }
    let verdict: Option<*const Verdict> = VERDICTS.get_ptr(u32::from(report));
    match verdict {
        // SAFETY: a live map value; one word.
        Some(verdict) => unsafe { verdict.read_volatile() }.is_lame(now_ns),
        None => false,
    }
}

/// The address of a backend. The address remains valid while a table, fallback or flow refers to
/// the backend's slot.
#[inline(always)]
pub fn address_of(backend: *const Backend) -> *const BackendAddress {
    // SAFETY: a live map value.
    unsafe { &raw const (*backend).endpoint }
}

/// The address of the backend in a slot.
#[inline(always)]
pub fn address(slot: u32) -> Option<*const BackendAddress> {
    backend(slot).map(address_of)
}

/// Whether the destination of a socket is the backend in a slot. Programs that run after socklb's
/// program, on the same cgroup or a cgroup above it, may have written another destination.
#[inline(always)]
pub fn is_backend(slot: u32, (ip, port): (Address, Be16)) -> bool {
    match address(slot) {
        Some(backend) => {
            // SAFETY: a live map value, with an aligned address; a slot retains its backend while
            // flows refer to it.
            unsafe { has_halves(&raw const (*backend).address, ip.halves()) && (*backend).port == port }
        }
        None => true,
    }
}

/// Whether an address has these [halves](Address::halves).
///
/// # Safety
/// `address` must be in a live map value and aligned to eight bytes.
#[inline(always)]
pub unsafe fn has_halves(address: *const Address, [ab, cd]: [u64; 2]) -> bool {
    const {
        let of_service = offset_of!(Service, address);
        let of_backend = offset_of!(Backend, endpoint) + offset_of!(BackendAddress, address);
        assert!(of_service.is_multiple_of(8) && of_backend.is_multiple_of(8));
    }
    let halves = address.cast::<u64>();
    // SAFETY: guaranteed by the caller.
    unsafe { halves.read_volatile() == ab && halves.add(1).read_volatile() == cd }
}

/// Like [`is_backend`], but as a global function, for slow paths. Returns 1 or 0. The words of the
/// address and the port are in network order.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn has_address(slot: u32, high: u64, low: u64, port: u32) -> u32 {
    let word = |word: u64| Be32::from_network(word as u32);
    let words = [word(high), word(high >> 32), word(low), word(low >> 32)];
    u32::from(is_backend(slot, (Address { words }, Be16::from_network(port as u16))))
}
