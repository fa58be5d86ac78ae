//! Sockets that a client's processes use and that its programs never see: made in another cgroup, and handed over by
//! socket activation, by passing a descriptor, or by moving the process.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use lb_diag::{SocketEntry, SocketLists};

use super::namespaces::open_in_namespace_of;
use crate::host::cgroup::{self, Cgroup};
use crate::host::process;
use crate::sys::network_namespace::NamespaceId;

/// A socket whose connects are not balanced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uncovered {
    /// A process that has it open.
    pub pid: u32,
    /// The name of that process.
    pub process: String,
    /// The socket's inode, as `/proc/<pid>/fd` shows it.
    pub inode: u32,
    /// The cgroup that it was made in, if that still exists.
    pub made_in: Option<PathBuf>,
    /// Whether it only listens: such a socket does not connect, and what it accepts others have connected.
    pub listens: bool,
    /// Its peer, if it is connected.
    pub peer: Option<SocketAddr>,
}

/// What could be found out about a cgroup's sockets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sockets {
    /// Those that are not covered.
    pub uncovered: Vec<Uncovered>,
    /// Processes whose sockets cannot be seen, for want of CAP_SYS_PTRACE (or the same user) or CAP_SYS_ADMIN.
    pub unseen: Vec<u32>,
}

/// The TCP sockets of a cgroup's processes that were made outside of it. Only those that are connected, connecting or
/// listening: the kernel lists no others. Those that were accepted do not connect, and are left out.
pub fn uncovered(cgroup: &Cgroup) -> Sockets {
    let covered: BTreeSet<u64> = cgroup::ids_below(&cgroup.path).into_iter().chain([cgroup.id]).collect();
    let mut lists = Lists::default();
    let mut found = Sockets::default();
    for pid in cgroup::processes(&cgroup.path) {
        look(pid, &covered, &mut lists, &mut found);
    }
    found
}

/// The sockets of one process that were made outside of these cgroups: as [`uncovered`], and UDP sockets that have a port.
pub fn made_elsewhere(pid: u32, cgroups: &BTreeSet<u64>) -> Sockets {
    let mut found = Sockets::default();
    look(pid, cgroups, &mut Lists { with_datagrams: true, ..Lists::default() }, &mut found);
    found
}

/// The lists of sockets of network namespaces, by which; `None` of one that cannot be seen.
#[derive(Default)]
struct Lists {
    by_namespace: BTreeMap<NamespaceId, Option<Vec<(SocketEntry, bool)>>>,
    /// Whether UDP sockets are looked for.
    with_datagrams: bool,
}

/// Adds the sockets of a process that were made outside of these cgroups.
fn look(pid: u32, cgroups: &BTreeSet<u64>, lists: &mut Lists, found: &mut Sockets) {
    let Ok(namespace) = NamespaceId::of(pid) else {
        // The process has ended, or its namespace may not be seen.
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
        // It was accepted from a socket that listens, whose cgroup it has.
        if !socket.listens && !is_datagram && ports.contains(&socket.local.port()) {
            continue;
        }
        // Where the kernel does not tell the cgroup, nothing can be said.
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

/// The TCP sockets of a process's network namespace, and with them its UDP sockets if these are wanted; each with whether
/// it is one of these.
fn list_of(pid: u32, namespace: NamespaceId, with_datagrams: bool) -> Option<Vec<(SocketEntry, bool)>> {
    let is_ours = NamespaceId::ours().is_ok_and(|ours| ours == namespace);
    let lists = if is_ours { SocketLists::open() } else { open_in_namespace_of(pid) }.ok()?;
    let mut sockets = Vec::new();
    lists.each_tcp(|socket| sockets.push((socket, false))).ok()?;
    if with_datagrams {
        // Not every kernel lists them.
        let _ = lists.each_udp(|socket| sockets.push((socket, true)));
    }
    Some(sockets)
}

/// Inodes of the sockets that a process has open; `None` if that cannot be seen.
fn socket_inodes(pid: u32) -> Option<BTreeSet<u32>> {
    let mut inodes = BTreeSet::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten() {
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let inode = target.to_str().and_then(|target| target.strip_prefix("socket:[")?.strip_suffix(']'));
        inodes.extend(inode.and_then(|inode| inode.parse::<u32>().ok()));
    }
    Some(inodes)
}
