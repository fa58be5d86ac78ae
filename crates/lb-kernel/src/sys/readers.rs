//! Waits for readers: a region of the schedule map may be overwritten only after all programs that
//! might read it have ended.

use std::io;

use crate::error::DatapathError;
use crate::sys;

/// Waits until every kernel program that is running now has ended: one RCU grace period, 8 to 16
/// ms. Blocks for this time: do not call the function in the event loop.
///
/// # Errors
/// If the kernel offers no way to wait.
pub fn wait_for_readers() -> Result<(), DatapathError> {
    match membarrier() {
        Ok(()) => Ok(()),
        // Kernels that were booted with nohz_full, and some system call filters, refuse this call.
        // The alternative requires a privilege, and takes the same time.
        Err(_) => sys::update_map_of_maps().map_err(DatapathError::Grace),
    }
}

fn membarrier() -> io::Result<()> {
    /// `MEMBARRIER_CMD_GLOBAL`. This is not the expedited command, which does not wait for a grace
    /// period.
    const GLOBAL: libc::c_int = 1;
    // SAFETY: the call has no pointer arguments.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, GLOBAL, 0, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
