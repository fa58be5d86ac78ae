//! The number and the total time of a program's runs, from `struct bpf_prog_info` (`linux/bpf.h`).

use std::io;
use std::os::fd::BorrowedFd;

use super::info;

/// `struct bpf_prog_info` up to its counters of runs.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct ProgramInfo {
    _before: [u64; 24],
    time_ns: u64,
    count: u64,
}

/// The runs of a program that the kernel has counted since the program was loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Runs {
    /// The time of all runs together, in nanoseconds.
    pub time_ns: u64,
    /// Number of runs.
    pub count: u64,
}

pub fn runs(program: BorrowedFd<'_>) -> io::Result<Runs> {
    let ProgramInfo { time_ns, count, .. } = info(program)?;
    Ok(Runs { time_ns, count })
}
