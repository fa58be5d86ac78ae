//! Creates and changes links with bpf(2). A link attaches a program to a cgroup or to a network
//! interface.
//!
//! aya also creates links, but it can neither replace the program of a link to a cgroup nor detach
//! a link that remains pinned. This module must not depend on the names or the owners of links.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use super::{AttachType, bpf, bpf_fd, info, raw};

const BPF_LINK_CREATE: i64 = 28;
const BPF_LINK_UPDATE: i64 = 29;
const BPF_LINK_DETACH: i64 = 34;

#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct LinkCreate {
    prog_fd: u32,
    target_fd: u32,
    attach_type: u32,
    flags: u32,
}

/// Attaches a program to a cgroup. Other programs on the cgroup remain attached.
pub fn link_create(
    program: BorrowedFd<'_>,
    cgroup: BorrowedFd<'_>,
    attach_type: AttachType,
) -> io::Result<OwnedFd> {
    let mut attr = LinkCreate {
        prog_fd: raw(program),
        target_fd: raw(cgroup),
        attach_type: attach_type as u32,
        flags: 0,
    };
    bpf_fd(BPF_LINK_CREATE, &mut attr)
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct LinkUpdate {
    link_fd: u32,
    new_prog_fd: u32,
    flags: u32,
    old_prog_fd: u32,
}

/// Replaces the program of a link in one step: at any time, either the old or the new program runs.
pub fn link_update(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = LinkUpdate { link_fd: raw(link), new_prog_fd: raw(program), flags: 0, old_prog_fd: 0 };
    bpf(BPF_LINK_UPDATE, &mut attr).map(drop)
}

/// Detaches the program of a link immediately. The link continues to exist, but is attached to
/// nothing.
pub fn link_detach(link: BorrowedFd<'_>) -> io::Result<()> {
    bpf(BPF_LINK_DETACH, &mut raw(link)).map(drop)
}

/// The properties of a link to a cgroup: the first fields of `struct bpf_link_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct LinkInfo {
    pub kind: u32,
    pub id: u32,
    pub program_id: u32,
    _pad: u32,
    pub cgroup_id: u64,
    pub attach_type: u32,
    _pad2: u32,
}

/// The properties of a link to a cgroup. If the cgroup no longer exists, its id is 0.
pub fn link_info(link: BorrowedFd<'_>) -> io::Result<LinkInfo> {
    info(link)
}

/// `BPF_XDP` of `enum bpf_attach_type`.
const XDP: u32 = 37;

/// The mode in which an XDP program runs, as a flag of `linux/if_link.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum XdpMode {
    /// The program runs in the interface's driver, before the kernel processes a packet.
    Native = 1 << 2,
    /// The program runs in the network stack. There the program runs later and takes more CPU time.
    /// Every interface supports this mode.
    Generic = 1 << 1,
}

impl XdpMode {
    /// Both modes, the better one first.
    pub const ALL: [Self; 2] = [Self::Native, Self::Generic];

    /// The name of the mode in the names of pins, in tables and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Generic => "generic",
        }
    }
}

/// Attaches a program to a network interface. An interface accepts only one program: if another
/// program is attached, the call fails with EBUSY or EEXIST.
pub fn xdp_link_create(program: BorrowedFd<'_>, interface: u32, mode: XdpMode) -> io::Result<OwnedFd> {
    let mut attr =
        LinkCreate { prog_fd: raw(program), target_fd: interface, attach_type: XDP, flags: mode as u32 };
    bpf_fd(BPF_LINK_CREATE, &mut attr)
}

/// The properties of a link to a network interface: the first fields of `struct bpf_link_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct XdpLinkInfo {
    pub kind: u32,
    pub id: u32,
    pub program_id: u32,
    _pad: u32,
    /// The index of the interface; 0 if the interface no longer exists.
    pub interface: u32,
    _pad2: u32,
}

/// The properties of a link to a network interface. Fails with EINVAL for any other link.
pub fn xdp_link_info(link: BorrowedFd<'_>) -> io::Result<XdpLinkInfo> {
    /// `BPF_LINK_TYPE_XDP`
    const KIND: u32 = 6;
    let found: XdpLinkInfo = info(link)?;
    if found.kind == KIND {
        return Ok(found);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "not a link to a network interface"))
}
