//! Flow records whose socket is gone: found by comparing them with the kernel's lists of sockets, and taken out.
//!
//! The kernel programs end every flow that they see end. What they do not see (a link that was removed for a while, a path
//! of an MPTCP socket on kernels that do not tell) leaves a record, and an active count that never returns to zero. A
//! record is taken out only if its network namespace could be listed completely, its socket was in the lists once (an
//! earlier list has shown it, or a program has seen its SYN leave) and this list does not show it: the connection is over
//! then, whether or not somebody still holds the socket. Any other socket may be one whose connect failed and which is
//! still open. What is not sure is kept and counted.

use std::collections::BTreeMap;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use lb_common::abi::{Backend, Datagrams, Flow, FlowPlace, HELD, Listed, NO_SLOT, Phase, map};
use serde::{Deserialize, Serialize};

use super::error::DatapathError;
use super::flow_table::FlowTable;
use super::maps::Mapped;
use super::namespaces::{Namespaces, Wanted};
use super::pins::Pins;
use super::readers::wait_for_readers;
use super::sys;
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
#[derive(Clone, Debug)]
enum Place {
    Table(usize),
    Overflow,
    /// The whole entry: all flows of a socket that addresses its datagrams.
    Datagrams(Box<Datagrams>),
}

/// A socket's record, or its entry of datagrams.
#[derive(Clone, Debug)]
struct Record {
    cookie: u64,
    place: Place,
    /// Its flow; of an entry, one of them.
    flow: Flow,
}

impl Record {
    /// How many flows it is.
    fn flows(&self) -> u64 {
        match &self.place {
            Place::Table(_) | Place::Overflow => 1,
            Place::Datagrams(entry) => entry.live().count() as u64,
        }
    }

    /// What stands in `listed` once a list has shown the socket. A socket that dials again is another matter: that flow no
    /// list has shown. One that addresses datagrams has its port, and is listed, before a flow begins.
    fn listed(&self) -> Listed {
        match self.place {
            Place::Table(_) | Place::Overflow => {
                Listed { slot: self.flow.slot, generation: self.flow.generation }
            }
            Place::Datagrams(_) => Listed { slot: NO_SLOT, generation: 0 },
        }
    }

    /// Whether a program has seen the flow's SYN leave: the kernel lists a socket before it sends one.
    fn has_sent(&self) -> bool {
        [Phase::Connecting as u8, Phase::Established as u8].contains(&self.flow.phase)
    }

    /// The list that shows its socket.
    fn wanted(&self) -> Wanted {
        Wanted { namespace: self.flow.namespace, datagrams: self.flow.phase == Phase::Datagrams as u8 }
    }
}

/// A socket may have both a record and an entry of datagrams; in the list of what was listed they are told apart by the
/// highest bit, which no cookie has.
const ENTRY: u64 = 1 << 63;

/// One client's flow records.
struct Records {
    table: FlowTable,
    backends: Mapped<Backend>,
    overflow: OwnedFd,
    datagrams: OwnedFd,
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
            table: FlowTable::open(pins, true)?,
            backends: Mapped::open(&path(map::BACKENDS), true)?,
            overflow: open(map::FLOW_OVERFLOW)?,
            datagrams: open(map::DATAGRAMS)?,
            listed: open(map::LISTED)?,
        })
    }

    fn read(&self) -> io::Result<BTreeMap<u64, Record>> {
        let mut records = BTreeMap::new();
        for (cookie, entry) in elements::entries::<u64, Datagrams>(self.datagrams.as_fd())? {
            if let Some(&flow) = entry.live().next() {
                let place = Place::Datagrams(Box::new(entry));
                records.insert(cookie | ENTRY, Record { cookie, place, flow });
            }
        }
        for (cookie, flow) in elements::entries::<u64, Flow>(self.overflow.as_fd())? {
            records.insert(cookie, Record { cookie, place: Place::Overflow, flow });
        }
        for index in 0..self.table.len() {
            if let Some(cookie) = self.table.socket(index) {
                let flow = self.table.flow(index);
                records.insert(cookie, Record { cookie, place: Place::Table(index), flow });
            }
        }
        Ok(records)
    }

    fn repair(&self, namespaces: &mut Namespaces, cgroup: Option<&Path>) -> Result<Repair, Failed> {
        let mut repair = Repair { removed: self.finish_what_was_begun()?, ..Repair::default() };
        let records = self.read()?;
        let known: BTreeMap<u64, Listed> =
            elements::entries::<u64, Listed>(self.listed.as_fd())?.into_iter().collect();
        let ended = known.keys().copied().filter(|key| !records.contains_key(key)).collect();
        elements::remove_all(self.listed.as_fd(), ended)?;
        let lists = namespaces.lists(&records.values().map(Record::wanted).collect(), cgroup);
        let (mut newly_listed, mut missing) = ((Vec::new(), Vec::new()), Vec::new());
        for (key, record) in records {
            let was_listed = known.get(&key) == Some(&record.listed()) || record.has_sent();
            match lists.get(&record.wanted()) {
                None => repair.kept_elsewhere += record.flows(),
                Some(list) if list.contains(&record.cookie) => {
                    if !was_listed {
                        newly_listed.0.push(key);
                        newly_listed.1.push(record.listed());
                    }
                }
                Some(_) if was_listed => missing.push(record),
                Some(_) => repair.kept_never_listed += record.flows(),
            }
        }
        elements::insert_all(self.listed.as_fd(), newly_listed)?;
        // A list is handed out in parts, and what moves between two parts can be missed: only what a second list does
        // not show either is gone.
        let again = namespaces.lists(&missing.iter().map(Record::wanted).collect(), cgroup);
        missing
            .retain(|record| again.get(&record.wanted()).is_some_and(|list| !list.contains(&record.cookie)));
        if !missing.is_empty() {
            repair.removed += self.take_out(missing, namespaces, cgroup)?;
        }
        Ok(repair)
    }

    /// Ends flows as the kernel programs do: whoever takes a record out gives its count back. Returns how many it were.
    ///
    /// A socket may dial again at any moment, and a program that does that for it may have found the record just now. So
    /// records in the table are held first, under a cookie that is nobody's; what is in them once readers are gone is what
    /// counts. The hashes offer no such thing: there a record is deleted if it is still the same, which leaves an instant.
    fn take_out(
        &self,
        missing: Vec<Record>,
        namespaces: &mut Namespaces,
        cgroup: Option<&Path>,
    ) -> Result<u64, Failed> {
        let mut removed = 0;
        let mut held = Vec::new();
        for record in missing {
            match record.place {
                Place::Table(index) => {
                    if self.table.pass_on(index, record.cookie, HELD) {
                        held.push((index, record));
                    }
                }
                Place::Overflow => removed += self.take_out_overflowed(&record)?,
                Place::Datagrams(entry) => removed += self.take_out_entry(record.cookie, &entry)?,
            }
        }
        if held.is_empty() {
            return Ok(removed);
        }
        wait_for_readers().map_err(Failed::Readers)?;
        let lists = namespaces.lists(&held.iter().map(|(_, record)| record.wanted()).collect(), cgroup);
        for (index, record) in held {
            let now = self.table.flow(index);
            let is_listed = lists.get(&record.wanted()).is_none_or(|list| list.contains(&record.cookie));
            let lives = now != record.flow || is_listed;
            if lives && elements::get::<u64, Flow>(self.overflow.as_fd(), &record.cookie)?.is_none() {
                self.table.pass_on(index, HELD, record.cookie);
                continue;
            }
            // Gone; or it has dialled meanwhile, found no record of its own, and made one in the overflow table.
            self.give_back(now);
            self.table.pass_on(index, HELD, 0);
            removed += u64::from(!lives);
        }
        Ok(removed)
    }

    fn take_out_overflowed(&self, &Record { cookie, flow, .. }: &Record) -> io::Result<u64> {
        let is_same = elements::get(self.overflow.as_fd(), &cookie)? == Some(flow);
        if !is_same || !elements::remove(self.overflow.as_fd(), &cookie)? {
            return Ok(0);
        }
        self.table.take_back(cookie, FlowPlace::IN_OVERFLOW);
        self.give_back(flow);
        Ok(1)
    }

    fn take_out_entry(&self, cookie: u64, entry: &Datagrams) -> io::Result<u64> {
        let is_same = elements::get(self.datagrams.as_fd(), &cookie)? == Some(*entry);
        if !is_same || !elements::remove(self.datagrams.as_fd(), &cookie)? {
            return Ok(0);
        }
        self.table.take_back(cookie, FlowPlace::IN_DATAGRAMS);
        entry.live().for_each(|flow| self.give_back(*flow));
        Ok(entry.live().count() as u64)
    }

    /// Ends the flows of records that a daemon held when it was killed: whose they were is not known any more.
    fn finish_what_was_begun(&self) -> Result<u64, Failed> {
        let held: Vec<usize> =
            (0..self.table.len()).filter(|index| self.table.cookie(*index) == HELD).collect();
        if held.is_empty() {
            return Ok(0);
        }
        wait_for_readers().map_err(Failed::Readers)?;
        for index in &held {
            self.give_back(self.table.flow(*index));
            self.table.pass_on(*index, HELD, 0);
        }
        Ok(held.len() as u64)
    }

    fn give_back(&self, flow: Flow) {
        self.backends.add64(flow.slot as usize, offset_of!(Backend, swept), 1);
        self.backends.add64(flow.slot as usize, offset_of!(Backend, flows), u64::MAX);
    }
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
