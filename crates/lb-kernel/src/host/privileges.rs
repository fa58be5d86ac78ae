//! The permissions of this process and the properties of this host. The checks change only this
//! process's RLIMIT_MEMLOCK.

use std::fs;
use std::path::Path;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::CapabilitySet;

use super::features::Features;
use crate::error::DatapathError;
use crate::sys;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capability {
    pub name: &'static str,
    /// The purpose for which socklb needs the capability.
    pub why: &'static str,
    /// Whether socklb cannot work without the capability.
    pub needed: bool,
    /// Whether this process has the capability.
    pub held: bool,
}

/// The host's properties that matter to socklb, and the permissions of this process.
#[derive(Clone, Debug)]
pub struct Host {
    /// The kernel's release.
    pub release: String,
    /// Whether the kernel describes its own types (BTF).
    pub btf: bool,
    /// Whether the pin directory, or the nearest existing directory above it, is on a bpf file
    /// system.
    pub bpffs: bool,
    pub capabilities: Vec<Capability>,
    /// Number of bytes of memory that this process may lock; `None` means unlimited. This limit
    /// matters only below Linux 5.11.
    pub memlock: Option<u64>,
}

/// The maximum number of open files of a process (its soft limit), if it can be read.
pub fn open_files_of(pid: u32) -> Option<u64> {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Reads the properties of the host.
pub fn host(pins: &Path) -> Host {
    let held = rustix::thread::capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective);
    // CAP_SYS_ADMIN implies CAP_BPF and CAP_PERFMON.
    let administrator = held.contains(CapabilitySet::SYS_ADMIN);
    let capability = |name, why, needed, set, implied: bool| Capability {
        name,
        why,
        needed,
        held: held.contains(set) || implied && administrator,
    };
    let existing = pins.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(Path::new("/"));
    Host {
        release: rustix::system::uname().release().to_string_lossy().into_owned(),
        btf: fs::metadata("/sys/kernel/btf/vmlinux").is_ok(),
        bpffs: sys::on_bpffs(existing),
        capabilities: vec![
            capability("CAP_BPF", "creates maps and loads programs", true, CapabilitySet::BPF, true),
            capability(
                "CAP_NET_ADMIN",
                "attaches programs to cgroups",
                true,
                CapabilitySet::NET_ADMIN,
                false,
            ),
            capability(
                "CAP_PERFMON",
                "is required by the verifiers of some kernels, and allows the programs to recognize sockets of MPTCP",
                false,
                CapabilitySet::PERFMON,
                true,
            ),
        ],
        memlock: getrlimit(Resource::Memlock).current,
    }
}

/// Checks that this process may load programs, and probes the optional features of the kernel.
///
/// # Errors
/// If this process may not load programs.
pub fn probe() -> Result<Features, DatapathError> {
    // Below Linux 5.11 maps count against RLIMIT_MEMLOCK, including maps that an earlier daemon
    // pinned, so that this process might be unable to load anything. An error is ignored: if the
    // limit is too low, a later load fails with an error that names the limit.
    let unlimited = Rlimit { current: None, maximum: None };
    let _ = setrlimit(Resource::Memlock, unlimited);
    Features::probe()
}
