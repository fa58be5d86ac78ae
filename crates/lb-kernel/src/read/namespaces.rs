//! The kernel's lists of sockets in network namespaces, including those of other processes.
//!
//! Each namespace is opened, queried for its lists of sockets, and closed again: processes may
//! create any number of namespaces, so the daemon must retain neither descriptors nor memory for
//! them.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use lb_diag::{SocketEntry, SocketLists};

use crate::host::cgroup;
use crate::sys::network_namespace::{NamespaceId, enter, open};

/// The maximum number of namespaces that one search enters. Processes may create any number of
/// namespaces, and entering a namespace takes about 0.2 ms.
pub const MOST: usize = 1024;
/// Maximum number of processes that are stored per namespace. Through each of these processes, the
/// namespace can be entered. Several are needed because a process may end before the search uses
/// it.
const WAYS: usize = 4;

/// Opens the lists of sockets of a process's network namespace. Requires CAP_SYS_ADMIN.
///
/// # Errors
/// If the process has ended, or this process may not enter the namespace.
pub fn open_in_namespace_of(pid: u32) -> io::Result<SocketLists> {
    open_within(open(pid)?)
}

/// Opens the lists of sockets of a network namespace. Requires CAP_SYS_ADMIN.
///
/// # Errors
/// If this process may not enter the namespace.
pub fn open_within(namespace: File) -> io::Result<SocketLists> {
    // A thread remains in the namespace that it has entered, so a new thread is used.
    let thread = std::thread::Builder::new().name("namespace".to_owned());
    let thread = thread.spawn(move || lists_of(&namespace))?;
    thread.join().map_err(|_| io::Error::other("the thread that entered a network namespace panicked"))?
}

/// Moves the calling thread into a network namespace, and opens its lists of sockets.
fn lists_of(namespace: &File) -> io::Result<SocketLists> {
    enter(namespace)?;
    SocketLists::open()
}

/// Identifies a list of sockets: the cookie of its namespace, and whether the list contains
/// datagram sockets or TCP sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct List {
    pub namespace: u64,
    pub datagrams: bool,
}

/// The cookies of wanted sockets, keyed by the list that must contain the sockets.
pub type SocketsByList = BTreeMap<List, BTreeSet<u64>>;

/// The result of a search of lists.
#[derive(Debug, Default)]
pub struct SocketSnapshot {
    /// For each wanted list that was read completely: the cookies of the wanted sockets in the
    /// list. The value is whether the socket is a path of an MPTCP socket.
    pub lists: BTreeMap<List, BTreeMap<u64, bool>>,
    /// The cookies of the wanted sockets that any list contains. This set is used if the kernel
    /// does not report the cookies of namespaces (before Linux 5.14), because the list that must
    /// contain a socket is then unknown.
    pub anywhere: BTreeSet<u64>,
    /// Whether the kernel reports no cookies of namespaces and `anywhere` is complete for all
    /// examined namespaces.
    pub is_everywhere: bool,
}

/// The result of the search for one socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sight {
    /// A list contains the socket.
    Seen { is_mptcp: bool },
    /// The list that must contain the socket, if the socket exists, was read completely and does
    /// not contain it.
    Missed,
    /// The list that must contain the socket could not be read. `is_nowhere`: the complete lists of
    /// all examined namespaces do not contain the socket.
    Unknown { is_nowhere: bool },
}

impl SocketSnapshot {
    /// The result of the search for a wanted socket.
    pub fn of(&self, list: &List, cookie: u64) -> Sight {
        match self.lists.get(list) {
            Some(found) => {
                found.get(&cookie).map_or(Sight::Missed, |is_mptcp| Sight::Seen { is_mptcp: *is_mptcp })
            }
            None if self.anywhere.contains(&cookie) => Sight::Seen { is_mptcp: false },
            None => Sight::Unknown { is_nowhere: self.is_everywhere },
        }
    }
}

/// A search for sockets.
pub trait SocketSearch {
    /// Searches all namespaces that can be entered for these sockets. May take seconds.
    fn look(&self, wanted: &SocketsByList) -> SocketSnapshot;
}

/// The namespaces to search: that of this process, and those of a cgroup's processes.
pub struct Namespaces {
    cgroup: Option<PathBuf>,
    /// The number of the search: if there are more namespaces than one search enters, each search
    /// begins at another namespace.
    turn: usize,
    /// Some processes of each namespace other than this process's namespace; read when they are
    /// first needed.
    others: OnceCell<Vec<Vec<u32>>>,
}

impl Namespaces {
    pub fn of(cgroup: Option<PathBuf>, turn: usize) -> Self {
        Self { cgroup, turn, others: OnceCell::new() }
    }

    /// Calls `visit` with the lists of this process's namespace, and then with those of the other
    /// namespaces that can be entered, until `visit` returns `Break`. Returns `false` if a
    /// namespace was skipped, because it could not be entered or because there are too many.
    ///
    /// # Errors
    /// If the lists of this process's namespace cannot be opened, or no thread can be started for
    /// the others.
    pub fn visit(&self, mut visit: impl FnMut(&SocketLists) -> ControlFlow<()> + Send) -> io::Result<bool> {
        if visit(&SocketLists::open()?).is_break() || self.others().is_empty() {
            return Ok(true);
        }
        let others = self.others();
        // A thread remains in the namespace that it has entered, so a new thread is used.
        let enter_all = || {
            let mut is_whole = others.len() < MOST;
            for ways in others {
                match ways.iter().find_map(|pid| lists_of(&open(*pid).ok()?).ok()) {
                    Some(lists) if visit(&lists).is_break() => break,
                    Some(_) => {}
                    None => is_whole = false,
                }
            }
            is_whole
        };
        let thread = std::thread::Builder::new().name("namespaces".to_owned());
        std::thread::scope(|scope| {
            let thread = thread.spawn_scoped(scope, enter_all)?;
            thread.join().map_err(|_| io::Error::other("the thread that enters network namespaces panicked"))
        })
    }

    fn others(&self) -> &[Vec<u32>] {
        self.others
            .get_or_init(|| self.cgroup.as_deref().map_or_else(Vec::new, |cgroup| others(cgroup, self.turn)))
    }
}

impl SocketSearch for Namespaces {
    fn look(&self, wanted: &SocketsByList) -> SocketSnapshot {
        let mut look = Look::new(wanted);
        let read = |lists: &SocketLists| {
            look.read(lists);
            if look.is_over() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        match self.visit(read) {
            Ok(is_whole) => {
                look.is_whole &= is_whole;
                look.end()
            }
            // After an error, no list is treated as complete.
            Err(_) => SocketSnapshot::default(),
        }
    }
}

/// Up to [`MOST`] namespaces of a cgroup's processes, each with some of its processes. Each search
/// begins at another namespace.
fn others(cgroup: &Path, turn: usize) -> Vec<Vec<u32>> {
    let ours = NamespaceId::ours().ok();
    let mut found: BTreeMap<NamespaceId, Vec<u32>> = BTreeMap::new();
    for pid in cgroup::processes(cgroup) {
        // An error means that the process has ended, or that this process may not read its
        // namespace.
        let Ok(id) = NamespaceId::of(pid) else { continue };
        let ways = found.entry(id).or_default();
        if Some(id) != ours && ways.len() < WAYS {
            ways.push(pid);
        }
    }
    let mut others: Vec<Vec<u32>> = found.into_values().filter(|ways| !ways.is_empty()).collect();
    if others.len() > MOST {
        let first = turn.wrapping_mul(MOST) % others.len();
        others.rotate_left(first);
        others.truncate(MOST);
    }
    others
}

/// A search of several namespaces in sequence.
struct Look<'w> {
    wanted: &'w SocketsByList,
    /// The cookies of wanted namespaces that have not been found yet.
    missing: BTreeSet<u64>,
    /// Whether the kernel has reported the cookies of all namespaces so far.
    are_reported: bool,
    /// Whether `anywhere` is complete so far.
    is_whole: bool,
    sockets: SocketSnapshot,
}

impl<'w> Look<'w> {
    fn new(wanted: &'w SocketsByList) -> Self {
        let missing = wanted.keys().map(|list| list.namespace).collect();
        Self { wanted, missing, are_reported: true, is_whole: true, sockets: SocketSnapshot::default() }
    }

    fn end(self) -> SocketSnapshot {
        SocketSnapshot { is_everywhere: self.is_whole && !self.are_reported, ..self.sockets }
    }

    /// Whether all wanted namespaces have been found.
    fn is_over(&self) -> bool {
        self.missing.is_empty()
    }

    /// Reads the wanted lists of a namespace.
    fn read(&mut self, lists: &SocketLists) {
        let Ok(namespace) = lists.namespace() else { return self.anywhere(lists) };
        if !self.missing.remove(&namespace) {
            return;
        }
        for (list, cookies) in self.wanted.iter().filter(|(list, _)| list.namespace == namespace) {
            let mut found = BTreeMap::new();
            let each = |socket: SocketEntry| {
                if cookies.contains(&socket.cookie) {
                    found.insert(socket.cookie, socket.is_mptcp);
                }
            };
            let result = if list.datagrams { lists.each_udp(each) } else { lists.each_tcp(each) };
            // A list that was not read completely proves nothing.
            if result.is_ok() {
                self.sockets.lists.insert(*list, found);
            }
        }
    }

    /// Searches both lists of a namespace for all wanted sockets, because the kernel does not
    /// report the namespace's cookie.
    fn anywhere(&mut self, lists: &SocketLists) {
        let wanted = self.wanted;
        let is_wanted =
            |socket: &SocketEntry| wanted.values().any(|cookies| cookies.contains(&socket.cookie));
        let found = &mut self.sockets.anywhere;
        let mut each = |socket: SocketEntry| {
            if is_wanted(&socket) {
                found.insert(socket.cookie);
            }
        };
        self.are_reported = false;
        self.is_whole &= lists.each_tcp(&mut each).and_then(|()| lists.each_udp(&mut each)).is_ok();
    }
}
