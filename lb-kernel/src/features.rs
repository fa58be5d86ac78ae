//! What this kernel can do, found out by trying, never by its version number.

use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::btf::{self, Offsets};
use super::sys::{self, AttachType, Instruction};

/// Optional abilities of the kernel. Without them socklb works, as told beside each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Features {
    /// Fetching atomics and compare-and-swap (Linux 5.12). Without: every flow goes to the overflow table, which is
    /// dearer.
    pub fetching_atomics: bool,
    /// `bpf_set_retval` (Linux 5.18). Without: a refused connect fails with EPERM instead of the service's errno.
    pub set_retval: bool,
    /// `bpf_skc_to_mptcp_sock` (Linux 6.0, and CAP_PERFMON). Without: a connection of an MPTCP socket stays in its
    /// backend's active count until the reclaim pass finds it gone.
    pub knows_mptcp: bool,
    /// The error of a socket that closes can be read (BTF, and CAP_PERFMON). Without: `accounting = "full"` knows when a
    /// flow was established and when it ended, and no cause.
    pub socket_errors: bool,
    /// A socket that is released can be read (BTF, and CAP_PERFMON). Without: `accounting = "active"` does not know whether a
    /// flow was ever established.
    pub outcomes_at_release: bool,
    /// How often a socket's SYN is sent again can be read and set before it dials (BTF, and CAP_PERFMON). Without:
    /// `connect_timeout` has no effect.
    pub connect_timeouts: bool,
    /// Sockets that the kernel itself opened can be told apart, and those of MPTCP among them (BTF, CAP_PERFMON, Linux 6.0).
    /// Without: a file system that a process of the client mounts from a service's address is balanced as the process
    /// would be.
    pub knows_kernel_sockets: bool,
    /// Where the last four read.
    pub offsets: Option<Offsets>,
}

const EXIT: u8 = 0x95;
const CALL: u8 = 0x85;
const MOV64_IMM: u8 = 0xb7;
const STORE_DW_IMM: u8 = 0x7a;
const ATOMIC_DW: u8 = 0xdb;
const R0: u8 = 0;
const R1: u8 = 1;
const R10: u8 = 10;
const BPF_FUNC_SET_RETVAL: i32 = 187;
const BPF_FUNC_SKC_TO_MPTCP_SOCK: i32 = 196;
const LOAD_DW: u8 = 0x79;
/// Offset of `sk` in `struct bpf_sock_addr`.
const SOCK_ADDR_SK: i16 = 64;
/// `BPF_ADD | BPF_FETCH`.
const FETCH_ADD: i32 = 0x01;
const BPF_FUNC_SKC_TO_TCP_SOCK: i32 = 137;
const BPF_FUNC_PROBE_READ_KERNEL: i32 = 113;
const LOAD_W: u8 = 0x61;
const MOV64: u8 = 0xbf;
const ADD64_IMM: u8 = 0x07;
const JEQ_IMM: u8 = 0x15;
const R2: u8 = 2;
const R3: u8 = 3;
const R4: u8 = 4;
const R5: u8 = 5;
const R6: u8 = 6;
const LOAD_B: u8 = 0x71;
const BPF_FUNC_SETSOCKOPT: i32 = 49;
/// Offset of `sk` in `struct bpf_sock_ops`.
const SOCK_OPS_SK: i16 = 184;

impl Features {
    /// Each by its name, and whether the kernel has it.
    pub fn named(&self) -> [(&'static str, bool); 7] {
        [
            ("fetching_atomics", self.fetching_atomics),
            ("set_retval", self.set_retval),
            ("knows_mptcp", self.knows_mptcp),
            ("socket_errors", self.socket_errors),
            ("outcomes_at_release", self.outcomes_at_release),
            ("connect_timeouts", self.connect_timeouts),
            ("knows_kernel_sockets", self.knows_kernel_sockets),
        ]
    }

    /// Asks the kernel.
    ///
    /// # Errors
    /// If it lets us load no program at all (no privilege, most likely), or was too short of something to tell.
    pub fn probe() -> io::Result<Self> {
        // A program that does nothing: if even that is refused, the answers below would mean nothing.
        let nothing = [Instruction(MOV64_IMM, R0, 0, 1), Instruction(EXIT, 0, 0, 0)];
        if !sys::accepts(AttachType::Connect4, &nothing)? {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "the kernel refuses an empty cgroup/connect4 program (needs Linux 5.10 with CONFIG_CGROUP_BPF)",
            ));
        }
        let fetching_atomics = sys::accepts(
            AttachType::Connect4,
            &[
                Instruction(STORE_DW_IMM, R10, -8, 0),
                Instruction(MOV64_IMM, R1, 0, 1),
                Instruction(ATOMIC_DW, R10 | (R1 << 4), -8, FETCH_ADD),
                Instruction(MOV64_IMM, R0, 0, 1),
                Instruction(EXIT, 0, 0, 0),
            ],
        )?;
        let set_retval = sys::accepts(
            AttachType::Connect4,
            &[
                Instruction(MOV64_IMM, R1, 0, -111),
                Instruction(CALL, 0, 0, BPF_FUNC_SET_RETVAL),
                Instruction(MOV64_IMM, R0, 0, 1),
                Instruction(EXIT, 0, 0, 0),
            ],
        )?;
        let knows_mptcp = sys::accepts(
            AttachType::Connect4,
            &[
                Instruction(LOAD_DW, R1 | (R1 << 4), SOCK_ADDR_SK, 0),
                Instruction(CALL, 0, 0, BPF_FUNC_SKC_TO_MPTCP_SOCK),
                Instruction(MOV64_IMM, R0, 0, 1),
                Instruction(EXIT, 0, 0, 0),
            ],
        )?;
        // A kernel that does not describe its types, or others than we know, cannot be read.
        let offsets = btf::offsets(Path::new(btf::VMLINUX)).ok();
        let (socket_errors, outcomes_at_release, connect_timeouts, knows_kernel_sockets) = match offsets {
            Some(offsets) => (
                reads_errors(offsets)?,
                reads_released(offsets)?,
                sets_syn_retries(offsets)?,
                reads_whose(offsets)?,
            ),
            None => (false, false, false, false),
        };
        if !loader_is_sound(outcomes_at_release) {
            return Err(io::Error::other(
                "the kernel refused what every kernel since Linux 5.10 takes, for want of memory or of descriptors \
                 most likely: start socklb again",
            ));
        }
        Ok(Self {
            fetching_atomics,
            set_retval,
            knows_mptcp,
            socket_errors,
            outcomes_at_release,
            connect_timeouts,
            // What MPTCP dials with is the kernel's as well, and is to be balanced.
            knows_kernel_sockets: knows_kernel_sockets && knows_mptcp,
            offsets,
        })
    }
}

/// Whether aya has found out rightly what the kernel takes. It tries once in the life of a process, and an attempt that
/// fails for a passing reason is an ability that the kernel lacks, to aya: maps would be refused ever after. Only another
/// process can try again. Tracing programs, with which it tries some, take CAP_PERFMON.
fn loader_is_sound(may_trace: bool) -> bool {
    let found = sys::without_signals(aya::features);
    let types = found.btf().is_some_and(|btf| btf.btf_func() && btf.btf_func_global() && btf.btf_datasec());
    types && found.bpf_global_data() && (!may_trace || found.bpf_name() && found.bpf_probe_read_kernel())
}

/// Whether a program for TCP events may read a socket's error.
fn reads_errors(offsets: Offsets) -> io::Result<bool> {
    let Ok(sk_err) = i16::try_from(offsets.sk_err) else { return Ok(false) };
    sys::accepts(
        AttachType::SockOps,
        &[
            Instruction(LOAD_DW, R1 | (R1 << 4), SOCK_OPS_SK, 0),
            Instruction(JEQ_IMM, R1, 3, 0),
            Instruction(CALL, 0, 0, BPF_FUNC_SKC_TO_TCP_SOCK),
            Instruction(JEQ_IMM, R0, 1, 0),
            Instruction(LOAD_W, R0 | (R0 << 4), sk_err, 0),
            Instruction(MOV64_IMM, R0, 0, 1),
            Instruction(EXIT, 0, 0, 0),
        ],
    )
}

/// Whether a connect program may read who opened the socket.
fn reads_whose(offsets: Offsets) -> io::Result<bool> {
    let Ok(sk_kern_sock) = i16::try_from(offsets.sk_kern_sock) else { return Ok(false) };
    sys::accepts(
        AttachType::Connect4,
        &[
            Instruction(LOAD_DW, R1 | (R1 << 4), SOCK_ADDR_SK, 0),
            Instruction(CALL, 0, 0, BPF_FUNC_SKC_TO_TCP_SOCK),
            Instruction(JEQ_IMM, R0, 1, 0),
            Instruction(LOAD_B, R0 | (R0 << 4), sk_kern_sock, 0),
            Instruction(MOV64_IMM, R0, 0, 1),
            Instruction(EXIT, 0, 0, 0),
        ],
    )
}

/// Whether a connect program may read how often the socket's SYN is to be sent again, and set it.
fn sets_syn_retries(offsets: Offsets) -> io::Result<bool> {
    let Ok(icsk_syn_retries) = i16::try_from(offsets.icsk_syn_retries) else { return Ok(false) };
    sys::accepts(
        AttachType::Connect4,
        &[
            Instruction(MOV64, R6 | (R1 << 4), 0, 0),
            Instruction(LOAD_DW, R1 | (R1 << 4), SOCK_ADDR_SK, 0),
            Instruction(CALL, 0, 0, BPF_FUNC_SKC_TO_TCP_SOCK),
            Instruction(JEQ_IMM, R0, 1, 0),
            Instruction(LOAD_B, R0 | (R0 << 4), icsk_syn_retries, 0),
            Instruction(STORE_DW_IMM, R10, -8, 1),
            Instruction(MOV64, R1 | (R6 << 4), 0, 0),
            Instruction(MOV64_IMM, R2, 0, libc::IPPROTO_TCP),
            Instruction(MOV64_IMM, R3, 0, libc::TCP_SYNCNT),
            Instruction(MOV64, R4 | (R10 << 4), 0, 0),
            Instruction(ADD64_IMM, R4, 0, -8),
            Instruction(MOV64_IMM, R5, 0, 4),
            Instruction(CALL, 0, 0, BPF_FUNC_SETSOCKOPT),
            Instruction(MOV64_IMM, R0, 0, 1),
            Instruction(EXIT, 0, 0, 0),
        ],
    )
}

/// Whether a program for released sockets may read the kernel's memory.
fn reads_released(offsets: Offsets) -> io::Result<bool> {
    let Ok(srtt_us) = i32::try_from(offsets.srtt_us) else { return Ok(false) };
    sys::accepts(
        AttachType::SockRelease,
        &[
            Instruction(MOV64, R3 | (R1 << 4), 0, 0),
            Instruction(ADD64_IMM, R3, 0, srtt_us),
            Instruction(MOV64, R1 | (R10 << 4), 0, 0),
            Instruction(ADD64_IMM, R1, 0, -8),
            Instruction(MOV64_IMM, R2, 0, 4),
            Instruction(CALL, 0, 0, BPF_FUNC_PROBE_READ_KERNEL),
            Instruction(MOV64_IMM, R0, 0, 1),
            Instruction(EXIT, 0, 0, 0),
        ],
    )
}
