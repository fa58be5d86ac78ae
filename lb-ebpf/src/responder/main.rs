//! The program of network interfaces (XDP) that answers requests in an agent's place, so that
//! clients get answers even if the agent gets no CPU time. It is a separate object, which the agent
//! loads on the host of its backends.
//!
//! `lb_common::abi::responder` documents the content and the writers of the maps. The kernel
//! removes the program and the maps when the agent ends.
#![no_std]
#![no_main]
#![feature(core_intrinsics)]
#![feature(asm_experimental_arch)]
#![expect(internal_features, reason = "as in the clients' main.rs")]

#[path = "../kernel/atomic.rs"]
#[expect(dead_code, reason = "the clients' programs need more of it")]
mod atomic;

#[path = "../kernel/log.rs"]
mod log;

#[path = "../host/packet.rs"]
mod packet;

mod maps;

use aya_ebpf::Global;
use aya_ebpf::bindings::xdp_action::{XDP_DROP, XDP_PASS, XDP_TX};
use aya_ebpf::helpers::generated::bpf_ktime_get_ns;
use aya_ebpf::macros::xdp;
use aya_ebpf::programs::XdpContext;
use lb_common::net::Be16;
use lb_report::respond::{Response, respond};

use crate::log::log;
use crate::maps::{AgentMaps, count, workspace};
use crate::packet::Packet;

/// The UDP port at which the agent listens. Set by the loader. One comparison with the port
/// excludes all other traffic.
#[unsafe(no_mangle)]
static PORT: Global<u32> = Global::new(0);

/// The secret of the agent's cookies as two words, and the time at which the agent drew it, in
/// nanoseconds of `CLOCK_MONOTONIC`. Set by the loader.
#[unsafe(no_mangle)]
static SECRET_LOW: Global<u64> = Global::new(0);
#[unsafe(no_mangle)]
static SECRET_HIGH: Global<u64> = Global::new(0);
#[unsafe(no_mangle)]
static SECRET_DRAWN_NS: Global<u64> = Global::new(0);

#[xdp]
pub fn socklb_respond(ctx: XdpContext) -> u32 {
    let port = Be16::from_host(PORT.load() as u16);
    // SAFETY: the helper has no arguments and returns a number.
    let now_ns = || unsafe { bpf_ktime_get_ns() };
    let Some(response) = respond(&mut Packet::of(&ctx), &AgentMaps, port, workspace, now_ns) else {
        return XDP_PASS;
    };
    count(response);
    let action = match response {
        Response::Answered => XDP_TX,
        Response::Refused(_) => XDP_DROP,
    };
    log!(&ctx, "respond: action {}", action);
    action
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
