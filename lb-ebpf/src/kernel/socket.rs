//! Reads the causes of a failure from the kernel's own structure of a socket. Each read is a call
//! of a helper, so programs use this module only for flows whose end may be evidence about the
//! backend.

use aya_ebpf::helpers::generated as helper;
use lb_common::load::is_not_zero;

use crate::globals::{
    BOUND_DEVICE, ERROR_QUEUE, ERROR_QUEUE_LENGTH, QUEUED_ERROR, SOCKET_FILTER, SOCKET_FLAGS, SOCKET_MARK,
    UNICAST_TTL, USER_LOCKS, USER_LOCKS_MASK,
};

/// Reads a value at a kernel address; all zeros if it cannot be read.
#[inline(always)]
pub fn read_at<T: Copy + Default>(address: *const u8) -> T {
    let mut value = T::default();
    // SAFETY: `value` is writable.
    unsafe { read_into(address, &raw mut value) }
}

/// Like [`read_at`], but reads into `value`, so that several reads share one variable: functions
/// that call each other share 512 bytes of stack.
///
/// # Safety
/// `value` must be writable.
#[inline(always)]
unsafe fn read_into<T: Copy>(address: *const u8, value: *mut T) -> T {
    // SAFETY: the helper writes as many bytes as `value` has, even if the address is invalid.
    unsafe {
        helper::bpf_probe_read_kernel(value.cast(), size_of::<T>() as u32, address.cast());
        value.read_volatile()
    }
}

/// 1 if a socket requests no special route, else 0. A socket requests no special route if it is
/// bound to no address, port or device, and has no mark, filter, TTL or `SO_DONTROUTE`, like the
/// sockets of most applications. Any process can set most of these options, and can thereby make
/// its own connects fail. (Arithmetic replaces branches, because the verifier follows both sides of
/// a branch to the end.)
#[inline(always)]
pub fn is_ordinary(socket: *const u8) -> u32 {
    /// The bit of `SOCK_LOCALROUTE` (`SO_DONTROUTE`), the same on every kernel since 2.6.
    const LOCAL_ROUTE: u64 = 1 << 13;
    let mut place = 0u64;
    let place = &raw mut place;
    // Reads the low bits of a field, up to its size.
    let read = |offset: u32, mask: u64| {
        // SAFETY: the variable has eight bytes; if the field is shorter, the bytes after it are
        // also read.
        unsafe { read_into(socket.wrapping_add(offset as usize), place) & mask }
    };
    let is_bound = read(BOUND_DEVICE.load(), 0xffff_ffff)
        | read(SOCKET_MARK.load(), 0xffff_ffff)
        | read(USER_LOCKS.load(), u64::from(USER_LOCKS_MASK.load()))
        | read(SOCKET_FILTER.load(), u64::MAX)
        | read(SOCKET_FLAGS.load(), LOCAL_ROUTE)
        // A TTL of -1 means that none was set.
        | read(UNICAST_TTL.load(), 0xffff) ^ 0xffff;
    is_not_zero(is_bound) ^ 1
}

/// Like [`is_ordinary`], as a global function, for the socket at an address.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn is_ordinary_at(socket: u64) -> u32 {
    is_ordinary(socket as *const u8)
}

/// The error of the first ICMP message in a socket's error queue; 0 if there is none.
///
/// Kernel facts: since Linux 5.18 an IPv4 TCP socket with a connect in progress gets such a message
/// for each ICMP error. The message stays in the queue when the application reads the error with
/// `SO_ERROR`, and is removed after the socket is closed. (An IPv6 socket gets such messages only
/// if the application has requested them.) Time stamps and notices of zero-copy sends are in the
/// same queue.
#[inline(always)]
pub fn queued_error(socket: *const u8) -> u32 {
    /// `SO_EE_ORIGIN_ICMP` and `SO_EE_ORIGIN_ICMP6`.
    const ICMP: u8 = 2;
    const ICMP6: u8 = 3;
    if ERROR_QUEUE.load() == 0 {
        return 0;
    }
    let mut place = 0u64;
    let place = &raw mut place;
    let at = |offset: u32| socket.wrapping_add(offset as usize);
    // SAFETY: the variable has eight bytes.
    unsafe {
        if read_into(at(ERROR_QUEUE_LENGTH.load()), place) as u32 == 0 {
            return 0;
        }
        let first = read_into(at(ERROR_QUEUE.load()), place);
        // A `struct sock_extended_err` begins with the error and its origin.
        let error = read_into((first as *const u8).wrapping_add(QUEUED_ERROR.load() as usize), place);
        if matches!((error >> 32) as u8, ICMP | ICMP6) { error as u32 } else { 0 }
    }
}
