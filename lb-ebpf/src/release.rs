//! The last close(2) of a socket: its flow ends, and whether it really went to the backend that connect chose is known.

use lb_common::abi::{Backend, Flow};

use crate::atomic::{self, Instructions};
use crate::context::Socket;
use crate::flow;
use crate::maps::{BACKENDS, CHOSEN};

#[inline(always)]
pub fn release<I: Instructions>(socket: &Socket) {
    let cookie = socket.cookie();
    let Some(flow) = flow::of(cookie) else { return };
    // Before the count is given back: after that the slot may get another backend.
    if socket.is_connected()
        && !goes_to_its_backend(socket, flow)
        && let Some(chosen) = CHOSEN.get_ptr_mut(flow.slot)
    {
        // SAFETY: a live map value.
        unsafe { atomic::add(&raw mut (*chosen).diverted, 1) };
    }
    flow::end::<I>(cookie);
}

/// Whether the socket is connected to the backend of its flow. Programs that run after ours, on a cgroup above or beside,
/// see the backend as the destination and may write another one.
#[inline(always)]
fn goes_to_its_backend(socket: &Socket, flow: Flow) -> bool {
    let backend: *const Backend = match BACKENDS.get_ptr(flow.slot) {
        Some(backend) => backend,
        None => return true,
    };
    let (address, port) = socket.peer();
    // SAFETY: a live map value; a slot keeps its backend while flows refer to it.
    unsafe { (*backend).address == address && (*backend).port == port }
}
