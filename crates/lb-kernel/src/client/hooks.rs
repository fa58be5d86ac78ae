//! The hooks of a client task's programs, in the order in which these are attached, and the programs once they are loaded.
//!
//! Which program a hook has is told here and nowhere else. This module knows neither how programs are loaded (see
//! `object`) nor how they are attached (see `links`).

use std::io;
use std::os::fd::AsFd;

use crate::host::loader::LoadedProgram;
use crate::sys::{self, AttachType, runs::Runs};

/// A hook of the kernel, with its program.
pub struct Hook {
    /// Its name.
    pub name: &'static str,
    /// Its program.
    pub program: &'static str,
    /// The program where the kernel lacks fetching atomics.
    pub without_fetching_atomics: &'static str,
    /// The kernel's number of the hook.
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

/// The hook that follows connections.
pub const FOLLOWS: &str = "tcp_events";

/// In the order in which they are attached: no flow may begin before its end can be seen and its answers translated.
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

/// A hook and the name of its program on this kernel.
pub type HookProgram = (&'static Hook, &'static str);

impl Programs {
    /// Programs in the order in which they are attached.
    pub const fn new(loaded: Vec<(&'static Hook, LoadedProgram)>) -> Self {
        Self { loaded }
    }

    /// The hooks that these programs are for, in the order in which they are attached, each with its program.
    pub fn hooks(&self) -> impl Iterator<Item = (&'static Hook, &LoadedProgram)> {
        self.loaded.iter().map(|(hook, program)| (*hook, program))
    }

    /// The program for a hook; `None` if this kind of accounting does not need it.
    pub fn of(&self, hook: &Hook) -> Option<&LoadedProgram> {
        self.hooks().find(|(known, _)| known.name == hook.name).map(|(_, program)| program)
    }

    /// How often the programs ran and how long, by hook. The kernel counts it only while its statistics are on, because
    /// they cost every run a look at the clock.
    ///
    /// # Errors
    /// If the kernel does not tell.
    pub fn runs(&self) -> io::Result<Vec<(&'static str, Runs)>> {
        let on = std::fs::read_to_string("/proc/sys/kernel/bpf_stats_enabled").unwrap_or_default();
        let mut all = Vec::with_capacity(self.loaded.len());
        for (hook, program) in &self.loaded {
            let runs = sys::runs::runs(program.fd.as_fd())?;
            // A process may also have turned them on with `BPF_ENABLE_STATS`, which that file does not show.
            if on.trim() == "1" || runs.count > 0 {
                all.push((hook.name, runs));
            }
        }
        Ok(all)
    }
}
