//! Waiting for readers: a region of the schedule map may be written again once all programs that ran have ended.

use std::io;

use crate::error::DatapathError;
use crate::sys;

/// Waits until every kernel program that is running now has ended: one RCU grace period, 8 to 16 ms. May block, so not
/// for the event loop.
///
/// # Errors
/// If the kernel offers no way to wait.
pub fn wait_for_readers() -> Result<(), DatapathError> {
    match membarrier() {
        Ok(()) => Ok(()),
        // Refused on kernels booted with nohz_full, and by some system call filters. The other way needs privilege and
        // takes as long.
        Err(_) => sys::update_map_of_maps().map_err(DatapathError::Grace),
    }
}

fn membarrier() -> io::Result<()> {
    /// `MEMBARRIER_CMD_GLOBAL`. Not the expedited command, which waits for no grace period.
    const GLOBAL: libc::c_int = 1;
    // SAFETY: the call takes no pointers.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, GLOBAL, 0, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
