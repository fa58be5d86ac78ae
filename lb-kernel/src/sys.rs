//! The kernel calls that aya does not offer, as `bpf(2)` itself: links, pins, what a map or a cgroup has, probes; what lies
//! in maps ([`elements`]); and beside it the lists of sockets ([`diag`]).
//!
//! Each function is one system call. The structures are the parts of the kernel's `union bpf_attr` (`linux/bpf.h`)
//! that the call reads; the kernel takes the rest as zero.

pub mod diag;

pub mod elements;

pub mod runs;

use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::ResolveFlags;

/// How a name that somebody else has chosen is opened below a descriptor: no `..`, no link, no other mount. openat2(2),
/// since Linux 5.6.
pub const BELOW: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_XDEV);

const BPF_MAP_CREATE: i64 = 0;
const BPF_PROG_LOAD: i64 = 5;
const BPF_PROG_TEST_RUN: i64 = 10;
const BPF_OBJ_PIN: i64 = 6;
const BPF_OBJ_GET: i64 = 7;
const BPF_PROG_GET_FD_BY_ID: i64 = 13;
const BPF_OBJ_GET_INFO_BY_FD: i64 = 15;
const BPF_PROG_QUERY: i64 = 16;
const BPF_LINK_CREATE: i64 = 28;
const BPF_LINK_UPDATE: i64 = 29;
const BPF_LINK_DETACH: i64 = 34;

const BPF_PROG_TYPE_SOCKET_FILTER: u32 = 1;
const BPF_PROG_TYPE_CGROUP_SOCK_ADDR: u32 = 18;
const BPF_MAP_TYPE_ARRAY: u32 = 2;
const BPF_MAP_TYPE_ARRAY_OF_MAPS: u32 = 12;

/// Where a program is attached: `enum bpf_attach_type`.
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

/// The call itself. Kernels refuse what they do not know unless it is zero, so no byte of `attr` may be left unwritten: a
/// type that is `Pod` has no padding.
fn bpf<A: bytemuck::Pod>(command: i64, attr: &mut A) -> io::Result<i64> {
    // SAFETY: `attr` is a prefix of the kernel's `bpf_attr` for this command, valid for reads and writes of its size;
    // pointers in it are valid for the duration of the call by the callers below.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<A>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Does something with this thread's signals held back, and delivers them afterwards. The verifier gives up with EAGAIN
/// as soon as a signal is pending: a request to reload or to stop would make a start fail.
pub fn without_signals<T>(act: impl FnOnce() -> T) -> T {
    /// Restores on every way out.
    struct Held(libc::sigset_t);
    impl Drop for Held {
        fn drop(&mut self) {
            // SAFETY: the set was filled in by the kernel; the former one is not asked for.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut()) };
        }
    }
    // SAFETY: sets of plain numbers, written by the calls; with these arguments they cannot fail.
    let held = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        Held(before)
    };
    let result = act();
    drop(held);
    result
}

fn bpf_fd<A: bytemuck::Pod>(command: i64, attr: &mut A) -> io::Result<OwnedFd> {
    let fd = i32::try_from(bpf(command, attr)?).map_err(io::Error::other)?;
    // SAFETY: the kernel has just returned this descriptor to us; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn raw(fd: BorrowedFd<'_>) -> u32 {
    // A descriptor that is borrowed is open, hence not negative.
    fd.as_raw_fd().cast_unsigned()
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct LinkCreate {
    prog_fd: u32,
    target_fd: u32,
    attach_type: u32,
    flags: u32,
}

/// Attaches a program to a cgroup. Other programs there stay; links always attach beside them.
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

/// Puts another program in place of the link's, in one step: every call runs the one or the other.
pub fn link_update(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = LinkUpdate { link_fd: raw(link), new_prog_fd: raw(program), flags: 0, old_prog_fd: 0 };
    bpf(BPF_LINK_UPDATE, &mut attr).map(drop)
}

/// Detaches the program of a link, now. The link stays, attached to nothing.
pub fn link_detach(link: BorrowedFd<'_>) -> io::Result<()> {
    bpf(BPF_LINK_DETACH, &mut raw(link)).map(drop)
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

/// Gives a map, program or link a name in bpffs.
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
    let mut attr = InfoByFd {
        bpf_fd: raw(object),
        info_len: u32::try_from(size_of::<I>()).map_err(io::Error::other)?,
        info: std::ptr::from_mut(&mut info).addr() as u64,
    };
    bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr)?;
    Ok(info)
}

/// What a map looks like: the first fields of `struct bpf_map_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct MapInfo {
    pub kind: u32,
    pub id: u32,
    pub key_size: u32,
    pub value_size: u32,
    pub max_entries: u32,
    pub flags: u32,
}

/// What a map looks like. Fails with EINVAL if `map` is not a map.
pub fn map_info(map: BorrowedFd<'_>) -> io::Result<MapInfo> {
    // A program's or link's info would be taken for a map's: only maps name themselves so.
    let target = std::fs::read_link(format!("/proc/self/fd/{}", raw(map)))?;
    if target != Path::new("anon_inode:bpf-map") {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a map"));
    }
    info(map)
}

/// What a link to a cgroup looks like: the first fields of `struct bpf_link_info`.
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

/// What a link looks like; a cgroup id of 0 means that its cgroup is gone.
pub fn link_info(link: BorrowedFd<'_>) -> io::Result<LinkInfo> {
    info(link)
}

/// `struct bpf_prog_info` up to the program's name.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct ProgInfo {
    kind: u32,
    id: u32,
    tag: [u8; 8],
    _lengths: [u32; 2],
    _instructions: [u64; 2],
    load_time: u64,
    created_by_uid: u32,
    map_count: u32,
    map_ids: u64,
    name: [u8; 16],
}

/// The kernel's id of a program.
pub fn program_id(program: BorrowedFd<'_>) -> io::Result<u32> {
    /// The first fields of `struct bpf_prog_info`.
    #[repr(C)]
    #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    struct Identity {
        kind: u32,
        id: u32,
    }
    let Identity { id, .. } = info(program)?;
    Ok(id)
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct ProgById {
    id: u32,
    _next_id: u32,
    open_flags: u32,
}

/// The name of a program; the kernel tells it to CAP_SYS_ADMIN only.
pub fn program_name(id: u32) -> io::Result<String> {
    let mut attr = ProgById { id, _next_id: 0, open_flags: 0 };
    let program = bpf_fd(BPF_PROG_GET_FD_BY_ID, &mut attr)?;
    let info: ProgInfo = info(program.as_fd())?;
    let length = info.name.iter().position(|byte| *byte == 0).unwrap_or(info.name.len());
    Ok(String::from_utf8_lossy(&info.name[..length]).into_owned())
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct ProgQuery {
    target_fd: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    prog_ids: u64,
    prog_cnt: u32,
    _pad: u32,
}

/// Ids of the programs that are attached to a cgroup itself, in the order in which they run there.
pub fn programs_of(cgroup: BorrowedFd<'_>, attach_type: AttachType) -> io::Result<Vec<u32>> {
    /// `BPF_CGROUP_MAX_PROGS`
    const MAX: u32 = 64;
    let mut ids = vec![0u32; MAX as usize];
    let mut attr = ProgQuery {
        target_fd: raw(cgroup),
        attach_type: attach_type as u32,
        query_flags: 0,
        attach_flags: 0,
        prog_ids: ids.as_mut_ptr().addr() as u64,
        prog_cnt: MAX,
        _pad: 0,
    };
    bpf(BPF_PROG_QUERY, &mut attr)?;
    ids.truncate(attr.prog_cnt as usize);
    Ok(ids)
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
    inner_map_fd: u32,
}

/// Puts an array into a map of maps, both made for this call. The kernel returns from that only after a grace period.
pub fn update_map_of_maps() -> io::Result<()> {
    let create = |map_type, inner_map_fd| {
        let mut attr =
            MapCreate { map_type, key_size: 4, value_size: 4, max_entries: 1, map_flags: 0, inner_map_fd };
        bpf_fd(BPF_MAP_CREATE, &mut attr)
    };
    let inner = create(BPF_MAP_TYPE_ARRAY, 0)?;
    let outer = create(BPF_MAP_TYPE_ARRAY_OF_MAPS, raw(inner.as_fd()))?;
    elements::set(outer.as_fd(), &0u32, std::slice::from_ref(&raw(inner.as_fd())))
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct ProgLoad {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
    prog_ifindex: u32,
    expected_attach_type: u32,
}

/// `struct bpf_insn`: opcode, registers (source in the high nibble), offset, immediate.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Instruction(pub u8, pub u8, pub i16, pub i32);

/// Whether the kernel accepts a program for connect that does nothing.
///
/// # Errors
/// If it refuses for another reason than the program: no privilege, no memory.
pub fn accepts_nothing() -> io::Result<bool> {
    const MOV64_IMM: u8 = 0xb7;
    const EXIT: u8 = 0x95;
    let nothing = [Instruction(MOV64_IMM, 0, 0, 1), Instruction(EXIT, 0, 0, 0)];
    match load(BPF_PROG_TYPE_CGROUP_SOCK_ADDR, AttachType::Connect4 as u32, &nothing) {
        Ok(_) => Ok(true),
        // The verifier answers EINVAL to what it does not know and EACCES to what it does not allow.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EACCES)) => Ok(false),
        Err(error) => Err(error),
    }
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct ProgTestRun {
    prog_fd: u32,
    retval: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    ctx_size_in: u32,
    ctx_size_out: u32,
    ctx_in: u64,
    ctx_out: u64,
    flags: u32,
    cpu: u32,
}

/// A program of a few instructions that needs no place to be attached.
pub struct TestRun(OwnedFd);

impl TestRun {
    /// Loads it.
    ///
    /// # Errors
    /// If the kernel does not.
    pub fn load(instructions: &[Instruction]) -> io::Result<Self> {
        load(BPF_PROG_TYPE_SOCKET_FILTER, 0, instructions).map(Self)
    }

    /// Runs it once, and returns what it returns.
    ///
    /// # Errors
    /// If the kernel does not.
    pub fn run(&self) -> io::Result<u32> {
        /// Such a program is for packets, and runs on one: the kernel wants to see an Ethernet header.
        const BYTES: u32 = 64;
        const PACKET: [u8; BYTES as usize] = [0; BYTES as usize];
        let mut attr = ProgTestRun {
            prog_fd: raw(self.0.as_fd()),
            retval: 0,
            data_size_in: BYTES,
            data_size_out: 0,
            data_in: PACKET.as_ptr().addr() as u64,
            data_out: 0,
            repeat: 1,
            duration: 0,
            ctx_size_in: 0,
            ctx_size_out: 0,
            ctx_in: 0,
            ctx_out: 0,
            flags: 0,
            cpu: 0,
        };
        // Linux 5.10 gives a run up for a pending signal.
        without_signals(|| bpf(BPF_PROG_TEST_RUN, &mut attr))?;
        Ok(attr.retval)
    }
}

fn load(prog_type: u32, expected_attach_type: u32, instructions: &[Instruction]) -> io::Result<OwnedFd> {
    let mut attr = ProgLoad {
        prog_type,
        insn_cnt: u32::try_from(instructions.len()).map_err(io::Error::other)?,
        insns: instructions.as_ptr().addr() as u64,
        license: c"Dual MIT/GPL".as_ptr().addr() as u64,
        log_level: 0,
        log_size: 0,
        log_buf: 0,
        kern_version: 0,
        prog_flags: 0,
        prog_name: [0; 16],
        prog_ifindex: 0,
        expected_attach_type,
    };
    without_signals(|| bpf_fd(BPF_PROG_LOAD, &mut attr))
}
