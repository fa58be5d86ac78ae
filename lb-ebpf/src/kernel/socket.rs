//! What the kernel's own structure of a socket says of a failure. Read only where a flow has failed, each field by a call.

use aya_ebpf::helpers::generated as helper;
use lb_common::load::is_not_zero;

use crate::globals::{
    BOUND_DEVICE, ERROR_QUEUE, ERROR_QUEUE_LENGTH, QUEUED_ERROR, SOCKET_FILTER, SOCKET_FLAGS, SOCKET_MARK,
    UNICAST_TTL, USER_LOCKS, USER_LOCKS_MASK,
};

/// Reads what lies at an address of the kernel's; nothing but zeros if it cannot be read.
#[inline(always)]
pub fn read_at<T: Copy + Default>(address: *const u8) -> T {
    let mut value = T::default();
    // SAFETY: a value to write to.
    unsafe { read_into(address, &raw mut value) }
}

/// The same by way of `value`: functions that call each other share 512 bytes of stack, so several reads use one place.
///
/// # Safety
/// `value` can be written.
#[inline(always)]
unsafe fn read_into<T: Copy>(address: *const u8, value: *mut T) -> T {
    // SAFETY: the helper writes as many bytes as there are, whatever it finds at the address.
    unsafe {
        helper::bpf_probe_read_kernel(value.cast(), size_of::<T>() as u32, address.cast());
        value.read_volatile()
    }
}

/// 1 if a socket is as applications have them that do not ask for a way of their own: bound to no address, port or device,
/// without mark, filter, TTL and `SO_DONTROUTE`. Any process can ask for most of these, and so make its connects fail. 0 if
/// it is not. (Arithmetic in place of a branch: the verifier follows both ways to the end.)
#[inline(always)]
pub fn is_ordinary(socket: *const u8) -> u32 {
    /// The bit of `SOCK_LOCALROUTE`, that is `SO_DONTROUTE`, the same on every kernel since 2.6.
    const LOCAL_ROUTE: u64 = 1 << 13;
    let mut place = 0u64;
    let place = &raw mut place;
    // Of each field as many of the low bits as it has.
    let read = |offset: u32, mask: u64| {
        // SAFETY: the place is eight bytes; with less than that behind the field, the next one is read as well.
        unsafe { read_into(socket.wrapping_add(offset as usize), place) & mask }
    };
    let asks = read(BOUND_DEVICE.load(), 0xffff_ffff)
        | read(SOCKET_MARK.load(), 0xffff_ffff)
        | read(USER_LOCKS.load(), u64::from(USER_LOCKS_MASK.load()))
        | read(SOCKET_FILTER.load(), u64::MAX)
        | read(SOCKET_FLAGS.load(), LOCAL_ROUTE)
        // A TTL of -1 stands for none that was asked for.
        | read(UNICAST_TTL.load(), 0xffff) ^ 0xffff;
    is_not_zero(asks) ^ 1
}

/// As [`is_ordinary`], of the socket at an address.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn is_ordinary_at(socket: u64) -> u32 {
    is_ordinary(socket as *const u8)
}

/// The error of the first ICMP message that waits in a socket's queue of errors; 0 if none does.
///
/// Kernel facts: since Linux 5.18 a TCP socket of IPv4 whose connect is under way gets one for each ICMP error; it stays when the
/// application takes the error by `SO_ERROR`, and goes after the socket is closed. (One of IPv6 only if the application has asked
/// for it.) Time stamps and notices of sends without a copy wait there as well.
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
    // SAFETY: the place is eight bytes.
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
