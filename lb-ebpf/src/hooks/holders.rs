//! Lists the sockets that processes have open: the program runs for every open file of every
//! process, and writes the cookie of each socket to its output. A flow has ended if the kernel's
//! lists do not contain its socket and no process has the socket open.
//!
//! The program is an iterator (`iter/task_file`, Linux 5.8). The daemon loads and reads it only
//! while it suspects that the socket of a record is gone. The program uses no map.

use aya_ebpf::bindings;
use aya_ebpf::helpers::{bpf_probe_read_kernel as probe, generated as helper};

use crate::globals::{FILE_INODE, FILE_PRIVATE_DATA, INODE_MODE, SOCK_COOKIE, SOCKET_SOCK};

/// `struct bpf_iter__task_file`, which has a stable layout of four words: the first points to a
/// description of the output, and the last to the file.
pub type OpenFile = *const *const u8;

/// Writes the cookie of a file to the output if the file is a socket with a cookie.
#[inline(always)]
pub fn write_socket(context: OpenFile) {
    // SAFETY: the context and the values it points to are valid while the program runs; at the end
    // of the iteration the file is null. A helper that checks each address reads the data to which
    // the file points.
    unsafe {
        let file = context.add(3).read_volatile();
        if file.is_null() {
            return;
        }
        let Ok(inode) = probe::<*const u8>(file.add(FILE_INODE.load() as usize).cast()) else { return };
        let Ok(mode) = probe::<u16>(inode.wrapping_add(INODE_MODE.load() as usize).cast()) else { return };
        if !is_socket(mode) {
            return;
        }
        // Kernel fact: the private data of a file that is a socket is the `struct socket`; a file
        // that was opened only as a path (O_PATH) has none.
        let Ok(socket) = probe::<*const u8>(file.add(FILE_PRIVATE_DATA.load() as usize).cast()) else {
            return;
        };
        let Ok(sock) = probe::<*const u8>(socket.wrapping_add(SOCKET_SOCK.load() as usize).cast()) else {
            return;
        };
        let Ok(cookie) = probe::<u64>(sock.wrapping_add(SOCK_COOKIE.load() as usize).cast()) else { return };
        // A socket's cookie is 0 until a program or process requests it, so a socket with cookie 0
        // has no record.
        if cookie == 0 {
            return;
        }
        // The first word of a `struct bpf_iter_meta` points to its `struct seq_file`.
        let output = context.read_volatile().cast::<*mut bindings::seq_file>().read_volatile();
        helper::bpf_seq_write(output, (&raw const cookie).cast(), 8);
    }
}

/// `S_ISSOCK`.
#[inline(always)]
fn is_socket(mode: u16) -> bool {
    mode & 0o170_000 == 0o140_000
}
