//! Pointers to the kernel's own structures. Through these, programs load fields as the kernel does,
//! with a load instruction and without a call.
//!
//! The kernel function `bpf_rdonly_cast` (Linux 6.2) returns such a pointer; the verifier replaces
//! its call with a move. In the object file, the call has the number of a helper that does not
//! exist, because the library that relocates the object does not support kernel functions. The
//! loader replaces that number with the function's number, or the call with a move of zero if the
//! kernel lacks the function. (Another function, `bpf_cast_to_kern_ctx`, also returns the structure
//! behind a context, but for each call of it the verifier searches all types of the kernel, which
//! takes a millisecond.)

use lb_common::constants::CAST;

/// Returns a pointer to the kernel structure at an address; `type_number` is the number of its type
/// in the kernel's BTF. A program's context is also such a structure.
///
/// # Safety
/// `address` must be the address of a structure with this type (or of one that begins with the same
/// fields, if only these are loaded), and the type's number must not be
/// 0.
#[inline(always)]
pub unsafe fn cast<T>(address: *const T, type_number: u32) -> *const u8 {
    // SAFETY: the number of a function is its address in a program; this function takes a pointer
    // and the number of a type.
    unsafe {
        let cast: unsafe extern "C" fn(*const T, u32) -> *const u8 = core::mem::transmute(CAST as usize);
        cast(address, type_number)
    }
}

/// Loads a field of a structure. The result is 0 if the field cannot be read, because the kernel
/// handles the fault of such a load.
///
/// # Safety
/// `structure` must be a pointer from [`cast`], and a field of this size must be at the offset. The
/// verifier checks both.
#[inline(always)]
pub unsafe fn field<T: Copy>(structure: *const u8, offset: u32) -> T {
    // SAFETY: guaranteed by the caller.
    unsafe { structure.add(offset as usize).cast::<T>().read_volatile() }
}
