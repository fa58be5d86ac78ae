//! Pointers to the kernel's own structures, through which programs load fields as the kernel does: a load and no call.
//!
//! Two functions of the kernel give them (`bpf_cast_to_kern_ctx` and `bpf_rdonly_cast`, Linux 6.2), in whose place the verifier puts a
//! move. In the object their calls are those of helpers that no kernel has, because the library that relocates it knows no
//! functions of the kernel: the loader puts their numbers in, or a move of zero where the kernel has none.

use lb_common::constants::{CAST_CONTEXT, CAST_READ_ONLY};

use crate::globals::TCP_SOCK;

/// The kernel's own structure of a program's context. Only where [`TCP_SOCK`] is not 0.
///
/// # Safety
/// `context` is a program's context.
#[inline(always)]
pub unsafe fn kernel_context<T>(context: *mut T) -> *const u8 {
    // SAFETY: the number of a function is its address in a program; this one takes the context.
    unsafe {
        let cast: unsafe extern "C" fn(*mut T) -> *const u8 = core::mem::transmute(CAST_CONTEXT as usize);
        cast(context)
    }
}

/// A socket as a TCP socket. Only where [`TCP_SOCK`] is not 0.
///
/// # Safety
/// `socket` points to the kernel's structure of a TCP socket.
#[inline(always)]
pub unsafe fn tcp_sock(socket: *const u8) -> *const u8 {
    // SAFETY: the number of a function is its address in a program; this one takes a pointer and the number of a type.
    unsafe {
        let cast: unsafe extern "C" fn(*const u8, u32) -> *const u8 =
            core::mem::transmute(CAST_READ_ONLY as usize);
        cast(socket, TCP_SOCK.load())
    }
}

/// Loads a field. What cannot be read is 0: the kernel catches the fault of such a load.
///
/// # Safety
/// `structure` is such a pointer, and a field of this size lies at the offset: the verifier checks both.
#[inline(always)]
pub unsafe fn field<T: Copy>(structure: *const u8, offset: u32) -> T {
    // SAFETY: the caller's.
    unsafe { structure.add(offset as usize).cast::<T>().read_volatile() }
}
