//! Checks whether the kernel stores the cgroup of version 2 in new sockets.
//!
//! Kernel fact: below Linux 5.15 a socket stores either its cgroup of version 2 or its classes of
//! the version 1 controllers net_cls and net_prio. Once any process has used one of these
//! controllers, new sockets get the classes until the next boot, and only programs that are
//! attached to the root cgroup run for these sockets.

use std::net::TcpListener;

use lb_diag::SocketLists;

use crate::host::cgroup::ours_and_above;

/// Whether a new socket of this process is in the process's cgroup; `None` if that cannot be
/// determined, for example because the process is in the root cgroup.
pub fn sockets_have_theirs() -> Option<bool> {
    let cgroups = ours_and_above().ok()?;
    // The socket is identified by its port in the kernel's list. The socket is bound to loopback,
    // and accepts no connection.
    let socket = TcpListener::bind("127.0.0.1:0").ok()?;
    let port = socket.local_addr().ok()?.port();
    let list = SocketLists::open().and_then(|lists| lists.tcp()).ok()?;
    let seen = list.iter().find(|seen| seen.listens && seen.local.port() == port)?;
    theirs(&cgroups, seen.cgroup?)
}

/// Whether `made_in`, the id of the socket's cgroup, is the first of `cgroups`: the ids of the
/// process's cgroup and of the cgroups above it. `None` if the process is in the root cgroup.
fn theirs(cgroups: &[u64], made_in: u64) -> Option<bool> {
    match cgroups {
        [] | [_] => None,
        [ours, ..] => Some(made_in == *ours),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_cgroup_gives_no_result() {
        assert_eq!(theirs(&[1], 1), None);
        assert_eq!(theirs(&[7, 1], 7), Some(true));
        assert_eq!(theirs(&[7, 1], 1), Some(false));
    }

    /// The tests run only on kernels that store the cgroup of version 2 in every new socket.
    #[test]
    fn a_socket_of_this_process_has_its_cgroup() {
        assert_ne!(sockets_have_theirs(), Some(false));
    }
}
