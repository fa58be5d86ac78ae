//! What the loader tells the programs before they are loaded, so that the verifier knows each value and skips what it makes
//! unreachable.
//!
//! Each is set by name: in `crates/lb-kernel/src/client/object.rs`, and in `read/holders.rs` for those of the iterator.

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
    /// Its value.
    #[inline(always)]
    pub fn load(self) -> u32 {
        let value: u32;
        // SAFETY: moves a number into a register.
        unsafe {
            asm!("{0} = {1}", out(wreg) value, const PLACE, options(pure, nomem, nostack, preserves_flags))
        };
        value
    }
}

impl<const PLACE: u32> Constant<u64, PLACE> {
    /// Its value.
    #[inline(always)]
    pub fn load(self) -> u64 {
        let value: u64;
        // SAFETY: moves a number into a register.
        unsafe {
            asm!("{0} = {1} ll", out(reg) value, const PLACE, options(pure, nomem, nostack, preserves_flags))
        };
        value
    }
}

/// Length of `flow_buckets` and of `flows` minus one.
pub const FLOW_MASK: Constant<u32, { place_of("FLOW_MASK") }> = Constant::new();

/// Whether the programs may ask the kernel if a socket is a path of an MPTCP socket (Linux 6.0 and CAP_PERFMON). Set by
/// the loader from a probe.
pub const KNOWS_MPTCP: Constant<u32, { place_of("KNOWS_MPTCP") }> = Constant::new();

/// Whether the kernel has `bpf_set_retval` (5.18). Set by the loader from a probe: where the helper is unknown, the
/// call is dead code, which the verifier skips. (Without CAP_PERFMON it follows dead code as well, as a processor
/// might, and then refuses an unknown helper.)
pub const HAS_SET_RETVAL: Constant<u32, { place_of("HAS_SET_RETVAL") }> = Constant::new();

/// Whether the TCP program is attached as well: flows then end when their connections do, with a cause.
pub const FULL_ACCOUNTING: Constant<u32, { place_of("FULL_ACCOUNTING") }> = Constant::new();

/// Whether some service of the client may have its backends scanned. Where none has, the scans are dead code, which
/// newer verifiers skip.
pub const SCANS: Constant<u32, { place_of("SCANS") }> = Constant::new();

/// Nanoseconds of a jiffy.
pub const JIFFY_NS: Constant<u64, { place_of("JIFFY_NS") }> = Constant::new();

/// The time of the jiffy with the number 0, which may be long before the start of the clock: modulo 2^64.
pub const FIRST_JIFFY_NS: Constant<u64, { place_of("FIRST_JIFFY_NS") }> = Constant::new();

/// The kernel's number of the type `struct tcp_sock`, 0 if the programs may not take a pointer for one to its own structures
/// (Linux 6.2 and CAP_PERFMON).
pub const TCP_SOCK: Constant<u32, { place_of("TCP_SOCK") }> = Constant::new();

/// Whether there are such pointers. Known when the program is loaded.
#[inline(always)]
pub fn can_cast() -> bool {
    TCP_SOCK.load() != 0
}

/// The type of the kernel's context of a call on an address (`struct bpf_sock_addr_kern`), only with [`TCP_SOCK`].
pub const CALL: Constant<u32, { place_of("CALL") }> = Constant::new();

/// Where that has its socket (`sk`), only with [`TCP_SOCK`].
pub const CALL_SOCKET: Constant<u32, { place_of("CALL_SOCKET") }> = Constant::new();

/// As [`CALL`], of a TCP event (`struct bpf_sock_ops_kern`).
pub const EVENT: Constant<u32, { place_of("EVENT") }> = Constant::new();

/// As [`CALL_SOCKET`], of a TCP event.
pub const EVENT_SOCKET: Constant<u32, { place_of("EVENT_SOCKET") }> = Constant::new();

/// A socket's cookie (`sock.__sk_common.skc_cookie`), only with [`TCP_SOCK`].
pub const SOCKET_COOKIE: Constant<u32, { place_of("SOCKET_COOKIE") }> = Constant::new();

/// A socket's network namespace (`sock.__sk_common.skc_net`), only with [`TCP_SOCK`].
pub const SOCKET_NAMESPACE: Constant<u32, { place_of("SOCKET_NAMESPACE") }> = Constant::new();

/// The cookie of a network namespace (`net.net_cookie`), only with [`TCP_SOCK`].
pub const NAMESPACE_COOKIE: Constant<u32, { place_of("NAMESPACE_COOKIE") }> = Constant::new();

/// Where a socket keeps its error (`sock.sk_err`), from the kernel's own description of its types; 0 if the programs
/// may not read it.
pub const SK_ERR: Constant<u32, { place_of("SK_ERR") }> = Constant::new();

/// Where a socket keeps an error that the kernel did not act on (`sock.sk_err_soft`), as [`SK_ERR`].
pub const SK_ERR_SOFT: Constant<u32, { place_of("SK_ERR_SOFT") }> = Constant::new();

/// As [`SK_ERR`], where a socket that is released is read: 0 if that may not be done.
pub const RELEASED_SK_ERR: Constant<u32, { place_of("RELEASED_SK_ERR") }> = Constant::new();

/// `sock.sk_err_soft`, as [`RELEASED_SK_ERR`].
pub const RELEASED_SK_ERR_SOFT: Constant<u32, { place_of("RELEASED_SK_ERR_SOFT") }> = Constant::new();

/// `tcp_sock.bpf_sock_ops_cb_flags`, as [`RELEASED_SK_ERR`].
pub const RELEASED_CALLBACKS: Constant<u32, { place_of("RELEASED_CALLBACKS") }> = Constant::new();

/// `tcp_sock.srtt_us`, as [`RELEASED_SK_ERR`].
pub const RELEASED_SRTT: Constant<u32, { place_of("RELEASED_SRTT") }> = Constant::new();

/// `tcp_sock.total_retrans`, as [`RELEASED_SK_ERR`].
pub const RELEASED_RETRANSMITS: Constant<u32, { place_of("RELEASED_RETRANSMITS") }> = Constant::new();

/// `tcp_sock.bytes_received`, as [`RELEASED_SK_ERR`].
pub const RELEASED_BYTES_RECEIVED: Constant<u32, { place_of("RELEASED_BYTES_RECEIVED") }> = Constant::new();

/// `tcp_sock.bytes_acked`, as [`RELEASED_SK_ERR`].
pub const RELEASED_BYTES_SENT: Constant<u32, { place_of("RELEASED_BYTES_SENT") }> = Constant::new();

/// `inet_connection_sock.icsk_syn_retries`, 0 if the programs may not read it or not set its option.
pub const SYN_RETRIES: Constant<u32, { place_of("SYN_RETRIES") }> = Constant::new();

/// The byte of a socket that tells whether the kernel itself opened it (`sock.sk_kern_sock`), 0 if the programs may not
/// read it.
pub const KERNEL_SOCKET: Constant<u32, { place_of("KERNEL_SOCKET") }> = Constant::new();

/// The bit of that byte, as a mask.
pub const KERNEL_SOCKET_MASK: Constant<u32, { place_of("KERNEL_SOCKET_MASK") }> = Constant::new();

/// Where a socket has the first message of its queue of errors (`sock.sk_error_queue`), as [`SK_ERR`].
pub const ERROR_QUEUE: Constant<u32, { place_of("ERROR_QUEUE") }> = Constant::new();

/// Where it has how many there are, as [`SK_ERR`].
pub const ERROR_QUEUE_LENGTH: Constant<u32, { place_of("ERROR_QUEUE_LENGTH") }> = Constant::new();

/// Where such a message has its `struct sock_extended_err`, as [`SK_ERR`].
pub const QUEUED_ERROR: Constant<u32, { place_of("QUEUED_ERROR") }> = Constant::new();

/// `sock_common.skc_bound_dev_if`, as [`SK_ERR`].
pub const BOUND_DEVICE: Constant<u32, { place_of("BOUND_DEVICE") }> = Constant::new();

/// `sock.sk_mark`, as [`SK_ERR`].
pub const SOCKET_MARK: Constant<u32, { place_of("SOCKET_MARK") }> = Constant::new();

/// The byte with the bits of `sock.sk_userlocks`, as [`SK_ERR`].
pub const USER_LOCKS: Constant<u32, { place_of("USER_LOCKS") }> = Constant::new();

/// The bits of that byte that say that an address or a port was bound, as a mask.
pub const USER_LOCKS_MASK: Constant<u32, { place_of("USER_LOCKS_MASK") }> = Constant::new();

/// `sock.sk_filter`, as [`SK_ERR`].
pub const SOCKET_FILTER: Constant<u32, { place_of("SOCKET_FILTER") }> = Constant::new();

/// `sock_common.skc_flags`, as [`SK_ERR`].
pub const SOCKET_FLAGS: Constant<u32, { place_of("SOCKET_FLAGS") }> = Constant::new();

/// `inet_sock.uc_ttl`, as [`SK_ERR`].
pub const UNICAST_TTL: Constant<u32, { place_of("UNICAST_TTL") }> = Constant::new();

/// Where the iterator over open files finds fields of the kernel's structures. Set by the loader from the kernel's
/// description of its types.
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
