//! The maps that all client tasks of a host share, as an object of its own: it outlives every client and their ABI.
//!
//! `lb_common::abi::host` says who writes them and what lies in them. The programs of the clients declare the one that they
//! read as well, and are loaded with this one in its place.
#![no_std]
#![no_main]

use aya_ebpf::btf_maps::{Array, HashMap};
use aya_ebpf::macros::btf_map;
use lb_common::abi::host::{MAX_SENDERS, REPORT_IDS, Sender, SenderName, Verdict};

/// `BPF_F_MMAPABLE`: whoever receives reports outside the kernel stores verdicts through a mapping.
const MAPPED: usize = 1 << 10;
/// `BPF_F_NO_PREALLOC`: most hosts hear of few backends, so memory is taken with each entry.
const ON_DEMAND: usize = 1;

#[btf_map(name = "verdicts")]
pub static VERDICTS: Array<Verdict, { REPORT_IDS as usize }, MAPPED> = Array::new();

#[btf_map(name = "senders")]
pub static SENDERS: HashMap<SenderName, Sender, { MAX_SENDERS as usize }, ON_DEMAND> = HashMap::new();

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
