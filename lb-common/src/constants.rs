//! Values that the loader writes into the instructions of the kernel programs of client tasks
//! before it loads the programs. They are constants and calls of kernel functions. The verifier
//! knows the value of such a constant, and a program need not load the value from memory.
//!
//! The object file contains placeholders for these values: numbers that no program uses for
//! anything else.

/// The names of all constants. A constant's number is its index in this list.
pub const NAMES: [&str; 35] = [
    "FLOW_MASK",
    "KNOWS_MPTCP",
    "HAS_SET_RETVAL",
    "FULL_ACCOUNTING",
    "SCANS",
    "JIFFY_NS",
    "FIRST_JIFFY_NS",
    "SK_ERR",
    "SK_ERR_SOFT",
    "RELEASED_SK_ERR",
    "RELEASED_SK_ERR_SOFT",
    "RELEASED_CALLBACKS",
    "RELEASED_SRTT",
    "RELEASED_RETRANSMITS",
    "RELEASED_BYTES_RECEIVED",
    "RELEASED_BYTES_SENT",
    "SYN_RETRIES",
    "KERNEL_SOCKET",
    "KERNEL_SOCKET_MASK",
    "TCP_SOCK",
    "EVENT",
    "EVENT_SOCKET",
    "SOCKET_COOKIE",
    "SOCKET_NAMESPACE",
    "NAMESPACE_COOKIE",
    "ERROR_QUEUE",
    "ERROR_QUEUE_LENGTH",
    "QUEUED_ERROR",
    "BOUND_DEVICE",
    "SOCKET_MARK",
    "USER_LOCKS",
    "USER_LOCKS_MASK",
    "SOCKET_FILTER",
    "SOCKET_FLAGS",
    "UNICAST_TTL",
];

/// The placeholder of the first constant in [`NAMES`]. The placeholder of the constant at index `i`
/// is `FIRST + i`.
pub const FIRST: u32 = 0x5c1c_0000;
/// The placeholder in a call of `bpf_rdonly_cast`: the immediate number of the instruction. (In a
/// call of a helper, the immediate number is the number of the helper.)
pub const CAST: u32 = 0x5c1b_0000;

/// The placeholder of a constant.
///
/// # Panics
/// If there is no constant with this name. The callers are evaluated at compile time, so the
/// compiler reports the error.
pub const fn place_of(name: &str) -> u32 {
    let mut number = 0;
    while number < NAMES.len() {
        if are_equal(NAMES[number].as_bytes(), name.as_bytes()) {
            #[expect(clippy::cast_possible_truncation, reason = "an index into a short list")]
            let number = number as u32;
            return FIRST + number;
        }
        number += 1;
    }
    panic!("no constant has this name");
}

const fn are_equal(one: &[u8], other: &[u8]) -> bool {
    let mut at = 0;
    while at < one.len() && at < other.len() && one[at] == other[at] {
        at += 1;
    }
    at == one.len() && at == other.len()
}

/// The meaning of a placeholder in an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placeholder {
    /// A 32-bit constant with this name.
    Word(&'static str),
    /// The lower half of a 64-bit constant with this name; the upper half is in the next
    /// instruction.
    DoubleWord(&'static str),
    /// A call of `bpf_rdonly_cast`, with the immediate number [`CAST`].
    Cast,
}

/// The opcode of a call.
pub const CALL: u8 = 0x85;
/// The opcode that moves a number into a register.
pub const MOVE: u8 = 0xb7;
/// The source register of a call of a kernel function (`BPF_PSEUDO_KFUNC_CALL`).
pub const OF_KERNEL: u8 = 2;

/// The placeholder in an instruction with this opcode and this immediate number; `None` if the
/// number is not a placeholder.
pub fn placeholder(operation: u8, immediate: u32) -> Option<Placeholder> {
    /// Opcodes that move 32 and 64 bits into a register.
    const MOVE_32: u8 = 0xb4;
    const MOVE_64: u8 = 0x18;
    let name = || NAMES.get(immediate.wrapping_sub(FIRST) as usize).copied();
    match operation {
        CALL if immediate == CAST => Some(Placeholder::Cast),
        MOVE_32 => name().map(Placeholder::Word),
        MOVE_64 => name().map(Placeholder::DoubleWord),
        _ => None,
    }
}
