//! Network namespaces, also of other processes: what can be asked of the kernel from inside them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::thread::LinkNameSpaceType;

use super::cgroup;
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

/// A list of sockets: of which namespace, by its cookie, and of datagram sockets or of streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Wanted {
    pub namespace: u64,
    pub datagrams: bool,
}

/// Ways to the lists of network namespaces, by cookie.
pub struct Namespaces {
    known: BTreeMap<u64, SocketLists>,
    /// Inodes of the namespaces that were tried.
    tried: BTreeSet<u64>,
}

impl Namespaces {
    /// Our own, if the kernel tells its cookie (Linux 5.14).
    pub fn new() -> Self {
        let mut namespaces = Self { known: BTreeMap::new(), tried: BTreeSet::new() };
        namespaces.add(SocketLists::open());
        namespaces
    }

    fn add(&mut self, lists: io::Result<SocketLists>) {
        if let Ok(lists) = lists
            && let Ok(cookie) = lists.namespace()
        {
            self.known.insert(cookie, lists);
        }
    }

    /// The cookies of the sockets in every wanted list that can be had completely.
    pub fn lists(
        &mut self,
        wanted: &BTreeSet<Wanted>,
        cgroup: Option<&Path>,
    ) -> BTreeMap<Wanted, BTreeSet<u64>> {
        let unknown = wanted.iter().any(|wanted| !self.known.contains_key(&wanted.namespace));
        if let Some(cgroup) = cgroup.filter(|_| unknown) {
            self.enter_those_of(cgroup);
        }
        let list = |wanted: &Wanted| {
            let lists = self.known.get(&wanted.namespace)?;
            let sockets = if wanted.datagrams { lists.udp() } else { lists.tcp() }.ok()?;
            Some((*wanted, sockets.into_iter().map(|socket| socket.cookie).collect()))
        };
        wanted.iter().filter_map(list).collect()
    }

    /// Looks into the namespaces of a cgroup's processes, as far as privileges go (entering takes CAP_SYS_ADMIN).
    fn enter_those_of(&mut self, cgroup: &Path) {
        for pid in cgroup::processes(cgroup) {
            let Ok(metadata) = fs::metadata(format!("/proc/{pid}/ns/net")) else { continue };
            if self.tried.insert(metadata.ino()) {
                self.add(open_in_namespace_of(pid));
            }
        }
    }
}
