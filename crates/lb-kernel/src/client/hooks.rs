//! The hooks of a client task's programs, in the order of attachment, and the loaded programs.
//!
//! Only this module assigns programs to hooks. The module must not depend on how programs are
//! loaded (see `object`) or attached (see `links`).

use std::io;
use std::os::fd::AsFd;

use crate::host::loader::LoadedProgram;
use crate::sys::{self, AttachType, runs::Runs};

pub struct Hook {
    pub name: &'static str,
    pub program: &'static str,
    /// The program for kernels without fetching atomics.
    pub without_fetching_atomics: &'static str,
    /// The kernel's number for the hook.
    pub attach_type: AttachType,
}

const fn hook(
    name: &'static str,
    program: &'static str,
    without: &'static str,
    attach_type: AttachType,
) -> Hook {
    Hook { name, program, without_fetching_atomics: without, attach_type }
}

/// The hook that tracks connections.
pub const FOLLOWS: &str = "tcp_events";

/// All hooks, in the order of attachment: a flow may begin only after the programs that process its
/// end and translate its answers are attached.
pub static HOOKS: [Hook; 10] = [
    hook("sock_release", "socklb_release", "socklb_release_5_10", AttachType::SockRelease),
    hook(FOLLOWS, "socklb_tcp", "socklb_tcp_5_10", AttachType::SockOps),
    hook("getpeername4", "socklb_getpeer4", "socklb_getpeer4", AttachType::Getpeername4),
    hook("getpeername6", "socklb_getpeer6", "socklb_getpeer6", AttachType::Getpeername6),
    hook("recvmsg4", "socklb_recvmsg4", "socklb_recvmsg4", AttachType::Recvmsg4),
    hook("recvmsg6", "socklb_recvmsg6", "socklb_recvmsg6", AttachType::Recvmsg6),
    hook("connect4", "socklb_connect4", "socklb_connect4_5_10", AttachType::Connect4),
    hook("connect6", "socklb_connect6", "socklb_connect6_5_10", AttachType::Connect6),
    hook("sendmsg4", "socklb_sendmsg4", "socklb_sendmsg4_5_10", AttachType::Sendmsg4),
    hook("sendmsg6", "socklb_sendmsg6", "socklb_sendmsg6_5_10", AttachType::Sendmsg6),
];

/// The programs of one client task, loaded and bound to its pinned maps.
pub struct Programs {
    loaded: Vec<(&'static Hook, LoadedProgram)>,
}

/// A hook and the name of its program for this kernel.
pub type HookProgram = (&'static Hook, &'static str);

impl Programs {
    /// `loaded` must be in the order of attachment.
    pub const fn new(loaded: Vec<(&'static Hook, LoadedProgram)>) -> Self {
        Self { loaded }
    }

    /// The hooks of these programs in the order of attachment, each with its program.
    pub fn hooks(&self) -> impl Iterator<Item = (&'static Hook, &LoadedProgram)> {
        self.loaded.iter().map(|(hook, program)| (*hook, program))
    }

    /// The program for a hook; `None` if the client's kind of accounting does not need the hook.
    pub fn of(&self, hook: &Hook) -> Option<&LoadedProgram> {
        self.hooks().find(|(known, _)| known.name == hook.name).map(|(_, program)| program)
    }

    /// The number and the total time of the programs' runs, for each hook. The kernel counts runs
    /// only while its BPF statistics are enabled. They are usually disabled, because they make
    /// every run read the clock.
    ///
    /// # Errors
    /// If the kernel does not report the runs.
    pub fn runs(&self) -> io::Result<Vec<(&'static str, Runs)>> {
        let on = std::fs::read_to_string("/proc/sys/kernel/bpf_stats_enabled").unwrap_or_default();
        let mut all = Vec::with_capacity(self.loaded.len());
        for (hook, program) in &self.loaded {
            let runs = sys::runs::runs(program.fd.as_fd())?;
            // A process may also turn the statistics on with `BPF_ENABLE_STATS`, which
            // `bpf_stats_enabled` does not show.
            if on.trim() == "1" || runs.count > 0 {
                all.push((hook.name, runs));
            }
        }
        Ok(all)
    }
}
