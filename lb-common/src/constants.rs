//! What the loader writes into the instructions of the kernel programs of client tasks before it loads them: constants, which the
//! verifier knows and which cost no load from memory, and calls of functions of the kernel.
//!
//! In the object, numbers stand in their place that no program has otherwise.

/// Every constant by name. Its number is its place in this list.
pub const NAMES: [&str; 37] = [
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
    "CALL",
    "CALL_SOCKET",
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

/// The number in place of the first of [`NAMES`]; those of the others follow.
pub const FIRST: u32 = 0x5c1c_0000;
/// In place of a helper's number: `bpf_rdonly_cast`.
pub const CAST: u32 = 0x5c1b_0000;

/// The number in place of a constant.
///
/// # Panics
/// If there is no such constant, which is seen when a program is compiled.
pub const fn place_of(name: &str) -> u32 {
    let mut number = 0;
    while number < NAMES.len() {
        if are_equal(NAMES[number].as_bytes(), name.as_bytes()) {
            #[expect(clippy::cast_possible_truncation, reason = "a place in a short list")]
            let number = number as u32;
            return FIRST + number;
        }
        number += 1;
    }
    panic!("no such constant");
}

const fn are_equal(one: &[u8], other: &[u8]) -> bool {
    let mut at = 0;
    while at < one.len() && at < other.len() && one[at] == other[at] {
        at += 1;
    }
    at == one.len() && at == other.len()
}

/// What stands in an instruction in place of what the loader writes there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placeholder {
    /// A constant of 32 bits, by its name.
    Word(&'static str),
    /// The lower half of a constant of 64 bits; the upper is in the next instruction.
    DoubleWord(&'static str),
    /// A call of [`CAST`].
    Cast,
}

/// The operation of a call.
pub const CALL: u8 = 0x85;
/// The operation that moves a number into a register.
pub const MOVE: u8 = 0xb7;
/// What a call names in its source register if it is one of a function of the kernel (`BPF_PSEUDO_KFUNC_CALL`).
pub const OF_KERNEL: u8 = 2;

/// What is to be written in place of the number `immediate` of an instruction with this operation, if anything is.
pub fn placeholder(operation: u8, immediate: u32) -> Option<Placeholder> {
    /// Moves 32 bits into a register, and 64 bits.
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
