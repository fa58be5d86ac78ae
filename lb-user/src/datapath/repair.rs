//! Flow records whose socket is gone: found by comparing them with the kernel's lists of sockets, and taken out.
//!
//! The kernel programs end every flow that they see end. What they do not see (a link that was removed for a while, a path
//! of an MPTCP socket on kernels that do not tell) leaves a record, and an active count that never returns to zero. A
//! record is taken out only if its network namespace could be listed completely, its socket was in the lists once (an
//! earlier list has shown it, or a program has seen its SYN leave) and this list does not show it: the connection is over
//! then, whether or not somebody still holds the socket. Any other socket may be one whose connect failed and which is
//! still open. What is not sure is kept and counted.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use lb_common::abi::{Active, Flow, FlowRecord, HELD, Listed, Phase, map};
use serde::{Deserialize, Serialize};

use super::cgroup;
use super::error::DatapathError;
use super::maps::Mapped;
use super::namespaces::open_in_namespace_of;
use super::pins::Pins;
use super::readers::wait_for_readers;
use super::sys;
use super::sys::diag::{ListedSocket, SocketLists};
use super::sys::elements;

/// What a pass over a client's flow records found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Repair {
    /// Records that were taken out: their connections are over.
    pub removed: u64,
    /// Kept: their sockets are in no list, but none has ever shown them.
    pub kept_never_listed: u64,
    /// Kept: in network namespaces that could not be looked into.
    pub kept_elsewhere: u64,
}

/// A client whose records are to be looked at.
#[derive(Clone, Debug)]
pub struct Patient {
    /// Its pins.
    pub pins: Pins,
    /// Its cgroup, if it has one: the processes there tell which network namespaces there are.
    pub cgroup: Option<PathBuf>,
}

/// Looks at the flow records of clients. Reads lists of sockets and may enter network namespaces on threads of its own,
/// so it is not for the event loop.
pub fn repair(patients: &[Patient]) -> Vec<(String, Result<Repair, DatapathError>)> {
    let mut namespaces = Namespaces::new();
    let of = |patient: &Patient, namespaces: &mut Namespaces| {
        let records = Records::open(&patient.pins)?;
        records.repair(namespaces, patient.cgroup.as_deref()).map_err(|failed| match failed {
            Failed::Io(source) => DatapathError::Repair { client: patient.pins.client.clone(), source },
            Failed::Readers(error) => error,
        })
    };
    patients.iter().map(|patient| (patient.pins.client.clone(), of(patient, &mut namespaces))).collect()
}

/// Where a record lies.
#[derive(Clone, Copy, Debug)]
enum Place {
    Table(usize),
    Overflow,
}

/// One client's flow records.
struct Records {
    flows: Mapped<FlowRecord>,
    active: Mapped<Active>,
    overflow: OwnedFd,
    listed: OwnedFd,
}

impl Records {
    fn open(pins: &Pins) -> Result<Self, DatapathError> {
        let path = |name: &str| pins.maps().join(name);
        let open = |name: &str| {
            let fail = |source| DatapathError::Map { path: path(name), operation: "open", source };
            sys::open_pin(&path(name)).map_err(fail)
        };
        Ok(Self {
            flows: Mapped::open(&path(map::FLOWS), true)?,
            active: Mapped::open(&path(map::ACTIVE), true)?,
            overflow: open(map::FLOW_OVERFLOW)?,
            listed: open(map::LISTED)?,
        })
    }

    fn read(&self) -> io::Result<BTreeMap<u64, (Place, Flow)>> {
        let mut records = BTreeMap::new();
        for (cookie, flow) in elements::entries::<u64, Flow>(self.overflow.as_fd())? {
            records.insert(cookie, (Place::Overflow, flow));
        }
        for index in 0..self.flows.len() {
            let record = self.flows.get(index);
            if record.cookie != 0 && record.cookie != HELD {
                records.insert(record.cookie, (Place::Table(index), record.flow));
            }
        }
        Ok(records)
    }

    fn repair(&self, namespaces: &mut Namespaces, cgroup: Option<&Path>) -> Result<Repair, Failed> {
        let mut repair = Repair { removed: self.finish_what_was_begun()?, ..Repair::default() };
        let records = self.read()?;
        let known: BTreeMap<u64, Listed> =
            elements::entries::<u64, Listed>(self.listed.as_fd())?.into_iter().collect();
        let ended = known.keys().copied().filter(|cookie| !records.contains_key(cookie)).collect();
        elements::remove_all(self.listed.as_fd(), ended)?;
        let wanted: BTreeSet<u64> = records.values().map(|(_, flow)| flow.namespace).collect();
        let lists = namespaces.lists(&wanted, cgroup);
        let (mut newly_listed, mut missing) = ((Vec::new(), Vec::new()), Vec::new());
        for (&cookie, &(place, flow)) in &records {
            // A socket that has dialled again since is another matter: that flow no list has shown.
            let was_listed = known.get(&cookie) == Some(&listed(flow)) || has_sent(flow);
            match lists.get(&flow.namespace) {
                None => repair.kept_elsewhere += 1,
                Some(list) if list.contains(&cookie) => {
                    if !was_listed {
                        newly_listed.0.push(cookie);
                        newly_listed.1.push(listed(flow));
                    }
                }
                Some(_) if was_listed => missing.push((cookie, place, flow)),
                Some(_) => repair.kept_never_listed += 1,
            }
        }
        elements::insert_all(self.listed.as_fd(), newly_listed)?;
        // A list is handed out in parts, and what moves between two parts can be missed: only what a second list does
        // not show either is gone.
        let wanted = missing.iter().map(|(_, _, flow)| flow.namespace).collect();
        let again = namespaces.lists(&wanted, cgroup);
        missing.retain(|(cookie, _, flow)| {
            again.get(&flow.namespace).is_some_and(|list| !list.contains(cookie))
        });
        if !missing.is_empty() {
            repair.removed += self.take_out(missing, namespaces, cgroup)?;
        }
        Ok(repair)
    }

    /// Ends flows as the kernel programs do: whoever takes a record out gives its count back. Returns how many it were.
    ///
    /// A socket may dial again at any moment, and a program that does that for it may have found the record just now. So
    /// records in the table are held first, under a cookie that is nobody's; what is in them once readers are gone is what
    /// counts. The hash offers no such thing: there a record is deleted if it is still the same, which leaves an instant.
    fn take_out(
        &self,
        missing: Vec<(u64, Place, Flow)>,
        namespaces: &mut Namespaces,
        cgroup: Option<&Path>,
    ) -> Result<u64, Failed> {
        let mut removed = 0;
        let mut held = Vec::new();
        for (cookie, place, flow) in missing {
            match place {
                Place::Table(index) => {
                    if self.flows.replace64(index, COOKIE, cookie, HELD) {
                        held.push((cookie, index, flow));
                    }
                }
                Place::Overflow => {
                    if elements::get(self.overflow.as_fd(), &cookie)? == Some(flow)
                        && elements::remove(self.overflow.as_fd(), &cookie)?
                    {
                        // The table's length is a power of two.
                        let index = usize::try_from(cookie).unwrap_or(usize::MAX) & (self.flows.len() - 1);
                        self.flows.add64(index, offset_of!(FlowRecord, overflowed), u64::MAX);
                        self.give_back(flow);
                        removed += 1;
                    }
                }
            }
        }
        if held.is_empty() {
            return Ok(removed);
        }
        wait_for_readers().map_err(Failed::Readers)?;
        let wanted = held.iter().map(|(_, _, flow)| flow.namespace).collect();
        let lists = namespaces.lists(&wanted, cgroup);
        for (cookie, index, flow) in held {
            let now = self.flows.get(index).flow;
            let lives = now != flow || lists.get(&flow.namespace).is_none_or(|list| list.contains(&cookie));
            if lives && elements::get::<u64, Flow>(self.overflow.as_fd(), &cookie)?.is_none() {
                self.flows.replace64(index, COOKIE, HELD, cookie);
                continue;
            }
            // Gone; or it has dialled meanwhile, found no record of its own, and made one in the overflow table.
            self.give_back(now);
            self.flows.replace64(index, COOKIE, HELD, 0);
            removed += u64::from(!lives);
        }
        Ok(removed)
    }

    /// Ends the flows of records that a daemon held when it was killed: whose they were is not known any more.
    fn finish_what_was_begun(&self) -> Result<u64, Failed> {
        let held: Vec<usize> =
            (0..self.flows.len()).filter(|index| self.flows.get(*index).cookie == HELD).collect();
        if held.is_empty() {
            return Ok(0);
        }
        wait_for_readers().map_err(Failed::Readers)?;
        for index in &held {
            self.give_back(self.flows.get(*index).flow);
            self.flows.replace64(*index, COOKIE, HELD, 0);
        }
        Ok(held.len() as u64)
    }

    fn give_back(&self, flow: Flow) {
        self.active.add64(flow.slot as usize, offset_of!(Active, swept), 1);
        self.active.add64(flow.slot as usize, offset_of!(Active, flows), u64::MAX);
    }
}

const COOKIE: usize = offset_of!(FlowRecord, cookie);

/// Whether a program has seen the flow's SYN leave: the kernel lists a socket before it sends one.
fn has_sent(flow: Flow) -> bool {
    [Phase::Connecting as u8, Phase::Established as u8].contains(&flow.phase)
}

fn listed(flow: Flow) -> Listed {
    Listed { slot: flow.slot, generation: flow.generation }
}

/// Why a client's records could not be looked at.
enum Failed {
    Io(io::Error),
    Readers(DatapathError),
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Ways to the lists of network namespaces, by cookie.
struct Namespaces {
    known: BTreeMap<u64, SocketLists>,
    /// Inodes of the namespaces that were tried.
    tried: BTreeSet<u64>,
}

impl Namespaces {
    /// Our own, if the kernel tells its cookie (Linux 5.14).
    fn new() -> Self {
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

    /// The cookies of the sockets of every wanted namespace that can be listed completely.
    fn lists(&mut self, wanted: &BTreeSet<u64>, cgroup: Option<&Path>) -> BTreeMap<u64, BTreeSet<u64>> {
        let unknown = wanted.iter().any(|namespace| !self.known.contains_key(namespace));
        if let Some(cgroup) = cgroup.filter(|_| unknown) {
            self.enter_those_of(cgroup);
        }
        let cookies = |sockets: Vec<ListedSocket>| sockets.into_iter().map(|socket| socket.cookie).collect();
        let list = |namespace: &u64| Some((*namespace, cookies(self.known.get(namespace)?.tcp().ok()?)));
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
