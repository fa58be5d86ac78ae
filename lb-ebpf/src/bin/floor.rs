//! Reference programs with which the connect benchmark compares socklb's program. Not shipped.
//!
//! `empty4` does nothing: it shows the cost of any program on this hook. `floor4` looks up one
//! service in a BPF hash and one backend in a BPF array, and rewrites the destination. This is the
//! minimum work of a balancer that has its tables in ordinary maps.
#![no_std]
#![no_main]

use aya_ebpf::btf_maps::{Array, HashMap};
use aya_ebpf::macros::{btf_map, cgroup_sock_addr};
use aya_ebpf::programs::SockAddrContext;
use lb_common::abi::BackendAddress;

#[btf_map(name = "floor_services")]
static SERVICES: HashMap<[u32; 2], u32, 256> = HashMap::new();

#[btf_map(name = "floor_backends")]
static BACKENDS: Array<BackendAddress, 256> = Array::new();

#[cgroup_sock_addr(connect4)]
pub fn empty4(_ctx: SockAddrContext) -> i32 {
    1
}

#[cgroup_sock_addr(connect4)]
pub fn floor4(ctx: SockAddrContext) -> i32 {
    let ctx = ctx.sock_addr;
    // SAFETY: the context is valid while the program runs; each field is read and written whole.
    unsafe {
        let key =
            [(&raw const (*ctx).user_ip4).read_volatile(), (&raw const (*ctx).user_port).read_volatile()];
        if let Some(index) = SERVICES.get(key)
            && let Some(backend) = BACKENDS.get(*index)
        {
            let [_, _, _, v4] = backend.address.words;
            (&raw mut (*ctx).user_ip4).write_volatile(v4.to_network());
            (&raw mut (*ctx).user_port).write_volatile(u32::from(backend.port.to_network()));
        }
    }
    1
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
