//! The hooks of a client task's programs, in the order in which these are attached.
//!
//! Which program a hook has is told here and nowhere else. This module knows neither how programs are loaded (see
//! `object`) nor how they are attached (see `links`).

use super::sys::AttachType;

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
