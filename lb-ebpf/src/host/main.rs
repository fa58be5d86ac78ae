//! The host's object: the maps that all client tasks share, and the program of network interfaces
//! (XDP) that processes reports, independently of the daemon. The object is separate from the
//! clients' object, because it outlives every client and every version of the clients' ABI.
//!
//! `lb_common::abi::host` documents the content and the writers of the maps. The clients' object
//! also declares the map `verdicts`, because the clients' programs read it; the loader replaces the
//! declared map with the map of this object.
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

mod packet;

mod maps;

use aya_ebpf::Global;
use aya_ebpf::bindings::xdp_action::{XDP_DROP, XDP_PASS};
use aya_ebpf::helpers::generated::bpf_ktime_get_ns;
use aya_ebpf::macros::xdp;
use aya_ebpf::programs::XdpContext;
use lb_common::net::Be16;
use lb_report::receive::{Received, receive};

use crate::atomic::{Instructions, Linux5_10, Linux5_12};
use crate::log::log;
use crate::maps::{HostMaps, count};
use crate::packet::Packet;

/// The UDP port at which the daemon listens. Set by the loader. One comparison with the port
/// excludes all other traffic.
#[unsafe(no_mangle)]
static PORT: Global<u32> = Global::new(0);

#[xdp]
pub fn socklb_receive(ctx: XdpContext) -> u32 {
    take_in::<Linux5_12>(&ctx)
}

#[xdp]
pub fn socklb_receive_5_10(ctx: XdpContext) -> u32 {
    take_in::<Linux5_10>(&ctx)
}

#[inline(always)]
fn take_in<I: Instructions>(ctx: &XdpContext) -> u32 {
    let port = Be16::from_host(PORT.load() as u16);
    // SAFETY: the helper has no arguments and returns a number.
    let now_ns = || unsafe { bpf_ktime_get_ns() };
    let Some(Received { reception, goes_on }) =
        receive(&Packet::of(ctx), &HostMaps::<I>::new(), port, now_ns)
    else {
        return XDP_PASS;
    };
    count(reception);
    log!(ctx, "receive: {}, goes on: {}", reception.number(), goes_on as u8);
    if goes_on { XDP_PASS } else { XDP_DROP }
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
