//! Network namespaces, also of other processes: what can be asked of the kernel from inside them.
//!
//! Each is opened, asked for its lists of sockets and closed again: processes may make any number of them, so they must
//! cost neither descriptors nor memory.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use lb_diag::{SocketEntry, SocketLists};

use crate::host::cgroup;
use crate::sys::network_namespace::{NamespaceId, enter, open};

/// Namespaces that one look goes into. A process may make as many as it likes, and each takes some 0.2 ms.
pub const MOST: usize = 1024;
/// Processes that are remembered as ways into a namespace: the first of them may end meanwhile.
const WAYS: usize = 4;

/// Opens a way to the lists of sockets of a process's network namespace, which takes CAP_SYS_ADMIN.
///
/// # Errors
/// If the process is gone or its namespace may not be entered.
pub fn open_in_namespace_of(pid: u32) -> io::Result<SocketLists> {
    open_within(open(pid)?)
}

/// Opens a way to the lists of sockets of a network namespace, which takes CAP_SYS_ADMIN.
///
/// # Errors
/// If the namespace may not be entered.
pub fn open_within(namespace: File) -> io::Result<SocketLists> {
    // A thread stays in the namespace that it has entered, so another one does it.
    let thread = std::thread::Builder::new().name("namespace".to_owned());
    let thread = thread.spawn(move || lists_of(&namespace))?;
    thread.join().map_err(|_| io::Error::other("the thread that entered a network namespace panicked"))?
}

/// Moves the calling thread into a network namespace, and opens its lists of sockets.
fn lists_of(namespace: &File) -> io::Result<SocketLists> {
    enter(namespace)?;
    SocketLists::open()
}

/// A list of sockets: of which namespace, by its cookie, and of datagram sockets or of streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct List {
    pub namespace: u64,
    pub datagrams: bool,
}

/// Sockets that are looked for, by the list that would show them.
pub type SocketsByList = BTreeMap<List, BTreeSet<u64>>;

/// What lists have shown.
#[derive(Debug, Default)]
pub struct SocketSnapshot {
    /// Of each wanted list that could be had completely: which of the wanted sockets it shows, and whether these are
    /// paths of an MPTCP socket.
    pub lists: BTreeMap<List, BTreeMap<u64, bool>>,
    /// Of the wanted sockets, those that some list shows, where namespaces do not tell their cookies (before Linux
    /// 5.14) and so not which list has to show a socket.
    pub anywhere: BTreeSet<u64>,
    /// Whether cookies are not told, and `anywhere` is from complete lists of all namespaces that are looked into.
    pub is_everywhere: bool,
}

/// What is known of one socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sight {
    /// A list shows it.
    Seen { is_mptcp: bool },
    /// The list that would have to show it is complete, and does not.
    Missed,
    /// That list could not be had; `is_nowhere` if complete lists of all these namespaces do not show it.
    Unknown { is_nowhere: bool },
}

impl SocketSnapshot {
    /// What is known of a socket that was wanted.
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

/// Our own namespace, and those of a cgroup's processes.
pub struct Namespaces {
    cgroup: Option<PathBuf>,
    /// Looks so far: where there are more namespaces than one look goes into, each look begins elsewhere.
    turn: usize,
    /// Processes of each namespace other than our own, found when they are needed.
    others: OnceCell<Vec<Vec<u32>>>,
}

impl Namespaces {
    pub fn of(cgroup: Option<PathBuf>, turn: usize) -> Self {
        Self { cgroup, turn, others: OnceCell::new() }
    }

    /// Looks for sockets, in each namespace that is wanted and can be entered. May take seconds.
    pub fn look(&self, wanted: &SocketsByList) -> SocketSnapshot {
        let mut look = Look::new(wanted);
        match SocketLists::open() {
            Ok(lists) => look.read(&lists),
            Err(_) => return SocketSnapshot::default(),
        }
        if look.is_over() || self.others().is_empty() {
            return look.end();
        }
        let others = self.others();
        // A thread stays in the namespace that it has entered, so another one does it; without it no list is complete.
        let visit = || {
            for ways in others {
                match ways.iter().find_map(|pid| lists_of(&open(*pid).ok()?).ok()) {
                    Some(lists) => look.read(&lists),
                    None => look.is_whole = false,
                }
                if look.is_over() {
                    break;
                }
            }
            look.is_whole &= others.len() < MOST;
            look.end()
        };
        let thread = std::thread::Builder::new().name("namespaces".to_owned());
        std::thread::scope(|scope| {
            let thread = thread.spawn_scoped(scope, visit);
            thread.ok().and_then(|thread| thread.join().ok()).unwrap_or_default()
        })
    }

    fn others(&self) -> &[Vec<u32>] {
        self.others
            .get_or_init(|| self.cgroup.as_deref().map_or_else(Vec::new, |cgroup| others(cgroup, self.turn)))
    }
}

/// Up to [`MOST`] namespaces of a cgroup's processes, in turn.
fn others(cgroup: &Path, turn: usize) -> Vec<Vec<u32>> {
    let ours = NamespaceId::ours().ok();
    let mut found: BTreeMap<NamespaceId, Vec<u32>> = BTreeMap::new();
    for pid in cgroup::processes(cgroup) {
        // The process has ended, or its namespace may not be seen.
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

/// A look at namespaces, one after the other.
struct Look<'w> {
    wanted: &'w SocketsByList,
    /// Wanted namespaces that were not seen yet.
    missing: BTreeSet<u64>,
    /// Whether all namespaces so far told their cookies.
    are_told: bool,
    /// Whether nothing is missing from `anywhere` so far.
    is_whole: bool,
    sockets: SocketSnapshot,
}

impl<'w> Look<'w> {
    fn new(wanted: &'w SocketsByList) -> Self {
        let missing = wanted.keys().map(|list| list.namespace).collect();
        Self { wanted, missing, are_told: true, is_whole: true, sockets: SocketSnapshot::default() }
    }

    fn end(self) -> SocketSnapshot {
        SocketSnapshot { is_everywhere: self.is_whole && !self.are_told, ..self.sockets }
    }

    /// Whether nothing more can be found.
    fn is_over(&self) -> bool {
        self.missing.is_empty()
    }

    /// Reads those lists of a namespace in which something is looked for.
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
            // A list that is not complete proves nothing.
            if result.is_ok() {
                self.sockets.lists.insert(*list, found);
            }
        }
    }

    /// Looks for all sockets in both lists of a namespace that does not tell which it is.
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
        self.are_told = false;
        self.is_whole &= lists.each_tcp(&mut each).and_then(|()| lists.each_udp(&mut each)).is_ok();
    }
}
