//! Memory that was freed, and that the C library keeps for the next thread that has the same arena.
//!
//! It keeps the more the larger a thing was that was freed once: of lists that are read one at a time, each in some thread,
//! hundreds of megabytes stay. A limit that is set does not grow.

/// From here on what is freed goes back to the kernel if it is large. To be called once, at the start.
pub fn give_back_what_is_freed() {
    /// The library's own limit before it lets it grow.
    const BYTES: libc::c_int = 128 << 10;
    // SAFETY: the call takes no pointers. Where it is refused memory is kept, as before.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, BYTES) };
}
