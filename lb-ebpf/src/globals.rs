//! Constants that the loader writes into the programs before it loads them. The verifier then knows
//! each value, and skips code that these values make unreachable.
//!
//! The loader sets each constant by its name. `crates/lb-kernel/src/client/object.rs` determines
//! the values; the values for kernel features come from `host/features.rs`, and the values for the
//! iterator from `read/holders.rs`.

use core::arch::asm;
use core::marker::PhantomData;

use aya_ebpf::Global;
use lb_common::constants::place_of;

/// A constant. The loader writes its value into each instruction that uses it.
pub struct Constant<T, const PLACE: u32>(PhantomData<T>);

impl<T, const PLACE: u32> Constant<T, PLACE> {
    const fn new() -> Self {
        Self(PhantomData)
    }
}

impl<const PLACE: u32> Constant<u32, PLACE> {
    #[inline(always)]
    pub fn load(self) -> u32 {
        let value: u32;
        // SAFETY: the instruction only moves a number into a register.
        unsafe {
            asm!("{0} = {1}", out(wreg) value, const PLACE, options(pure, nomem, nostack, preserves_flags))
        };
        value
    }
}

impl<const PLACE: u32> Constant<u64, PLACE> {
    #[inline(always)]
    pub fn load(self) -> u64 {
        let value: u64;
        // SAFETY: the instruction only moves a number into a register.
        unsafe {
            asm!("{0} = {1} ll", out(reg) value, const PLACE, options(pure, nomem, nostack, preserves_flags))
        };
        value
    }
}

/// Length of `flows` minus one.
pub const FLOW_MASK: Constant<u32, { place_of("FLOW_MASK") }> = Constant::new();

/// 1 if the programs may check whether a socket is a path of an MPTCP socket (Linux 6.0 and
/// CAP_PERFMON), else 0. Set from a probe.
pub const KNOWS_MPTCP: Constant<u32, { place_of("KNOWS_MPTCP") }> = Constant::new();

/// 1 if the kernel has the helper `bpf_set_retval` (Linux 5.18), else 0. Set from a probe. If the
/// kernel lacks the helper, its call is dead code, which the verifier skips. (Without CAP_PERFMON
/// the verifier also follows dead code, as a processor might by speculation, and then rejects the
/// unknown helper.)
pub const HAS_SET_RETVAL: Constant<u32, { place_of("HAS_SET_RETVAL") }> = Constant::new();

/// 1 if the program for TCP events is attached (`accounting = "full"`), else 0. If it is attached,
/// a flow ends when its connection ends, and the programs can determine the cause.
pub const FULL_ACCOUNTING: Constant<u32, { place_of("FULL_ACCOUNTING") }> = Constant::new();

/// 1 if a choice for any service of the client may scan the service's backends, else 0. If it is 0,
/// the scans are dead code, which newer verifiers skip.
pub const SCANS: Constant<u32, { place_of("SCANS") }> = Constant::new();

/// Nanoseconds of a jiffy.
pub const JIFFY_NS: Constant<u64, { place_of("JIFFY_NS") }> = Constant::new();

/// The time of jiffy number 0 by `CLOCK_MONOTONIC`, in nanoseconds modulo 2^64. It may be long
/// before the clock's start.
pub const FIRST_JIFFY_NS: Constant<u64, { place_of("FIRST_JIFFY_NS") }> = Constant::new();

/// The number of the type `struct tcp_sock` in the kernel's BTF; 0 if the programs may not cast
/// pointers to the kernel's own structures (Linux 6.2 and CAP_PERFMON).
pub const TCP_SOCK: Constant<u32, { place_of("TCP_SOCK") }> = Constant::new();

/// Whether the programs may cast pointers to the kernel's own structures. The verifier knows the
/// result.
#[inline(always)]
pub fn can_cast() -> bool {
    TCP_SOCK.load() != 0
}

/// The number of the type of a TCP event's context (`struct bpf_sock_ops_kern`) in the kernel's
/// BTF; valid only if [`TCP_SOCK`] is not 0.
pub const EVENT: Constant<u32, { place_of("EVENT") }> = Constant::new();

/// The offset of the socket (`sk`) in the structure whose type is [`EVENT`]; valid only if
/// [`TCP_SOCK`] is not 0.
pub const EVENT_SOCKET: Constant<u32, { place_of("EVENT_SOCKET") }> = Constant::new();

/// The offset of a socket's cookie (`sock.__sk_common.skc_cookie`); valid only if [`TCP_SOCK`] is
/// not 0.
pub const SOCKET_COOKIE: Constant<u32, { place_of("SOCKET_COOKIE") }> = Constant::new();

/// The offset of the pointer to a socket's network namespace (`sock.__sk_common.skc_net`); valid
/// only if [`TCP_SOCK`] is not 0.
pub const SOCKET_NAMESPACE: Constant<u32, { place_of("SOCKET_NAMESPACE") }> = Constant::new();

/// The offset of a network namespace's cookie (`net.net_cookie`); valid only if [`TCP_SOCK`] is not
/// 0.
pub const NAMESPACE_COOKIE: Constant<u32, { place_of("NAMESPACE_COOKIE") }> = Constant::new();

/// The offset of a socket's error (`sock.sk_err`), from the kernel's BTF; 0 if the programs may not
/// read it.
pub const SK_ERR: Constant<u32, { place_of("SK_ERR") }> = Constant::new();

/// Like [`SK_ERR`], for an error that the kernel did not act on (`sock.sk_err_soft`).
pub const SK_ERR_SOFT: Constant<u32, { place_of("SK_ERR_SOFT") }> = Constant::new();

/// Like [`SK_ERR`], for sockets that are being released: 0 if the programs may not read the error
/// of such a socket.
pub const RELEASED_SK_ERR: Constant<u32, { place_of("RELEASED_SK_ERR") }> = Constant::new();

/// Like [`RELEASED_SK_ERR`], for `sock.sk_err_soft`.
pub const RELEASED_SK_ERR_SOFT: Constant<u32, { place_of("RELEASED_SK_ERR_SOFT") }> = Constant::new();

/// Like [`RELEASED_SK_ERR`], for `tcp_sock.bpf_sock_ops_cb_flags`. This offset and the next two are
/// also used for TCP events if the programs may cast pointers.
pub const RELEASED_CALLBACKS: Constant<u32, { place_of("RELEASED_CALLBACKS") }> = Constant::new();

/// Like [`RELEASED_SK_ERR`], for `tcp_sock.srtt_us`.
pub const RELEASED_SRTT: Constant<u32, { place_of("RELEASED_SRTT") }> = Constant::new();

/// Like [`RELEASED_SK_ERR`], for `tcp_sock.total_retrans`.
pub const RELEASED_RETRANSMITS: Constant<u32, { place_of("RELEASED_RETRANSMITS") }> = Constant::new();

/// Like [`RELEASED_SK_ERR`], for `tcp_sock.bytes_received`.
pub const RELEASED_BYTES_RECEIVED: Constant<u32, { place_of("RELEASED_BYTES_RECEIVED") }> = Constant::new();

/// Like [`RELEASED_SK_ERR`], for `tcp_sock.bytes_acked`.
pub const RELEASED_BYTES_SENT: Constant<u32, { place_of("RELEASED_BYTES_SENT") }> = Constant::new();

/// The offset of `inet_connection_sock.icsk_syn_retries`; 0 if the programs may not read this
/// field, or may not set the socket option for it.
pub const SYN_RETRIES: Constant<u32, { place_of("SYN_RETRIES") }> = Constant::new();

/// The offset of the byte with the bit that is set if the kernel itself opened a socket
/// (`sock.sk_kern_sock`); 0 if the programs may not read it.
pub const KERNEL_SOCKET: Constant<u32, { place_of("KERNEL_SOCKET") }> = Constant::new();

/// The bit in the byte at [`KERNEL_SOCKET`], as a mask.
pub const KERNEL_SOCKET_MASK: Constant<u32, { place_of("KERNEL_SOCKET_MASK") }> = Constant::new();

/// Like [`SK_ERR`], for the first message in a socket's error queue (`sock.sk_error_queue`).
pub const ERROR_QUEUE: Constant<u32, { place_of("ERROR_QUEUE") }> = Constant::new();

/// Like [`SK_ERR`], for the length of a socket's error queue.
pub const ERROR_QUEUE_LENGTH: Constant<u32, { place_of("ERROR_QUEUE_LENGTH") }> = Constant::new();

/// Like [`SK_ERR`], for the `struct sock_extended_err` in a message of the error queue.
pub const QUEUED_ERROR: Constant<u32, { place_of("QUEUED_ERROR") }> = Constant::new();

/// Like [`SK_ERR`], for `sock_common.skc_bound_dev_if`.
pub const BOUND_DEVICE: Constant<u32, { place_of("BOUND_DEVICE") }> = Constant::new();

/// Like [`SK_ERR`], for `sock.sk_mark`.
pub const SOCKET_MARK: Constant<u32, { place_of("SOCKET_MARK") }> = Constant::new();

/// Like [`SK_ERR`], for the byte with the bits of `sock.sk_userlocks`.
pub const USER_LOCKS: Constant<u32, { place_of("USER_LOCKS") }> = Constant::new();

/// The bits in the byte at [`USER_LOCKS`] that are set if an address or a port was bound, as a
/// mask.
pub const USER_LOCKS_MASK: Constant<u32, { place_of("USER_LOCKS_MASK") }> = Constant::new();

/// Like [`SK_ERR`], for `sock.sk_filter`.
pub const SOCKET_FILTER: Constant<u32, { place_of("SOCKET_FILTER") }> = Constant::new();

/// Like [`SK_ERR`], for `sock_common.skc_flags`.
pub const SOCKET_FLAGS: Constant<u32, { place_of("SOCKET_FLAGS") }> = Constant::new();

/// Like [`SK_ERR`], for `inet_sock.uc_ttl`.
pub const UNICAST_TTL: Constant<u32, { place_of("UNICAST_TTL") }> = Constant::new();

/// Offsets of fields of the kernel's structures, for the iterator over open files. Set by the
/// loader from the kernel's BTF.
#[unsafe(no_mangle)]
pub static FILE_INODE: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
pub static FILE_PRIVATE_DATA: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
pub static INODE_MODE: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
pub static SOCKET_SOCK: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
pub static SOCK_COOKIE: Global<u32> = Global::new(0);
