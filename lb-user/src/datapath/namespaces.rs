//! Network namespaces of other processes: what can be asked of the kernel from inside them.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use rustix::thread::LinkNameSpaceType;

use super::sys::diag::SocketLists;

/// Opens a way to the lists of sockets of a process's network namespace, which takes CAP_SYS_ADMIN.
///
/// # Errors
/// If the process is gone or its namespace may not be entered.
pub fn open_in_namespace_of(pid: u32) -> io::Result<SocketLists> {
    let namespace = File::open(format!("/proc/{pid}/ns/net"))?;
    // A thread stays in the namespace that it has entered, so one is spent.
    let thread = std::thread::Builder::new().name("namespace".to_owned()).spawn(move || {
        rustix::thread::move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
        SocketLists::open()
    })?;
    thread.join().map_err(|_| io::Error::other("the thread that entered a network namespace panicked"))?
}
