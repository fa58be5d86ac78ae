//! The kernel programs of socklb: one function for each hook.
//!
//! Each program reads its context, calls one function and returns the verdict. A program that uses
//! instructions which Linux 5.10 lacks exists in two versions; the loader chooses the `_5_10`
//! version if a probe shows that the kernel rejects the newer instructions. All names begin with
//! `socklb_`, which identifies the programs in lists; the kernel stores 15 characters of a name.
#![no_std]
#![no_main]
// `core::sync::atomic` has no read-modify-write operations for the bpfel target; the intrinsics for
// them work.
#![feature(core_intrinsics)]
// Inline assembly for this target is not stable yet.
#![feature(asm_experimental_arch)]
#![expect(internal_features, reason = "see core_intrinsics above")]

mod maps;

mod globals;

mod rows;

mod kernel;

mod flow;

mod decide;

mod ejection;

mod hooks;

use aya_ebpf::macros::{cgroup_sock, cgroup_sock_addr, sock_ops};
use aya_ebpf::programs::{SockAddrContext, SockContext, SockOpsContext};

use crate::hooks::{connect, holders, peer, release, sendmsg, tcp};
use crate::kernel::atomic::{Linux5_10, Linux5_12};
use crate::kernel::context::{Dial, Socket};
use crate::kernel::log::log;
use crate::kernel::sock_ops::Ops;

/// The return value of a program if the call proceeds.
const PROCEED: i32 = 1;
/// The return value of a program if the call fails.
const REFUSE: i32 = 0;
/// The return value of a program for TCP events; the kernel requires 1.
const SEEN: u32 = 1;

#[cgroup_sock_addr(connect4)]
pub fn socklb_connect4(ctx: SockAddrContext) -> i32 {
    let dial = Dial::with_socket(&ctx);
    let verdict = connect::connect4::<Linux5_12>(&dial);
    log!(&ctx, "connect4: {:i} port {}, verdict {}", dial.ip4().to_host(), dial.port().to_host(), verdict);
    verdict
}

#[cgroup_sock_addr(connect4)]
pub fn socklb_connect4_5_10(ctx: SockAddrContext) -> i32 {
    let dial = Dial::with_socket(&ctx);
    let verdict = connect::connect4::<Linux5_10>(&dial);
    log!(&ctx, "connect4: {:i} port {}, verdict {}", dial.ip4().to_host(), dial.port().to_host(), verdict);
    verdict
}

#[cgroup_sock_addr(connect6)]
pub fn socklb_connect6(ctx: SockAddrContext) -> i32 {
    let dial = Dial::with_socket(&ctx);
    let verdict = connect::connect6::<Linux5_12>(&dial);
    log!(&ctx, "connect6: port {}, verdict {}", dial.port().to_host(), verdict);
    verdict
}

#[cgroup_sock_addr(connect6)]
pub fn socklb_connect6_5_10(ctx: SockAddrContext) -> i32 {
    let dial = Dial::with_socket(&ctx);
    let verdict = connect::connect6::<Linux5_10>(&dial);
    log!(&ctx, "connect6: port {}, verdict {}", dial.port().to_host(), verdict);
    verdict
}

#[cgroup_sock_addr(getpeername4)]
pub fn socklb_getpeer4(ctx: SockAddrContext) -> i32 {
    peer::getpeername4(&Dial::new(&ctx));
    PROCEED
}

#[cgroup_sock_addr(getpeername6)]
pub fn socklb_getpeer6(ctx: SockAddrContext) -> i32 {
    peer::getpeername6(&Dial::new(&ctx));
    PROCEED
}

#[cgroup_sock_addr(sendmsg4)]
pub fn socklb_sendmsg4(ctx: SockAddrContext) -> i32 {
    sendmsg::sendmsg4::<Linux5_12>(&Dial::new(&ctx))
}

#[cgroup_sock_addr(sendmsg4)]
pub fn socklb_sendmsg4_5_10(ctx: SockAddrContext) -> i32 {
    sendmsg::sendmsg4::<Linux5_10>(&Dial::new(&ctx))
}

#[cgroup_sock_addr(sendmsg6)]
pub fn socklb_sendmsg6(ctx: SockAddrContext) -> i32 {
    sendmsg::sendmsg6::<Linux5_12>(&Dial::new(&ctx))
}

#[cgroup_sock_addr(sendmsg6)]
pub fn socklb_sendmsg6_5_10(ctx: SockAddrContext) -> i32 {
    sendmsg::sendmsg6::<Linux5_10>(&Dial::new(&ctx))
}

#[cgroup_sock_addr(recvmsg4)]
pub fn socklb_recvmsg4(ctx: SockAddrContext) -> i32 {
    peer::recvmsg4(&Dial::new(&ctx));
    PROCEED
}

#[cgroup_sock_addr(recvmsg6)]
pub fn socklb_recvmsg6(ctx: SockAddrContext) -> i32 {
    peer::recvmsg6(&Dial::new(&ctx));
    PROCEED
}

#[sock_ops]
pub fn socklb_tcp(ctx: SockOpsContext) -> u32 {
    tcp::tcp::<Linux5_12>(&Ops::new(&ctx));
    SEEN
}

#[sock_ops]
pub fn socklb_tcp_5_10(ctx: SockOpsContext) -> u32 {
    tcp::tcp::<Linux5_10>(&Ops::new(&ctx));
    SEEN
}

#[cgroup_sock(sock_release)]
pub fn socklb_release(ctx: SockContext) -> i32 {
    release::release::<Linux5_12>(&Socket::new(&ctx));
    PROCEED
}

#[cgroup_sock(sock_release)]
pub fn socklb_release_5_10(ctx: SockContext) -> i32 {
    release::release::<Linux5_10>(&Socket::new(&ctx));
    PROCEED
}

// The loader derives the type of the program from the section name. aya has no macro for iterators,
// so the section is set here.
#[unsafe(link_section = "iter/task_file")]
#[unsafe(no_mangle)]
pub extern "C" fn socklb_holders(context: holders::OpenFile) -> i32 {
    holders::write_socket(context);
    0
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // Unreachable: nothing in this crate can panic. The verifier would reject an endless loop that
    // can be reached.
    loop {}
}
