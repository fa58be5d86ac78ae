//! Kernel programs of other owners, attached to a cgroup, with effects that occur in production.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use aya_obj::generated::{bpf_attach_type, bpf_cmd, bpf_prog_type};

use crate::Cgroup;
use crate::sys::{attributes, bpf, load_program};

/// An attached program that does not belong to socklb. Detached on close.
pub struct Foreign {
    _link: OwnedFd,
}

const LOAD_WORD: u8 = 0x61;
const COPY: u8 = 0xbf;
const SET: u8 = 0xb7;
const JUMP_IF_NOT: u8 = 0x55;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
const BPF_FUNC_SOCK_OPS_CB_FLAGS_SET: i32 = 59;
const BPF_SOCK_OPS_TCP_CONNECT_CB: i32 = 3;

impl Foreign {
    /// Attaches a program that clears all callback flags of every socket that connects. Programs
    /// that tune TCP sometimes have this bug.
    ///
    /// # Panics
    /// If the kernel refuses.
    pub fn that_clears_callbacks(cgroup: &Cgroup) -> Self {
        let instructions = [
            instruction(COPY, 6, 1, 0, 0),
            instruction(LOAD_WORD, 1, 6, 0, 0),
            instruction(JUMP_IF_NOT, 1, 0, 3, BPF_SOCK_OPS_TCP_CONNECT_CB),
            instruction(COPY, 1, 6, 0, 0),
            instruction(SET, 2, 0, 0, 0),
            instruction(CALL, 0, 0, 0, BPF_FUNC_SOCK_OPS_CB_FLAGS_SET),
            instruction(SET, 0, 0, 0, 1),
            instruction(EXIT, 0, 0, 0, 0),
        ];
        let attach_type = bpf_attach_type::BPF_CGROUP_SOCK_OPS;
        let program = load_program(bpf_prog_type::BPF_PROG_TYPE_SOCK_OPS, attach_type, &instructions);
        Self { _link: attach(&program, cgroup, attach_type) }
    }
}

fn instruction(code: u8, to: u8, from: u8, offset: i16, constant: i32) -> u64 {
    u64::from(code)
        | u64::from(from << 4 | to) << 8
        | u64::from(offset.cast_unsigned()) << 16
        | u64::from(constant.cast_unsigned()) << 32
}

fn attach(program: &OwnedFd, cgroup: &Cgroup, attach_type: bpf_attach_type) -> OwnedFd {
    let directory = std::fs::File::open(cgroup.path()).expect("open the cgroup");
    let mut attr = attributes();
    // SAFETY: this member is the one that the command below reads; nothing else was written.
    let create = unsafe { &mut attr.link_create };
    create.__bindgen_anon_1.prog_fd = program.as_raw_fd().cast_unsigned();
    create.__bindgen_anon_2.target_fd = directory.as_fd().as_raw_fd().cast_unsigned();
    create.attach_type = attach_type as u32;
    // SAFETY: there are no pointers in these attributes.
    let link = unsafe { bpf(bpf_cmd::BPF_LINK_CREATE, &mut attr) };
    let link =
        link.unwrap_or_else(|error| panic!("attach a program to {}: {error}", cgroup.path().display()));
    // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(link) }
}
