//! Log lines of programs, for their development. Only a build with the feature `log-programs`
//! (`cargo xtask run --log-programs`) contains them. Shipped programs do not, because every tool
//! must be able to read their maps, and bpftool and libbpf reject the type of the logging library's
//! map.

/// Writes a line with the arguments of `aya_log_ebpf::debug!`: the program's context, a format, its
/// arguments. Without the feature it compiles to nothing.
#[cfg(feature = "log-programs")]
macro_rules! log {
    ($($arguments:tt)*) => { aya_log_ebpf::debug!($($arguments)*) };
}

#[cfg(not(feature = "log-programs"))]
macro_rules! log {
    ($($arguments:tt)*) => {};
}

pub(crate) use log;
