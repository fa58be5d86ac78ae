//! Finds sockets of a client's processes for which the client's programs never run, because the
//! sockets were made in another cgroup. A process gets such sockets by socket activation, by
//! receiving a descriptor, or by being moved to the cgroup.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use lb_diag::{SocketEntry, SocketLists};

use super::namespaces::open_in_namespace_of;
use crate::host::cgroup::{self, Cgroup};
use crate::host::process;
use crate::sys::network_namespace::NamespaceId;

/// A socket that the client's programs do not cover: its connects are not balanced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uncovered {
    /// The PID of a process that has the socket open.
    pub pid: u32,
    pub process: String,
    /// The socket's inode, as `/proc/<pid>/fd` shows it.
    pub inode: u32,
    /// The cgroup in which the socket was made, if it still exists.
    pub made_in: Option<PathBuf>,
    /// Whether the socket listens: such a socket does not connect, and the connections that it
    /// accepts were made by peers.
    pub listens: bool,
    /// The socket's peer, if it is connected.
    pub peer: Option<SocketAddr>,
}

/// The result of a search for uncovered sockets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sockets {
    /// The uncovered sockets.
    pub uncovered: Vec<Uncovered>,
    /// The processes with sockets that this process cannot read, because this process runs as
    /// another user without CAP_SYS_PTRACE, or has no CAP_SYS_ADMIN.
    pub unseen: Vec<u32>,
}

/// The TCP sockets of a cgroup's processes that were made outside the cgroup. Contains only
/// connected, connecting and listening sockets, because the kernel lists no others. Omits accepted
/// sockets, because they do not connect.
pub fn uncovered(cgroup: &Cgroup) -> Sockets {
    let covered: BTreeSet<u64> = cgroup::ids_below(&cgroup.path).into_iter().chain([cgroup.id]).collect();
    let mut lists = Lists::default();
    let mut found = Sockets::default();
    for pid in cgroup::processes(&cgroup.path) {
        look(pid, &covered, &mut lists, &mut found);
    }
    found
}

/// The sockets of one process that were made outside these cgroups: those that [`uncovered`] finds,
/// and also UDP sockets that have a port.
pub fn made_elsewhere(pid: u32, cgroups: &BTreeSet<u64>) -> Sockets {
    let mut found = Sockets::default();
    look(pid, cgroups, &mut Lists { with_datagrams: true, ..Lists::default() }, &mut found);
    found
}

/// The lists of sockets, keyed by network namespace; `None` for a list that cannot be read.
#[derive(Default)]
struct Lists {
    by_namespace: BTreeMap<NamespaceId, Option<Vec<(SocketEntry, bool)>>>,
    /// Whether UDP sockets are included.
    with_datagrams: bool,
}

/// Adds the sockets of a process that were made outside these cgroups.
fn look(pid: u32, cgroups: &BTreeSet<u64>, lists: &mut Lists, found: &mut Sockets) {
    let Ok(namespace) = NamespaceId::of(pid) else {
        // The process has ended, or its namespace may not be read.
        if Path::new("/proc").join(pid.to_string()).exists() {
            found.unseen.push(pid);
        }
        return;
    };
    let with_datagrams = lists.with_datagrams;
    let list = lists.by_namespace.entry(namespace);
    let list = list.or_insert_with(|| list_of(pid, namespace, with_datagrams));
    let (Some(list), Some(inodes)) = (list, socket_inodes(pid)) else {
        found.unseen.push(pid);
        return;
    };
    let ports: BTreeSet<u16> =
        list.iter().filter(|(socket, _)| socket.listens).map(|(socket, _)| socket.local.port()).collect();
    for (socket, is_datagram) in list.iter().filter(|(socket, _)| inodes.contains(&socket.inode)) {
        // The socket was accepted by a listening socket, and has the cgroup of that socket.
        if !socket.listens && !is_datagram && ports.contains(&socket.local.port()) {
            continue;
        }
        // If the kernel does not report the cgroup, the socket cannot be judged.
        let Some(made_in) = socket.cgroup.filter(|made_in| !cgroups.contains(made_in)) else { continue };
        found.uncovered.push(Uncovered {
            pid,
            process: process::name(pid).unwrap_or_else(|| "?".to_owned()),
            inode: socket.inode,
            made_in: cgroup::path_of(made_in),
            listens: socket.listens,
            // A UDP socket need not be connected.
            peer: (!socket.listens && socket.peer.port() != 0).then_some(socket.peer),
        });
    }
}

/// The TCP sockets of a process's network namespace and, if `with_datagrams`, its UDP sockets; each
/// with a flag that is true for a UDP socket.
fn list_of(pid: u32, namespace: NamespaceId, with_datagrams: bool) -> Option<Vec<(SocketEntry, bool)>> {
    let is_ours = NamespaceId::ours().is_ok_and(|ours| ours == namespace);
    let lists = if is_ours { SocketLists::open() } else { open_in_namespace_of(pid) }.ok()?;
    let mut sockets = Vec::new();
    lists.each_tcp(|socket| sockets.push((socket, false))).ok()?;
    if with_datagrams {
        // Not every kernel lists UDP sockets.
        let _ = lists.each_udp(|socket| sockets.push((socket, true)));
    }
    Some(sockets)
}

/// The inodes of the sockets that a process has open; `None` if they cannot be read.
fn socket_inodes(pid: u32) -> Option<BTreeSet<u32>> {
    let mut inodes = BTreeSet::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten() {
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let inode = target.to_str().and_then(|target| target.strip_prefix("socket:[")?.strip_suffix(']'));
        inodes.extend(inode.and_then(|inode| inode.parse::<u32>().ok()));
    }
    Some(inodes)
}
