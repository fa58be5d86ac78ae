//! Makes the C library return freed memory to the kernel.
//!
//! glibc raises its mmap threshold to the size of a large block when the block is freed. It then
//! takes later blocks of that size from arenas and retains them after they are freed. Endpoint
//! lists are read one at a time, each in some thread, so hundreds of megabytes would stay
//! allocated. A threshold that is set explicitly does not grow.

/// Makes large blocks return to the kernel when they are freed. Call it once, at the start.
pub fn give_back_what_is_freed() {
    /// glibc's own threshold before it grows.
    const BYTES: libc::c_int = 128 << 10;
    // SAFETY: the call takes no pointers. If it is refused, freed memory is retained as before.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, BYTES) };
}
