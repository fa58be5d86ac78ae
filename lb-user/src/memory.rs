//! Memory that was freed, and that the C library keeps for the next thread that has the same arena.
//!
//! glibc raises its mmap threshold to the size of a large block that is freed, and keeps later blocks of that size in
//! arenas: of lists that are read one at a time, each in some thread, hundreds of megabytes stay. A threshold that is
//! set does not grow.

/// Has large blocks go back to the kernel when they are freed. To be called once, at the start.
pub fn give_back_what_is_freed() {
    /// glibc's own threshold before it grows.
    const BYTES: libc::c_int = 128 << 10;
    // SAFETY: the call takes no pointers. Where it is refused memory is kept, as before.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, BYTES) };
}
