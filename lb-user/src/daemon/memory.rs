//! Makes the C library return freed memory to the kernel.
//!
//! When glibc frees a large block, it raises its mmap threshold to the size of the block. It then
//! allocates later blocks of that size in arenas, and retains them after they are freed. Endpoint
//! lists are read one at a time, but on different threads, and therefore in different arenas.
//! Without this module these arenas would retain hundreds of megabytes. If a program sets the
//! threshold explicitly, glibc does not raise it.

/// Makes glibc return large blocks to the kernel when they are freed. Call it once, at the start.
pub fn give_back_what_is_freed() {
    /// glibc's default threshold.
    const BYTES: libc::c_int = 128 << 10;
    // SAFETY: the call takes no pointers. If the call fails, freed memory is retained as before.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, BYTES) };
}
