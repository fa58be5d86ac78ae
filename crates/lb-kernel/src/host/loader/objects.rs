//! The objects of kernel programs, as they are committed beside their sources.

/// An object.
#[cfg(not(feature = "log-programs"))]
macro_rules! object {
    ($name:literal) => {
        aya::include_bytes_aligned!(concat!("../../../../../lb-ebpf/object/", $name, ".o"))
    };
}

/// The same with programs that write lines; the build is told where (`cargo xtask run --log-programs`).
#[cfg(feature = "log-programs")]
macro_rules! object {
    ($name:literal) => {
        aya::include_bytes_aligned!(concat!(env!("SOCKLB_LOGGING_OBJECTS"), "/", $name, ".o"))
    };
}

/// The programs of clients.
pub static CLIENT: &[u8] = object!("socklb");

/// The program that takes reports in, and the maps that all clients share.
pub static HOST: &[u8] = object!("host");

/// The program that answers for an agent.
pub static RESPONDER: &[u8] = object!("responder");

/// The programs by which is found out what the kernel can do.
pub static PROBES: &[u8] = aya::include_bytes_aligned!("../../../../../lb-ebpf/object/probes.o");
