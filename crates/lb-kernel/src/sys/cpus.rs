//! The number of CPUs that the kernel may use.

use std::io;

/// The number of CPUs that the kernel may ever run on, which is the length of a per-CPU value.
///
/// # Errors
/// If the kernel does not report the number.
pub fn possible_cpus() -> io::Result<u32> {
    let cpus = aya::util::nr_cpus().map_err(|(_, error)| error)?;
    u32::try_from(cpus).map_err(io::Error::other)
}
