//! Constants that the loader sets in the programs before they are loaded, so that the verifier
//! knows each value and skips code that it makes unreachable.
//!
//! Each is set by name: in `crates/lb-kernel/src/client/object.rs`, and in `read/holders.rs` for
//! those of the iterator.

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

/// Length of `flow_buckets` and of `flows` minus one.
pub const FLOW_MASK: Constant<u32, { place_of("FLOW_MASK") }> = Constant::new();

/// Whether the programs may check if a socket is a path of an MPTCP socket (Linux 6.0 and
/// CAP_PERFMON). Set by the loader from a probe.
pub const KNOWS_MPTCP: Constant<u32, { place_of("KNOWS_MPTCP") }> = Constant::new();

/// Whether the kernel has `bpf_set_retval` (5.18). Set by the loader from a probe: if the helper is
/// unknown, the call is dead code, which the verifier skips. (Without CAP_PERFMON it also follows
/// dead code, as a processor might, and then rejects an unknown helper.)
pub const HAS_SET_RETVAL: Constant<u32, { place_of("HAS_SET_RETVAL") }> = Constant::new();

/// Whether the TCP program is attached as well: flows then end with their connections, with a
/// cause.
pub const FULL_ACCOUNTING: Constant<u32, { place_of("FULL_ACCOUNTING") }> = Constant::new();

/// Whether any service of the client may have its backends scanned. If none may, the scans are dead
/// code, which newer verifiers skip.
pub const SCANS: Constant<u32, { place_of("SCANS") }> = Constant::new();

/// Nanoseconds of a jiffy.
pub const JIFFY_NS: Constant<u64, { place_of("JIFFY_NS") }> = Constant::new();

/// The time of jiffy number 0, modulo 2^64; it may be long before the start of the clock.
pub const FIRST_JIFFY_NS: Constant<u64, { place_of("FIRST_JIFFY_NS") }> = Constant::new();

/// The kernel's number of the type `struct tcp_sock`; 0 if the programs may not cast pointers to
/// the kernel's own structures (Linux 6.2 and CAP_PERFMON).
pub const TCP_SOCK: Constant<u32, { place_of("TCP_SOCK") }> = Constant::new();

/// Whether the programs may cast pointers to the kernel's own structures. Known when the program is
/// loaded.
#[inline(always)]
pub fn can_cast() -> bool {
    TCP_SOCK.load() != 0
}

/// The type of the kernel's context of a call on an address (`struct bpf_sock_addr_kern`), only
/// with [`TCP_SOCK`].
pub const CALL: Constant<u32, { place_of("CALL") }> = Constant::new();

/// The offset of the socket in that structure (`sk`), only with [`TCP_SOCK`].
pub const CALL_SOCKET: Constant<u32, { place_of("CALL_SOCKET") }> = Constant::new();

/// Like [`CALL`], for a TCP event (`struct bpf_sock_ops_kern`).
pub const EVENT: Constant<u32, { place_of("EVENT") }> = Constant::new();

/// Like [`CALL_SOCKET`], for a TCP event.
pub const EVENT_SOCKET: Constant<u32, { place_of("EVENT_SOCKET") }> = Constant::new();

/// The offset of a socket's cookie (`sock.__sk_common.skc_cookie`), only with [`TCP_SOCK`].
pub const SOCKET_COOKIE: Constant<u32, { place_of("SOCKET_COOKIE") }> = Constant::new();

/// The offset of a socket's network namespace (`sock.__sk_common.skc_net`), only with [`TCP_SOCK`].
pub const SOCKET_NAMESPACE: Constant<u32, { place_of("SOCKET_NAMESPACE") }> = Constant::new();

/// The offset of a network namespace's cookie (`net.net_cookie`), only with [`TCP_SOCK`].
pub const NAMESPACE_COOKIE: Constant<u32, { place_of("NAMESPACE_COOKIE") }> = Constant::new();

/// The offset of a socket's error (`sock.sk_err`), from the kernel's own description of its types;
/// 0 if the programs may not read it.
pub const SK_ERR: Constant<u32, { place_of("SK_ERR") }> = Constant::new();

/// The offset of an error that the kernel did not act on (`sock.sk_err_soft`), as [`SK_ERR`].
pub const SK_ERR_SOFT: Constant<u32, { place_of("SK_ERR_SOFT") }> = Constant::new();

/// Like [`SK_ERR`], for sockets that are being released: 0 if the programs may not read them.
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

/// `inet_connection_sock.icsk_syn_retries`, 0 if the programs may not read it or not set its
/// option.
pub const SYN_RETRIES: Constant<u32, { place_of("SYN_RETRIES") }> = Constant::new();

/// The offset of the byte that tells whether the kernel itself opened a socket
/// (`sock.sk_kern_sock`), 0 if the programs may not read it.
pub const KERNEL_SOCKET: Constant<u32, { place_of("KERNEL_SOCKET") }> = Constant::new();

/// The bit of that byte, as a mask.
pub const KERNEL_SOCKET_MASK: Constant<u32, { place_of("KERNEL_SOCKET_MASK") }> = Constant::new();

/// The offset of the first message in a socket's error queue (`sock.sk_error_queue`), as
/// [`SK_ERR`].
pub const ERROR_QUEUE: Constant<u32, { place_of("ERROR_QUEUE") }> = Constant::new();

/// The offset of the length of that queue, as [`SK_ERR`].
pub const ERROR_QUEUE_LENGTH: Constant<u32, { place_of("ERROR_QUEUE_LENGTH") }> = Constant::new();

/// The offset of the `struct sock_extended_err` in such a message, as [`SK_ERR`].
pub const QUEUED_ERROR: Constant<u32, { place_of("QUEUED_ERROR") }> = Constant::new();

/// `sock_common.skc_bound_dev_if`, as [`SK_ERR`].
pub const BOUND_DEVICE: Constant<u32, { place_of("BOUND_DEVICE") }> = Constant::new();

/// `sock.sk_mark`, as [`SK_ERR`].
pub const SOCKET_MARK: Constant<u32, { place_of("SOCKET_MARK") }> = Constant::new();

/// The byte with the bits of `sock.sk_userlocks`, as [`SK_ERR`].
pub const USER_LOCKS: Constant<u32, { place_of("USER_LOCKS") }> = Constant::new();

/// The bits of that byte that are set if an address or a port was bound, as a mask.
pub const USER_LOCKS_MASK: Constant<u32, { place_of("USER_LOCKS_MASK") }> = Constant::new();

/// `sock.sk_filter`, as [`SK_ERR`].
pub const SOCKET_FILTER: Constant<u32, { place_of("SOCKET_FILTER") }> = Constant::new();

/// `sock_common.skc_flags`, as [`SK_ERR`].
pub const SOCKET_FLAGS: Constant<u32, { place_of("SOCKET_FLAGS") }> = Constant::new();

/// `inet_sock.uc_ttl`, as [`SK_ERR`].
pub const UNICAST_TTL: Constant<u32, { place_of("UNICAST_TTL") }> = Constant::new();

/// Offsets of fields of the kernel's structures, for the iterator over open files. Set by the
/// loader from the kernel's description of its types.
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
