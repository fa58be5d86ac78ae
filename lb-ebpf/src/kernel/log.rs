//! Lines that programs write while they are being changed: in a build with the feature `log-programs` (`cargo xtask run
//! --log-programs`), and nothing in what ships, whose maps every tool reads (the library's is of a kind that bpftool and libbpf
//! refuse).

/// Writes a line as `aya_log_ebpf::debug!` has it: the program's context, a format, its arguments. Without
/// the feature nothing of it is compiled.
#[cfg(feature = "log-programs")]
macro_rules! log {
    ($($arguments:tt)*) => { aya_log_ebpf::debug!($($arguments)*) };
}

#[cfg(not(feature = "log-programs"))]
macro_rules! log {
    ($($arguments:tt)*) => {};
}

pub(crate) use log;
