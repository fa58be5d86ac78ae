//! The object files of the kernel programs, which are committed beside their sources.

#[cfg(not(feature = "log-programs"))]
macro_rules! object {
    ($name:literal) => {
        aya::include_bytes_aligned!(concat!("../../../../../lb-ebpf/object/", $name, ".o"))
    };
}

/// Includes the object of programs that write log lines. `cargo xtask run --log-programs` sets the
/// directory for the build.
#[cfg(feature = "log-programs")]
macro_rules! object {
    ($name:literal) => {
        aya::include_bytes_aligned!(concat!(env!("SOCKLB_LOGGING_OBJECTS"), "/", $name, ".o"))
    };
}

/// The programs of clients.
pub static CLIENT: &[u8] = object!("socklb");

/// The program that receives reports, and the maps that all clients share.
pub static HOST: &[u8] = object!("host");

/// The program that answers requests for an agent.
pub static RESPONDER: &[u8] = object!("responder");

/// The programs that probe the features of the kernel.
pub static PROBES: &[u8] = aya::include_bytes_aligned!("../../../../../lb-ebpf/object/probes.o");
