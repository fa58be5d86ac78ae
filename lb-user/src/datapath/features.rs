//! What this kernel can do, found out by trying, never by its version number.

use std::io;

use serde::{Deserialize, Serialize};

use super::sys::{self, Instruction};

/// Optional abilities of the kernel. Without them socklb works, as told beside each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Features {
    /// Fetching atomics and compare-and-swap (Linux 5.12). Without: every flow goes to the overflow table, about 1.5 %
    /// of a connect dearer.
    pub fetching_atomics: bool,
    /// `bpf_set_retval` (Linux 5.18). Without: a refused connect fails with EPERM instead of the service's errno.
    pub set_retval: bool,
    /// `bpf_skc_to_mptcp_sock` (Linux 6.0, and CAP_PERFMON). Without: a connection of an MPTCP socket stays in its
    /// backend's active count until the repair pass finds it gone.
    pub knows_mptcp: bool,
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

impl Features {
    /// Asks the kernel.
    ///
    /// # Errors
    /// If it lets us load no program at all: no privilege, most likely.
    pub fn probe() -> io::Result<Self> {
        // A program that does nothing: if even that is refused, the answers below would mean nothing.
        let nothing = [Instruction(MOV64_IMM, R0, 0, 1), Instruction(EXIT, 0, 0, 0)];
        if !sys::accepts(&nothing)? {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "the kernel refuses an empty cgroup/connect4 program (needs Linux 5.10 with CONFIG_CGROUP_BPF)",
            ));
        }
        let fetching_atomics = sys::accepts(&[
            Instruction(STORE_DW_IMM, R10, -8, 0),
            Instruction(MOV64_IMM, R1, 0, 1),
            Instruction(ATOMIC_DW, R10 | (R1 << 4), -8, FETCH_ADD),
            Instruction(MOV64_IMM, R0, 0, 1),
            Instruction(EXIT, 0, 0, 0),
        ])?;
        let set_retval = sys::accepts(&[
            Instruction(MOV64_IMM, R1, 0, -111),
            Instruction(CALL, 0, 0, BPF_FUNC_SET_RETVAL),
            Instruction(MOV64_IMM, R0, 0, 1),
            Instruction(EXIT, 0, 0, 0),
        ])?;
        let knows_mptcp = sys::accepts(&[
            Instruction(LOAD_DW, R1 | (R1 << 4), SOCK_ADDR_SK, 0),
            Instruction(CALL, 0, 0, BPF_FUNC_SKC_TO_MPTCP_SOCK),
            Instruction(MOV64_IMM, R0, 0, 1),
            Instruction(EXIT, 0, 0, 0),
        ])?;
        Ok(Self { fetching_atomics, set_retval, knows_mptcp })
    }
}
