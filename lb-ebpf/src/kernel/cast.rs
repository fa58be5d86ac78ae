//! Pointers to the kernel's own structures, through which programs load fields as the kernel does: a load and no call.
//!
//! A function of the kernel gives them (`bpf_rdonly_cast`, Linux 6.2), in whose place the verifier puts a move. In the object its call
//! is that of a helper that no kernel has, because the library that relocates it knows no functions of the kernel: the loader puts
//! its number in, or a move of zero where the kernel has none. (Another one, `bpf_cast_to_kern_ctx`, gives the structure behind a
//! context as well; but for each time that it meets it the verifier looks through all types of the kernel, which takes a
//! millisecond.)

use lb_common::constants::CAST;

/// What is at an address as a structure of the kernel's. A program's context is one, too.
///
/// # Safety
/// `address` is that of a structure with this type, whose number is not 0.
#[inline(always)]
pub unsafe fn cast<T>(address: *const T, type_number: u32) -> *const u8 {
    // SAFETY: the number of a function is its address in a program; this one takes a pointer and the number of a type.
    unsafe {
        let cast: unsafe extern "C" fn(*const T, u32) -> *const u8 = core::mem::transmute(CAST as usize);
        cast(address, type_number)
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
