//! Thin wrappers of system calls.
//!
//! The module contains calls of bpf(2) that aya does not offer: for [`links`], for [`maps`] and
//! their contents ([`elements`], [`per_cpu`] and [`mapped`]), for [`programs`] and their [`runs`],
//! and for pins. The module also contains the wait for running programs ([`readers`]), [`clock`]
//! and [`jiffies`], [`cpus`], and [`network_namespace`].
//!
//! Most functions make one system call. A structure is the part of `union bpf_attr` (`linux/bpf.h`)
//! that the kernel reads for the call; the kernel treats the rest as zero.

mod links;

mod maps;

mod programs;

pub mod clock;

pub mod cpus;

pub mod elements;

pub mod jiffies;

pub mod mapped;

pub mod network_namespace;

pub mod per_cpu;

pub mod readers;

pub mod runs;

pub use links::{
    LinkInfo, XdpLinkInfo, XdpMode, link_create, link_detach, link_info, link_update, xdp_link_create,
    xdp_link_info,
};
pub use maps::{map_info, update_map_of_maps};
pub use programs::{
    Instruction, TestRun, accepts_nothing, bind_map, map_by_id, program_by_id, program_id, program_maps,
    program_name, programs_of,
};

use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::ResolveFlags;

/// The flags of openat2(2) (since Linux 5.6) for names that another process has chosen, which are
/// opened below a directory. With these flags, a name may not lead out of the directory by `..`, go
/// through a symbolic link, or lead into another mount.
pub const BELOW: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_XDEV);

const BPF_OBJ_PIN: i64 = 6;
const BPF_OBJ_GET: i64 = 7;
const BPF_OBJ_GET_INFO_BY_FD: i64 = 15;

/// The hook to which a program is attached: `enum bpf_attach_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum AttachType {
    SockOps = 3,
    Connect4 = 10,
    Connect6 = 11,
    Sendmsg4 = 14,
    Sendmsg6 = 15,
    Recvmsg4 = 19,
    Recvmsg6 = 20,
    Getpeername4 = 29,
    Getpeername6 = 30,
    SockRelease = 34,
}

/// Calls bpf(2). Kernels refuse unknown fields unless they are zero, so every byte of `attr` must
/// be initialized: a type that is `Pod` has no padding.
fn bpf<A: bytemuck::Pod>(command: i64, attr: &mut A) -> io::Result<i64> {
    // SAFETY: `attr` is a prefix of the kernel's `bpf_attr` for this command, valid for reads and
    // writes of its size; the callers below ensure that pointers in it are valid for the duration
    // of the call.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<A>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Calls `act` while this thread's signals are blocked; the kernel delivers them afterwards. The
/// verifier fails with EAGAIN as soon as a signal is pending, so a signal to reload or to stop
/// would make a start fail.
pub fn without_signals<T>(act: impl FnOnce() -> T) -> T {
    /// Restores the mask of signals when this value is dropped, even if `act` panics.
    struct SignalMask(libc::sigset_t);
    impl Drop for SignalMask {
        fn drop(&mut self) {
            // SAFETY: the set was filled in by the kernel; the previous set is not requested.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut()) };
        }
    }
    // SAFETY: sets of plain numbers, written by the calls; with these arguments the calls cannot
    // fail.
    let mask = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        SignalMask(before)
    };
    let result = act();
    drop(mask);
    result
}

fn bpf_fd<A: bytemuck::Pod>(command: i64, attr: &mut A) -> io::Result<OwnedFd> {
    let fd = i32::try_from(bpf(command, attr)?).map_err(io::Error::other)?;
    // SAFETY: the kernel has just returned this descriptor to this process; it has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn raw(fd: BorrowedFd<'_>) -> u32 {
    // A borrowed descriptor is open, so its number is not negative.
    fd.as_raw_fd().cast_unsigned()
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct ObjectPath {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(OsStr::as_bytes(path.as_os_str())).map_err(io::Error::other)
}

/// `BPF_FS_MAGIC`
const BPF_FS: i64 = 0xcafe_4a11;

pub fn on_bpffs(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|stat| stat.f_type == BPF_FS)
}

/// Whether an open file is on a bpf file system.
pub fn is_bpffs(file: impl AsFd) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|stat| stat.f_type == BPF_FS)
}

/// Pins a map, program or link under a name in bpffs.
pub fn pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    let mut attr = ObjectPath { pathname: path.as_ptr().addr() as u64, bpf_fd: raw(object), file_flags: 0 };
    bpf(BPF_OBJ_PIN, &mut attr).map(drop)
}

/// Opens a map, program or link by its name in bpffs.
pub fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    let mut attr = ObjectPath { pathname: path.as_ptr().addr() as u64, bpf_fd: 0, file_flags: 0 };
    bpf_fd(BPF_OBJ_GET, &mut attr)
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct InfoByFd {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

fn info<I: bytemuck::Pod>(object: BorrowedFd<'_>) -> io::Result<I> {
    let mut info = I::zeroed();
    info_into(object, &mut info)?;
    Ok(info)
}

/// Like [`info`], but the structure already contains the addresses of the arrays that the kernel
/// must fill.
fn info_into<I: bytemuck::Pod>(object: BorrowedFd<'_>, info: &mut I) -> io::Result<()> {
    let mut attr = InfoByFd {
        bpf_fd: raw(object),
        info_len: u32::try_from(size_of::<I>()).map_err(io::Error::other)?,
        info: std::ptr::from_mut(info).addr() as u64,
    };
    bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr).map(drop)
}
