//! Reads the ids and names of programs with bpf(2), lists the programs of a cgroup, and runs small
//! programs that probe the kernel.
//!
//! aya loads the programs of the objects. The small programs here are lists of instructions. A
//! small program is closed as soon as the verifier has accepted or rejected the program, or a run
//! of the program has returned a result.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bytemuck::Zeroable;

use super::{AttachType, bpf, bpf_fd, info, info_into, raw, without_signals};

const BPF_PROG_LOAD: i64 = 5;
const BPF_PROG_TEST_RUN: i64 = 10;
const BPF_PROG_GET_FD_BY_ID: i64 = 13;
const BPF_MAP_GET_FD_BY_ID: i64 = 14;
const BPF_PROG_QUERY: i64 = 16;
const BPF_PROG_BIND_MAP: i64 = 35;
const BPF_PROG_TYPE_SOCKET_FILTER: u32 = 1;
const BPF_PROG_TYPE_CGROUP_SOCK_ADDR: u32 = 18;

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
struct ById {
    id: u32,
    _next_id: u32,
    open_flags: u32,
}

impl ProgInfo {
    fn name(&self) -> String {
        let length = self.name.iter().position(|byte| *byte == 0).unwrap_or(self.name.len());
        String::from_utf8_lossy(&self.name[..length]).into_owned()
    }
}

/// The name of a program. The kernel reports the name only to processes with CAP_SYS_ADMIN.
pub fn program_name(id: u32) -> io::Result<String> {
    let info: ProgInfo = info(program_by_id(id)?.as_fd())?;
    Ok(info.name())
}

/// Opens a program by its id. The kernel permits this only to processes with CAP_SYS_ADMIN.
pub fn program_by_id(id: u32) -> io::Result<OwnedFd> {
    bpf_fd(BPF_PROG_GET_FD_BY_ID, &mut ById { id, _next_id: 0, open_flags: 0 })
}

/// Opens a map by its id. The kernel permits this only to processes with CAP_SYS_ADMIN.
pub fn map_by_id(id: u32) -> io::Result<OwnedFd> {
    bpf_fd(BPF_MAP_GET_FD_BY_ID, &mut ById { id, _next_id: 0, open_flags: 0 })
}

/// The first 15 bytes of the name of a program, and the ids of its maps.
pub fn program_maps(program: BorrowedFd<'_>) -> io::Result<(String, Vec<u32>)> {
    /// `MAX_USED_MAPS`
    const MAX: u32 = 64;
    let mut ids = vec![0u32; MAX as usize];
    let mut info = ProgInfo::zeroed();
    (info.map_count, info.map_ids) = (MAX, ids.as_mut_ptr().addr() as u64);
    info_into(program, &mut info)?;
    ids.truncate(info.map_count as usize);
    Ok((info.name(), ids))
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct ProgBindMap {
    prog_fd: u32,
    map_fd: u32,
    flags: u32,
}

/// Binds a map to a program (since Linux 5.10): the map exists as long as the program and is one of
/// its maps, even if no instruction refers to it.
pub fn bind_map(program: BorrowedFd<'_>, map: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = ProgBindMap { prog_fd: raw(program), map_fd: raw(map), flags: 0 };
    bpf(BPF_PROG_BIND_MAP, &mut attr).map(drop)
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

/// The ids of the programs that are attached to this cgroup, and not those of cgroups above, in the
/// order in which they run.
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
/// If the kernel refuses for a reason other than the program, such as a missing privilege or
/// missing memory.
pub fn accepts_nothing() -> io::Result<bool> {
    const MOV64_IMM: u8 = 0xb7;
    const EXIT: u8 = 0x95;
    let nothing = [Instruction(MOV64_IMM, 0, 0, 1), Instruction(EXIT, 0, 0, 0)];
    match load(BPF_PROG_TYPE_CGROUP_SOCK_ADDR, AttachType::Connect4 as u32, &nothing) {
        Ok(_) => Ok(true),
        // The verifier returns EINVAL for unknown instructions or helpers, and EACCES for
        // instructions or helpers that it does not allow.
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

/// A program of a few instructions that is attached to no hook.
pub struct TestRun(OwnedFd);

impl TestRun {
    /// Loads the program.
    ///
    /// # Errors
    /// If the kernel does not load the program.
    pub fn load(instructions: &[Instruction]) -> io::Result<Self> {
        load(BPF_PROG_TYPE_SOCKET_FILTER, 0, instructions).map(Self)
    }

    /// Runs the program once. Returns its result.
    ///
    /// # Errors
    /// If the kernel does not run the program.
    pub fn run(&self) -> io::Result<u32> {
        /// A program of this type runs on a packet: the kernel requires an Ethernet header.
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
        // Linux 5.10 aborts a run if a signal is pending.
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
