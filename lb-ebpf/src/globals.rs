//! What the loader tells the programs before they are loaded: read-only data, so that the verifier knows each value and
//! skips what it makes unreachable.
//!
//! Each is set by name: in `lb-kernel/src/object.rs`, and in `holders.rs` for those of the iterator.

use aya_ebpf::Global;
use lb_common::abi::FLOW_RECORDS;

/// Length of `flow_buckets` and of `flows` minus one.
#[unsafe(no_mangle)]
pub static FLOW_MASK: Global<u32> = Global::new(FLOW_RECORDS - 1);

/// Whether the programs may ask the kernel if a socket is a path of an MPTCP socket (Linux 6.0 and CAP_PERFMON). Set by
/// the loader from a probe.
#[unsafe(no_mangle)]
pub static KNOWS_MPTCP: Global<u32> = Global::new(0);

/// Whether the kernel has `bpf_set_retval` (5.18). Set by the loader from a probe: where the helper is unknown, the
/// call is dead code, which the verifier skips. (Without CAP_PERFMON it follows dead code as well, as a processor
/// might, and then refuses an unknown helper.)
#[unsafe(no_mangle)]
pub static HAS_SET_RETVAL: Global<u32> = Global::new(0);

/// Whether the TCP program is attached as well: flows then end when their connections do, with a cause.
#[unsafe(no_mangle)]
pub static FULL_ACCOUNTING: Global<u32> = Global::new(0);

/// Whether some service of the client may have its backends scanned. Where none has, the scans are dead code, which
/// newer verifiers skip.
#[unsafe(no_mangle)]
pub static SCANS: Global<u32> = Global::new(0);

/// Nanoseconds of a jiffy.
#[unsafe(no_mangle)]
pub static JIFFY_NS: Global<u64> = Global::new(0);

/// The time of the jiffy with the number 0, which may be long before the start of the clock: modulo 2^64.
#[unsafe(no_mangle)]
pub static FIRST_JIFFY_NS: Global<u64> = Global::new(0);

/// Where a socket keeps its error (`sock.sk_err`), from the kernel's own description of its types; 0 if the programs
/// may not read it.
#[unsafe(no_mangle)]
pub static SK_ERR: Global<u32> = Global::new(0);

/// Where a socket keeps an error that the kernel did not act on (`sock.sk_err_soft`), as [`SK_ERR`].
#[unsafe(no_mangle)]
pub static SK_ERR_SOFT: Global<u32> = Global::new(0);

/// As [`SK_ERR`], where a socket that is released is read: 0 if that may not be done.
#[unsafe(no_mangle)]
pub static RELEASED_SK_ERR: Global<u32> = Global::new(0);

/// `sock.sk_err_soft`, as [`RELEASED_SK_ERR`].
#[unsafe(no_mangle)]
pub static RELEASED_SK_ERR_SOFT: Global<u32> = Global::new(0);

/// `tcp_sock.bpf_sock_ops_cb_flags`, as [`RELEASED_SK_ERR`].
#[unsafe(no_mangle)]
pub static RELEASED_CALLBACKS: Global<u32> = Global::new(0);

/// `tcp_sock.srtt_us`, as [`RELEASED_SK_ERR`].
#[unsafe(no_mangle)]
pub static RELEASED_SRTT: Global<u32> = Global::new(0);

/// `tcp_sock.total_retrans`, as [`RELEASED_SK_ERR`].
#[unsafe(no_mangle)]
pub static RELEASED_RETRANSMITS: Global<u32> = Global::new(0);

/// `tcp_sock.bytes_received`, as [`RELEASED_SK_ERR`].
#[unsafe(no_mangle)]
pub static RELEASED_BYTES_RECEIVED: Global<u32> = Global::new(0);

/// `tcp_sock.bytes_acked`, as [`RELEASED_SK_ERR`].
#[unsafe(no_mangle)]
pub static RELEASED_BYTES_SENT: Global<u32> = Global::new(0);

/// `inet_connection_sock.icsk_syn_retries`, 0 if the programs may not read it or not set its option.
#[unsafe(no_mangle)]
pub static SYN_RETRIES: Global<u32> = Global::new(0);

/// The byte of a socket that tells whether the kernel itself opened it (`sock.sk_kern_sock`), 0 if the programs may not
/// read it.
#[unsafe(no_mangle)]
pub static KERNEL_SOCKET: Global<u32> = Global::new(0);

/// The bit of that byte, as a mask.
#[unsafe(no_mangle)]
pub static KERNEL_SOCKET_MASK: Global<u32> = Global::new(0);

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
