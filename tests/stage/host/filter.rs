//! Packet filters on sockets. A filter drops packets that a socket receives, or selects the packets
//! that a raw socket receives. A test needs no firewall to lose packets.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use libc::{
    BPF_ABS, BPF_ALU, BPF_AND, BPF_B, BPF_H, BPF_IND, BPF_JEQ, BPF_JGE, BPF_JGT, BPF_JMP, BPF_JSET, BPF_K,
    BPF_LD, BPF_LDX, BPF_MSH, BPF_RET, BPF_W, SKF_AD_OFF, SKF_AD_RANDOM, sock_filter,
};

const SYN: u32 = 0x02;
const RST: u32 = 0x04;
const ACK: u32 = 0x10;
const ACCEPT: u32 = u32::MAX;
const DROP: u32 = 0;

fn instruction(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code: u16::try_from(code).expect("the opcode fits"), jt, jf, k }
}

/// Makes a socket drop all received packets. A listener with this filter never answers.
///
/// # Errors
/// Returns the kernel's error.
pub fn drop_all(socket: impl AsFd) -> io::Result<()> {
    attach(socket, &[instruction(BPF_RET | BPF_K, 0, 0, DROP)])
}

/// Makes a connection drop data and acknowledgements. A reset still ends it, and a new connection
/// may reuse its ports.
///
/// # Errors
/// Returns the kernel's error.
pub fn drop_data(socket: impl AsFd) -> io::Result<()> {
    // A TCP socket's filter sees the packet from its TCP header on; the flags are its 14th byte.
    let filter = [
        instruction(BPF_LD | BPF_B | BPF_ABS, 0, 0, 13),
        instruction(BPF_JMP | BPF_JSET | BPF_K, 0, 1, SYN | RST),
        instruction(BPF_RET | BPF_K, 0, 0, ACCEPT),
        instruction(BPF_RET | BPF_K, 0, 0, DROP),
    ];
    attach(socket, &filter)
}

/// Makes a listener drop a random share of the SYNs that it receives, `in_a_million` per million.
/// The connections that it accepts inherit the filter, which drops none of their packets.
///
/// # Errors
/// Returns the kernel's error.
pub fn drop_syns(listener: impl AsFd, in_a_million: u32) -> io::Result<()> {
    let filter = [
        instruction(BPF_LD | BPF_B | BPF_ABS, 0, 0, 13),
        instruction(BPF_ALU | BPF_AND | BPF_K, 0, 0, SYN | ACK),
        instruction(BPF_JMP | BPF_JEQ | BPF_K, 0, 2, SYN),
        random(),
        instruction(BPF_JMP | BPF_JGE | BPF_K, 0, 1, share_of_numbers(in_a_million)),
        instruction(BPF_RET | BPF_K, 0, 0, ACCEPT),
        instruction(BPF_RET | BPF_K, 0, 0, DROP),
    ];
    attach(listener, &filter)
}

/// Makes a socket drop a random share of the packets that it receives, `in_a_million` per million.
/// The connections that a listener accepts inherit the filter.
///
/// # Errors
/// Returns the kernel's error.
pub fn drop_some(socket: impl AsFd, in_a_million: u32) -> io::Result<()> {
    let filter = [
        random(),
        instruction(BPF_JMP | BPF_JGE | BPF_K, 0, 1, share_of_numbers(in_a_million)),
        instruction(BPF_RET | BPF_K, 0, 0, ACCEPT),
        instruction(BPF_RET | BPF_K, 0, 0, DROP),
    ];
    attach(socket, &filter)
}

/// Loads a random number of 32 bits.
fn random() -> sock_filter {
    instruction(BPF_LD | BPF_W | BPF_ABS, 0, 0, (SKF_AD_OFF + SKF_AD_RANDOM).cast_unsigned())
}

/// The bound below which a share of `in_a_million` per million of all 32-bit numbers lies.
fn share_of_numbers(in_a_million: u32) -> u32 {
    let numbers = (u64::from(in_a_million) << 32) / 1_000_000;
    u32::try_from(numbers).expect("the share is at most a million in a million")
}

/// Makes a raw socket receive only SYNs to one of these ports.
///
/// # Errors
/// Returns the kernel's error.
pub fn see_only_dials(socket: impl AsFd, ports: std::ops::RangeInclusive<u16>) -> io::Result<()> {
    // A raw socket's filter sees the packet from its IP header on. The index register is loaded
    // with that header's length.
    let filter = [
        instruction(BPF_LDX | BPF_B | BPF_MSH, 0, 0, 0),
        instruction(BPF_LD | BPF_B | BPF_IND, 0, 0, 13),
        instruction(BPF_ALU | BPF_AND | BPF_K, 0, 0, SYN | ACK),
        instruction(BPF_JMP | BPF_JEQ | BPF_K, 0, 4, SYN),
        instruction(BPF_LD | BPF_H | BPF_IND, 0, 0, 2),
        instruction(BPF_JMP | BPF_JGE | BPF_K, 0, 2, u32::from(*ports.start())),
        instruction(BPF_JMP | BPF_JGT | BPF_K, 1, 0, u32::from(*ports.end())),
        instruction(BPF_RET | BPF_K, 0, 0, ACCEPT),
        instruction(BPF_RET | BPF_K, 0, 0, DROP),
    ];
    attach(socket, &filter)
}

fn attach(socket: impl AsFd, filter: &[sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog {
        len: u16::try_from(filter.len()).expect("the filter is short"),
        filter: filter.as_ptr().cast_mut(),
    };
    let length = libc::socklen_t::try_from(size_of::<libc::sock_fprog>()).expect("the structure is small");
    // SAFETY: the program and its instructions outlive the call, and the kernel only reads them.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            length,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
