//! One program for each optional feature of the kernel. The kernel has a feature if its verifier
//! accepts the feature's program.
//!
//! The probes use the features in the same way as the shipped programs, and are never attached. The
//! loader sets the offsets of kernel fields in the probes as it does in the shipped programs
//! (`globals.rs`). `crates/lb-kernel/src/host/features.rs` has the table of features.
#![no_std]
#![no_main]
#![feature(core_intrinsics)]
#![expect(internal_features, reason = "as in main.rs")]

use core::ffi::c_void;
use core::intrinsics::{AtomicOrdering, atomic_xadd};

use aya_ebpf::Global;
use aya_ebpf::bindings::bpf_sock_addr;
use aya_ebpf::helpers::generated as helper;
use aya_ebpf::macros::{cgroup_sock, cgroup_sock_addr, sock_ops};
use aya_ebpf::programs::{SockAddrContext, SockContext, SockOpsContext};

#[path = "../kernel/cast.rs"]
mod cast;

#[unsafe(no_mangle)]
static TCP_SOCK: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
static SOCKET_COOKIE: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
static SK_ERR: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
static RELEASED_SRTT: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
static KERNEL_SOCKET: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
static SYN_RETRIES: Global<u32> = Global::new(0);

/// Since Linux 5.12: atomic instructions that return the value that they replace.
#[cgroup_sock_addr(connect4)]
pub fn fetching_atomics(_: SockAddrContext) -> i32 {
    let mut word = 0u64;
    let word = &raw mut word;
    // SAFETY: the pointer is to a local variable.
    let before = unsafe {
        word.write_volatile(0);
        atomic_xadd::<u64, u64, { AtomicOrdering::AcqRel }>(word, 1)
    };
    i32::from(before == 0)
}

/// Since Linux 5.18: a program can make a connect fail with another errno than EPERM.
#[cgroup_sock_addr(connect4)]
pub fn set_retval(_: SockAddrContext) -> i32 {
    const BPF_FUNC_SET_RETVAL: usize = 187;
    /// `ECONNREFUSED`
    const ERRNO: i64 = 111;
    // The argument has 64 bits, because Linux 7.2 checks the whole register. The binding declares
    // an `int`, which does not fill the register.
    // SAFETY: the number of a helper is its address in a program, and this helper takes and returns
    // a number.
    unsafe {
        let set_retval: unsafe extern "C" fn(i64) -> i64 = core::mem::transmute(BPF_FUNC_SET_RETVAL);
        set_retval(-ERRNO);
    }
    1
}

/// Since Linux 6.0: a program can check whether a socket is a path of an MPTCP socket.
#[cgroup_sock_addr(connect4)]
pub fn knows_mptcp(ctx: SockAddrContext) -> i32 {
    // SAFETY: the context and its socket are valid while the program runs.
    unsafe { helper::bpf_skc_to_mptcp_sock(socket(ctx.sock_addr)) };
    1
}

/// Reads the error of a socket that is being closed, as the program for TCP events does.
#[sock_ops]
pub fn socket_errors(ctx: SockOpsContext) -> u32 {
    // SAFETY: the context is valid while the program runs. The helper returns a pointer to the
    // kernel's own structure or null, and the verifier checks the read against the BTF of its type,
    // from which the offset comes.
    unsafe {
        let socket = (&raw const (*ctx.ops).__bindgen_anon_2.sk).read_volatile();
        if !socket.is_null() {
            let tcp = helper::bpf_skc_to_tcp_sock(socket.cast());
            if !tcp.is_null() {
                tcp.cast::<u8>().add(SK_ERR.load() as usize).cast::<u32>().read_volatile();
            }
        }
    }
    1
}

/// Reads the kernel's own structure of a socket that is being released.
#[cgroup_sock(sock_release)]
pub fn outcomes_at_release(ctx: SockContext) -> i32 {
    let mut value = 0u32;
    // SAFETY: the helper writes four bytes, even if the address is invalid.
    unsafe {
        let field = ctx.sock.cast::<u8>().add(RELEASED_SRTT.load() as usize);
        helper::bpf_probe_read_kernel((&raw mut value).cast(), 4, field.cast());
    }
    1
}

/// Reads and sets how often a socket's SYN is retransmitted, before the socket dials.
#[cgroup_sock_addr(connect4)]
pub fn connect_timeouts(ctx: SockAddrContext) -> i32 {
    /// `SOL_TCP`
    const LEVEL: i32 = 6;
    /// `TCP_SYNCNT`
    const OPTION: i32 = 7;
    // SAFETY: as in `socket_errors`. `bpf_setsockopt` reads the four bytes of the value.
    unsafe {
        let tcp = helper::bpf_skc_to_tcp_sock(socket(ctx.sock_addr));
        if !tcp.is_null() {
            tcp.cast::<u8>().add(SYN_RETRIES.load() as usize).read_volatile();
        }
        let mut value = 1i32;
        helper::bpf_setsockopt(ctx.sock_addr.cast(), LEVEL, OPTION, (&raw mut value).cast(), 4);
    }
    1
}

/// Reads whether a process or the kernel opened a socket, before the socket dials.
#[cgroup_sock_addr(connect4)]
pub fn knows_kernel_sockets(ctx: SockAddrContext) -> i32 {
    // SAFETY: as in `socket_errors`.
    unsafe {
        let tcp = helper::bpf_skc_to_tcp_sock(socket(ctx.sock_addr));
        if !tcp.is_null() {
            tcp.cast::<u8>().add(KERNEL_SOCKET.load() as usize).read_volatile();
        }
    }
    1
}

/// Since Linux 6.2: a program can get pointers to the kernel's own structures.
#[cgroup_sock_addr(connect4)]
pub fn kernel_casts(ctx: SockAddrContext) -> i32 {
    // SAFETY: the context and its socket are valid while the program runs. A load past the end of a
    // smaller structure may fault, which the kernel handles.
    unsafe {
        let socket = cast::cast(socket(ctx.sock_addr).cast_const(), TCP_SOCK.load());
        cast::field::<u64>(socket, SOCKET_COOKIE.load());
        // The programs also cast their own contexts.
        cast::field::<u8>(cast::cast(ctx.sock_addr.cast_const(), TCP_SOCK.load()), SOCKET_COOKIE.load());
    }
    1
}

/// # Safety
/// `ctx` must be a program's context.
#[inline(always)]
unsafe fn socket(ctx: *mut bpf_sock_addr) -> *mut c_void {
    // SAFETY: guaranteed by the caller.
    unsafe { (&raw const (*ctx).__bindgen_anon_1.sk).read_volatile().cast() }
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
